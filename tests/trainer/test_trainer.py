"""The trainer against a loop written out, on one rank and on two, in float64; and what it does with what goes wrong."""

import math

import pytest
import torch

import runs
from helpers import dense_clip, dense_siglip
from megabatch.world import LostRankError, World
from megabatch_train.data.loader import Order
from megabatch_train.display.observers import TensorBoardLog
from megabatch_train.evaluation import results
from megabatch_train.trainer.build import build_optimizer
from megabatch_train.trainer.config import learning_rate
from megabatch_train.trainer.loss import Objective
from megabatch_train.trainer.run import MetricsFile

TOLERANCE = 1e-9  # float64, a few steps of an optimizer that divides by roots of squares


def written_out(config, pair, data, *, broken=()):
    """The same training without the library's step: whole batches, dense losses, PyTorch's optimizer."""
    modules = [tower.module for tower in pair.towers]
    objective = Objective(config.loss, pair.logit_scale, pair.logit_bias, torch.float64)
    parts = [("first", modules[0]), ("second", modules[1]), ("loss", objective)]
    named = {f"{part}.{name}": p for part, module in parts for name, p in module.named_parameters()}
    decaying, others = ([p for p in named.values() if (p.dim() > 1) == large] for large in (True, False))
    groups = [{"params": decaying, "weight_decay": config.optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if config.optimizer.name == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6)
    else:
        optimizer = build_optimizer(config.optimizer, groups)
    order = Order(len(data), config.batch_size, config.seed)
    average = {name: p.detach().clone() for name, p in named.items()}
    for batch in order.batches(0, config.steps):
        indices = [i for i in batch.indices.tolist() if i not in broken]
        embeddings = []
        for side, tower in enumerate(pair.towers):
            source = data.source(indices, side, tower, seed=config.seed, epoch=batch.epoch, augment=config.augment)
            embeddings.append(tower.module(next(source.chunks([(0, len(indices))], None))))
        scale, ids = objective.log_scale.exp(), data.ids(indices)
        assert config.loss.ids
        loss = reference(embeddings, ids, scale, objective.bias)
        optimizer.zero_grad()
        loss.backward()
        if config.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.schedule, config.optimizer.lr, batch.number, config.steps)
        optimizer.step()
        with torch.no_grad():
            objective.log_scale.clamp_(max=math.log(config.loss.max_scale))
            share = 1 - min(config.ema, (2 + batch.number) / (11 + batch.number))
            average = {name: old + share * (named[name] - old) for name, old in average.items()}
    return objective, average


def reference(embeddings, ids, scale, bias):
    """Losses in which pairs of the same id are not each other's negatives."""
    x, y = embeddings
    same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    if bias is not None:
        logits = scale * x @ y.T + bias
        signs = 2 * torch.eye(len(x), dtype=torch.float64) - 1
        return -torch.nn.functional.logsigmoid(signs * logits).masked_fill(same, 0).sum() / len(x)
    logits = (scale * x @ y.T).masked_fill(same, -torch.inf)
    labels = torch.arange(len(x))
    cross_entropy = torch.nn.functional.cross_entropy
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def test_the_reference_is_the_dense_loss():
    x, y = (torch.nn.functional.normalize(torch.randn(5, 4, dtype=torch.float64), dim=1) for _ in range(2))
    scale, bias = torch.tensor(3.0, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    torch.testing.assert_close(reference([x, y], torch.arange(5), scale, None), dense_clip(x, y, scale))
    torch.testing.assert_close(reference([x, y], torch.arange(5), scale, bias), dense_siglip(x, y, scale, bias))


CASES = {
    "plain": {},
    "siglip, adafactor, clipped": {
        "loss": {"name": "siglip"},
        "optimizer": {"name": "adafactor", "clip_norm": 0.5},
        "schedule": {"name": "constant", "warmup_steps": 3},
    },
    "average": {"ema": 0.8, "loss": {"scale": 7.0}, "augment": False},
}


def close(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_loop_written_out(tmp_path, case):
    wanted_pair, memory = runs.tiny(), runs.Memory()
    objective, average = written_out(runs.config(**CASES[case]), wanted_pair, runs.Numbers())
    made = runs.trainer(tmp_path, CASES[case], observers=[memory])
    before = runs.weights(made)
    made.fit()
    wanted = {f"{s}.{n}": v for s, t in enumerate(wanted_pair.towers) for n, v in t.module.state_dict().items()}
    close(runs.weights(made), wanted | {f"loss.{name}": value for name, value in objective.state_dict().items()})
    assert all(not torch.equal(before[name], value) for name, value in wanted.items())
    if case == "average":
        close(made.average.values, average)
    assert [record["step"] for record in memory.records] == list(range(1, 8))
    assert memory.records[-1]["pairs"] == 7 * 12
    assert ("bias" in memory.records[0]) == ("siglip" in case)
    assert memory.calls == [("start", 0), ("finish", 7)]


def test_the_scale_stays_below_its_bound(tmp_path):
    memory = runs.Memory()
    made = runs.trainer(tmp_path, {"steps": 1}, observers=[memory])
    with torch.no_grad():
        made.objective.log_scale.fill_(6.0)
    made.fit()
    assert made.objective.log_scale.item() == math.log(100)
    assert memory.records[0]["scale"] == pytest.approx(100)


@pytest.mark.quick({"how": {"broken": [3, 4, 5, 6, 7, 8, 9]}}, {"changes": {"batch_size": 13, "optimizer": {"clip_norm": 0.3}}})
@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"batch_size": 13, "optimizer": {"clip_norm": 0.3}}, {}),
        ({"parallel": "fsdp", "optimizer": {"name": "adafactor", "clip_norm": 0.5}, "ema": 0.9}, {}),
        ({"loss": {"name": "siglip"}}, {"broken": [3, 4, 5, 6, 7, 8, 9]}),
    ],
)
def test_two_ranks_train_as_one(pool, tmp_path, changes, how):
    made = runs.trainer(tmp_path / "one", changes, data=runs.Numbers(how.get("broken", ())))
    made.fit()
    wanted = runs.weights(made)
    for found in pool.run(runs.on_rank, 2, tmp_path / "two", changes, how):
        close(found, wanted)


