"""`megabatch train` from the command line: files, resuming, settings, data, and messages."""

import errno
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import word_pairs
from helpers import PATIENCE
from megabatch_train import cli, settings, towers
from megabatch_train.commands import train
from megabatch_train.data import load as data
from megabatch_train.data import loader
from megabatch_train.evaluation import results
from megabatch_train.machine import StartClock
from megabatch_train.trainer import loop
from megabatch_train.trainer.checkpoints import read_weights
from word_pairs import call


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    return word_pairs.enter(tmp_path, monkeypatch)


def test_train_writes_what_it_should_and_loads_again(pairs):
    assert call("--epochs", "3", "--lr", "1e-2", "--validation", "pairs.jsonl", "--set", "evaluate_every=2") == 0
    folder = pairs / "runs" / "pairs-1"
    names = {"config.toml", "command.txt", "metrics.jsonl", "model.safetensors", "checkpoints"}
    assert names <= {path.name for path in folder.iterdir()}
    config = settings.read(folder / "config.toml")
    assert (config["epochs"], config["optimizer"]["lr"], config["model_options"]["width"]) == (3.0, 1e-2, 16)
    lines = results.read(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 7))
    assert [line["step"] for line in lines if "evaluation" in line] == [2, 4, 6]
    assert "query_to_text_R@1" in lines[-1]["evaluation"]
    assert towers.load_saved(folder).logit_scale == pytest.approx(lines[-2]["scale"])
    assert call("--epochs", "3") == 0  # the next one has a folder of its own
    assert (pairs / "runs" / "pairs-2" / "model.safetensors").exists()


def test_workers_start_before_data_and_model_are_loaded(pairs, monkeypatch):
    def watch(owner, name):
        plain = getattr(owner, name)

        def call(*args, **options):
            events.append(name)
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, call)

    def load_data(*args, **options):
        assert imported.wait(PATIENCE)  # another thread imports the packages of the model
        events.append("data")
        return load(*args, **options)

    def import_packages(names):
        assert threading.current_thread() is not threading.main_thread()
        assert names == ("open_clip",)
        imported.set()

    events, imported, load = [], threading.Event(), data.load
    monkeypatch.setattr(data, "load", load_data)
    monkeypatch.setattr(loader, "import_packages", import_packages)
    monkeypatch.setitem(train.PACKAGES, "small", ("open_clip",))
    for owner, name in (
        (loader, "start_processes"),
        (towers, "load"),
        (loader, "open_readers"),
        (loop, "build"),
    ):
        watch(owner, name)
    assert call("--steps", "1", "--no-report") == 0
    assert events == ["start_processes", "data", "load", "open_readers", "build"]


def test_the_phases_of_a_start_are_told_and_stored(pairs, caplog):
    caplog.set_level("INFO")
    assert call("--steps", "2", "--output", "mine", "--set", "checkpoint.every=1") == 0
    assert call("--resume", "mine", "--steps", "4") == 0
    lines = results.read("mine/metrics.jsonl")
    assert [line["step"] for line in lines if "start" in line] == [1, 3]  # once per process
    names = ["imports", "data", "model", "optimizer", "folder", "chunk_size", "stored_embeddings", "compilation", "first_step"]
    assert list(lines[0]["start"]) == names
    assert [name for name in names if name not in lines[2]["start"]] == ["chunk_size"]  # the checkpoint has it
    assert all(seconds >= 0 for line in (lines[0], lines[2]) for seconds in line["start"].values())
    assert sum("s to the end of the first step" in message for message in caplog.messages) == 2


def test_the_phases_of_a_start_follow_each_other():
    moments = iter([10.0, 12.5, 12.52, 13.0, 14.0])
    clock = StartClock(lambda: next(moments))
    for name in ("imports", "data", "model", "data"):
        clock.end_phase(name)
    assert clock.seconds == pytest.approx({"imports": 2.5, "data": 1.02, "model": 0.48})
    assert clock.describe() == "4.0 s to the end of the first step: imports 2.5 s, data 1.0 s, model 0.5 s"
    moments = iter([0.0, 0.01])
    short = StartClock(lambda: next(moments))
    short.end_phase("imports")
    assert short.describe() == "0.0 s to the end of the first step"


