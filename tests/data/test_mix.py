"""Sources in proportion: the same batches on any number of ranks and from any step on, each source in its own order."""

import dataclasses
import json

import pytest
import torch

import runs
from megabatch_train.data import load as data
from megabatch_train.data.load import Mix, parse_spec
from megabatch_train.data.loader import Mixture, Order

MIXTURES = [
    Mixture((7, 30), (1.0, 1.0)),
    Mixture((5, (4, 3, 8), 40), (0.5, 3.0, 0.0)),
    Mixture(((3, 3), 11, 2), (1.0, 1e-9, 2.5)),
]


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_follow_from_the_seed_and_their_number(mixture, ranks):
    orders = [Order(mixture, 6, seed=4, rank=rank, world_size=ranks, window=2) for rank in range(ranks)]
    whole = [batch.indices for batch in Order(mixture, 6, seed=4, window=2).batches(0, 30)]
    for start in (0, 11, 29):
        for batches in zip(*(order.batches(start, start + 1) for order in orders), strict=True):
            assert torch.equal(torch.cat([batch.indices for batch in batches]), whole[start])


@pytest.mark.parametrize("mixture", MIXTURES)
def test_each_source_has_its_share_and_goes_on_where_it_stopped(mixture):
    order, epochs = Order(mixture, 1, seed=3, window=2), 5
    sizes = [part if isinstance(part, int) else sum(part) for part in mixture.parts]
    found, first = torch.cat([order.epoch(epoch) for epoch in range(epochs)]), 0
    assert len(found) == epochs * sum(sizes)
    for size, weight in zip(sizes, mixture.weights, strict=True):
        own = found[(found >= first) & (found < first + size)] - first
        assert abs(len(own) - epochs * sum(sizes) * weight / sum(mixture.weights)) <= epochs
        for begin in range(0, len(own) - size + 1, size):  # every pass over the source has each sample once
            assert own[begin : begin + size].sort().values.tolist() == list(range(size))
        first += size


def test_shares_that_fit_have_every_sample_once():
    order = Order(Mixture((3, 9), (3.0, 9.0)), 1)
    assert sorted(order.epoch(5).tolist()) == list(range(12))
    with pytest.raises(ValueError, match="weights must be a number of at least 0 for each of 2 sources"):
        Mixture((3, 9), (0.0, 0.0))


def test_sources_by_name(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("query,document\n" + "\n".join(f"q{i},d{i // 2}" for i in range(6)))
    lines = [json.dumps({"word": f"w{i}", "gloss": f"g{i}"}) for i in range(4)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    spec = f"3 * {tmp_path}/a.csv + 0.5 * {tmp_path}/b.jsonl"
    own = {"2": {"columns": {"query": "word", "document": "gloss"}}}
    mixed = data.load(spec, **own)
    assert isinstance(mixed, Mix)
    assert (len(mixed), mixed.groups) == (10, Mixture((6, 4), (3.0, 0.5)))
    assert [mixed.read(index, 1) for index in (1, 5, 6, 9)] == ["d0", "d2", "g0", "g3"]
    ids = mixed.ids([0, 1, 2, 6, 7, 6]).tolist()
    assert len(set(ids)) == 4
    assert ids[0] == ids[1]  # one text
    assert ids[3] == ids[5]  # one sample
    assert mixed.items().unique().numel() == 10
    train, test = (data.load(spec, split, holdout=0.4, **own) for split in ("train", "test"))
    assert sorted(read.name(i) for read in (train, test) for i in range(len(read))) == sorted(mixed.name(i) for i in range(10))
    assert parse_spec("a/*.tar + b.csv") == (["a/*.tar", "b.csv"], None)
    assert parse_spec("3*a.csv + .5*b.csv") == (["a.csv", "b.csv"], [3.0, 0.5])
    (tmp_path / "3_a.csv").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_spec("3*a.csv + b.csv") == (["3*a.csv", "b.csv"], None)
    with pytest.raises(ValueError, match="every source or none must have a weight"):
        data.load("3 * a.csv + b.csv")
    with pytest.raises(ValueError, match="options of a source must have its number, from 1 to 2, got 3"):
        data.load(spec, **{"3": {}})
    with pytest.raises(ValueError, match="options of source 2 must be a table, got 'query'"):
        data.load(spec, **{"2": "query"})
    for nameless in ("a.csv + ", "2 * a.csv + 1 * "):
        with pytest.raises(ValueError, match="every source must have a name, got "):
            data.load(nameless)
    (tmp_path / "c.csv").write_text("query,document,negative\nq,d,n\n")
    with pytest.raises(ValueError, match="must be pairs, got hard negatives in the column negative"):
        data.load(f"{tmp_path}/a.csv + {tmp_path}/c.csv")


def test_ids_of_a_batch_without_a_sample_of_one_source(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("query,document\n" + "".join(f"{name}{i},{name}{i}\n" for i in range(4)))
    mix = Mix([data.load(str(tmp_path / f"{name}.csv")) for name in ("a", "b")])
    everything = mix.ids(range(8))
    assert torch.equal(mix.ids([0, 1]), everything[:2])
    assert torch.equal(mix.ids([5]), everything[5:6])


def test_items_of_parts_are_not_mixed_up(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("query,document\n" + "\n".join(f"{name}{i // 2},{name}{i}" for i in range(40)))
    tables = [data.load(str(tmp_path / f"{name}.csv")) for name in "ab"]
    mixed = Mix([tables[0].part([4, 5, 6]), tables[1].part([0, 1, 9])])
    assert torch.unique(mixed.items(), return_inverse=True)[1].tolist() == [0, 0, 1, 2, 2, 3]


@pytest.mark.thorough
def test_a_run_on_a_mixture_continues_with_the_same_bits_and_with_any_number_of_readers(tmp_path):
    def made(folder, **changes):
        return runs.trainer(tmp_path / folder, changes, data=Mix([runs.Numbers(), runs.Numbers(samples=9)], [1, 3]))

    every = {"every": 1, "keep": 9}
    whole, failed, readers = made("whole"), made("failed", checkpoint=every), made("readers", workers=2)
    whole.fit()
    readers.fit()
    failed.stages = [dataclasses.replace(failed.stages[0], order=runs.Failing(failed.order, 5))]
    with pytest.raises(FloatingPointError, match="meant to fail"):
        failed.fit()
    resumed = made("failed")
    assert resumed.resume()
    assert 0 < resumed.step < whole.step
    resumed.fit()
    assert runs.same_bits(runs.weights(resumed), runs.weights(whole)) == []
    assert runs.same_bits(runs.weights(readers), runs.weights(whole)) == []