@pytest.mark.parametrize(("parallel", "keep"), [("ddp", True), ("fsdp", False)])
def test_one_module_for_both_sides_with_parameters_that_nobody_uses(pool, tmp_path, parallel, keep):
    # Its dropout, which differs between ranks, is off while it is locked.
    changes = {"freeze": "second", "keep_frozen": keep, "parallel": parallel}
    made = runs.trainer(tmp_path / "one", changes, pair=runs.tiny(shared=True))
    locked = {name: value for name, value in runs.weights(made).items() if ".second." in name}
    made.fit()
    wanted = runs.weights(made)
    for found in pool.run(runs.on_rank, 2, tmp_path / "two", changes, {"shared": True}):
        close(found, wanted)
    assert runs.same_bits({name: wanted[name] for name in locked}, locked) == []


@pytest.mark.quick({"parallel": "fsdp"})
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_sharded_checkpoints_continue_on_two_ranks(pool, tmp_path, parallel):
    changes = {"parallel": parallel, "optimizer": {"name": "adafactor"}, "ema": 0.9, "checkpoint": {"every": 3, "keep": 1}}
    wanted = pool.run(runs.on_rank, 2, tmp_path / "whole", changes, {"dropout": 0.2})
    pool.attempt(runs.on_rank, 2, tmp_path / "half", changes, {"dropout": 0.2, "fails_at": 5})
    names = [path.name for path in (tmp_path / "half" / "checkpoints").iterdir()]
    assert names == ["step_00000003"]
    found = pool.run(runs.on_rank, 2, tmp_path / "half", changes, {"dropout": 0.2, "resume": True})
    for one, other in zip(found, wanted, strict=True):
        assert runs.same_bits(one, other) == []


@pytest.mark.quick({"ranks": 3})
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.thorough
def test_sharded_checkpoints_continue_on_another_number_of_ranks(pool, tmp_path, ranks):
    changes = {"parallel": "fsdp", "optimizer": {"name": "adafactor"}, "ema": 0.9, "checkpoint": {"every": 3, "keep": 1}}
    wanted = runs.trainer(tmp_path / "whole", changes)
    wanted.fit()
    pool.attempt(runs.on_rank, 2, tmp_path / "half", changes, {"fails_at": 5})
    if ranks == 1:
        made = runs.trainer(tmp_path / "half", changes)
        assert made.resume()
        assert made.step == 3
        made.fit()
        close(made.average.values, wanted.average.values)
        found = [runs.weights(made)]
    else:
        found = pool.run(runs.on_rank, ranks, tmp_path / "half", changes, {"resume": True})
    for one in found:
        close(one, runs.weights(wanted))


