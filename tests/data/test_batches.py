"""Batches of one source and batches of groups: proportions, whole groups, and the same order on any ranks from any step on."""

import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch

from megabatch_train.data import batches
from megabatch_train.data.batches import (
    GroupOrder,
    MiningConfig,
    SourceOrder,
    order_groups,
    read_groups,
    read_groups_of,
    write_groups,
)
from megabatch_train.data.loader import Mixture
from megabatch_train.data.tables import Table

MIXTURES = [
    Mixture((30, 10), (3.0, 1.0)),
    Mixture((9, (4, 3, 8), 40), (0.5, 3.0, 0.0)),
    Mixture(((3, 3), 11, 20), (1.0, 0.2, 2.5)),
]


def grouped(batch_size, ranks=1, rank=0, samples=70, group_size=8, current=None):
    groups = torch.arange(samples)[torch.randperm(samples, generator=torch.Generator().manual_seed(1))] // group_size
    return GroupOrder(samples, batch_size, 5, rank, ranks, group_of=groups, current=current)


def make(kind, mixture, ranks=1, rank=0):
    return SourceOrder(mixture, 6, 4, rank, ranks, window=2) if kind == "source" else grouped(6, ranks, rank)


@pytest.mark.parametrize("kind", ["source", "mined"])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_follow_from_the_seed_and_their_number(kind, mixture, ranks):
    orders = [make(kind, mixture, ranks, rank) for rank in range(ranks)]
    whole = [batch.indices for batch in make(kind, mixture).batches(0, 30)]
    for start in (0, 11, 29):
        for parts in zip(*(order.batches(start, start + 1) for order in orders), strict=True):
            assert torch.equal(torch.cat([part.indices for part in parts]), whole[start])


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_batch_has_one_source_and_sources_have_their_share(mixture):
    order = SourceOrder(mixture, 3, seed=3, window=2)
    sizes = [part if isinstance(part, int) else sum(part) for part in mixture.parts]
    ends, per_epoch = list(itertools.accumulate(sizes)), order.batches_per_epoch
    sources, own = [], [[] for _ in sizes]
    for batch in order.batches(0, 12 * per_epoch):
        numbers = {next(i for i, end in enumerate(ends) if index < end) for index in batch.indices.tolist()}
        (number,) = numbers
        sources.append(number)
        own[number] += batch.indices.tolist()
    shares = mixture.shares()
    for epochs in range(1, 13):
        counts = Counter(sources[: epochs * per_epoch])
        for number, share in enumerate(shares):
            assert abs(counts[number] - Fraction(epochs * per_epoch * share, sum(shares))) < 1
    for number, size in enumerate(sizes):
        for begin in range(0, len(own[number]) - size + 1, size):  # every pass over the source has each sample once
            assert sorted(own[number][begin : begin + size]) == list(range(ends[number] - size, ends[number]))


def test_shares_that_fit_are_exact_in_every_epoch():
    order = SourceOrder(Mixture((24, 8), (3.0, 1.0)), 4)
    for epoch in range(5):
        found = order.epoch(epoch).view(-1, 4)
        assert ((found < 24).all(1).sum(), (found >= 24).all(1).sum()) == (6, 2)
        assert sorted(found.flatten().tolist()) == list(range(32))
    orders = {tuple((order.epoch(epoch).view(-1, 4)[:, 0] < 24).tolist()) for epoch in range(8)}
    assert len(orders) > 1  # the turns are shuffled


def test_a_source_must_fill_a_batch():
    with pytest.raises(ValueError, match=r'batch_size must be at most 8, the number of samples of source 2, with batches = "s'):
        SourceOrder(Mixture((24, 8), (3.0, 1.0)), 9)
    SourceOrder(Mixture((24, 8), (3.0, 0.0)), 9)
    with pytest.raises(ValueError, match="for data that is not a mixture, such as"):
        SourceOrder(24, 4)


