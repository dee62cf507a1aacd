"""The command line: help that teaches, errors in a line, settings, versions."""

import argparse
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megabatch
import word_pairs
from helpers import PATIENCE
from megabatch_train import cli, commands, machine, names, settings
from megabatch_train.commands import small, train
from megabatch_train.display.tables import TextTable
from megabatch_train.names import sanitize
from megabatch_train.trainer.config import TrainConfig
from word_pairs import WORDS, call


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    return word_pairs.enter(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "optimzer.lr=1"], 'optimzer is not a setting; did you mean "optimizer"?'),
        (["--set", "optimizer.lrate=1"], 'optimizer.lrate is not a setting; did you mean "lr"?'),
        (["--batch-size", "13"], "batch_size … 12 … got 13"),
        (["--data", "nothing.csv"], "No such file: nothing.csv"),
        (["--data", "emojis"], "No such data: emojis … emoji"),
        (["--model", "tiny"], "model_options.width must not be set for 'tiny' … image_size"),
        (["--resume", "nowhere"], "No such run: nowhere"),
        (["--resume", "."], ". has no checkpoint to resume from"),
        (["--set", "data=5"], "data must be a string, got 5"),
        (["--set", "model_options.widht=16"], 'model_options.widht is not a setting; did you mean "width"?'),
        *((["--set", f"model_options.width={n}"], f"model_options.width must be at least 1, got {n}") for n in (0, -4)),
        (["--set", "model_options.image_size=1"], "model_options.image_size must be at least 16 … got 1"),
        (["--set", "model_options.channels=[]"], "model_options.channels … got []"),
        (["--set", "model_options.width=wide"], "model_options.width … got 'wide'"),
        (
            ["--set", "data_options.colums=5"],
            "data_options … columns, texts, root … got 'colums'",
        ),
        (["--steps", "2", "--epochs", "9"], "--epochs … --steps … got 9.0 and 2"),
        (["--set", "checkpoint.best=foo"], "checkpoint.best … evaluate_every … got 'foo'"),
        (
            ["--set", "checkpoint.best=foo", "--evaluate-every", "1", "--validation", "pairs.jsonl"],
            "checkpoint.best … query_to_text_R@1 … got 'foo'",
        ),
        (["--output", "pairs.jsonl"], "--output … got pairs.jsonl"),
        (["--set", "device=cuda"], 'device … "cuda"'),
    ],
)
def test_mistakes_are_told_in_a_line(pairs, capsys, arguments, message):
    if "device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is one")
    assert call(*arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("megabatch train: ")
    assert all(part in told for part in message.split(" … ")), told
    assert "Traceback" not in told
    assert "MEGABATCH_TRACEBACK" not in told  # the hint is for faults of the program


def test_faults_of_the_program_have_a_hint_and_files_a_sentence(pairs, capsys, monkeypatch):
    def fault(*arguments, **options):
        return int("nonsense" if kind == "fault" else (pairs / "gone").read_text())

    monkeypatch.setattr("megabatch_train.data.load.load", fault)
    kind = "file"
    assert call() == 1
    assert capsys.readouterr().err == f"megabatch train: No such file or directory: {pairs / 'gone'}\n"
    kind = "fault"
    monkeypatch.setattr("megabatch_train.data.load.load", lambda *arguments, **options: json.loads("{"))
    assert call() == 1
    told = capsys.readouterr().err.splitlines()
    assert told[1] == "set MEGABATCH_TRACEBACK=1 for the traceback"


def test_deeply_nested_json_is_told_in_a_line(pairs, capsys, monkeypatch):
    monkeypatch.setattr("megabatch_train.data.load.load", lambda *arguments, **options: json.loads("[" * 200_000))
    assert call() == 1
    assert capsys.readouterr().err.startswith("megabatch train: a JSON or TOML file is nested too deeply")


def test_a_missing_pillow_is_told_in_a_line(pairs, capsys, monkeypatch):
    (pairs / "images.csv").write_text("image,caption\n" + "\n".join(f"{word}.png,{word}" for word in WORDS))
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert call("--data", "images.csv") == 1
    told = capsys.readouterr().err
    assert told.startswith('megabatch train: Reading images needs the package "PIL", which is not installed; pip install')
    assert told.count("\n") == 1


@pytest.mark.parametrize("package", ["numpy", "safetensors"])
def test_a_package_that_saves_models_is_missed_before_the_training(pairs, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert call() == 1
    assert f'Saving a model needs the package "{package}", which is not installed; pip install' in capsys.readouterr().err
    assert not (pairs / "runs").exists()


def test_lines_are_not_doubled_after_someone_logs_to_the_root():
    program = """
import logging
from megabatch_train import cli
cli._log_to_terminal()
logging.info("of open_clip")
logging.warning("a warning")
logging.getLogger("megabatch").info("ours")
logging.getLogger("megabatch_train.trainer").warning("ours too")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stderr.splitlines() == ["a warning", "ours", "ours too"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--batchsize", "3"], "unrecognized arguments: --batchsize 3; did you mean --batch-size?"),
        (["train", "--learning-rate", "3"], "did you mean --lr?"),
        (["train", "--batch_size", "3"], "did you mean --batch-size?"),
        (["train", "--ema", "0.9"], "--ema 0.9; other settings need --set KEY=VALUE (see `megabatch config`)"),
        (["trian"], "no such command: trian; did you mean train; commands: train, eval, search"),
        (["eval", "run", "--zzz"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_unknown_flags_get_a_suggestion(capsys, arguments, told):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    assert done.value.code == 2
    assert told in capsys.readouterr().err


def test_config_lists_settings_and_makes_their_page(pairs, capsys):
    assert cli.main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == settings.keys(TrainConfig)
    assert cli.main(["config", "warm"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "} == {
        *("optimizer.lr", "schedule.warmup_steps", "schedule.warmup_fraction", "schedule.name")
    }
    assert cli.main(["config", "--markdown"]) == 0
    page = Path(__file__).parent.parent / "docs" / "settings.md"
    assert capsys.readouterr().out == page.read_text("utf-8"), "megabatch config --markdown > docs/settings.md"
    assert call("--steps", "1", "--output", "mine") == 0
    capsys.readouterr()
    assert cli.main(["config", "--of", "mine", "batch_size"]) == 0
    assert "batch_size                   6  pairs" in capsys.readouterr().out
    assert cli.main(["config", "nothing-like-it"]) == 1


@pytest.mark.thorough
def test_output_into_a_closed_pipe_is_quiet():
    program = "import sys; from megabatch_train import cli; sys.stdout.flush(); sys.exit(cli.main(['config']))"
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE) == 141


def test_a_number_that_is_none_is_told_without_our_names(pairs, capsys):
    with pytest.raises(SystemExit):
        call("--chunk-size", "many")
    assert """--chunk-size: must be a whole number or "auto", got 'many'""" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("https://user:PASS@host/a b.csv?token=SECRET", "https://host/a b.csv"),
        ("3 * http://h/a.csv?SECRET + 1 * b?.csv + s3://key:PASS@h/?.tar", "3 * http://h/a.csv + 1 * b?.csv + s3://h/?.tar"),
        ('["HTTPS://h/a?x=SECRET", "hf://datasets/me/x@main/?.csv"]', '["HTTPS://h/a", "hf://datasets/me/x@main/?.csv"]'),
        ("https://h/a.csv has no pairs; is it a page?", "https://h/a.csv has no pairs; is it a page?"),
        ("got 'https://u:PA'SS@h/it's.csv?sig=SECRET', which", "got 'https://h/it's.csv', which"),
        ("https://u:PA/SS@h/x http://h:80/a@b http://[::1]:80/a@b", "https://h/x http://h:80/a@b http://[::1]:80/a@b"),
        (
            "[\"https://h/a?sig=SECRET\",\"y\"] {'x': 'https://h/a?X-Amz-Signature=SECRET'}",
            "[\"https://h/a\",\"y\"] {'x': 'https://h/a'}",
        ),
    ],
)
def test_addresses_are_shown_without_tokens_and_passwords(text, told):
    assert sanitize(text) == told


def test_control_characters_are_escaped_and_other_text_is_kept(capsys, monkeypatch):
    assert sanitize("red\x1b[31m\r\x07\x7f\x9b2J\u202e\udc80") == r"red\x1b[31m\x0d\x07\x7f\x9b2J\u202e\udc80"
    kept = "Grüße, 漢字, עברית, 👩‍🚀 …\n\tindented"
    assert sanitize(kept) == kept
    TextTable(["name"], [["a\x1b]0;title\x07\nb"]], title="\x1b[2J").print()
    assert capsys.readouterr().out == "\\x1b[2J\n  name\n  a\\x1b]0;title\\x07\\nb\n"
    monkeypatch.setattr(logging.getLogger("megabatch"), "handlers", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["megabatch", "eval", "no\x1b[31mrun"])
    assert cli.main() == 1
    told = capsys.readouterr().err
    assert r"No such run or model: no\x1b[31mrun" in told
    assert "\x1b" not in told
    error = RuntimeError("http://me:SECRET@host/a\x1b[2J")
    sys.excepthook(RuntimeError, error, None)
    assert capsys.readouterr().err == "RuntimeError: http://host/a\\x1b[2J\n"


def test_help_and_version_come_without_torch():
    program = """
import sys
from megabatch_train import cli
assert "torch" not in sys.modules
for arguments in (["--help"], ["--version"], [], *([name, "--help"] for name in cli.COMMANDS), ["help"], ["trian"]):
    try:
        cli.main(arguments)
    except SystemExit as done:
        assert done.code == (2 if arguments == ["trian"] else 0), (arguments, done.code)
assert not {"torch", "numpy", "matplotlib", "rich"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    for line in (
        "megabatch train --resume runs/emoji-1",
        "--set KEY=VALUE",
        "torchrun --nproc-per-node 8",
        "drawings by two artists",
        "hf:IMAGES+TEXTS",
    ):
        assert line in done.stdout
    assert "no such command: trian" in done.stderr


def test_lines_of_help_have_at_most_a_hundred_characters(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for arguments in (["--help"], ["help"], *([name, "--help"] for name in cli.COMMANDS)):
        with contextlib.suppress(SystemExit):
            cli.main(arguments)
        told = capsys.readouterr().out
        assert max(map(len, told.splitlines())) <= 100, (arguments, max(told.splitlines(), key=len))


def test_help_topics_are_explained_once(capsys):
    assert cli.main(["help"]) == 0
    both = capsys.readouterr().out
    for topic in ("data", "models"):
        assert cli.main(["help", topic]) == 0
        assert capsys.readouterr().out in both
    for kind in (
        "wordnet",
        ".parquet",
        ".tar",
        "gs://",
        "datasets:PATH@SPLIT",
        "save_to_disk",
        "hf-config:FOLDER",
        "FILE.json",
    ):
        assert kind in both
        assert any(kind in known for known in (*names.DATA, *names.MODELS)) or kind == "datasets:PATH@SPLIT"


def test_flags_of_train_are_read_from_the_source_of_the_settings():
    known = settings.describe_fields(TrainConfig)
    fields = settings.read_fields()
    assert list(fields) == [setting.key for setting in known]
    for setting in known:
        field = fields[setting.key]
        assert field.text == setting.text
        shown = "{}" if setting.kind == "a table" else "" if field.default is None else settings.format_value(field.default)
        assert shown == setting.default
    assert {flag.key for flag in train.FLAGS.values()} <= set(fields)


@pytest.mark.parametrize(
    ("variables", "drivers", "torch_is_there", "told"),
    [
        ({}, (), False, "passive"),
        ({"OMP_WAIT_POLICY": "active"}, (), False, "active"),
        ({"GOMP_SPINCOUNT": "100"}, (), False, None),
        ({}, (os.devnull,), False, None),  # a GPU
        ({}, (), True, None),  # too late
    ],
)
def test_threads_sleep_while_they_wait_on_a_cpu(monkeypatch, variables, drivers, torch_is_there, told):
    for name in machine.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "GPU_DRIVERS", drivers)
    if not torch_is_there:
        monkeypatch.delitem(sys.modules, "torch")
    machine.let_threads_sleep()
    assert os.environ.get("OMP_WAIT_POLICY") == told


def test_a_command_sets_how_threads_wait_before_torch_is_imported():
    program = """
import os, sys
import megabatch_train.machine
from megabatch_train import cli

class Seen(Exception):
    pass

class Watching:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise Seen(os.environ.get("OMP_WAIT_POLICY"))

assert "OMP_WAIT_POLICY" not in os.environ
megabatch_train.machine.GPU_DRIVERS = ()
sys.meta_path.insert(0, Watching())
for command in (["info"], ["bench"]):
    try:
        cli.main(command)
    except Seen as seen:
        print(command[0], seen)
        os.environ.pop("OMP_WAIT_POLICY", None)
"""
    environment = {name: value for name, value in os.environ.items() if name not in machine.WAIT_VARIABLES}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.stdout.split("\n")[:2] == ["info passive", "bench None"], done.stderr


def test_ctrl_c_while_torch_is_imported_is_one_line():
    program = """
import os, signal, sys
from megabatch_train import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a program started in the background ignores it

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.exit(cli.main(["info"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "megabatch info: stopped by Ctrl-C\n")


def rows_of_info(capsys):
    """The rows of `megabatch info` by name; all values begin in the same column."""
    assert cli.main(["info"]) == 0
    columns, _, _ = capsys.readouterr().out.partition("How a loss is computed")
    lines = [line for line in columns.splitlines() if line]
    (begin,) = {re.match(r".+?  +", line).end() for line in lines}
    return {line[:begin].rstrip(): line[begin:] for line in lines}


def test_info_names_versions_backends_and_extras(capsys):
    rows = rows_of_info(capsys)
    assert rows["torch"] == torch.__version__.split("+")[0]
    assert rows["backend of cpu"].startswith("eager")
    assert re.fullmatch(r"[\d.]+ GiB", rows["memory"])
    assert rows["sentence-transformers"].startswith(("installed", "missing: "))  # the longest name
    assert "pillow" in small.read_extras()["train"]
    assert ("tomli" in small.read_extras()["train"]) == (sys.version_info < (3, 11))


def test_info_of_a_source_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(small.machine, "version", lambda name: None)
    rows = rows_of_info(capsys)
    assert rows["megabatch"] == megabatch.__version__
    assert rows["extras"].startswith("unknown, because megabatch is not installed")


def test_python_m_megabatch_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "megabatch", "--version"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.startswith("megabatch 0.")


def test_columns_by_role(capsys):
    parser = argparse.ArgumentParser()
    commands.add_columns(parser)
    given = ["query=q", "document=d", "negative=a", "negative=b", "label="]
    found = parser.parse_args(["--columns", *given]).columns
    assert found == {"query": "q", "document": "d", "negative": ["a", "b"], "label": ""}
    for wrong, told in (
        (["query=q", "query=r"], "must name one column for query, got q and r"),
        (["query="], "must be ROLE=NAME"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(["--columns", *wrong])
        assert told in capsys.readouterr().err
