"""Runs that are killed, stopped or damaged: they continue, and end with the bits of a run that nothing happened to."""

import dataclasses
import json
import signal
import types
from pathlib import Path

import pytest
import torch

import runs
from megabatch.world import World
from megabatch_train.commands.train import _read_old_settings
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import results
from megabatch_train.trainer.checkpoints import CheckpointError, read_manifest
from megabatch_train.trainer.config import FIXED, FREE, CheckpointConfig, TrainConfig
from megabatch_train.trainer.health import StoppedError
from megabatch_train.trainer.run import MetricsFile, began_in
from megabatch_train.trainer.step import Fit
from ranks import RankFailedError

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


@pytest.mark.thorough
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
        StoppedError, match=r"stopped by SIGTERM after step 3 of 7\. A checkpoint is saved\. .* megabatch train --resume .*run"
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
    assert "step_00000007 is renamed to abandoned_step_00000007" in caplog.text
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
    assert list(lines[1]) == [*keys, "seconds", "phases", "spread", "advantage"]
    assert list(lines[0]) == [*lines[1], "start"]


def test_a_run_continues_only_with_what_it_began_with(tmp_path):
    runs.trainer(tmp_path).fit()
    for changes, problem in (
        ({"batch_size": 10}, "batch_size was 12 and is 10"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"loss": {"name": "siglip"}}, "loss.name was 'clip' and is 'siglip'"),
        ({"data_options": {"texts": True}}, "data_options.texts was not set and is True.* These may change: .*workers"),
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


def test_paths_are_those_of_the_directory_that_the_run_began_in(tmp_path, monkeypatch):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "pairs.csv").touch()
    monkeypatch.chdir(tmp_path / "here")
    relative, absolute = {"data": "pairs.csv"}, {"data": str(tmp_path / "here" / "pairs.csv")}
    runs.trainer(tmp_path / "run", {"steps": 2, **relative}).fit()
    assert began_in(tmp_path / "run") == str(tmp_path / "here")
    for place, changes in (("here", relative), ("here", absolute), ("there", absolute)):
        monkeypatch.chdir(tmp_path / place)
        assert runs.trainer(tmp_path / "run", {"steps": 2, **changes}).resume()
    with pytest.raises(ValueError, match=r"data was '.*/here/pairs.csv' and is '.*/there/pairs.csv'"):
        runs.trainer(tmp_path / "run", {"steps": 2, **relative}).resume()
    assert _read_old_settings(tmp_path / "run", None)["data"] == absolute["data"]


def test_a_project_that_was_moved_continues(tmp_path, monkeypatch):
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "pairs.csv").touch()
    monkeypatch.chdir(tmp_path / "before")
    runs.trainer(Path("run"), {"steps": 2, "data": "pairs.csv"}).fit()
    (tmp_path / "before").rename(tmp_path / "after")
    monkeypatch.chdir(tmp_path / "after")
    assert runs.trainer(Path("run"), {"steps": 2, "data": "pairs.csv"}).resume()
    with pytest.raises(ValueError, match=r"data was '.*/after/pairs.csv' and is 'other.csv'"):
        runs.trainer(Path("run"), {"steps": 2, "data": "other.csv"}).resume()


def test_data_that_has_changed_is_warned_about(tmp_path, monkeypatch, caplog):
    rows = [{"image": f"{number}.png", "text": f"text {number}"} for number in range(8)]
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(Table, "read_stored", lambda table, index, side: torch.full((runs.WIDTH,), float(index)).double())
    runs.trainer(tmp_path / "run", {"steps": 2, "batch_size": 4}, data=Table(tmp_path / "before")).fit()
    (tmp_path / "before").rename(tmp_path / "after")
    for changed in (rows, rows[::-1], [*rows[:7], {**rows[7], "text": "another text"}]):
        (tmp_path / "after" / "pairs.jsonl").write_text("\n".join(map(json.dumps, changed)))
        caplog.clear()
        assert runs.trainer(tmp_path / "run", {"steps": 2, "batch_size": 4}, data=Table(tmp_path / "after")).resume()
        assert ("the data has changed since" in caplog.text) == (changed != rows)


