"""The command line: help that teaches, errors in a line, settings, versions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megabatch
import word_pairs
from helpers import PATIENCE
from megabatch import cli, settings
from megabatch.commands import info, train
from megabatch.names import shown
from megabatch.trainer.config import TrainConfig
from word_pairs import WORDS, call


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    return word_pairs.enter(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "optimzer.lr=1"], 'optimzer is no setting; did you mean "optimizer"?'),
        (["--set", "optimizer.lrate=1"], 'optimizer.lrate is no setting; did you mean "lr"?'),
        (["--batch-size", "13"], "batch_size … 12 … got 13"),
        (["--data", "nothing.csv"], "No such file: nothing.csv"),
        (["--data", "emojis"], "No such data: emojis … emoji"),
        (["--model", "tiny"], 'options … "small"'),
        (["--resume", "nowhere"], "No such run: nowhere"),
        (["--resume", "."], ". has no checkpoint to resume from"),
        (["--set", "data=5"], "data must be a string, got 5"),
        (["--set", "model_options.widht=16"], 'model_options.widht is no setting; did you mean "width"?'),
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

    monkeypatch.setattr(train.data, "load", fault)
    kind = "file"
    assert call() == 1
    assert capsys.readouterr().err == f"megabatch train: No such file or directory: {pairs / 'gone'}\n"
    kind = "fault"
    monkeypatch.setattr(train.data, "load", lambda *arguments, **options: json.loads("{"))
    assert call() == 1
    told = capsys.readouterr().err.splitlines()
    assert told[1] == "set MEGABATCH_TRACEBACK=1 for the traceback"


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
from megabatch import cli
cli._log_to_terminal()
logging.info("of open_clip")
logging.warning("a warning")
logging.getLogger("megabatch").info("ours")
logging.getLogger("megabatch.trainer").warning("ours too")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stderr.splitlines() == ["a warning", "ours", "ours too"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--batchsize", "3"], "unrecognized arguments: --batchsize 3; did you mean --batch-size?"),
        (["train", "--learning-rate", "3"], "did you mean --lr?"),
        (["train", "--batch_size", "3"], "did you mean --batch-size?"),
        (["train", "--ema", "0.9"], "--ema 0.9; --set KEY=VALUE sets what has no option, and `megabatch config` lists it"),
        (["trian"], "no such command: trian; did you mean train; there are: train, eval, search"),
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
        *("schedule.warm_up_steps", "schedule.warm_up_fraction", "schedule.name")
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
    program = "import sys; from megabatch import cli; sys.stdout.flush(); sys.exit(cli.main(['config']))"
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
    ],
)
def test_addresses_are_shown_without_tokens_and_passwords(text, told):
    assert shown(text) == told


def test_help_and_version_come_without_torch():
    program = """
import sys
from megabatch import cli
assert "torch" not in sys.modules
for arguments in (["--help"], ["--version"], [], *([name, "--help"] for name in cli.COMMANDS), ["trian"]):
    try:
        cli.main(arguments)
    except SystemExit as done:
        assert done.code == (2 if arguments == ["trian"] else 0), (arguments, done.code)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    for line in ("megabatch train --resume runs/emoji-1", "--set KEY=VALUE", "torchrun --nproc-per-node 8", "emoji (drawings"):
        assert line in done.stdout
    assert "no such command: trian" in done.stderr


def test_ctrl_c_while_torch_is_imported_is_one_line():
    program = """
import os, signal, sys
from megabatch import cli

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


def test_info_names_versions_backends_and_extras(capsys):
    assert cli.main(["info"]) == 0
    told = capsys.readouterr().out
    assert f"torch              {torch.__version__.split('+')[0]}" in told
    assert "cpu                eager" in told
    assert "pillow" in info.extras()["data"]
    assert ("tomli" in info.extras()["train"]) == (sys.version_info < (3, 11))


def test_info_of_a_source_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr(info.machine, "version", lambda name: None)
    assert cli.main(["info"]) == 0
    told = capsys.readouterr().out
    assert f"megabatch          {megabatch.__version__}" in told
    assert "extras             not known: megabatch runs from its source" in told


def test_python_m_megabatch_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "megabatch", "--version"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.startswith("megabatch 0.")
