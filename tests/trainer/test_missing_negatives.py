"""Pairs without a negative in their batch are counted, a batch without negatives is skipped, and many of them end the run."""

import json
import logging
import math

import pytest
import torch

import runs
from megabatch.world import World
from megabatch_train.data.tables import Table
from megabatch_train.trainer.config import LossConfig
from megabatch_train.trainer.health import TrainingFailedError
from megabatch_train.trainer.loss import LossInputs, Objective, ReadablePairs

ALONE = World(torch.device("cpu"))
CHAIN = torch.stack([torch.arange(6) // 2, (torch.arange(6) + 1) // 2], dim=1)  # every pair shares a side with the next


def embeddings(rows=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.functional.normalize(torch.randn(rows, 4, generator=generator), dim=1) for _ in range(2)]


def loss_of(name, ids, usable=None, **inputs):
    objective = Objective(LossConfig(name), 5.0, None)
    objective.inputs_of = lambda indices: LossInputs(**inputs)
    usable = torch.ones(6, dtype=torch.bool) if usable is None else usable
    return ReadablePairs(objective, ALONE, lambda: usable, ids, {}, torch.arange(6))


@pytest.mark.parametrize("name", ["clip", "info_nce", "dcl"])
def test_pairs_are_excluded_by_a_shared_side_and_not_through_other_pairs(name):
    loss = loss_of(name, CHAIN)
    x, y = embeddings()
    value = loss(x, y)
    related = (CHAIN[:, None] == CHAIN).any(2)
    assert not related.all()
    assert loss.without_negatives == 0
    diagonal, own, entropy = torch.eye(6, dtype=torch.bool), torch.arange(6), torch.nn.functional.cross_entropy
    s = (loss._objective.log_scale.exp() * x @ y.T).masked_fill(related & ~diagonal, -torch.inf)
    wanted = {
        "clip": (entropy(s, own) + entropy(s.T, own)) / 2,
        "info_nce": entropy(s, own),
        "dcl": (s.masked_fill(diagonal, -torch.inf).logsumexp(1) - s.diagonal()).mean(),
    }[name]
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce", "matryoshka"])
def test_a_batch_without_negatives_has_no_gradient(name):
    objective = Objective(LossConfig(name, widths=(2, 4) if name == "matryoshka" else ()), 5.0, None)
    usable = torch.ones(6, dtype=torch.bool)
    for ids in (torch.zeros(6, dtype=torch.int64), torch.stack([torch.zeros(6, dtype=torch.int64), torch.arange(6)], dim=1)):
        x, y = (side.requires_grad_() for side in embeddings())
        loss = ReadablePairs(objective, ALONE, lambda: usable, ids, {})
        loss(x, y).backward()
        assert (loss.pairs, loss.without_negatives) == (6, 6)
        assert not any(tensor.grad.any() for tensor in (x, y, objective.log_scale))


def test_pairs_without_negatives_are_counted():
    star = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [0, 0]])  # the first and the last share a side with all
    loss = loss_of("clip", star)
    loss(*embeddings())
    assert (loss.pairs, loss.without_negatives) == (6, 2)
    usable = torch.tensor([True, True, True, False, False, False])  # the rest could not be read: no error
    loss = loss_of("clip", star, usable)
    loss(*embeddings())
    assert (loss.pairs, loss.without_negatives) == (3, 3)


def test_hard_negatives_are_negatives():
    x, y = embeddings()
    hard = torch.nn.functional.normalize(torch.randn(2, 4), dim=1)
    ids = torch.zeros(6, dtype=torch.int64)
    loss = loss_of("info_nce", ids, owners=torch.tensor([0, 3]), negative_ids=torch.tensor([-1, -2]))
    assert loss(x, torch.cat([y, hard])) > 0
    assert loss.without_negatives == 0


def test_losses_that_ignore_ids():
    loss = loss_of("nt_xent", torch.zeros(6, dtype=torch.int64))
    assert loss(*embeddings()) > 0
    assert loss.without_negatives == 0


def _on_a_rank(group, rank):
    world = World(torch.device("cpu"), group)
    mine = slice(3 * rank, 3 * rank + 3)
    x, y = embeddings()
    found = []
    for ids in (CHAIN, torch.zeros(6, dtype=torch.int64)):
        usable = torch.ones(3, dtype=torch.bool)
        loss = ReadablePairs(Objective(LossConfig(), 5.0, None), world, lambda usable=usable: usable, ids[mine], {})
        found.append((loss(x[mine], y[mine]).item(), loss.without_negatives))
    return found