@pytest.mark.parametrize(
    ("batch_size", "group_size"), [(16, 8), (24, 8), (20, 8), (6, 8), (8, 8), (7, 3), (32, 64), (5, 1), (70, 9)]
)
@pytest.mark.parametrize("samples", [70, 72])
def test_a_batch_has_whole_groups_where_possible(batch_size, group_size, samples):
    order = grouped(batch_size, samples=samples, group_size=group_size)
    parts = Counter()  # parts of each group
    for epoch in range(4):
        found = order.epoch(epoch)
        assert sorted(found.tolist()) == list(range(samples))
        split = [order.group_of[found[begin : begin + batch_size]] for begin in range(0, samples, batch_size)]
        for batch in split:
            numbers, counts = torch.unique(batch, return_counts=True)
            sizes = torch.bincount(order.group_of)[numbers]
            parts["cut" if (counts < sizes).sum() > 2 else "whole"] += 1  # at most one part ends and one part begins here
            assert int((counts < sizes).sum()) <= max(3, batch_size // group_size + 2)
        if batch_size % group_size == 0 and samples % group_size == 0:
            full = [batch for batch in split if len(batch) == batch_size]
            assert all((torch.bincount(batch)[torch.unique(batch)] == group_size).all() for batch in full)
        if group_size % batch_size == 0 and group_size > batch_size:
            full = [batch for batch in split if len(batch) == batch_size]
            assert sum(len(torch.unique(batch)) > 1 for batch in full) <= 1
    assert parts["whole"] > parts["cut"]
    assert not torch.equal(order.epoch(0), order.epoch(1))


def test_only_one_group_is_cut_if_one_is_smaller():
    """The rest of the cut group waits, so that later batches have whole groups."""
    order = grouped(16, samples=8 * 40 + 3)
    for epoch in range(5):
        found = order.epoch(epoch)[: 20 * 16].view(20, 16)
        cut = [int((torch.unique(order.group_of[batch], return_counts=True)[1] < 8).any()) for batch in found]
        assert sum(cut) <= 2


def test_new_groups_within_an_epoch_keep_the_samples_of_its_past():
    order, new = grouped(16), torch.arange(70) // 8
    begun = order.regroup(new, 2 * 4 + 1, lambda rest: new[rest])
    old, now = order.epoch(2), begun.epoch(2)
    assert torch.equal(old[:16], now[:16])
    assert sorted(now.tolist()) == list(range(70))
    assert not torch.equal(old[16:], now[16:])
    assert torch.equal(begun.epoch(3), GroupOrder(70, 16, 5, group_of=new).epoch(3))
    whole = order.regroup(new, 2 * 4, lambda rest: new[rest])  # at the beginning of an epoch
    assert whole.current is None
    assert torch.equal(whole.epoch(2), GroupOrder(70, 16, 5, group_of=new).epoch(2))
    assert order_groups(torch.empty(0, dtype=torch.int64), 4, torch.Generator()).numel() == 0


def test_many_groups_are_ordered_in_a_moment():
    groups = torch.arange(200_000) // 2
    assert len(torch.unique(order_groups(groups, 4096, torch.Generator().manual_seed(0)))) == 200_000


@pytest.mark.parametrize(("name", "value"), [("every", -1), ("group_size", 1), ("neighbors", 0), ("range_min", -1)])
def test_settings_of_mining(name, value):
    with pytest.raises(ValueError, match=f"mining.{name} must be at least"):
        MiningConfig(**{name: value})


def test_a_file_belongs_to_its_data(tmp_path):
    def table(name, rows):
        (tmp_path / name).write_text("query,document\n" + "\n".join(rows))
        return Table(str(tmp_path / name))

    data = table("a.csv", ["one,1", "two,2", "three,3"])
    path, groups = tmp_path / "groups.safetensors", torch.tensor([0, 1, 0])
    write_groups(path, {"groups": groups}, {"data": "a.csv", "samples": batches.fingerprint(data)})
    assert torch.equal(read_groups_of(path, data), groups)
    (tmp_path / "moved").mkdir()
    assert torch.equal(read_groups_of(path, table("moved/b.csv", ["one,1", "two,2", "three,3"])), groups)
    with pytest.raises(ValueError, match=r"which has 2 pairs, got .* for 3 pairs of a\.csv"):
        read_groups_of(path, table("c.csv", ["one,1", "two,2"]))
    for other in (["two,2", "one,1", "three,3"], ["one,1", "two,2", "three,4"]):
        with pytest.raises(ValueError, match="the names, the texts or their order differ"):
            read_groups_of(path, table("d.csv", other))
    (tmp_path / "text").write_text("no groups")
    write_groups(tmp_path / "other", {"weights": groups}, {})
    for name in ("text", "other"):
        with pytest.raises(ValueError, match="must be a file that `megabatch mine --batches` wrote"):
            read_groups(tmp_path / name)
    write_groups(tmp_path / "floats", {"groups": groups.float()}, {})
    with pytest.raises(ValueError, match="must have a group of at least 0 for each pair"):
        read_groups(tmp_path / "floats")
    with pytest.raises(FileNotFoundError, match="No such file"):
        read_groups(tmp_path / "none")