def test_train_resumes_by_folder_by_checkpoint_and_by_itself(pairs, capsys):
    assert call("--set", "steps=4", "--output", "mine", "--set", "checkpoint.every=2", "--resume", "auto") == 0
    assert call("--output", "mine") == 1
    assert "mine contains a run. Use --resume mine to continue it" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "mine", "--set", "steps=6", "--no-report"]) == 0
    lines = results.read("mine/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    commands = (pairs / "mine" / "command.txt").read_text().splitlines()
    assert len(commands) == 2  # the first command is kept
    assert call("--resume", "mine/checkpoints/step_00000004", "--output", "other", "--set", "steps=6") == 0
    assert [line["step"] for line in results.read("other/metrics.jsonl")] == [5, 6]
    weights = [read_weights(Path(f"{run}/checkpoints/step_00000006"))[0] for run in ("mine", "other")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_log_without_a_login_fails_before_the_data_is_loaded(pairs, monkeypatch, capsys):
    monkeypatch.setattr(train, "_list_observers", Mock(side_effect=ValueError("--wandb needs a login")))
    monkeypatch.setattr(train, "_build_trainer", Mock(side_effect=AssertionError("the data is loaded")))
    assert call("--output", "mine", "--wandb", "project") == 1
    assert capsys.readouterr().err.startswith("megabatch train: --wandb needs a login\n")
    assert not (pairs / "mine").exists()


def test_what_a_checkpoint_cannot_continue_with_is_told_in_a_line(pairs, capsys):
    assert call("--set", "steps=2", "--output", "mine") == 0
    assert cli.main(["train", "--resume", "mine", "--set", "model_options.width=8", "--no-report"]) == 1
    assert "model_options.width was 16 and is 8" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "mine", "--set", 'data_options.columns=["document", "query"]', "--no-report"]) == 1
    assert "data_options.columns was not set and is ['document', 'query']" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "mine", "--set", "workers=2", "--no-report"]) == 0
    capsys.readouterr()
    with (pairs / "mine" / "checkpoints" / "step_00000002" / "state.pt").open("ab") as file:
        file.write(b"x")
    assert cli.main(["train", "--resume", "mine/checkpoints/step_00000002", "--no-report"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("megabatch train: --resume must name an intact checkpoint: the checkpoint mine/")


def test_a_folder_that_cannot_be_written_to_is_noticed_before_anything_is_loaded(pairs, capsys, monkeypatch):
    assert call("--set", "steps=1", "--output", "mine") == 0
    monkeypatch.setattr(train, "_build_trainer", lambda *_: pytest.fail("something was loaded"))
    capsys.readouterr()
    wanted = "megabatch train: --output must be a folder that can be written to, got {}, and {}; free disk space or allow"
    assert call("--output", "pairs.jsonl/run") == 1
    assert capsys.readouterr().err.startswith(wanted.format("pairs.jsonl/run", "pairs.jsonl: Not a directory"))
    (pairs / "gone").symlink_to("nowhere")
    assert call("--output", "gone") == 1
    assert capsys.readouterr().err.startswith(wanted.format("gone", "gone: No such file or directory"))
    temporary_file = tempfile.TemporaryFile

    def refused(dir):  # whoever runs the tests may be allowed everything
        if dir.name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(dir))
        return temporary_file(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert cli.main(["train", "--resume", "mine", "--no-report"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(wanted.format("mine", "mine/checkpoints: Permission denied"))
    assert "or use --resume mine/checkpoints/step_… --output OTHER_FOLDER" in told


def test_a_run_that_does_not_begin_leaves_no_folder(pairs):
    assert call("--data", "nothing.csv") == 1
    assert not (pairs / "runs").exists()


def test_columns_of_training_and_validation_data(pairs, capsys):
    text = (pairs / "pairs.jsonl").read_text().replace("query", "asks").replace("document", "says")
    (pairs / "other.jsonl").write_text(text)
    assert call("--data", "other.jsonl") == 1
    assert "other.jsonl has the columns asks, says. Name the columns to use: --columns image=asks" in capsys.readouterr().err
    columns = ("--columns", "query=asks", "document=says")
    assert call("--data", "other.jsonl", "--validation", "other.jsonl", *columns, "--set", "steps=2", "--output", "mine") == 0
    config = settings.read("mine/config.toml")
    wanted = {"columns": {"query": "asks", "document": "says"}}
    assert (config["data_options"], config["validation_options"]) == (wanted, wanted)
    assert cli.main(["train", "--resume", "mine", "--set", "steps=3", "--no-report"]) == 0
    assert cli.main(["eval", "mine"]) == 0
    rows = [json.loads(line) for line in text.splitlines()]
    (pairs / "more.jsonl").write_text("\n".join(json.dumps({**row, "not": "x", "kind": 1}) for row in rows))
    more = (*columns, "negative=not", "label=kind")
    given = ("--loss", "info_nce", "--set", "steps=1", "--output", "more")
    assert call("--data", "more.jsonl", "--validation", "other.jsonl", *more, *given) == 0  # evaluation needs neither


def test_an_interrupted_run_is_evaluated_and_searched_on_its_own_data(pairs, capsys, caplog):
    assert call("--set", "steps=4", "--output", "mine", "--set", "checkpoint.every=1") == 0
    assert cli.main(["eval", "mine"]) == 0
    whole = capsys.readouterr().out
    (pairs / "mine" / "model.safetensors").unlink()
    assert cli.main(["eval", "mine"]) == 0
    assert capsys.readouterr().out == whole
    assert "data: pairs.jsonl, 12 pairs, the training data of the run; --data names other data" in caplog.messages
    assert "weights: checkpoint of mine, after step 4" in caplog.messages
    assert cli.main(["search", "mine/checkpoints/step_00000003", "number two", "-k", "3"]) == 0
    assert "number two" in capsys.readouterr().out
    for name, damaged in (("state.pt", "state.pt has 3 bytes"), ("checkpoint.json", "checkpoint.json cannot be read")):
        (pairs / "mine" / "checkpoints" / "step_00000003" / name).write_text("bad")
        for command in (["eval"], ["search"]):
            assert cli.main([*command, "mine/checkpoints/step_00000003", *(["two"] if command == ["search"] else [])]) == 1
            told = capsys.readouterr().err
            assert "MODEL must be an intact checkpoint: the checkpoint mine/checkpoints/step_00000003 is" in told
            assert f"is damaged: {damaged}" in told
    (pairs / "mine" / "checkpoints" / "step_00000004" / "state.pt").write_text("bad")
    assert cli.main(["eval", "mine"]) == 1
    assert "has no model.safetensors and no intact checkpoint" in capsys.readouterr().err


def test_epochs_and_steps_given_last_win(pairs):
    assert call("--steps", "2", "--output", "mine") == 0
    assert cli.main(["train", "--resume", "mine", "--epochs", "3", "--no-report"]) == 0
    assert results.read("mine/metrics.jsonl")[-1]["step"] == 6  # two batches an epoch
    assert cli.main(["train", "--resume", "mine", "--steps", "7", "--no-report"]) == 0
    assert results.read("mine/metrics.jsonl")[-1]["step"] == 7
    assert call("--set", "steps=1", "--set", "epochs=1", "--output", "other") == 0
    assert len(results.read("other/metrics.jsonl")) == 2


def test_flags_are_settings(pairs):
    given = "--steps 2 --warmup 1 --weight-decay 0.3 --clip-norm 2 --evaluate-every 1 --workers 1 --compile off"
    assert call(*given.split(), "--validation", "pairs.jsonl", "--output", "mine") == 0
    config = settings.read("mine/config.toml")
    assert (config["steps"], config["evaluate_every"], config["workers"], config["compile"]) == (2, 1, 1, "off")
    assert (config["optimizer"]["weight_decay"], config["optimizer"]["clip_norm"]) == (0.3, 2.0)
    assert config["schedule"] == {"name": "cosine", "warmup_steps": 1, "end": 0.0, "unmask_fraction": 0.0}
    assert call("--steps", "1", "--warmup", "0.5", "--output", "other") == 0
    assert settings.read("other/config.toml")["schedule"]["warmup_fraction"] == 0.5


def test_a_part_is_held_out_by_itself(pairs, capsys):
    assert call("--holdout", "0.4", "--batch-size", "4", "--steps", "2", "--evaluate-every", "1", "--output", "mine") == 0
    lines = results.read("mine/metrics.jsonl")
    held = lines[-1]["evaluation"]["num_samples"]
    assert 1 < held < 8
    assert cli.main(["eval", "mine"]) == 0
    assert f"samples: {held}, failed: 0" in capsys.readouterr().out
    assert cli.main(["eval", "mine", "--split", "train"]) == 0
    assert f"samples: {12 - held}, failed: 0" in capsys.readouterr().out
    assert cli.main(["train", "--resume", "mine", "--holdout", "0.3", "--no-report"]) == 1
    assert "holdout was 0.4 and is 0.3" in capsys.readouterr().err


def test_several_validation_sets(pairs):
    text = (pairs / "pairs.jsonl").read_text()
    (pairs / "less.jsonl").write_text("\n".join(text.splitlines()[:5]))
    assert call("--validation", "pairs.jsonl", "less.jsonl", "--steps", "1", "--output", "mine") == 0
    found = results.read("mine/metrics.jsonl")[-1]["evaluation"]
    assert (found["num_samples"], found["less/num_samples"]) == (12, 5)
    assert found["clip_val_loss"] > found["less/clip_val_loss"] > 0
    assert settings.read("mine/config.toml")["validation"] == ["pairs.jsonl", "less.jsonl"]
    assert cli.main(["train", "--resume", "mine", "--steps", "2", "--no-report"]) == 0


@pytest.mark.thorough
def test_two_runs_do_not_write_to_one_folder(pairs, capsys, monkeypatch):
    assert call("--set", "steps=2", "--output", "mine") == 0
    program = "import sys, time; from pathlib import Path; from megabatch_train.trainer.run import lock_folder\n"
    program += "with lock_folder(Path('mine')), lock_folder(Path('runs/pairs-1')): print('held', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        for how in (["--resume", "mine"], ["--resume", "auto", "--output", "mine"]):
            assert call(*how, "--set", "steps=4") == 1
            assert f"mine is in use by process {other.pid} on " in capsys.readouterr().err
        assert [line["step"] for line in results.read("mine/metrics.jsonl")] == [1, 2]
        names = iter([pairs / "runs" / "pairs-1", pairs / "runs" / "pairs-2"])
        monkeypatch.setattr(
            "megabatch_train.trainer.run.find_unused", lambda parent, name: next(names)
        )  # as if both had begun at once
        assert call("--set", "steps=2") == 0  # with no folder given, a new run takes the next
        assert (pairs / "runs" / "pairs-2" / "model.safetensors").exists()
    finally:
        other.kill()
        other.communicate()
    assert call("--resume", "mine", "--set", "steps=4") == 0


def test_validation_on_training_data_is_warned_about(pairs, caplog):
    shutil.copy("pairs.jsonl", "other.jsonl")
    for validation, warns in (("pairs.jsonl", True), (str(pairs / "pairs.jsonl"), True), ("other.jsonl", False)):
        caplog.clear()
        assert call("--set", "steps=1", "--validation", validation) == 0
        assert (f"{validation} is training data, too" in caplog.text) == warns


def test_problems_of_the_data_are_named_and_counted(pairs, caplog):
    with (pairs / "pairs.jsonl").open("a") as file:
        file.write("\n" + "nonsense\n" * 7)
    assert call("--set", "steps=1", "--validation", "pairs.jsonl") == 0
    named = [line for line in caplog.messages if "must be a JSON object" in line]
    assert [line.split(":")[0] for line in named] == [f"pairs.jsonl, row {row}" for row in range(13, 18)]
    assert "and 2 more problems like these" in caplog.messages


def test_a_loss_that_is_not_finite_ends_with_the_status_of_failed_runs(pairs, caplog):
    assert call("--steps", "9", "--lr", "1e30", "--output", "failed") == 3
    assert "--resume failed continues after step " in caplog.text
    assert (pairs / "failed" / "checkpoints").is_dir()


def test_ctrl_c_before_a_run_begins_is_a_line(pairs, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("megabatch_train.data.load.load", interrupted)
    assert call() == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megabatch train: ")
    assert "Ctrl-C" in line


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("emoji", "emoji"),
        ("data/my pairs.csv", "my-pairs"),
        ("cc12m/{00000..00099}.tar", "cc12m"),
        ("*.tar", "run"),
        ("/data/shards/", "shards"),
        ("..", "run"),
        ("https://user:pass@host/my.pairs.csv?token=a.b", "my.pairs"),
    ],
)
def test_a_run_is_called_after_its_data(source, name):
    assert train._run_name(source) == name


def test_the_start_of_a_run_counts_its_data(pairs, caplog):
    caplog.set_level("INFO", "megabatch")
    assert call("--steps", "1", "--holdout", "0.3", "--set", "batch_size=4", "--output", "held") == 0
    held = len(data.load("pairs.jsonl", "test", holdout=0.3))
    batches = (12 - held) // 4
    told = next(line for line in caplog.messages if line.startswith("data: ")).removeprefix("data:").lstrip()
    assert told.startswith(f"{12 - held} pairs of pairs.jsonl (columns query, document), {held} held out; ")
    assert told.endswith(f"an epoch has {4 * batches} samples in {batches} {'batch' if batches == 1 else 'batches'}")
    caplog.clear()
    assert call("--steps", "1", "--validation", "pairs.jsonl", "--output", "tested") == 0
    assert "12 pairs of pairs.jsonl (columns query, document), 12 to evaluate on; an epoch has 12" in caplog.text
    caplog.clear()
    assert call("--steps", "1", "--output", "alone") == 0
    assert "none to evaluate on; an epoch has 12 samples in 2 batches" in caplog.text


def test_commands_say_which_data_they_use(pairs, caplog, capsys):
    assert call("--steps", "1", "--holdout", "0.3", "--set", "batch_size=4", "--output", "held") == 0
    held = len(data.load("pairs.jsonl", "test", holdout=0.3))
    caplog.set_level("INFO", "megabatch")
    for command, wanted in (
        (["eval", "held"], f"data: pairs.jsonl, test split, {held} pairs, held out of the training data"),
        (["search", "held", "two"], f"data: pairs.jsonl, test split, {held} pairs, held out of the training data"),
        (["embed", "held", "--output", "a.npy"], f"data: pairs.jsonl, test split, {held} pairs, held out of the training data"),
        (
            ["mine", "held", "--negatives", "1"],
            f"data: pairs.jsonl, train split, {12 - held} pairs, the training data of the run",
        ),
    ):
        caplog.clear()
        assert cli.main(command) == 0
        assert f"{wanted}; --data names other data" in caplog.messages
    assert len((pairs / "mined.jsonl").read_text().splitlines()) == 12 - held  # nothing that was held out
    caplog.clear()
    assert cli.main(["eval", "held", "--data", "pairs.jsonl"]) == 0
    assert "data: pairs.jsonl, 12 pairs" in caplog.messages