def test_over_ranks(pool):
    one = loss_of("clip", CHAIN)(*embeddings()).item()
    ranks = pool.run(_on_a_rank, 2)
    assert sum(found[0][0] for found in ranks) / 2 == pytest.approx(one, rel=1e-6)
    assert [found[1] for found in ranks] == [(0.0, 6), (0.0, 6)]


class Chained(runs.Numbers):
    """Sample 0 shares a side with all others."""

    def ids(self, indices):
        numbers = torch.as_tensor(indices)
        return torch.stack([torch.where(numbers % 2 == 0, 0, numbers), torch.where(numbers % 2 == 1, 0, numbers)], dim=1)


def test_a_run_logs_pairs_without_negatives(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "megabatch"):
        runs.trainer(tmp_path, {"batch_size": 12, "steps": 4, "checkpoint": {"every": 0}}, data=Chained(samples=12)).fit()
    assert "step 1: 1 of 12 pairs have no negatives, because they share an image or a text" in caplog.text
    assert "4 of 48 pairs had no negatives in their batch" in caplog.text


class Batches(runs.Numbers):
    """The batches of some steps have only pairs of one id."""

    def __init__(self, bad=()):
        super().__init__(samples=96)
        self.bad, self.of_sample = bad, {}

    def ids(self, indices):
        return torch.zeros(len(indices), dtype=torch.int64) if self.of_sample[indices[0]] in self.bad else super().ids(indices)


def batches_trainer(folder, bad, changes=None, **options):
    """A trainer of an epoch of 8 steps. The batches of `bad`, which are counted from 0, have no negatives."""
    data = Batches(bad)
    made = runs.trainer(
        folder, {"steps": 8, "batch_size": 12, "checkpoint": {"every": 0}, **(changes or {})}, data=data, **options
    )
    for batch in made.order.batches(0, 8):
        data.of_sample.update(dict.fromkeys(batch.indices.tolist(), batch.number))
    return made


def test_one_batch_without_negatives_is_skipped(tmp_path, caplog):
    memory = runs.Memory()
    made = batches_trainer(tmp_path, {2}, observers=[memory])
    made.fit()
    assert made.step == 8
    assert caplog.text.count("has a negative") == 1
    assert "step 3 changes nothing, because none of its 12 pairs has a negative" in caplog.text
    assert "12 of 96 pairs had no negatives in their batch. Skipped steps, because no pair had negatives: 1" in caplog.text
    record = memory.records[2]
    assert math.isnan(record["loss"])
    assert "step 3 changes nothing" in record["problem"]
    assert record["gradient_norm"] == 0
    assert all(math.isfinite(memory.records[step]["loss"]) for step in (1, 3))


def test_a_skipped_step_changes_no_weight(tmp_path):
    seen = []

    class Look(runs.Memory):
        def step(self, record):
            seen.append(runs.weights(made))

    made = batches_trainer(tmp_path, {0}, {"steps": 2, "optimizer": {"weight_decay": 0.5}}, observers=[Look()])
    before = runs.weights(made)
    made.fit()
    assert runs.same_bits(seen[0], before) == []
    assert runs.same_bits(seen[1], before) != []


def test_many_batches_without_negatives_end_the_run_and_save_it(tmp_path):
    made = batches_trainer(tmp_path, {1, 2, 3, 4, 5})
    with pytest.raises(TrainingFailedError, match=r"after step 6 of 8.*the last 5 batches had no negatives.*loss\.ids=false"):
        made.fit()
    assert made.describe_saved() == f"--resume {tmp_path} continues after step 6"
    again = batches_trainer(tmp_path, {6})
    assert again.resume()
    again.fit()
    assert again.step == 8


def test_a_short_run_without_negatives_fails(tmp_path):
    with pytest.raises(TrainingFailedError, match=r"the last 2 batches had no negatives"):
        batches_trainer(tmp_path, {0, 1}, {"steps": 2}).fit()


def test_a_run_without_negatives_continues_if_the_user_wants_it(tmp_path, caplog):
    batches_trainer(tmp_path, range(8), {"collapse": "warn"}).fit()
    assert "96 of 96 pairs had no negatives in their batch. Skipped steps, because no pair had negatives: 8" in caplog.text


def test_a_batch_of_one_pair_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batch_size must be at least 2, .* got 1"):
        runs.trainer(tmp_path, {"batch_size": 1, "steps": 1}).fit()


def test_a_table_of_clicks_has_negatives(tmp_path):
    rows = [{"query": f"q{(i * 7) % 20}", "document": f"d{(i * 11) % 45}"} for i in range(180)]
    (tmp_path / "clicks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ids = Table(tmp_path / "clicks.jsonl").ids(range(6))
    loss = loss_of("clip", ids)
    assert loss(*embeddings()) > 0
    assert loss.without_negatives == 0
