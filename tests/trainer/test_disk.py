"""Runs whose disk is full, slow or broken: they keep what was saved, say what could not be written, and train on."""

import dataclasses
import fcntl
import threading
from types import SimpleNamespace

import pytest
import torch

import runs
from helpers import PATIENCE
from megabatch.world import World
from megabatch_train import towers
from megabatch_train.evaluation import results
from megabatch_train.towers import models
from megabatch_train.trainer import checkpoints as checkpoint
from megabatch_train.trainer.checkpoints import CheckpointError, Files, list_checkpoints, read_manifest
from megabatch_train.trainer.run import MetricsFile
from megabatch_train.trainer.storage import Checkpoints


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
    assert caplog.text.count("the disk is full. Training continues") == 1
    # The weights take less room than a checkpoint. They are there, evaluated, and the message is true.
    assert (tmp_path / "model.safetensors").exists()
    assert "evaluation" in results.read(tmp_path / "metrics.jsonl")[-1]
    assert made.describe_saved() == (
        f"the weights after step 7 are in {tmp_path}/model.safetensors, and --resume {tmp_path} continues after step 2"
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert read_manifest(tmp_path / "checkpoints" / "step_00000002")["step"] == 2


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
        made.describe_saved()
        == f"the weights after step {made.step} are in {tmp_path}/model.safetensors, and there is no checkpoint to resume from"
    )
    assert (tmp_path / "model.safetensors").exists()


def test_a_model_that_does_not_fit_is_told_on_all_ranks(tmp_path, monkeypatch):
    def full(pair, folder, *, step):
        raise OSError(28, "No space left on device")

    made = runs.trainer(tmp_path)
    monkeypatch.setattr("megabatch_train.towers.save", full)
    with pytest.raises(CheckpointError, match=r"the model could not be written in .*: the disk is full"):
        made.fit()
    assert made.describe_saved() == f"--resume {tmp_path} continues after step 6"


def test_the_model_is_worth_more_than_old_checkpoints(tmp_path, caplog, monkeypatch):
    save = towers.save

    def free():
        """The disk is full while it has more than one checkpoint and no model."""
        count = len(list((tmp_path / "checkpoints").glob("step_*")))
        return 0 if count > 1 and not (tmp_path / "model.safetensors").exists() else 10**9

    def bounded(pair, folder, *, step):
        if not free():
            raise OSError(28, "No space left on device")
        return save(pair, folder, step=step)

    monkeypatch.setattr("megabatch_train.towers.save", bounded)
    monkeypatch.setattr("megabatch_train.trainer.run.free_bytes", lambda folder: 10**9)
    monkeypatch.setattr(Checkpoints, "_free", lambda checkpoints: free())
    monkeypatch.setattr(Checkpoints, "_make_space", lambda checkpoints: None)  # for the next checkpoint
    runs.trainer(tmp_path, {"checkpoint": {"every": 2, "keep": 4}}).fit()
    assert models.read_step(tmp_path) == 7
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000006", "step_00000007"]
    assert caplog.text.count("the disk has no space for the model, so the oldest checkpoint") == 2


def test_old_checkpoints_stay_if_the_model_would_not_fit_without_them(tmp_path, monkeypatch):
    made = Checkpoints(tmp_path, 3, World(torch.device("cpu")))
    for step in (1, 2, 3):
        folder = tmp_path / f".partial_{step}"
        folder.mkdir()
        (folder / "state.pt").write_bytes(bytes(100))
        checkpoint.finish(folder, tmp_path / f"step_{step:08d}", {})
    monkeypatch.setattr(made, "_free", lambda: 0)
    for complete in (False, True):
        assert not made.make_space(10**6, complete=complete)
    assert len(list_checkpoints(tmp_path)) == 3
    assert made.make_space(100, complete=False)  # no space is seen to become free, so all but the newest are deleted
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000003"]
    assert not made.make_space(100, complete=False)  # the newest is not deleted
    assert made.make_space(100, complete=True)
    assert list_checkpoints(tmp_path) == []


def test_the_model_of_a_complete_run_is_worth_more_than_the_last_checkpoint(tmp_path, caplog, monkeypatch):
    save, write = towers.save, Files.write

    def is_full():
        """The disk has space for one checkpoint or for the model."""
        return any((tmp_path / "checkpoints").glob("step_*")) or (tmp_path / "model.safetensors").exists()

    def bounded_save(pair, folder, *, step):
        if is_full():
            raise OSError(28, "No space left on device")
        return save(pair, folder, step=step)

    def bounded_write(files, folder):
        if is_full():
            raise OSError(28, "No space left on device")
        write(files, folder)

    monkeypatch.setattr("megabatch_train.towers.save", bounded_save)
    monkeypatch.setattr(Files, "write", bounded_write)
    monkeypatch.setattr(Checkpoints, "_free", lambda checkpoints: 0)
    with pytest.raises(CheckpointError, match=r"a checkpoint could not be written in .*: the disk is full"):
        runs.trainer(tmp_path, {"steps": 3, "checkpoint": {"every": 2}}).fit()
    assert models.read_step(tmp_path) == 3
    assert list_checkpoints(tmp_path / "checkpoints") == []
    folder = tmp_path / "checkpoints" / "step_00000002"
    assert f"the last checkpoint, which a complete run does not need, {folder}, is deleted" in caplog.text


