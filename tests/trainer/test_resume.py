"""Runs that are killed, stopped or damaged: they continue, and end with the bits of a run that nothing happened to."""

import dataclasses
import json
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import runs
from helpers import PATIENCE
from megabatch.evaluation import results
from megabatch.trainer import checkpoint
from megabatch.trainer.checkpoint import CheckpointError, contents
from megabatch.trainer.config import FIXED, FREE, TrainConfig
from megabatch.trainer.fit import Fit
from megabatch.trainer.observers import MetricsFile
from megabatch.trainer.state import Files
from megabatch.trainer.stopping import StoppedError

# Dropout, augmentation, an average: everything that has a state. Images are read in both passes.
SETTINGS = {"ema": 0.9, "memory": {"graphs": 0.0, "inputs": 0.0}, "steps": 7}


@pytest.fixture(autouse=True)
def _one_thread():
    """As in the processes that are killed: the order of sums, and so the last bits, depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def uninterrupted(folder, changes=SETTINGS, **how):
    made = runs.trainer(folder, changes, pair=runs.tiny(how.pop("dropout", 0.0)), **how)
    made.fit()
    return made


def test_killed_in_the_middle_of_a_step_and_continued_ends_with_the_same_bits(tmp_path):
    wanted = uninterrupted(tmp_path / "whole", dropout=0.2)
    ((_, status),) = runs.processes(tmp_path / "killed", SETTINGS, dropout=0.2, kill_at_read=174)
    assert status == -signal.SIGKILL
    made = runs.trainer(tmp_path / "killed", SETTINGS, pair=runs.tiny(0.2))
    assert made.resume()
    assert 0 < made.step < 7
    made.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []
    assert runs.same_bits(made.average.values, wanted.average.values) == []
    assert torch.equal(torch.rand(3), _after(wanted, tmp_path))


def _after(wanted, tmp_path):
    """What the generators give next: the same after both runs."""
    again = runs.trainer(tmp_path / "whole", SETTINGS, pair=runs.tiny(0.2))
    again.resume()
    return torch.rand(3)


@pytest.mark.thorough
def test_two_ranks_killed_and_continued_end_with_the_same_bits(pool, tmp_path):
    wanted = pool.run(runs.on_rank, 2, tmp_path / "whole", SETTINGS, {"dropout": 0.2})
    # In step 5: the checkpoint of step 4 was begun once that of step 2 was on the disk, however slow it is.
    (_, first), (_, second) = runs.processes(tmp_path / "killed", SETTINGS, ranks=2, dropout=0.2, kill_at_read=86)
    assert second == -signal.SIGKILL
    assert first != 0
    found = pool.run(runs.on_rank, 2, tmp_path / "killed", SETTINGS, {"dropout": 0.2, "resume": True})
    for one, other in zip(found, wanted, strict=True):
        assert runs.same_bits(one, other) == []


def test_sigterm_saves_first_and_says_how_to_continue(tmp_path):
    changes = {**SETTINGS, "checkpoint": {"every": 100}}
    numbers = runs.Numbers()
    numbers.signalled_at = 80
    with pytest.raises(
        StoppedError, match=r"stopped by SIGTERM after step 3 of 7, and saved; .* megabatch train --resume .*run"
    ):
        runs.trainer(tmp_path / "run", changes, pair=runs.tiny(0.2), data=numbers).fit()
    made = runs.trainer(tmp_path / "run", changes, pair=runs.tiny(0.2))
    assert made.resume()
    assert made.step == 3
    made.fit()
    wanted = uninterrupted(tmp_path / "whole", changes, dropout=0.2)
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []


@pytest.mark.thorough
def test_a_signal_on_one_rank_stops_all(tmp_path):
    answers = runs.processes(tmp_path, {**SETTINGS, "checkpoint": {"every": 100}}, ranks=2, signal_at_read=45)
    assert [status for _, status in answers] == [3, 3]
    assert all("stopped by SIGTERM after step 3 of 7" in said for said, _ in answers)
    made = runs.trainer(tmp_path, SETTINGS)
    assert made.resume()
    assert made.step == 3


def test_ctrl_c_stops_after_the_step_and_a_second_one_at_once(tmp_path):
    class Interrupting(runs.Numbers):
        times = 0

        def read(self, index, side):
            if self.reads == 40 or (self.times == 2 and self.reads == 41):
                signal.raise_signal(signal.SIGINT)
            return super().read(index, side)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(StoppedError, match=r"stopped by Ctrl-C after step 2 of 7"):
        runs.trainer(tmp_path / "once", data=Interrupting()).fit()
    twice = Interrupting()
    twice.times = 2
    with pytest.raises(KeyboardInterrupt):
        runs.trainer(tmp_path / "twice", data=twice).fit()
    assert signal.getsignal(signal.SIGINT) is before


def damage_cut(folder):
    path = folder / "state.pt"
    path.write_bytes(path.read_bytes()[:-100])


def damage_bit(folder):
    path = folder / "state.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_missing(folder):
    (folder / "generators_00000.pt").unlink()


def damage_contents(folder):
    (folder / "checkpoint.json").write_text('{"step": 6,')


@pytest.mark.parametrize("damage", [damage_cut, damage_bit, damage_missing, damage_contents])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, caplog, damage):
    wanted = uninterrupted(tmp_path)
    damage(tmp_path / "checkpoints" / "step_00000007")
    made = runs.trainer(tmp_path, SETTINGS)
    assert made.resume()
    assert made.step == 6
    assert "step_00000007 is damaged: " in caplog.text
    assert "step_00000007 is now called abandoned_step_00000007" in caplog.text
    made.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []
    with pytest.raises(CheckpointError, match="abandoned_step_00000007 is damaged"):
        made.resume(tmp_path / "checkpoints" / "abandoned_step_00000007")


def test_a_checkpoint_that_was_being_written_is_not_there(tmp_path):
    uninterrupted(tmp_path)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000007").rename(folder / ".partial_step_00000007")
    made = runs.trainer(tmp_path, SETTINGS)
    assert made.resume()
    assert made.step == 6
    made.fit()
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000006", "step_00000007"]


def test_a_full_disk_keeps_what_was_saved_and_goes_on_until_the_end(tmp_path, caplog, monkeypatch):
    validation = runs.Numbers(samples=20)
    made = runs.trainer(
        tmp_path, {"steps": 7, "checkpoint": {"every": 2, "keep": 5}}, validation=validation, observers=[MetricsFile()]
    )
    write = Files.write

    def full(files, folder):
        write(files, folder)
        if "step_00000002" not in folder.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "write", full)
    with pytest.raises(CheckpointError, match=r"a checkpoint could not be written in .*: the disk is full"):
        made.fit()
    assert made.step == 7
    assert caplog.text.count("the disk is full; training goes on") == 1
    # The weights take less room than a checkpoint. They are there, evaluated, and the message is true.
    assert (tmp_path / "model.safetensors").exists()
    assert "evaluation" in results.read(tmp_path / "metrics.jsonl")[-1]
    assert made.saved() == (
        f"the weights after step 7 are in {tmp_path}/model.safetensors, and --resume {tmp_path} continues after step 2"
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert contents(tmp_path / "checkpoints" / "step_00000002")["step"] == 2


def test_a_disk_that_is_full_from_the_start_promises_nothing(tmp_path, caplog, monkeypatch):
    def full(files, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "write", full)
    data = runs.Numbers()
    data.signalled_at = 60  # Ctrl-C in mid-run: the weights are saved if the checkpoint does not fit
    made = runs.trainer(tmp_path, {"steps": 7}, data=data)
    with pytest.raises(CheckpointError, match="the disk is full"):
        made.fit()
    assert made.step < 7
    assert (
        made.saved()
        == f"the weights after step {made.step} are in {tmp_path}/model.safetensors, and there is no checkpoint to resume from"
    )
    assert (tmp_path / "model.safetensors").exists()


def test_a_model_that_does_not_fit_is_told_on_all_ranks(tmp_path, monkeypatch):
    def full(pair, folder, *, step):
        raise OSError(28, "No space left on device")

    made = runs.trainer(tmp_path)
    monkeypatch.setattr("megabatch.towers.save", full)
    with pytest.raises(CheckpointError, match=r"the model could not be written in .*: the disk is full"):
        made.fit()
    assert made.saved() == f"--resume {tmp_path} continues after step 6"


def test_room_on_the_disk_is_checked_before_the_first_step(tmp_path, caplog, monkeypatch):
    made = runs.trainer(tmp_path / "none")
    monkeypatch.setattr("megabatch.trainer.room.free_bytes", lambda folder: 60_000)
    with pytest.raises(ValueError, match=r"has 0\.1 MB free; the model takes .* Make room, or use another folder"):
        made.fit()
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr("megabatch.trainer.room.free_bytes", lambda folder: 150_000)
    runs.trainer(tmp_path / "some").fit()
    assert "2 of them, and the next, may not fit" in caplog.text


def test_the_oldest_checkpoint_makes_room_for_the_next(tmp_path, caplog, monkeypatch):
    runs.trainer(tmp_path / "one", {"steps": 1}).fit()
    size = used(tmp_path / "one" / "checkpoints" / "step_00000001")
    capacity = int(3.5 * size)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=capacity - used(tmp_path / "run")))
    write = Files.write

    def bounded(files, folder):
        write(files, folder)
        if used(tmp_path / "run") > capacity:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "write", bounded)
    left = tmp_path / "run" / "checkpoints" / ".partial_step_00000009"  # of a run that was killed
    left.mkdir(parents=True)
    (left / "state.pt").write_bytes(bytes(size))
    runs.trainer(tmp_path / "run", {"steps": 6, "checkpoint": {"every": 1, "keep": 5}}).fit()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names[-1] == "step_00000006"
    assert 1 < len(names) < 4
    assert "could not be written" not in caplog.text
    assert "the disk has no room for another checkpoint; the oldest, " in caplog.text


def used(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_room_counts_the_best_model_and_old_checkpoints(tmp_path, monkeypatch):
    runs.trainer(tmp_path, {"steps": 4}).fit()
    made = runs.trainer(tmp_path, {"steps": 5})
    assert made.resume()
    model = sum(v.numel() * v.element_size() for tower in made.pair.towers for v in tower.module.state_dict().values())
    monkeypatch.setattr("megabatch.trainer.room.free_bytes", lambda folder: 2 * model)
    made.fit()  # the older of two checkpoints gives way
    changes = {"steps": 7, "evaluate_every": 1, "checkpoint": {"keep": 1}}
    monkeypatch.setattr("megabatch.trainer.room.free_bytes", lambda folder: int(1.5 * model))
    made = runs.trainer(tmp_path, changes, validation=runs.Numbers(samples=20))
    assert made.resume()
    with pytest.raises(ValueError, match=r"checkpoint\.best.* use --resume .*checkpoints/step_… --output OTHER_FOLDER"):
        made.fit()


def test_checkpoints_that_cannot_be_written_are_named_once_until_they_can(tmp_path, caplog, monkeypatch):
    made = runs.trainer(tmp_path, {"steps": 7, "checkpoint": {"every": 1, "keep": 9}})
    write = Files.write

    def full(files, folder):
        write(files, folder)
        if folder.name[-1] in "235":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "write", full)
    made.fit()
    saved = sorted(int(path.name[-1]) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [1, 4, 6, 7]
    told = [line.split(":")[0] for line in caplog.messages if "checkpoint" in line]
    again = "checkpoints are written again"
    failed = f"a checkpoint could not be written in {tmp_path / 'checkpoints'}"
    assert told == [failed, again, failed, again]


@pytest.fixture
def slow_disk(monkeypatch):
    """An event that writing waits for."""
    ready, write = threading.Event(), Files.write

    def slow(files, folder):
        assert ready.wait(PATIENCE)
        write(files, folder)

    monkeypatch.setattr(Files, "write", slow)
    yield ready
    ready.set()


class Releasing(runs.Memory):
    """Lets the disk work once a step has ended, and remembers which checkpoints there were after each step."""

    def __init__(self, ready, step):
        super().__init__()
        self.ready, self.step_released, self.after = ready, step, {}

    def step(self, record):
        super().step(record)
        self.after[record["step"]] = len(self.files)
        if record["step"] == self.step_released:
            self.ready.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, slow_disk):
    memory = Releasing(slow_disk, 5)
    made = runs.trainer(tmp_path, {"steps": 7, "checkpoint": {"every": 3, "keep": 9}}, observers=[memory])
    made.fit()
    assert [memory.after[step] for step in (4, 5)] == [0, 0]  # the first was still being written
    assert [path.name for path in memory.files] == ["step_00000003", "step_00000006", "model.safetensors", "step_00000007"]
    # A checkpoint holds the state of its step, not the state of the step in which it was written.
    again = runs.trainer(tmp_path, {"steps": 7, "checkpoint": {"every": 3, "keep": 9}})
    assert again.resume(tmp_path / "checkpoints" / "step_00000003")
    again.fit()
    assert runs.same_bits(runs.weights(again), runs.weights(made)) == []


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path, slow_disk):
    timer = threading.Timer(0.5, slow_disk.set)
    timer.start()
    memory = runs.Memory()
    runs.trainer(tmp_path, {"steps": 3, "checkpoint": {"every": 1, "keep": 9}}, observers=[memory]).fit()
    timer.join()
    names = [path.name for path in memory.files]
    assert names == ["step_00000001", "step_00000002", "model.safetensors", "step_00000003"]
    waited = [record["phases"].get("checkpoint", 0.0) for record in memory.records]
    assert max(waited) > 0.2  # it is the training that waited


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(tmp_path, slow_disk):
    threading.Timer(0.3, slow_disk.set).start()
    made = runs.trainer(tmp_path, {"steps": 7, "checkpoint": {"every": 2}})
    made.order = runs.Failing(made.order, 3)  # asked for while step 3 trains
    with pytest.raises(FloatingPointError, match="meant to fail"):
        made.fit()
    assert contents(tmp_path / "checkpoints" / "step_00000002")["step"] == 2


def test_a_disk_that_cannot_be_read_back_gives_up_the_checkpoint_on_all_ranks(tmp_path, caplog, monkeypatch):
    def broken(path):
        raise OSError(5, "Input/output error")

    made = runs.trainer(tmp_path)
    monkeypatch.setattr(checkpoint, "_checksum", broken)
    with pytest.raises(CheckpointError, match=r"a checkpoint could not be finished in .*Input/output error"):
        made.fit()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_last_few_are_kept(tmp_path):
    uninterrupted(tmp_path, {"steps": 9, "checkpoint": {"every": 2, "keep": 3}})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000006", "step_00000008", "step_00000009"]


def test_metrics_have_every_step_once_after_a_run_has_continued(tmp_path):
    wanted = runs.trainer(tmp_path / "whole", observers=[MetricsFile()])
    wanted.fit()
    made = runs.trainer(tmp_path / "again", observers=[MetricsFile()])
    made.fit()
    (tmp_path / "again" / "checkpoints" / "step_00000007").rename(tmp_path / "gone")
    with (tmp_path / "again" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "evaluation": {}}\n{"step": 8, "lo')
    again = runs.trainer(tmp_path / "again", observers=[MetricsFile()])
    assert again.resume()
    again.fit()
    lines = results.read(tmp_path / "again" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    expected = results.read(tmp_path / "whole" / "metrics.jsonl")
    for name in ("epoch", "pairs", "loss", "scale", "learning_rate", "gradient_norm"):
        assert [line[name] for line in lines] == [line[name] for line in expected], name
    keys = ["step", "epoch", "pairs", "loss", "scale", "learning_rate", "gradient_norm", "pairs_per_second", "memory_bytes"]
    assert list(lines[0]) == [*keys, "seconds", "phases"]


def test_a_run_continues_only_with_what_it_began_with(tmp_path):
    runs.trainer(tmp_path).fit()
    for changes, problem in (
        ({"batch_size": 10}, "batch_size was 12 and is 10"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"loss": {"name": "siglip"}}, "loss.name was 'clip' and is 'siglip'"),
        ({"data_options": {"texts": True}}, "data_options.texts was left out and is True.* These may change: .*workers"),
    ):
        with pytest.raises(ValueError, match=problem):
            runs.trainer(tmp_path, changes).resume()
    with pytest.raises(ValueError, match="the data had 40 samples and has 30"):
        runs.trainer(tmp_path, data=runs.Numbers(samples=30)).resume()
    longer = runs.trainer(tmp_path, {"steps": 8, "optimizer": {"weight_decay": 0.5}})
    assert longer.resume()
    assert longer.optimizer.param_groups[0]["weight_decay"] == 0.5
    longer.fit()
    assert longer.step == 8
    assert not runs.trainer(tmp_path / "empty").resume()


def test_options_of_the_data_are_those_the_run_began_with(tmp_path):
    options = {"columns": ("image", "caption"), "root": Path("images")}
    runs.trainer(tmp_path, {"data_options": options}).fit()
    assert runs.trainer(tmp_path, {"data_options": options, "workers": 2}).resume()
    from_toml = {"columns": ["image", "caption"], "root": "images"}
    assert runs.trainer(tmp_path, {"data_options": from_toml}).resume()
    columns = r"data_options.columns was \['image', 'caption'\] and is \['image', 'title'\]"
    with pytest.raises(ValueError, match=f"{columns}; data_options.root was 'images' and is left out"):
        runs.trainer(tmp_path, {"data_options": {"columns": ["image", "title"]}}).resume()


def test_every_setting_may_change_or_may_not():
    decided = [name.partition(".")[0] for name in FIXED] + list(FREE)
    assert sorted(decided) == sorted([*(field.name for field in dataclasses.fields(TrainConfig)), "optimizer"])


def test_memory_and_chunks_may_change(tmp_path):
    runs.trainer(tmp_path, {"memory": {"graphs": 0.5}}).fit()

    def fit_of(**changes):
        made = runs.trainer(tmp_path, {"memory": {"graphs": 0.5}, **changes})
        assert made.resume()
        made.fit()
        return made._fit

    before = contents(tmp_path / "checkpoints" / "step_00000007")
    assert before["graph_bytes"] > 0
    assert fit_of() == Fit((4, 4), before["graph_bytes"])
    assert fit_of(memory={"graphs": 0.0}) == Fit((4, 4), 0)
    assert fit_of(chunk_size=3).chunk_sizes == (3, 3)


def test_chunks_that_were_halved_stay_halved(tmp_path):
    made = runs.trainer(tmp_path)
    made._fit = Fit((2, 2), 0)  # as after memory ran out
    made.fit()
    again = runs.trainer(tmp_path, {"steps": 8})
    assert again.resume()
    again.fit()
    assert again._fit == Fit((2, 2), 0)


def test_a_checkpoint_named_by_a_relative_path_sets_later_ones_aside(tmp_path, monkeypatch):
    runs.trainer(tmp_path / "run", {"checkpoint": {"every": 2, "keep": 9}}).fit()
    monkeypatch.chdir(tmp_path)
    made = runs.trainer(tmp_path / "run")
    assert made.resume(Path("run/checkpoints/step_00000004"))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["abandoned_step_00000006", "abandoned_step_00000007", "step_00000002", "step_00000004"]


def test_another_number_of_ranks_continues(pool, tmp_path, caplog):
    changes = {**SETTINGS, "checkpoint": {"every": 2, "keep": 9}}
    (wanted, *_) = pool.run(runs.on_rank, 2, tmp_path, changes, {})
    made = runs.trainer(tmp_path, changes)
    assert made.resume(tmp_path / "checkpoints" / "step_00000004")
    assert made.step == 4
    made.fit()
    for name, value in runs.weights(made).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-9)
    about = json.loads((tmp_path / "checkpoints" / "step_00000007" / "checkpoint.json").read_text())
    assert about["world_size"] == 1
    assert "step_00000006 is now called abandoned_step_00000006" in caplog.text


def test_checkpoints_by_time(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 400))  # seconds
    monkeypatch.setattr("megabatch.trainer.storage.time.monotonic", lambda: next(clock))
    memory = runs.Memory()
    runs.trainer(tmp_path, {"steps": 8, "checkpoint": {"every": 100, "minutes": 15, "keep": 9}}, observers=[memory]).fit()
    names = [path.name for path in memory.files if path.name.startswith("step")]
    assert names == ["step_00000003", "step_00000006", "step_00000008"]


def test_the_best_weights_are_kept(tmp_path, monkeypatch):
    found = iter([0.2, 0.5, 0.4, 0.6, 0.1])
    saved = []
    made = runs.trainer(tmp_path, {"steps": 5, "evaluate_every": 1}, validation=runs.Numbers(samples=20))
    monkeypatch.setattr("megabatch.trainer.loop.evaluate", lambda *a, **b: {"text_to_image_R@1": next(found), "mean_rank": 3.0})
    keep = made._storage.keep_best
    made._storage.keep_best = lambda result: (
        keep(result),
        saved.append(json.loads((tmp_path / "best" / "best.json").read_text())["step"]),
    )
    made.fit()
    assert saved == [1, 2, 2, 4, 4]
    assert json.loads((tmp_path / "best" / "best.json").read_text())["value"] == 0.6
    assert (tmp_path / "best" / "model.safetensors").exists()
    # A run that goes back forgets what came later.
    again = runs.trainer(tmp_path, {"steps": 5, "evaluate_every": 1}, validation=runs.Numbers(samples=20))
    again.run.step = 2
    again._storage.keep_best({"text_to_image_R@1": 0.3})
    assert json.loads((tmp_path / "best" / "best.json").read_text())["step"] == 2


def test_the_metric_of_the_best_weights_is_checked_at_the_start(tmp_path):
    validation = {"one": runs.Numbers(samples=20), "two": runs.Numbers(samples=20)}
    made = runs.trainer(tmp_path, {"steps": 1, "evaluate_every": 1}, validation=validation)
    known = [key for key in made.fit() if "num_" not in key]
    with pytest.raises(ValueError, match=r'checkpoint.best must be "auto", "none" or one of .*, got \'foo\'') as error:
        runs.trainer(tmp_path, {"evaluate_every": 1, "checkpoint": {"best": "foo"}}, validation=validation)
    assert sorted(str(error.value).partition("one of ")[2].rpartition(", got")[0].split(", ")) == sorted(known)
    with pytest.raises(ValueError, match=r"checkpoint.best .* without evaluate_every, got 'two/clip_val_loss'"):
        runs.trainer(tmp_path, {"checkpoint": {"best": "two/clip_val_loss"}}, validation=validation)


def test_a_new_run_begins_without_the_best_weights_of_another(tmp_path):
    about = tmp_path / "best" / "best.json"
    about.parent.mkdir()
    about.write_text(json.dumps({"step": 0, "metric": "text_to_image_R@1", "value": 2.0}))
    (about.parent / "model.safetensors").write_text("old")
    runs.trainer(tmp_path, {"steps": 2, "evaluate_every": 1}, validation=runs.Numbers(samples=20)).fit()
    assert json.loads(about.read_text())["value"] <= 1


def test_a_rank_is_better_if_it_is_lower_and_none_keeps_nothing(tmp_path):
    metric = "image_to_text_mean_rank"
    changes = {"evaluate_every": 3, "checkpoint": {"best": metric}}
    made = runs.trainer(tmp_path, changes, validation=runs.Numbers(samples=20))
    for made.run.step, value in ((1, 3.0), (2, 5.0), (3, 2.0)):
        made._storage.keep_best({metric: value})
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == {"step": 3, "metric": metric, "value": 2.0}
    changes = {"evaluate_every": 3, "checkpoint": {"best": "none"}}
    runs.trainer(tmp_path / "none", changes, validation=runs.Numbers(samples=20)).fit()
    assert not (tmp_path / "none" / "best").exists()