def test_options_of_the_data_are_those_the_run_began_with(tmp_path):
    options = {"columns": ("image", "caption"), "root": Path("images")}
    runs.trainer(tmp_path, {"data_options": options}).fit()
    assert runs.trainer(tmp_path, {"data_options": options, "workers": 2}).resume()
    from_toml = {"columns": ["image", "caption"], "root": "images"}
    assert runs.trainer(tmp_path, {"data_options": from_toml}).resume()
    columns = r"data_options.columns was \['image', 'caption'\] and is \['image', 'title'\]"
    with pytest.raises(ValueError, match=f"{columns}; data_options.root was 'images' and is not set"):
        runs.trainer(tmp_path, {"data_options": {"columns": ["image", "title"]}}).resume()


def test_every_setting_may_change_or_may_not():
    decided = [name.partition(".")[0] for name in FIXED] + list(FREE)
    assert sorted(decided) == sorted([*(field.name for field in dataclasses.fields(TrainConfig)), *["optimizer"] * 2])


def test_memory_and_chunks_may_change(tmp_path):
    runs.trainer(tmp_path, {"memory": {"graphs": 0.5}}).fit()

    def fit_of(**changes):
        made = runs.trainer(tmp_path, {"memory": {"graphs": 0.5}, **changes})
        assert made.resume()
        made.fit()
        return made._fit

    before = read_manifest(tmp_path / "checkpoints" / "step_00000007")
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
    assert "step_00000006 is renamed to abandoned_step_00000006" in caplog.text


def test_checkpoints_by_time(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 400))  # seconds
    monkeypatch.setattr("megabatch_train.trainer.storage.time.monotonic", lambda: next(clock))
    memory = runs.Memory()
    runs.trainer(tmp_path, {"steps": 8, "checkpoint": {"every": 100, "minutes": 15, "keep": 9}}, observers=[memory]).fit()
    names = [path.name for path in memory.files if path.name.startswith("step")]
    assert names == ["step_00000003", "step_00000006", "step_00000008"]