def test_temporary_files_of_a_killed_run_are_removed_at_the_next_start(tmp_path):
    digits = "0123456789abcdef" * 2
    ours = [f".config.toml-{digits}", f".model.safetensors-{digits}", f"best/.best.json-{digits}"]
    others = [
        f".notes.txt-{digits}",
        ".model.safetensors-1",
        ".config.toml-",
        f"config.toml-{digits}",
        f"mine/.config.toml-{digits}",
    ]
    alive = tmp_path / f".report.html-{digits}"
    for name in (*ours, *others, alive.name):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with alive.open() as file:  # as `megabatch report` holds it while the run starts
        fcntl.flock(file, fcntl.LOCK_EX)
        runs.trainer(tmp_path, {"steps": 1}).fit()
        assert alive.exists()
    assert [name for name in ours if (tmp_path / name).exists()] == []
    assert [name for name in others if not (tmp_path / name).exists()] == []


def test_room_on_the_disk_is_checked_before_the_first_step(tmp_path, caplog, monkeypatch):
    made = runs.trainer(tmp_path / "none")
    monkeypatch.setattr("megabatch_train.trainer.run.free_bytes", lambda folder: 60_000)
    with pytest.raises(ValueError, match=r"has 0\.1 MB free; the model takes .* Free disk space, or use another folder"):
        made.fit()
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr("megabatch_train.trainer.run.free_bytes", lambda folder: 150_000)
    runs.trainer(tmp_path / "some").fit()
    assert "2 checkpoints and the temporary copy of the next one may not fit" in caplog.text


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
    assert "the disk has no space for another checkpoint, so the oldest checkpoint, " in caplog.text


def used(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_room_counts_the_best_model_and_old_checkpoints(tmp_path, monkeypatch):
    runs.trainer(tmp_path, {"steps": 4}).fit()
    made = runs.trainer(tmp_path, {"steps": 5})
    assert made.resume()
    model = sum(v.numel() * v.element_size() for tower in made.pair.towers for v in tower.module.state_dict().values())
    monkeypatch.setattr("megabatch_train.trainer.run.free_bytes", lambda folder: 2 * model)
    made.fit()  # the older of two checkpoints gives way
    changes = {"steps": 7, "evaluate_every": 1, "checkpoint": {"keep": 1}}
    monkeypatch.setattr("megabatch_train.trainer.run.free_bytes", lambda folder: int(1.5 * model))
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
    again = "checkpoints can be written again"
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
    timer = threading.Timer(1.5, slow_disk.set)

    class Memory(runs.Memory):
        def step(self, record):
            super().step(record)
            if record["step"] == 1:  # its checkpoint is being written
                timer.start()

    memory = Memory()
    runs.trainer(tmp_path, {"steps": 3, "checkpoint": {"every": 1, "keep": 9}}, observers=[memory]).fit()
    timer.join()
    names = [path.name for path in memory.files]
    assert names == ["step_00000001", "step_00000002", "model.safetensors", "step_00000003"]
    waited = [record["phases"].get("checkpoint", 0.0) for record in memory.records]
    assert max(waited) > 0.2  # it is the training that waited


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(tmp_path, slow_disk):
    threading.Timer(0.3, slow_disk.set).start()
    made = runs.trainer(tmp_path, {"steps": 7, "checkpoint": {"every": 2}})
    made.stages = [dataclasses.replace(made.stages[0], order=runs.Failing(made.order, 3))]  # asked for while step 3 trains
    with pytest.raises(FloatingPointError, match="meant to fail"):
        made.fit()
    assert read_manifest(tmp_path / "checkpoints" / "step_00000002")["step"] == 2


def test_a_disk_that_cannot_be_read_back_gives_up_the_checkpoint_on_all_ranks(tmp_path, caplog, monkeypatch):
    def broken(path):
        raise OSError(5, "Input/output error")

    made = runs.trainer(tmp_path)
    monkeypatch.setattr(checkpoint, "_checksum", broken)
    with pytest.raises(CheckpointError, match=r"a checkpoint could not be finished in .*Input/output error"):
        made.fit()
    assert list((tmp_path / "checkpoints").iterdir()) == []