def test_a_checkpoint_in_one_piece_is_not_continued_in_parts(pool, tmp_path):
    runs.trainer(tmp_path).fit()
    answers = pool.attempt(runs.on_rank, 2, tmp_path, {"parallel": "fsdp"}, {"resume": True})
    assert all(not worked and 'parallel must be "ddp" to continue' in told for worked, told in answers)


def test_what_cannot_be_read_is_left_out(tmp_path):
    broken = (1, 5, 8, 30)
    wanted = runs.tiny()
    objective, _ = written_out(runs.config(), wanted, runs.Numbers(), broken=broken)
    memory, data = runs.Memory(), runs.Numbers(broken)
    made = runs.trainer(tmp_path, data=data, observers=[memory])
    made.fit()
    close(runs.weights(made), {f"0.{name}": value for name, value in wanted.first.module.state_dict().items()})
    assert made.objective.log_scale.item() == pytest.approx(objective.log_scale.item(), rel=TOLERANCE)
    assert set(data.failures) <= set(broken)
    assert memory.records[-1]["pairs"] < 7 * 12


def test_what_cannot_be_read_is_named_once_and_counted(tmp_path, caplog):
    runs.trainer(tmp_path / "few", data=runs.Numbers((1, 5))).fit()
    assert caplog.text.count("skipped: sample 1 is damaged") == caplog.text.count("skipped: sample 5 is damaged") == 1
    assert "2 samples could not be read and were skipped" in caplog.text
    caplog.clear()
    runs.trainer(tmp_path / "many", {"steps": 4}, data=runs.Numbers(range(0, runs.SAMPLES, 3))).fit()
    assert caplog.text.count("skipped: ") == caplog.text.count("is damaged") == 5
    assert "further unreadable samples are counted, but not named" in caplog.text
    caplog.clear()
    runs.trainer(tmp_path / "none").fit()
    assert "could not be read" not in caplog.text


def test_a_later_batch_of_which_nothing_can_be_read_changes_nothing(tmp_path, caplog):
    order = runs.trainer(tmp_path).order.epoch(0).tolist()
    memory, data = runs.Memory(), runs.Numbers(order[12:24])
    made = runs.trainer(tmp_path, {"steps": 2}, data=data, observers=[memory])
    made.fit()
    alone = runs.trainer(tmp_path / "alone", {"steps": 2}, data=data)
    alone.steps = 1
    alone.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(alone)) == []
    assert "step 2 changes nothing, because none of its pairs could be read" in caplog.text
    assert memory.records[-1]["pairs"] == 12


def test_a_run_that_can_hardly_read_its_data_stops(tmp_path):
    with pytest.raises(
        ValueError, match=r"stops at step 1, because 12 of 12 pairs could not be read: sample \d+ is damaged; paths"
    ):
        runs.trainer(tmp_path / "none", data=runs.Numbers(range(runs.SAMPLES))).fit()
    assert not (tmp_path / "none" / "model.safetensors").exists()
    assert not (tmp_path / "none" / "checkpoints").exists()
    with pytest.raises(ValueError, match=r"stops at step 3, because \d\d of 36 pairs could not be read"):  # after an epoch
        runs.trainer(tmp_path / "few", data=runs.Numbers([i for i in range(runs.SAMPLES) if i % 3])).fit()


def test_ranks_stop_together_if_they_can_hardly_read(pool, tmp_path):
    answers = pool.attempt(runs.on_rank, 2, tmp_path, {}, {"broken": list(range(runs.SAMPLES))})
    assert all(not worked and "12 of 12 pairs could not be read" in told for worked, told in answers)


def test_settings_that_would_have_no_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match="evaluate_every must be 0 without validation data"):
        runs.trainer(tmp_path, {"evaluate_every": 3})


@pytest.mark.quick({"precision": "fp16"})
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(tmp_path, precision):
    memory = runs.Memory()
    pair = runs.tiny(dtype=torch.float32)
    changes = {"precision": precision, "steps": 12, "augment": False, "batch_size": 40}
    made = runs.trainer(tmp_path, changes, pair=pair, observers=[memory], data=Float32())
    made.fit()
    losses = [record["loss"] for record in memory.records]
    assert losses[-1] < 0.8 * losses[0]
    again = runs.trainer(tmp_path, changes, pair=runs.tiny(dtype=torch.float32), data=Float32())
    assert again.resume()
    if precision == "fp16":
        assert again._trained.scaler.state_dict() == made._trained.scaler.state_dict()


