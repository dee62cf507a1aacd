"""`megabatch eval`, `search` and `report`, as a command line calls them."""

import argparse
import json
import logging
import shutil

import pytest
import torch

from megabatch.world import World
from megabatch_train import cli, towers
from megabatch_train.commands import eval as eval_command
from megabatch_train.commands import find_command
from megabatch_train.data.dataset import UnreadableSampleError
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import classifier, embed, encode, evaluate, results

TINY = {"width": 16, "image_size": 16, "channels": (8, 16), "blocks": 1, "buckets": 512}
COLOURS = ("red", "green", "blue", "yellow", "black")


def call(command, *words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, and the images and captions that it is tested on; one image is damaged."""
    pillow = pytest.importorskip("PIL.Image", reason='pip install "megabatch[train]"')
    torch.manual_seed(2)  # untrained towers that name some of the colours, and not all
    folder = tmp_path_factory.mktemp("commands")
    (folder / "images").mkdir()
    rows = ["image,caption"]
    for number in range(10):
        pillow.new("RGB", (24, 30), COLOURS[number % 5]).save(folder / "images" / f"{number}.png")
        rows.append(f"{number}.png,{COLOURS[number % 5]}")
    (folder / "images" / "7.png").write_bytes(b"no image")
    (folder / "images" / "pairs.csv").write_text("\n".join(rows))
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text(f"data = 'emoji'\nvalidation = '{folder / 'images'}'\n")
    towers.save(towers.load("small", **TINY), folder / "run")
    return folder


def test_eval_of_a_run_is_what_evaluate_says(place, capsys):
    assert call(eval_command, place / "run", "--device", "cpu") == 0
    (line,) = results.read(place / "run" / "evaluation.jsonl")
    expected = evaluate(towers.load_saved(place / "run"), Table(place / "images"))
    assert {key: line[key] for key in expected} == expected
    assert line["data"] == str(place / "images")
    assert (line["num_samples"], line["num_failed"]) == (9, 1)
    printed = capsys.readouterr().out
    assert "image → text" in printed
    assert f"{expected['text_to_image_R@5']:.1%}" in printed
    assert "samples: 9, texts: 5, failed: 1" in printed  # five captions, of two images each


def test_eval_with_workers_into_a_file_of_ones_own(place, tmp_path):
    output = tmp_path / "deep" / "found.jsonl"
    for workers in (0, 2):
        call(eval_command, place / "run", "--output", output, "--workers", workers, "--chunk-size", 3)
    first, second = results.read(output)
    assert first == second


def test_zero_shot(place, tmp_path, capsys):
    (tmp_path / "classes.txt").write_text("\n".join(["white", *COLOURS]))
    (tmp_path / "templates.txt").write_text("{}\na {} square\n")
    call(eval_command, place / "run", "--zero-shot", "--output", tmp_path / "a.jsonl")
    call(
        *(eval_command, place / "run", "--zero-shot", "--output", tmp_path / "a.jsonl"),
        *("--classes", tmp_path / "classes.txt", "--templates", tmp_path / "templates.txt"),
    )
    first, second = results.read(tmp_path / "a.jsonl")
    assert (first["num_classes"], second["num_classes"]) == (5, 6)
    assert first["images-zeroshot-val-top5"] == 1.0  # of five
    assert first["num_failed"] == 1
    pair, data, names = towers.load_saved(place / "run"), Table(place / "images"), sorted(COLOURS)
    readable = [index for index in range(10) if index != 7]
    classes = classifier(lambda texts: encode(pair.second, texts), names)
    guessed = (embed(pair.first, data, 0, readable) @ classes.T).argmax(1).tolist()
    right = sum(names[guess] == data.read(index, 1) for guess, index in zip(guessed, readable, strict=True))
    assert 0 < right < 9  # or else what is left out would not show
    assert first["images-zeroshot-val-top1"] == pytest.approx(right / 9, rel=1e-12)
    assert "images-zeroshot-val-top1" in capsys.readouterr().out
    (tmp_path / "classes.txt").write_text("red")
    with pytest.raises(ValueError, match=r"--classes .* 'green'"):
        call(eval_command, place / "run", "--zero-shot", "--classes", tmp_path / "classes.txt")
    with pytest.raises(ValueError, match=r"--classes needs --zero-shot"):
        call(eval_command, place / "run", "--classes", tmp_path / "classes.txt")
    (tmp_path / "classes.txt").write_text("\n".join([*COLOURS, COLOURS[0]]))
    with pytest.raises(ValueError, match=rf"--classes must name each class once, got '{COLOURS[0]}' more than once"):
        call(eval_command, place / "run", "--zero-shot", "--classes", tmp_path / "classes.txt")


@pytest.mark.parametrize("query", ["", "  "])
def test_an_empty_query_raises_an_error(place, query):
    with pytest.raises(
        ValueError, match=r"QUERY must be a text or the path of an image or a recording, got ' *', which is empty"
    ):
        call(find_command("search"), place / "run", query)
    with pytest.raises(ValueError, match=r"--query must not be empty"):
        call(find_command("report"), place / "run", "--query", query)


def test_eval_says_that_a_run_has_other_validation_sets(place, tmp_path, caplog):
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text(f"data = 'emoji'\nvalidation = ['{place / 'images'}', 'other.csv']\n")
    with caplog.at_level(logging.INFO, "megabatch"):
        call(eval_command, tmp_path / "run")
    assert f"evaluating on {place / 'images'}, the first validation set of the run; others for --data: other.csv" in caplog.text


def _zero_shot_on_a_rank(group, rank, run, data):
    args = argparse.Namespace(classes=None, templates=None, chunk_size=4)
    world = World(torch.device("cpu"), group)
    return eval_command.classify(towers.load_saved(run), Table(data), world, args, name="x")


def test_zero_shot_on_ranks_counts_as_one(place, pool):
    alone = _zero_shot_on_a_rank(None, 0, place / "run", place / "images")
    assert alone["num_failed"] == 1
    for found in pool.run(_zero_shot_on_a_rank, 3, place / "run", place / "images"):
        assert found == pytest.approx(alone, rel=1e-12)


def test_zero_shot_counts_captions_that_cannot_be_read(place):
    class Speechless(Table):
        def read(self, index, side):
            if side == 1 and index in (2, 7):  # of 7 the image cannot be read either
                raise UnreadableSampleError("no caption")
            return super().read(index, side)

    args = argparse.Namespace(classes=None, templates=None, chunk_size=4)
    data, world = Speechless(place / "images"), World(torch.device("cpu"))
    found = eval_command.classify(towers.load_saved(place / "run"), data, world, args, name="x")
    assert found["num_failed"] == 2


def test_search_by_text_draws_and_prints(place, tmp_path, capsys, monkeypatch):
    pillow = pytest.importorskip("PIL.Image", reason='pip install "megabatch[train]"')
    sheet = tmp_path / "sheet.png"
    assert call(find_command("search"), place / "run", "red", "a blue one", "-k", 3, "--sheet", sheet) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "red"
    assert printed[5] == "a blue one"
    scores = [float(line.split()[-1]) for line in printed[2:5]]
    assert scores == sorted(scores, reverse=True)
    with pillow.open(sheet) as image:
        assert image.width > 3 * 96
        pixels = {image.convert("RGB").getpixel((x, y)) for x in range(0, image.width, 3) for y in range(0, image.height, 3)}
    named = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0), "black": (0, 0, 0)}
    found = {line.split()[1] for line in (*printed[2:5], *printed[7:10])}
    assert found <= set(named)
    assert {named[name] for name in found} <= pixels  # what is printed is drawn
    monkeypatch.setattr("megabatch_train.display.plots.MOST_MATCHES", 5)
    call(find_command("search"), place / "run", "red", "-k", 99, "--sheet", sheet)
    printed = capsys.readouterr().out
    with pillow.open(sheet) as image:
        assert image.width == 14 + 190 + 5 * (96 + 14) + 14  # bounded, whatever k
    assert "(the first 5 matches of the first 1 queries)" in printed
    ranks = [int(line.split()[0]) for line in printed.splitlines() if line.lstrip()[:1].isdigit() and ".png" in line]
    assert [rank for rank in ranks if rank > 1] == list(range(2, 10))  # the tenth is damaged
    assert "1 samples could not be read; the first: " in printed


def test_search_by_image(place, tmp_path, capsys):
    query = place / "images" / "3.png"
    call(find_command("search"), place / "run", query, "--among", "images", "-k", 2, "--sheet", tmp_path / "a.png")
    printed = capsys.readouterr().out.splitlines()
    files = [str(place / "images" / f"{number}.png") for number in (3, 8)]
    assert [line.split()[1:] for line in printed[2:4]] == [["yellow", file, "1.000"] for file in files]  # itself, and its like
    call(find_command("search"), place / "run", query, "-k", 10, "--sheet", tmp_path / "b.png")
    printed = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in printed[2:-1]) == sorted(COLOURS)  # the captions, each once


def test_texts_and_images_in_one_search(place, tmp_path, capsys):
    query, data = place / "images" / "3.png", tmp_path / "whole.csv"
    # One image of each colour: equal ones would come in any order.
    different = (place / "images" / "pairs.csv").read_text().splitlines()[: 1 + len(COLOURS)]
    data.write_text("\n".join(different))

    def matches(*queries):
        root = ("--data", data, "-k", 4, "--sheet", tmp_path / "a.png")
        call(find_command("search"), place / "run", *queries, *root)
        return capsys.readouterr().out.splitlines()[:-1]  # without the name of the sheet

    shutil.copytree(place / "images", tmp_path, dirs_exist_ok=True)
    assert matches("red", query, "blue") == [*matches("red"), *matches(query), *matches("blue")]


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_a_search_shows_an_image_with_several_captions_once(place, tmp_path, capsys, suffix):
    folder, files = tmp_path / "twice", sorted((place / "images").glob("*.png"))[:3]
    folder.mkdir()
    rows = [f"{name},{caption} of {name.stem}" for name in files for caption in ("one caption", "another caption")]
    (folder / "pairs.csv").write_text("\n".join(["image,caption", *rows, ""]))

    def matches(query, *options):
        call(find_command("search"), place / "run", query, "-k", 6, "--json", *options)
        (result,) = json.loads(capsys.readouterr().out)
        return result["matches"]

    found = matches("red", "--data", folder / "pairs.csv")
    assert sorted(match["path"] for match in found) == [str(name) for name in files]
    assert {match["index"] for match in found} == {0, 2, 4}
    texts = matches("red", "--data", folder / "pairs.csv", "--among", "texts")
    assert len(texts) == 6
    call(find_command("embed"), place / "run", "--data", folder / "pairs.csv", "--output", tmp_path / f"images.{suffix}")
    capsys.readouterr()
    stored = matches("red", "--embeddings", tmp_path / f"images.{suffix}")
    assert [match["index"] for match in stored] == [match["index"] for match in found]


def test_search_of_texts_among_texts(tmp_path, capsys):
    torch.manual_seed(0)
    rows = [json.dumps({"anchor": f"word{i}", "positive": f"the meaning of number {i}"}) for i in range(5)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    prompts = {"query_prompt": "ask: ", "document_prompt": "tell: "}
    towers.save(towers.load("small", ("text", "text"), **TINY, **prompts), tmp_path / "run")
    call(
        *(find_command("search"), tmp_path / "run", "word3", "--data", tmp_path / "pairs.jsonl", "-k", 2),
        *("--sheet", tmp_path / "sheet.png"),
    )
    printed = capsys.readouterr().out.splitlines()
    pair, table = towers.load_saved(tmp_path / "run"), Table(tmp_path / "pairs.jsonl")
    query, documents = encode(pair.first, ["word3"]), embed(pair.second, table, 1)
    best = (query @ documents.T)[0].topk(2)
    wanted = [f"the meaning of number {i} {score:.3f}" for score, i in zip(*map(torch.Tensor.tolist, best), strict=True)]
    assert [" ".join(line.split()[1:]) for line in printed[2:4]] == wanted
    with pytest.raises(ValueError, match=r"--among .* got image"):
        call(find_command("search"), tmp_path / "run", "word3", "--data", tmp_path / "pairs.jsonl", "--among", "images")


def test_towers_by_name_need_data(place, tmp_path):
    with pytest.raises(ValueError, match=r"--data is required, because 'small' is not a run with data; `megabatch help data`"):
        call(eval_command, "small")
    call(eval_command, "small", "--data", place / "images", "--output", tmp_path / "a.jsonl")
    assert results.read(tmp_path / "a.jsonl")[0]["num_samples"] == 9
    with pytest.raises(ValueError, match="split must not be set for files"):
        call(eval_command, "small", "--data", place / "images", "--split", "test")
    with pytest.raises(ValueError, match=r"No such data: nonsense. Possible are: emoji"):
        call(eval_command, "small", "--data", "nonsense")
    with pytest.raises(ValueError, match=r"No such run or model: smal; did you mean small\."):
        call(eval_command, "smal")
    with pytest.raises(
        ValueError, match=r"No such run or model: runs/emojy. There are no runs in runs/; `megabatch help models`"
    ):
        call(eval_command, "runs/emojy")


def test_a_message_lists_the_runs_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/emoji-1", "runs/emoji-2", "deep/photos"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
    with pytest.raises(
        ValueError, match=r"No such run or model: runs/emoji-3; did you mean runs/emoji-\d. Runs: runs/emoji-\d, runs/"
    ):
        call(eval_command, "runs/emoji-3")
    with pytest.raises(ValueError, match=r"No such run or model: deep/none. Runs: .*deep/photos"):
        call(eval_command, "deep/none")


def test_columns_are_named_in_eval_and_search(place, tmp_path, capsys):
    other = place / "images" / "other.tsv"
    other.write_text((place / "images" / "pairs.csv").read_text().replace("image,caption", "file,says").replace(",", "\t"))
    try:
        with pytest.raises(ValueError, match=r"--columns image=file text=says"):
            call(eval_command, place / "run", "--data", other)
        columns = ("--columns", "image=file", "text=says")
        call(eval_command, place / "run", "--data", other, "--output", tmp_path / "a.jsonl", *columns)
        assert results.read(tmp_path / "a.jsonl")[0]["num_samples"] == 9
        call(find_command("search"), place / "run", "red", "--data", other, "--sheet", tmp_path / "sheet.png", *columns)
        assert "yellow" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            call(eval_command, place / "run", "--columns", "file")
        assert "--columns: must be ROLE=NAME, such as image=file text=description, got 'file'" in capsys.readouterr().err
    finally:
        other.unlink()


def test_zero_shot_with_a_folder_for_each_class(place, tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason='pip install "megabatch[train]"')
    for colour in ("red", "blue"):
        (tmp_path / "data" / colour).mkdir(parents=True)
        for number in range(3):
            pillow.new("RGB", (24 + number, 30), colour).save(tmp_path / "data" / colour / f"{number}.png")
    call(eval_command, place / "run", "--zero-shot", "--data", tmp_path / "data", "--output", tmp_path / "a.jsonl")
    (line,) = results.read(tmp_path / "a.jsonl")
    assert (line["num_classes"], line["num_failed"], line["data-zeroshot-val-top5"]) == (2, 0, 1.0)


def test_scored_pairs_have_a_correlation(tmp_path, capsys):
    torch.manual_seed(0)
    towers.save(towers.load("small", ("text", "text"), **TINY), tmp_path / "run")
    rows = [("a red cat", "a red cat", 5), ("a red cat", "a red dog", 3), ("a red cat", "the sea", 0), ("x", "y", "none")]
    (tmp_path / "sts.csv").write_text("sentence1,sentence2,score\n" + "\n".join(f"{a},{b},{c}" for a, b, c in rows))
    call(eval_command, tmp_path / "run", "--data", tmp_path / "sts.csv")
    (line,) = results.read(tmp_path / "run" / "evaluation.jsonl")
    assert (line["sts_spearman"], line["num_samples"], line["num_failed"]) == (pytest.approx(1.0), 3, 1)
    assert "sts_spearman" in capsys.readouterr().out


def test_queries_that_cannot_be(place, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"an image or a recording that exists, got 'nowhere.png'"):
        call(find_command("search"), place / "run", "nowhere.png")
    with pytest.raises(ValueError, match=r"QUERY .* read"):
        call(find_command("search"), place / "run", place / "images" / "7.png")
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        call(find_command("search"), place / "run", "red", "-k", 0)


def test_commands_name_the_weights_they_use(place, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, "megabatch")
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    pair = towers.load_saved(run)
    towers.save(pair, run, step=40)
    towers.save(pair, run / "best", step=10)
    (run / "best" / "best.json").write_text(json.dumps({"step": 10, "metric": "text_to_image_R@1", "value": 0.5}))
    best = "after step 10 (text → image R@1 50.0%)"
    last = f"weights: last of {run}, after step 40; the best weights are in {run / 'best'}, {best}"
    for command, *words in (
        (eval_command,),
        (find_command("search"), "red", "--sheet", tmp_path / "sheet.png"),
        (find_command("report"),),
    ):
        caplog.clear()
        call(command, run, *words)
        assert [message for message in caplog.messages if message.startswith("weights")] == [last]
    call(eval_command, run / "best")
    assert f"weights: best of {run}, {best}" in caplog.messages
    call(eval_command, "small", "--data", place / "images", "--output", tmp_path / "a.jsonl")
    assert "weights: random, because the name small does not include weights" in caplog.messages


def test_report(place, capsys):
    assert call(find_command("report"), place / "run", "--query", "red") == 0
    assert capsys.readouterr().out == f"wrote {place / 'run' / 'report.html'}\n"
    assert "<h3>red</h3>" in (place / "run" / "report.html").read_text("utf-8")


def test_a_folder_without_a_run_has_no_report(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        call(find_command("report"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_eval_says_why_nothing_could_be_read(place, tmp_path):
    (tmp_path / "pairs.csv").write_text("image,caption\nnone.png,a cat\nno.png,a dog\n")
    with pytest.raises(
        ValueError, match=r"none of 2 samples could be read, the first because .*none.png cannot be read: No such"
    ):
        call(eval_command, place / "run", "--data", tmp_path / "pairs.csv")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_teaches_in_a_hundred_columns(name, capsys):
    parser, command = argparse.ArgumentParser(), find_command(name)
    command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    told = capsys.readouterr().out
    assert "  megabatch " in told
    assert max(map(len, parser.description.splitlines())) <= 100
    assert all(action.help for action in parser._actions)
