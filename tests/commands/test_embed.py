"""`megabatch embed`: the rows of `embed`, after a stop too, and `megabatch search` over them."""

import argparse
import importlib
import json
import math
import re
import shutil
import sys

import pytest
import torch

from megabatch_train import towers
from megabatch_train.commands import find_command, mine
from megabatch_train.data import dataset
from megabatch_train.data.load import load
from megabatch_train.data.rows import ImageFolder, is_plain
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import embed, embedding, results
from megabatch_train.evaluation.embedding import read_or_none

TINY = {"width": 16, "image_size": 16, "channels": (8, 16), "blocks": 1, "buckets": 512}
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "gray")


def call(command, *arguments):
    parser = argparse.ArgumentParser()
    module = find_command(command)
    module.add_arguments(parser)
    words = [str(argument) for argument in (*arguments, "--device", "cpu", "--chunk-size", "2")]
    return module.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, a table of images and captions, and a folder of images without captions; one image is damaged."""
    pillow = pytest.importorskip("PIL.Image", reason='pip install "megabatch[train]"')
    folder = tmp_path_factory.mktemp("embed")
    torch.manual_seed(0)
    towers.save(towers.load("small", **TINY), folder / "run")
    (folder / "images").mkdir()
    for number, colour in enumerate(COLOURS):
        pillow.new("RGB", (20, 24), colour).save(folder / "images" / f"{number}.png")
    (folder / "images" / "4.png").write_bytes(b"no image")
    rows = [f"images/{number}.png,a {colour} square" for number, colour in enumerate(COLOURS)]
    (folder / "pairs.csv").write_text("\n".join(["image,caption", *rows]))
    return folder


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("ending", [".npy", ".parquet"])
def test_a_stopped_command_continues_and_its_file_is_searched(place, tmp_path, capsys, monkeypatch, ending, side):
    if ending == ".parquet":
        pytest.importorskip("pyarrow", reason='pip install "megabatch[train]"')
    output, real, calls = tmp_path / f"x{ending}", embedding.Stored.append, []
    arguments = (place / "run", "--data", place / "pairs.csv", "--output", output, "--side", ("images", "texts")[side])

    def stops(self, chunk):
        real(self, chunk)
        calls.append(chunk)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(embedding.Stored, "append", stops)
    with pytest.raises(KeyboardInterrupt):
        call("embed", *arguments)
    assert not output.exists()
    with (tmp_path / f"x{ending}.work" / "rows.bin").open("ab") as file:
        file.write(b"cut off")
    call("embed", *arguments)
    assert len(calls) == 4  # of two rows each, none of them twice
    assert not list(tmp_path.glob("*.work"))
    pair, table = towers.load_saved(place / "run"), Table(place / "pairs.csv")
    expected = embed(pair.towers[side], table, side, chunk_size=2)
    if side == 0:
        expected[4] = math.nan
    assert ("1 samples could not be read" in capsys.readouterr().out) == (side == 0)
    saved = embedding.Saved(output)
    torch.testing.assert_close(torch.cat(list(saved.chunks())), expected, rtol=0, atol=0, equal_nan=True)
    wanted = [{"name": f"images/{i}.png", "path": str(place / "images" / f"{i}.png")} for i in range(7)]
    assert saved.samples == [{**row, "text": f"a {colour} square"} for row, colour in zip(wanted, COLOURS, strict=True)]
    found = []
    for where in (("--embeddings", output), ("--data", place / "pairs.csv", "--among", ("images", "texts")[side])):
        call("search", place / "run", "a red square", place / "images" / "2.png", "--json", "-k", 3, *where)
        found.append(json.loads(capsys.readouterr().out))
    for match, other in zip(*([match for query in queries for match in query["matches"]] for queries in found), strict=True):
        assert match == {**other, "similarity": pytest.approx(other["similarity"], abs=1e-6)}
    assert [list(match) for match in found[0][0]["matches"]] == 3 * [["rank", "similarity", "index", "name", "path", "text"]]
    assert not (tmp_path / "found.png").exists()


def test_a_folder_of_images_alone(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "images", "photos")
    (tmp_path / "photos" / "README.txt").write_text("not a caption")
    call("embed", place / "run", "--data", "photos", "--output", "x.npy")
    assert embedding.Saved(tmp_path / "x.npy").samples[2]["path"] == "photos/2.png"
    call("embed", place / "run", "--data", place / "images", "--output", "x.npy")
    (tmp_path / "p.csv").write_text("image,caption\nphotos/0.png,a red square")
    call("search", place / "run", "a question " * 30, "--data", " + ".join(["p.csv"] * 33), "--among", "texts", "--json")
    for arguments in (("--data", place / "images"), ("--embeddings", "x.npy")):
        capsys.readouterr()
        call("search", place / "run", "a red square", place / "images" / "2.png", "-k", 9, *arguments)
        printed = capsys.readouterr().out
        assert str(place / "images" / "5.png") in printed
        assert "images/4.png" not in printed.partition("1 samples")[0]
        lines = printed.partition("2.png\n")[2].splitlines()
        assert lines[1].split()[1:] == ["2.png", str(place / "images" / "2.png"), "1.000"]
    with pytest.raises(ValueError, match="--among must be a side of the data, image, got text"):
        call("search", place / "run", "red", "--data", place / "images", "--among", "texts")


def test_embeddings_of_other_weights_and_wrong_arguments(place, tmp_path):
    call("embed", place / "run", "--data", place / "images", "--output", tmp_path / "x.npy")
    torch.manual_seed(1)
    towers.save(towers.load("small", **TINY), tmp_path / "other")
    for arguments, message in (
        ((tmp_path / "other", "red", "--embeddings", tmp_path / "x.npy"), "must have the same model and weights"),
        ((place / "run", "red", "--embeddings", tmp_path / "x.npy", "--data", "emoji"), "--data cannot be used with"),
        ((place / "run", "red", "--embeddings", place / "pairs.csv"), r"ends in \.npy or \.parquet"),
    ):
        with pytest.raises(ValueError, match=message):
            call("search", *arguments)
    (tmp_path / "x.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"must have x\.json and x\.jsonl in the same folder"):
        call("search", place / "run", "red", "--embeddings", tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"--output must end in \.npy or \.parquet"):
        call("embed", place / "run", "--data", place / "images", "--output", tmp_path / "x.csv")
    with pytest.raises(ValueError, match="--side must be images or texts for this data, got queries"):
        call("embed", place / "run", "--data", place / "images", "--output", tmp_path / "y.npy", "--side", "queries")
    assert len(ImageFolder(place / "images")) == 7


def test_images_with_captions_beside_them_are_not_alone(tmp_path):
    (tmp_path / "0.png").touch()
    assert is_plain(tmp_path)
    for ending in (".txt", ".TXT", ".json"):
        (tmp_path / f"0{ending}").touch()
        assert not is_plain(tmp_path)
        (tmp_path / f"0{ending}").unlink()


@pytest.mark.parametrize("ending", [".npy", ".parquet"])
def test_only_files_of_an_earlier_embed_are_replaced(place, tmp_path, ending):
    pytest.importorskip("pyarrow", reason='pip install "megabatch[train]"')
    output = tmp_path / f"pairs{ending}"
    table = tmp_path / ("pairs.jsonl" if ending == ".npy" else "pairs.parquet")
    arguments = (place / "run", "--output", output, "--data")
    table.write_text('{"image": "a.png", "caption": "a dog"}\n')
    with pytest.raises(ValueError, match=f"must replace only files that `megabatch embed` wrote, got {table}"):
        call("embed", *arguments, place / "pairs.csv")
    assert table.read_text() == '{"image": "a.png", "caption": "a dog"}\n'
    table.unlink()
    for _ in range(2):
        call("embed", *arguments, place / "pairs.csv")
    for spec in (table, f"{table} + {table}", tmp_path / f"[p]airs{table.suffix}", tmp_path):
        with pytest.raises(ValueError, match=f"--output must not replace the data, got {table}"):
            call("embed", *arguments, spec, "--columns", "image=path", "text=text")
    (tmp_path / f"folder{ending}").mkdir()
    with pytest.raises(ValueError, match="--output must be a file, got "):
        call("embed", place / "run", "--data", place / "pairs.csv", "--output", tmp_path / f"folder{ending}")


@pytest.mark.parametrize(("command", "ending"), [("embed", ".npy"), ("embed", ".parquet"), ("mine", ".parquet")])
def test_temporary_files_of_a_killed_command_are_removed(place, tmp_path, command, ending):
    pytest.importorskip("pyarrow", reason='pip install "megabatch[train]"')
    output, digits = tmp_path / f"x{ending}", "0123456789abcdef" * 2
    names = ["x.npy", "x.json", "x.jsonl"] if ending == ".npy" else ["x.parquet"]
    others = [f".y{ending}-{digits}", f".x{ending}-1"]
    for name in (*(f".{name}-{digits}" for name in names), *others):
        (tmp_path / name).write_text("left")
    call(command, place / "run", "--data", place / "pairs.csv", "--output", output)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, *others])


def test_a_missing_package_is_named_before_the_work_begins(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "megabatch\[train\]"'):
        call("embed", place / "run", "--data", place / "pairs.csv", "--output", tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["embed", "eval", "mine", "search"])
def test_long_work_logs_its_progress(place, tmp_path, monkeypatch, caplog, command):
    monkeypatch.setattr(dataset, "SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    further = {"embed": ("--output", "x.npy"), "search": ("red",), "mine": ("--output", "x.jsonl"), "eval": ()}[command]
    with caplog.at_level("INFO", "megabatch"):
        call(command, place / "run", *further, "--data", place / "pairs.csv")
    assert [line for line in caplog.messages if re.fullmatch(r"4 of [67] images embedded, 0:00:0\d left", line)]


def test_data_of_another_kind_and_untrained_models(place, tmp_path, capsys):
    (tmp_path / "qa.csv").write_text("query,document\na question,an answer\n")
    for command, name, *side in (("embed", "x.npy", "--side", "queries"), ("mine", "x.jsonl")):
        with pytest.raises(ValueError, match="MODEL must encode side 1 of the data, texts, got a model of images there"):
            call(command, place / "run", "--data", tmp_path / "qa.csv", "--output", tmp_path / name, *side)
    assert not list(tmp_path.glob("*.work"))
    call("embed", "small", "--data", tmp_path / "qa.csv", "--output", tmp_path / "x.npy")
    capsys.readouterr()
    call("search", "small", "an answer", "--embeddings", tmp_path / "x.npy", "--json")
    assert json.loads(capsys.readouterr().out)[0]["matches"][0]["text"] == "an answer"


def test_rows_and_samples_have_the_same_length(place, tmp_path):
    call("embed", place / "run", "--data", place / "pairs.csv", "--output", tmp_path / "x.npy")
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    (tmp_path / "x.jsonl").write_text("\n".join(lines[:6]))
    with pytest.raises(ValueError, match=r"must have a row for each line of x\.jsonl, got 7 and 6"):
        embedding.Saved(tmp_path / "x.npy")


def test_places_of_images_are_what_train_reads(place, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason='pip install "megabatch[train]"')
    parquet = importlib.import_module("pyarrow.parquet")
    images = [{"bytes": (place / "images" / f"{i}.png").read_bytes(), "path": "same.png"} for i in (0, 1)]
    images.append({"bytes": None, "path": str(place / "images" / "2.png")})
    parquet.write_table(arrow.table({"image": images, "caption": ["a", "b", "c"]}), tmp_path / "inside.parquet")
    (tmp_path / "remote.csv").write_text("image,caption\nhttps://host/a.png?token=x,d\n")
    mixed = load(f"{tmp_path / 'inside.parquet'} + {tmp_path / 'remote.csv'}")
    wanted = [None, None, str(place / "images" / "2.png"), "https://host/a.png?token=x"]
    assert [mixed.place(index) for index in range(4)] == wanted
    with pytest.raises(ValueError, match=r"--data must have images with a path or a URL, .* got 'same\.png'"):
        call("mine", place / "run", "--data", tmp_path / "inside.parquet", "--output", tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl.work").exists()
    for output in (place / "mined.jsonl", tmp_path / "mined.jsonl"):  # beside the table, where names stay, and elsewhere
        call("mine", place / "run", "--data", place / "pairs.csv", "--negatives", "1", "--output", output)
        mined = Table(output)
        assert [mined.place(index) for index in range(7)] == [str(place / "images" / f"{index}.png") for index in range(7)]
        assert (mined.name(0) == "images/0.png") == (output.parent == place)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_mined_parquet_file_holds_its_images(place, tmp_path, monkeypatch, drawn):
    """Images of files, images inside a table, and drawings, which are in neither."""
    parquet = pytest.importorskip("pyarrow.parquet", reason='pip install "megabatch[train]"')
    monkeypatch.setattr(mine, "ROWS_AT_ONCE", 3)
    if drawn:
        monkeypatch.setattr(embedding, "read_stored_or_none", read_or_none)
    pairs, named, held, again = place / "pairs.csv", *(tmp_path / name for name in ("x.jsonl", "x.parquet", "y.parquet"))
    for data, output in ((pairs, named), (pairs, held), (held, again)):
        call("mine", place / "run", "--data", data, "--negatives", "2", "--output", output)
    lines = [json.loads(line) | {"image": None} for line in named.read_text().splitlines()]
    assert [line | {"image": None} for line in parquet.read_table(held).to_pylist()] == lines
    original, indices = Table(pairs), [index for index in range(7) if index != 4 or not drawn]  # 4 cannot be decoded
    for mined in (Table(held), Table(again)):
        assert [mined.name(row) for row in range(len(mined))] == [original.name(index) for index in indices]
        for row, index in enumerate(indices):
            assert mined.place(row) is None
            assert drawn or mined.read_stored(row, 0).data == original.read_stored(index, 0).data
            assert index == 4 or torch.equal(mined.read(row, 0), original.read(index, 0))
    assert not list(tmp_path.glob("*.part"))


def test_a_changed_image_is_not_continued_with(place, tmp_path, monkeypatch):
    shutil.copytree(place / "images", tmp_path / "images")
    arguments = (place / "run", "--data", tmp_path / "images", "--output", tmp_path / "x.npy")

    def stops(self, chunk):
        raise KeyboardInterrupt

    monkeypatch.setattr(embedding.Stored, "append", stops)
    with pytest.raises(KeyboardInterrupt):
        call("embed", *arguments)
    shutil.copy(tmp_path / "images" / "1.png", tmp_path / "images" / "0.png")
    with pytest.raises(ValueError, match="must have the same model and data, but these have changed: samples"):
        call("embed", *arguments)


def test_embeddings_are_cut_to_a_dimension(place, tmp_path, capsys, caplog):
    output, arguments = tmp_path / "x.npy", (place / "run", "--data", place / "pairs.csv")
    with pytest.raises(ValueError, match="--dim must be from 1 to 16, the embedding dimension, got 17"):
        call("embed", *arguments, "--output", output, "--dim", 17)
    call("embed", *arguments, "--output", output, "--side", "texts", "--dim", 5)
    assert "7 embeddings of 5 dimensions to" in capsys.readouterr().out
    assert "embeddings are cut to 5 of 16 dimensions, but the run was trained for 16" in caplog.text
    pair = towers.load_saved(place / "run")
    whole = embed(pair.second, Table(place / "pairs.csv"), 1)
    wanted = torch.nn.functional.normalize(whole[:, :5], dim=1)
    torch.testing.assert_close(next(embedding.Saved(output).chunks()), wanted)
    assert embedding.Saved(output).about["dim"] == 5

    def found(*more):
        call("search", place / "run", "a red square", *more, "--json", "-k", 7)
        return {match["text"]: match["similarity"] for match in json.loads(capsys.readouterr().out)[0]["matches"]}

    by_file = found("--embeddings", output)  # cut as the file is
    assert by_file == pytest.approx(dict(zip((f"a {c} square" for c in COLOURS), (wanted @ wanted[0]).tolist(), strict=True)))
    assert found("--data", place / "pairs.csv", "--among", "texts", "--dim", 5) == pytest.approx(by_file)
    with pytest.raises(
        ValueError, match=r"--dim must equal the dimension of --embeddings, .* got 6 for a file of 5 dimensions"
    ):
        found("--embeddings", output, "--dim", 6)
    call("embed", *arguments, "--output", tmp_path / "full.npy", "--side", "texts")
    with pytest.raises(ValueError, match="got 5 for a file of all dimensions of the model"):
        found("--embeddings", tmp_path / "full.npy", "--dim", 5)
    call("eval", *arguments, "--dim", 5, "--output", tmp_path / "a.jsonl")
    call("eval", *arguments, "--output", tmp_path / "a.jsonl")
    cut, full = results.read(tmp_path / "a.jsonl")
    assert cut["dim"] == 5
    assert "dim" not in full
    assert cut["clip_val_loss"] != full["clip_val_loss"]
    assert "pairs.csv, 5 dimensions" in capsys.readouterr().out