class Float32(runs.Numbers):
    def read(self, index, side):
        return super().read(index, side).float()


def test_evaluation_on_the_way_and_at_the_end_leaves_no_trace(tmp_path):
    memory = runs.Memory()
    changes = {"evaluate_every": 3, "ema": 0.5}
    made = runs.trainer(tmp_path / "a", changes, pair=runs.tiny(0.2), observers=[memory], validation=runs.Numbers(samples=20))
    result = made.fit()
    assert [record["step"] for record in memory.evaluations] == [3, 6, 7]
    assert memory.evaluations[-1]["evaluation"] == result
    assert result["num_samples"] == 20
    other = runs.trainer(tmp_path / "b", {"ema": 0.5}, pair=runs.tiny(0.2))
    assert other.fit() is None
    assert runs.same_bits(runs.weights(made), runs.weights(other)) == []


def evaluated(group, rank, folder):
    world = World(torch.device("cpu"), group)
    validation = runs.Numbers(samples=513)  # chunks of 256: one on a rank, two on the other
    return runs.trainer(folder, {"parallel": "fsdp"}, world=world, validation=validation).fit()


@pytest.mark.thorough
def test_sharded_towers_evaluate_on_ranks_with_different_numbers_of_chunks(pool, tmp_path):
    wanted = runs.trainer(tmp_path / "one", validation=runs.Numbers(samples=513)).fit()
    same = pytest.approx(wanted, rel=1e-13)  # two processes add the loss in another order; a match one place off is 1e-5
    assert pool.run(evaluated, 2, tmp_path / "two") == [same, same]


def test_memory_that_runs_out_halves_the_chunks_and_does_the_step_again(tmp_path, caplog):
    made = runs.trainer(tmp_path / "a", {"chunk_size": 8}, pair=runs.tiny(0.2))
    wanted = runs.trainer(tmp_path / "b", {"chunk_size": 4}, pair=runs.tiny(0.2))
    narrow = made.pair.first.module.hidden

    def limited(module, inputs):
        if len(inputs[0]) > 4 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")

    narrow.register_forward_pre_hook(limited)
    made.fit()
    wanted.fit()
    assert "the step is repeated with chunks of (4, 4) samples" in caplog.text
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []

    def nothing_left(module, inputs):
        raise torch.OutOfMemoryError("all gone")

    narrow.register_forward_pre_hook(nothing_left)
    made.run.step = 0
    with pytest.raises(MemoryError, match=r"memory ran out with chunks of \(1, 1\) samples\. Continue with a smaller"):
        made.fit()


def test_a_loss_that_is_no_number_ends_the_run_before_it_does_harm(tmp_path):
    made = runs.trainer(tmp_path)
    with torch.no_grad():
        made.objective.log_scale.fill_(math.nan)
    before = runs.weights(made)
    with pytest.raises(FloatingPointError, match=r"the loss of step 1 is nan\. This step has not changed the weights"):
        made.fit()
    assert runs.same_bits(runs.weights(made), before) == ["loss.log_scale"]  # NaN is not equal to itself


def test_gradients_that_are_no_numbers_end_the_run_before_they_do_harm(tmp_path):
    """A finite loss may have gradients that are not: the weights, and every checkpoint after, would be lost one step later."""
    made = runs.trainer(tmp_path)
    made.pair.first.module.head.weight.register_hook(lambda gradient: gradient * math.inf)
    before = runs.weights(made)
    with pytest.raises(FloatingPointError, match=r"the gradient norm of step 1 is (nan|inf)\. This step has not changed"):
        made.fit()
    assert runs.same_bits(runs.weights(made), before) == []


def spoil_gradients(made, after):
    """Multiplies the gradients of the first tower by infinity after some steps."""
    made.pair.first.module.head.weight.register_hook(lambda gradient: gradient * (math.inf if made.step >= after else 1.0))
    return made