@pytest.mark.parametrize(
    ("seconds", "every", "wanted"),
    [
        (1, 0, [20]),  # a short run has only its last checkpoint
        (4, 0, [8, 16, 20]),  # due after every second step, and 30 seconds apart
        (40, 0, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        (1, 5, [5, 10, 15, 20]),  # as the user has set
    ],
)
def test_checkpoints_of_a_short_run_are_not_too_close(tmp_path, monkeypatch, seconds, every, wanted):
    memory = runs.Memory()
    made = runs.trainer(tmp_path, {"steps": 20, "checkpoint": {"every": every, "keep": 99}}, observers=[memory])
    clock = types.SimpleNamespace(monotonic=lambda: float(seconds * made.step))
    monkeypatch.setattr("megabatch_train.trainer.storage.time", clock)
    made.fit()
    assert [int(path.name.removeprefix("step_")) for path in memory.files if path.name.startswith("step")] == wanted


def _of_one_clock(group, rank, folder):
    made = runs.trainer(folder, {"steps": 20, "checkpoint": {"every": 0}}, world=World(torch.device("cpu"), group))
    recent = CheckpointConfig.early
    CheckpointConfig.early = lambda config, seconds: rank == 1  # the clock of one rank is behind
    try:
        made.fit()
    finally:
        CheckpointConfig.early = recent
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_ranks_skip_the_same_checkpoints(pool, tmp_path):
    assert pool.run(_of_one_clock, 2, tmp_path) == [["step_00000020"]] * 2


def test_the_best_weights_are_kept(tmp_path, monkeypatch, caplog):
    found = iter([0.2, 0.5, 0.4, 0.6, 0.1])
    saved = []
    made = runs.trainer(tmp_path, {"steps": 5, "evaluate_every": 1}, validation=runs.Numbers(samples=20))
    monkeypatch.setattr(
        "megabatch_train.trainer.loop.evaluate", lambda *a, **b: {"text_to_image_R@1": next(found), "mean_rank": 3.0}
    )
    keep = made._storage.save_best
    made._storage.save_best = lambda result, loss: (
        keep(result, loss),
        saved.append(json.loads((tmp_path / "best" / "best.json").read_text())["step"]),
    )
    losses = iter([5.0, 4.0, 3.0, 2.0, 1.5, 1.4])
    made._recent_loss = lambda: next(losses)
    made.fit()
    assert saved == [1, 2, 2, 4, 4]
    assert "the model overfits: the training loss fell from 2 to 1.4, but the best evaluation was after step 4" in caplog.text
    assert "with text_to_image_R@1 = 0.6; at the end it is 0.1" in caplog.text
    assert f"{tmp_path / 'best'} has the weights of step 4. Pass this folder to eval, search or export" in caplog.text
    assert json.loads((tmp_path / "best" / "best.json").read_text())["value"] == 0.6
    assert (tmp_path / "best" / "model.safetensors").exists()
    # A run that goes back forgets what came later.
    again = runs.trainer(tmp_path, {"steps": 5, "evaluate_every": 1}, validation=runs.Numbers(samples=20))
    again.run.step = 2
    again._storage.save_best({"text_to_image_R@1": 0.3})
    assert json.loads((tmp_path / "best" / "best.json").read_text())["step"] == 2


@pytest.mark.parametrize(
    ("value", "loss", "told"),
    [(0.5, 1.0, "INFO"), (0.4, 3.0, "INFO"), (0.4, 1.0, "WARNING"), (0.4, None, "INFO"), (0.6, 1.0, None)],
)
def test_the_end_of_a_run_names_the_best_evaluation(tmp_path, caplog, value, loss, told):
    caplog.set_level("INFO")
    made = runs.trainer(tmp_path, {"evaluate_every": 1}, validation=runs.Numbers(samples=20))
    for made.run.step, result, before in ((1, 0.5, 2.0), (2, value, loss)):
        made._storage.save_best({"text_to_image_R@1": result}, before)
    caplog.clear()
    made._storage.log_best({"text_to_image_R@1": value}, loss)
    assert [record.levelname for record in caplog.records] == [told] * (told is not None)
    assert told is None or "the best evaluation was after step 1" in caplog.text


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
        made._storage.save_best({metric: value})
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == {"step": 3, "metric": metric, "value": 2.0}
    changes = {"evaluate_every": 3, "checkpoint": {"best": "none"}}
    runs.trainer(tmp_path / "none", changes, validation=runs.Numbers(samples=20)).fit()
    assert not (tmp_path / "none" / "best").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Other numbers of ranks. Without dropout, which each rank draws for its own rows. Batches of 12 have equal parts on 4 and 3
# ranks, and unequal ones of 13.


def losses(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def check_same_run(folder, whole, wanted, learned):
    """The batches and their order, seen by the losses; and the weights. In float64, sums over ranks round in another order."""
    assert [step for step, _ in losses(folder)] == list(range(1, 8))
    torch.testing.assert_close(losses(folder), losses(whole), rtol=1e-12, atol=0)
    for name, value in runs.weights(wanted).items():
        torch.testing.assert_close(learned[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batch", [12, pytest.param(13, marks=pytest.mark.thorough)])
def test_ranks_that_fail_and_continue_as_other_numbers_of_ranks_are_one_run(pool, tmp_path, batch):
    changes = {**SETTINGS, "batch_size": batch}
    wanted = uninterrupted(tmp_path / "whole", changes, observers=[MetricsFile()])
    for ranks, how in (4, {"fails_at": 3}), (3, {"fails_at": 5, "resume": True}):
        with pytest.raises(RankFailedError, match="meant to fail"):
            pool.run(runs.on_rank, ranks, tmp_path / "run", changes, how)
    learned = pool.run(runs.on_rank, 4, tmp_path / "run", changes, {"resume": True})
    for rank in range(4):
        check_same_run(tmp_path / "run", tmp_path / "whole", wanted, learned[rank])


@pytest.mark.thorough
def test_killed_jobs_of_torchrun_that_continue_as_other_numbers_of_ranks_are_one_run(tmp_path):
    """A rank is killed, and torchrun ends the others: by 4 ranks, then by 3; 4 ranks end the run."""
    wanted = uninterrupted(tmp_path / "whole", observers=[MetricsFile()])
    for ranks, reads, resume in (4, 36, False), (3, 36, True), (4, 0, True):
        job = runs.under_torchrun(tmp_path / "run", SETTINGS, ranks=ranks, kill_at_read=reads, resume=resume)
        assert (job.returncode == 0) == (not reads), job.stderr[-3000:]
        assert not reads or "SIGKILL" in job.stderr
    made = runs.trainer(tmp_path / "run", SETTINGS)
    assert made.resume()
    check_same_run(tmp_path / "run", tmp_path / "whole", wanted, runs.weights(made))
