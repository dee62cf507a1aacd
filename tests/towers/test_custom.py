"""Towers of the user ("python:"): training, resuming, saved runs, every command, and modules that are not trusted."""

import json
import sys

import pytest
import torch

from megabatch.world import World
from megabatch_train import towers
from megabatch_train.cli import main
from megabatch_train.data.dataset import StoredFile, UnreadableSampleError
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import embed, results
from megabatch_train.planning import models as planning
from megabatch_train.towers import custom
from megabatch_train.towers.tower import allow_remote_code
from megabatch_train.trainer.loop import embed_by_teacher

MODULE = """
import torch
from torch import nn
from megabatch_train.data import UnreadableSampleError
from megabatch_train.towers import Pair, Tower, load

class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, width))

    def forward(self, numbers):
        return nn.functional.normalize(self.layers(numbers), dim=-1)

def prepare(values, generator):
    if len(values) != 4:
        raise UnreadableSampleError(f"four numbers are needed, got {len(values)}")
    numbers = torch.tensor(values, dtype=torch.float32)
    return numbers if generator is None else numbers + 0.01 * torch.randn(4, generator=generator)

def read(file, generator):
    return prepare([float(word) for word in file.data.split()], generator)

def build(width=16, kind="value", second="text"):
    text = load("small", ("text", "text"), width=width, buckets=64).second
    other = text if second == "text" else Tower(Encoder(width), second, prepare)
    return Pair(Tower(Encoder(width), kind, read if kind == "file" else prepare), other, logit_scale=5.0)

def wrong(result="nothing"):
    text = load("small", ("text", "text")).second
    results = {"nothing": None, "module": Pair(Tower(build, "value", prepare), text), "side": Pair(None, text)}
    results |= {"kind": Pair(Tower(Encoder(4), "smell", prepare), text), "scale": Pair(text, text, logit_scale=-1.0)}
    results |= {"no scale": Pair(text, text, logit_scale=None), "bias": Pair(text, text, logit_bias="low")}
    return results[result]

nothing = None
"""
NAMES = ("north", "east", "south", "west")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working directory, which no other test has imported or named."""
    (tmp_path / "compass.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(custom, "_NAMED", set())
    monkeypatch.delitem(sys.modules, "compass", raising=False)
    yield tmp_path
    sys.modules.pop("compass", None)


def write_rows(path, count=32):
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(count):
        values = torch.nn.functional.one_hot(torch.tensor(number % 4), 4) + 0.3 * torch.rand(4, generator=generator)
        rows.append({"reading": values.tolist(), "caption": f"{NAMES[number % 4]} {number // 4}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words):
    assert main([str(word) for word in words]) in (0, None)


def test_a_run_trains_resumes_and_serves_every_command(module, monkeypatch, capsys):
    table = write_rows(module / "compass.jsonl")
    model = ["--model", "python:compass:build", "--set", "model_options.width=8"]
    shared = [*model, "--data", table, "--columns", "value=reading", "text=caption", "--validation", table, "--batch-size", 8]
    shared += ["--chunk-size", 4, "--compile", "off", "--lr", "1e-2", "--no-report", "--set", "checkpoint.every=12"]
    run("train", *shared, "--steps", 24, "--output", "run")
    losses = [line["loss"] for line in results.read(module / "run" / "metrics.jsonl") if "loss" in line]
    assert sum(losses[-4:]) < sum(losses[:4]) - 1
    # Without its name on the command line, the module runs only if the user allows it.
    monkeypatch.setattr(custom, "_NAMED", set())
    resume = ("train", "--resume", "run/checkpoints/step_00000012", "--output", "again")
    capsys.readouterr()
    for words in (resume, ("eval", "run"), ("search", "run", "north"), ("eval", "run/checkpoints/step_00000012")):
        assert main(list(words)) not in (0, None)
    assert capsys.readouterr().err.count("--trust-remote-code imports its module") == 4
    (module / "foreign.toml").write_text('model = "python:compass:build"\n')
    assert main(["train", "--config", "foreign.toml", "--data", str(table), "--output", "foreign"]) not in (0, None)
    assert "foreign.toml must be a model without custom code" in capsys.readouterr().err
    run(*resume, "--trust-remote-code", "--no-report")
    first, second = ((module / name / "model.safetensors").read_bytes() for name in ("run", "again"))
    assert first == second

    run("eval", "run")  # the process has run the module already
    assert "value → text" in capsys.readouterr().out
    run("search", "run", "north", "--json", "-k", 3)
    (found,) = json.loads(capsys.readouterr().out)
    assert sum(match["text"].startswith("north") for match in found["matches"]) >= 2
    run("search", "run", "north", "--sheet", "sheet.png", "--dim", 4)
    run("embed", "run", "--side", "first", "--output", "readings.npy")
    run("search", "run", "east", "--embeddings", "readings.npy")
    run("eval", "run", "--zero-shot")
    run("report", "run")
    assert "north" in (module / "run" / "report.html").read_text()
    capsys.readouterr()
    assert main(["export", "run", "exported", "--to", "onnx"]) not in (0, None)
    assert main(["plan", "--model", "python:compass:build", "--gpus", "1xH100"]) == 2
    errors = capsys.readouterr().err
    assert "--to onnx needs a model of transformers, open_clip or megabatch" in errors
    assert "a plan needs the sizes of the inputs" in errors


def test_a_saved_model_is_the_model(module):
    pair = towers.load("python:compass:build", ("value", "text"), width=8)
    assert (pair.name, pair.options, pair.logit_scale) == ("python:compass:build", {"width": 8}, 5.0)
    towers.save(pair, module / "saved")
    loaded = towers.load_saved(module / "saved")
    for tower, other in zip(pair.towers, loaded.towers, strict=True):
        for key, value in tower.module.state_dict().items():
            assert torch.equal(value, other.module.state_dict()[key])
    custom._NAMED.clear()
    with pytest.raises(ValueError, match="--trust-remote-code imports its module"):
        towers.load_saved(module / "saved")
    with allow_remote_code():
        towers.load_saved(module / "saved")


def test_settings_of_a_run_cannot_choose_a_module_as_teacher(module):
    table = Table(write_rows(module / "rows.jsonl", 4), columns={"value": "reading", "text": "caption"})
    world = World(torch.device("cpu"))
    with pytest.raises(ValueError, match="a teacher or guide must be a model without custom code"):
        embed_by_teacher("python:compass:build", table, module / "teacher", world, chunk_size=2, workers=0)
    assert "compass" not in sys.modules


def test_samples_that_a_tower_refuses_are_skipped(module):
    table = module / "rows.jsonl"
    write_rows(table, 6)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    rows[0]["reading"], rows[3]["reading"] = [], [1.0] * 5
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = Table(table, columns={"value": "reading", "text": "caption"})
    pair = towers.load("python:compass:build", dataset.sides)
    embeddings = embed(pair.first, dataset, 0)
    assert dataset.failures == {0: "four numbers are needed, got 0", 3: "four numbers are needed, got 5"}
    assert torch.equal(embeddings[0], embeddings[1]), "the first sample that can be read replaces it"
    with pytest.raises(RuntimeError, match="one of the first 100 samples must be readable, got none: four numbers"):
        embed(pair.first, dataset.part([0, 3]), 0)


def test_samples_are_skipped_by_a_tower_that_refuses_blanks(module):
    def prepare(text, generator):
        if len(text) < 3:
            raise UnreadableSampleError(f"a text must have three characters, got {text!r}")
        return torch.tensor([float(len(text))])

    (module / "texts.csv").write_text("query,document\nab,x\nabc,x\nabcd,x\n")
    dataset = Table(module / "texts.csv")
    embeddings = embed(towers.Tower(torch.nn.Linear(1, 4), "text", prepare), dataset, 0)
    assert dataset.failures == {0: "a text must have three characters, got 'ab'"}
    assert torch.equal(embeddings[0], embeddings[1])
    assert not torch.equal(embeddings[1], embeddings[2])


def test_values_keep_their_types(module):
    parquet = pytest.importorskip("pyarrow.parquet", reason='pip install "megabatch[train]"')
    import pyarrow

    values = [[1, 2], {"a": None}, b"bytes", 1.5, " text\n", True]
    (module / "v.jsonl").write_text("".join(json.dumps({"v": v, "t": "t"}) + "\n" for v in values if v != b"bytes"))
    table = Table(module / "v.jsonl", columns={"value": "v", "text": "t"})
    assert [table.read(index, 0) for index in range(5)] == [value for value in values if value != b"bytes"]
    parquet.write_table(pyarrow.table({"v": [b"ab", b"cd", b"ab"], "w": [1, 2, 3]}), module / "v.parquet")
    table = Table(module / "v.parquet", columns={"value": "v", "second_value": "w"})
    assert table.sides == ("value", "value")
    assert [(table.read(index, 0), table.read(index, 1)) for index in range(3)] == [(b"ab", 1), (b"cd", 2), (b"ab", 3)]
    assert table.items().tolist() == [0, 1, 0], "equal values are one item"
    (module / "n.jsonl").write_text('{"v": null, "t": "a"}\n{"v": 1, "t": "b"}\n')
    table = Table(module / "n.jsonl", columns={"value": "v", "text": "t"})
    assert len(table) == 1
    assert table.problems == ["n.jsonl, row 1: v must be a value, got nothing"]


def test_files_are_given_as_bytes(module):
    for number in range(3):
        (module / f"{number}.txt").write_text(f"{number} 1 2 3")
    (module / "files.csv").write_text("path,caption\n0.txt,a\n1.txt,b\nmissing.txt,c\n")
    dataset = Table(module / "files.csv", columns={"file": "path", "text": "caption"})
    assert dataset.read(1, 0) == StoredFile(b"1 1 2 3", str(module / "1.txt"))
    pair = towers.load("python:compass:build", dataset.sides, kind="file")
    embed(pair.first, dataset, 0)
    assert list(dataset.failures) == [2]
    assert dataset.place(0) == str(module / "0.txt")


def test_two_sides_of_values(module, capsys):
    generator = torch.Generator().manual_seed(0)
    rows = [{"a": (value := torch.rand(4, generator=generator).tolist()), "b": value[::-1]} for _ in range(16)]
    (module / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", "python:compass:build", "--set", 'model_options.second="value"', "--data", "rows.jsonl"]
    words += ["--columns", "value=a", "second_value=b", "--validation", "rows.jsonl", "--batch-size", 8, "--compile", "off"]
    run("train", *words, "--steps", 3, "--output", "run")
    assert "query_to_text_R@1" in results.read(module / "run" / "metrics.jsonl")[-1]["evaluation"]
    capsys.readouterr()
    assert main(["search", "run", "a text"]) not in (0, None)
    assert "QUERY must be of a kind that the model encodes, value or value, got text" in capsys.readouterr().err


WRONG = [
    ("python:compass", {}, "model must be python:MODULE:FUNCTION"),
    ("python:com pass:build", {}, "model must be python:MODULE:FUNCTION"),
    ("python:compas:build", {}, "must name a module that can be imported, got 'python:compas:build'"),
    ("python:compass:bild", {}, "must name a function of compass, got 'bild', which is None"),
    ("python:compass:nothing", {}, "must name a function of compass"),
    ("python:compass:build", {"depth": 3}, r"model_options must be arguments of compass:build\(.*'depth'"),
    ("python:compass:wrong", {}, "must return a megabatch_train.towers.Pair, got NoneType"),
    ("python:compass:wrong", {"result": "module"}, "module of the first tower must be an nn.Module, got function"),
    ("python:compass:wrong", {"result": "side"}, "the first tower must be a megabatch_train.towers.Tower, got NoneType"),
    ("python:compass:wrong", {"result": "kind"}, "kind of the first tower must be one of image, text, audio, value, file"),
    ("python:compass:wrong", {"result": "scale"}, "logit_scale must be a positive number, got -1.0"),
    ("python:compass:wrong", {"result": "no scale"}, "logit_scale must be a positive number, got None"),
    ("python:compass:wrong", {"result": "bias"}, "logit_bias must be a number or None, got 'low'"),
]


@pytest.mark.parametrize(("spec", "options", "message"), WRONG)
def test_errors_name_the_problem(module, spec, options, message):
    with pytest.raises(ValueError, match=message):
        towers.load(spec, None, **options)


def test_kinds_columns_and_plans(module):
    with pytest.raises(
        ValueError, match=r"must have towers for image and text, got 'python:compass:build', which is for value"
    ):
        towers.load("python:compass:build")
    with pytest.raises(ValueError, match="a plan needs the sizes of the inputs"):
        planning.model("python:compass:build")
    write_rows(module / "rows.jsonl", 4)
    with pytest.raises(ValueError, match="columns must not name negatives"):
        Table(module / "rows.jsonl", columns={"value": "reading", "second_value": "caption", "negative": "reading"})


def test_a_broken_import_of_the_module_keeps_its_error(module):
    (module / "compass.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        towers.load("python:compass:build", None)