def test_a_run_that_ends_at_a_loss_that_is_no_number_saves_its_last_good_step(tmp_path):
    """It would lose all steps since the last checkpoint, and the message promises weights that nobody could have."""
    made = spoil_gradients(runs.trainer(tmp_path, {"steps": 5, "checkpoint": {"every": 1000}}), after=2)
    with pytest.raises(FloatingPointError, match=r"of step 3 is (nan|inf).*--resume .* continues after step 2"):
        made.fit()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    again = spoil_gradients(runs.trainer(tmp_path, {"steps": 5, "checkpoint": {"every": 1000}}), after=0)
    assert again.resume()
    assert runs.same_bits(runs.weights(again), runs.weights(made)) == []
    with pytest.raises(FloatingPointError, match="continues after step 2"):  # the checkpoint that is there stays
        again.fit()


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    made = spoil_gradients(runs.trainer(tmp_path, {"steps": 5, "checkpoint": {"every": 1000}}), after=2)
    made.pair.first.module.register_buffer("statistics", torch.tensor(math.nan), persistent=False)
    with pytest.raises(FloatingPointError, match="there is no checkpoint to resume from"):
        made.fit()


def test_the_model_is_there_when_its_evaluation_fails(tmp_path):
    made = runs.trainer(tmp_path, pair=runs.tiny(), validation=runs.Numbers(range(20), samples=20))
    with pytest.raises(ValueError, match="none of 20 samples could be read, the first because sample 0 is damaged"):
        made.fit()
    assert (tmp_path / "model.safetensors").is_file()


def test_validation_of_another_kind_is_refused_before_training(tmp_path):
    texts = runs.Numbers()
    texts.sides = ("text", "text")
    with pytest.raises(ValueError, match="validation must have the sides of the training data, image and text, got text and"):
        runs.trainer(tmp_path, validation=texts)


def test_batches_that_cannot_be_shared_out_are_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_size must be at most the number of samples, 40, got 41"):
        runs.trainer(tmp_path, {"batch_size": 41})


class Full(runs.Memory):
    """On a disk that is full in some steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def step(self, record):
        if record["step"] in self.steps:
            raise OSError(28, "No space left on device")


def test_an_observer_that_cannot_write_does_not_end_the_run_and_is_named_once_until_it_can(tmp_path, caplog):
    made = runs.trainer(tmp_path, observers=[Full((2, 3, 4, 6))])  # with checkpoints in between, of which it writes nothing
    made.fit()
    assert made.step == 7
    told = [line for line in caplog.messages if line.startswith("Full")]
    assert told[::2] == ["Full could not write, but the run continues: [Errno 28] No space left on device"] * 2
    assert told[1::2] == ["Full can write again"] * 2


@pytest.mark.parametrize("until", [5, 8])
def test_metrics_of_a_full_disk_wait_until_there_is_room(tmp_path, caplog, monkeypatch, until):
    append = results.append

    def full(path, record):
        if 2 < made.step < until:
            raise OSError(28, "No space left on device", str(path))
        append(path, record)

    made = runs.trainer(tmp_path, observers=[MetricsFile()])
    monkeypatch.setattr(results, "append", full)
    made.fit()
    steps = [line["step"] for line in results.read(tmp_path / "metrics.jsonl")]
    assert caplog.text.count("MetricsFile could not write, but the run continues") == 1
    if until == 5:
        assert steps == [1, 2, 3, 4, 5, 6, 7]
        assert caplog.messages[-1] == "MetricsFile can write again"
    else:
        assert steps == [1, 2]
        assert "No space left on device; 5 lines are missing at the end" in caplog.messages[-1]


def test_an_observer_that_cannot_begin_is_told_nothing_more(tmp_path, caplog):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    made = runs.trainer(tmp_path, observers=[TensorBoardLog(), memory := runs.Memory()])
    made.fit()
    assert caplog.text.count("TensorBoardLog could not write, but the run continues") == 1
    assert len(memory.records) == 7


class Two(World):
    """One of two ranks, without the other."""

    rank, size = 0, 2


def test_a_lost_rank_is_a_sentence_with_the_step():
    world = Two(torch.device("cpu"))
    gloo = "[pair.cc:561] Connection closed by peer [127.0.0.1]:27525. This is typically caused by a remote worker crashing."
    with (
        pytest.raises(LostRankError) as error,
        world.explain_errors(lambda: "in step 3 of 7; there is no checkpoint to resume from"),
    ):
        raise RuntimeError(gloo)
    assert str(error.value) == (
        "rank 0 of 2 lost another rank in step 3 of 7; there is no checkpoint to resume from. The messages of that rank "
        "contain the reason. The error on this rank: Connection closed by peer [127.0.0.1]:27525"
    )
    with pytest.raises(RuntimeError, match="another fault"), world.explain_errors(lambda: ""):
        raise RuntimeError("another fault")
