"""The page: whole whatever a folder lacks, nothing fetched from elsewhere, plots that show what they are given."""

import dataclasses
import html.parser
import json
import math
import re
import sys
import types

import pytest
import torch

import runs
import word_pairs
from megabatch_train import cli, towers
from megabatch_train.data.tables import Table
from megabatch_train.display import observers, plots
from megabatch_train.display import report as curves
from megabatch_train.display.report import gallery, write_report
from megabatch_train.evaluation import embed, encode, evaluate, results
from megabatch_train.export import write_card
from megabatch_train.trainer.run import MetricsFile

TINY = {"width": 16, "image_size": 16, "channels": (8, 16), "blocks": 1, "buckets": 512}
EVALUATION = {
    f"{way}_{name}": 0.5 for way in ("image_to_text", "text_to_image") for name in ("R@1", "R@5", "R@10", "mean_rank")
}
VOID = ("meta", "img", "br")


class Page(html.parser.HTMLParser):
    """Checks that every element is closed, and keeps addresses and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.text, self.classes = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            fetched = tag != "a" and name in ("src", "href", "data", "action")  # a link is not fetched
            if fetched or (name == "xlink:href" and not value.startswith("#")):
                self.addresses.append(value)
            if name == "class":
                self.classes += value.split()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def table(folder, rows=12):
    """Words and definitions in a file."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"anchor": f"word{i}", "positive": f"meaning <{i}> & more"}) for i in range(rows)]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"


def write_run(folder, data, steps=60, **config):
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model": "small", "data": str(data), "validation": str(data), "batch_size": 1024} | config
    (folder / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    (folder / "command.txt").write_text('megabatch train --data "a & b"\n')
    for step in range(1, steps + 1):
        record = {"step": step, "epoch": 0, "pairs": 1024 * step, "loss": 7 - step / 10, "scale": 10.0, "learning_rate": 1e-3}
        record |= {"gradient_norm": 1.5, "pairs_per_second": 1000.0, "memory_bytes": 2**30, "seconds": 0.1 * step}
        record |= {"phases": {"data": 0.01, "forward": 0.03, "backward": 0.06}, "mfu": 0.3}
        results.append(folder / "metrics.jsonl", record)
        if step % 20 == 0:
            results.append(folder / "metrics.jsonl", {"step": step, "evaluation": EVALUATION})


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    return towers.load("small", ("text", "text"), **TINY)


def test_a_page_of_everything(tmp_path, pair):
    write_run(tmp_path / "run<b>", table(tmp_path / "data"))
    towers.save(dataclasses.replace(pair, logit_scale=20.0), tmp_path / "run<b>")
    path = write_report(tmp_path / "run<b>", queries=["what is <this>?"])
    assert path == tmp_path / "run<b>" / "report.html"
    text = path.read_text("utf-8")
    page = Page(text)
    assert all(address.startswith("data:") for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)", text)
    told = "".join(page.text)
    for expected in ("run<b>", "what is <this>?", "meaning <3> & more", 'megabatch train --data "a & b"', "batch_size = 1024"):
        assert expected in told, expected
    assert "pairs.jsonl: owners and license are unknown" in told
    assert page.classes.count("query") == 9  # one of ours, eight of the data's
    assert page.classes.count("plot") == 9
    assert "Time by phase: backward 60.0 %, forward 30.0 %, data 10.0 %" in text
    assert "Evaluation after step 60" in told


def test_report_and_card_show_chance_level_beside_recall(tmp_path, pair, monkeypatch):
    write_run(tmp_path / "run", table(tmp_path / "data"), steps=1)
    results.append(tmp_path / "run" / "metrics.jsonl", {"step": 1, "evaluation": {**EVALUATION, "num_samples": 200}})
    if plots.available():
        described, figure = curves.recalls(results.read_run(tmp_path / "run"))
        assert described == "Recall: 50.0% at the end (text → image R@1, 0.5% by chance)"
        names = figure.axes[0].get_legend_handles_labels()[1]
        assert names[-3:] == ["R@1 by chance", "R@5 by chance", "R@10 by chance"]
    monkeypatch.setattr(plots, "available", lambda: False)
    told = "".join(Page(write_report(tmp_path / "run", load=None).read_text("utf-8")).text)
    assert "50.0%text → image R@1, 0.5% by chance" in told  # the first of the large numbers
    card = write_card(pair, "hf", tmp_path, run=tmp_path / "run").read_text("utf-8")
    assert "| by chance | 0.5% | 2.5% | 5.0% | 100.5 |" in card


def test_the_curves_show_the_loss_of_the_evaluation_and_the_best_weights(tmp_path):
    pytest.importorskip("matplotlib", reason='pip install "megabatch[train]"')
    write_run(tmp_path / "run", table(tmp_path / "data"), steps=3)
    for step, value in ((2, 5.0), (3, 5.5)):
        evaluation = {**EVALUATION, "clip_val_loss": value}
        results.append(tmp_path / "run" / "metrics.jsonl", {"step": step, "evaluation": evaluation})
    run = results.read_run(tmp_path / "run")
    described, figure = curves.loss(run)
    assert described.endswith("evaluation data: 5.5 at the end")
    names = figure.axes[0].get_legend_handles_labels()[1]
    assert names == ["training data, one batch", "evaluation data, all pairs"]
    run.best.update(step=2)
    assert "weights in best/" in curves.recalls(run)[1].axes[0].get_legend_handles_labels()[1]
    run.best.update(step=3)
    assert "weights in best/" not in curves.recalls(run)[1].axes[0].get_legend_handles_labels()[1]


def test_report_and_card_name_the_best_evaluation(tmp_path, pair, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    write_run(tmp_path / "run", table(tmp_path / "data"), steps=2)
    for step, recall in ((1, 0.75), (2, 0.25)):
        evaluation = {"text_to_image_R@1": recall, "num_samples": 200}
        results.append(tmp_path / "run" / "metrics.jsonl", {"step": step, "evaluation": evaluation})
    (tmp_path / "run" / "best").mkdir()
    best = {"step": 1, "metric": "text_to_image_R@1", "value": 0.75}
    (tmp_path / "run" / "best" / "best.json").write_text(json.dumps(best))
    told = "".join(Page(write_report(tmp_path / "run", load=None).read_text("utf-8")).text)
    assert "Evaluation after step 2" in told
    assert "The best evaluation was after step 1: text → image R@1 75.0%. The folder best/ contains the weights" in told
    for step, recall, further in ((1, "75.0%", ", the step with the best evaluation"), (2, "25.0%", "")):
        card = write_card(pair, "hf", tmp_path, run=tmp_path / "run", step=step).read_text("utf-8")
        assert f"The weights are from step {step}{further}." in card
        assert f"| text → image | {recall} |" in card
        assert f"After step {step} on" in card


def test_report_and_card_hold_no_token(tmp_path, pair, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    address = "https://me:SECRET@host/pairs.csv?token=SECRET"
    write_run(tmp_path / "run", address, steps=20)
    (tmp_path / "run" / "command.txt").write_text(f"megabatch train --data '{address}'\n")
    for path in (write_report(tmp_path / "run"), write_card(pair, "hf", tmp_path, run=tmp_path / "run")):
        text = path.read_text("utf-8")
        assert text.count("https://host/pairs.csv") >= 3
        assert "SECRET" not in text


def test_the_gallery_marks_what_is_right_and_shows_an_image_once(pair):
    from megabatch_train.data.dataset import Dataset

    class Captions(Dataset):
        """Three captions of each of four texts; a caption is its text, so the right one is found first."""

        sides = ("text", "text")

        def __len__(self):
            return 12

        def read(self, index, side):
            return f"thing {'abcd'[index // 3] * 5}"

        def name(self, index):
            return f"number {index}"

        def items(self):
            return torch.arange(12) // 3

    found = gallery(pair, Captions(), Captions(), ["thing bbbbb"])
    assert (found.searched, found.of) == (4, 4)
    assert len(found.queries) == 5
    assert found.found[0][0].right is None
    assert found.found[0][0].shown == "thing bbbbb"
    assert found.found[0][0].score == pytest.approx(1.0, abs=1e-5)
    for query, row in zip(found.queries[1:], found.found[1:], strict=True):
        assert [match.right for match in row] == [True, False, False, False]
        assert row[0].shown == query
        assert len({match.name for match in row}) == 4


def test_queries_find_documents_with_the_tower_of_queries(tmp_path):
    torch.manual_seed(0)
    pair = towers.load("small", ("text", "text"), **TINY, query_prompt="ask ", document_prompt="tell ")
    rows = [*((f"question {i}", f"answer {i // 3}") for i in range(9)), ("question 0", "a second answer")]
    (tmp_path / "qa.jsonl").write_text("\n".join(json.dumps({"query": q, "document": d}) for q, d in rows))
    data = Table(tmp_path / "qa.jsonl")
    shown = gallery(pair, data, data, ["what?"])
    assert (shown.searched, shown.of) == (4, 4)  # three questions have one answer
    assert all(query.startswith("question") for query in shown.queries[1:])
    documents = ["answer 0", "answer 1", "answer 2", "a second answer"]
    similarities = encode(pair.first, shown.queries) @ encode(pair.second, documents).T  # with both prompts
    for number, (query, row) in enumerate(zip(shown.queries, shown.found, strict=True)):
        wanted = dict(zip(documents, similarities[number].tolist(), strict=True))
        assert {match.shown: match.score for match in row} == pytest.approx(wanted, abs=1e-5)
        assert [match.score for match in row] == sorted((match.score for match in row), reverse=True)
        right = {document for other, document in rows if other == query}
        assert {match.shown for match in row if match.right} == right
        assert shown.ranks[number] == next((rank for rank, match in enumerate(row, 1) if match.right), None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(f"data = '{tmp_path / 'qa.jsonl'}'\n")
    told = "".join(Page(write_report(tmp_path / "run", load=lambda folder: pair).read_text("utf-8")).text)
    assert "the best matches among 4 documents" in told
    assert "Queries are random queries of the data" in told


def test_a_gallery_leaves_out_what_cannot_be_read(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason='pip install "megabatch[train]"')
    torch.manual_seed(0)
    images = tmp_path / "images"
    images.mkdir()
    for number in range(6):
        pillow.new("RGB", (300, 200), (40 * number, 0, 0)).save(images / f"{number}.png")
    (images / "2.png").write_bytes(b"no image")
    (images / "pairs.csv").write_text("image,caption\n" + "".join(f"{i}.png,caption {i}\n" for i in range(6)))
    write_run(tmp_path / "run", images, steps=3)
    towers.save(towers.load("small", **TINY), tmp_path / "run")
    page = Page(write_report(tmp_path / "run").read_text("utf-8"))
    pictures = [address for address in page.addresses if address.startswith("data:image/jpeg;base64,")]
    assert page.classes.count("query") == 5
    assert len(pictures) == 25
    assert "caption 2" not in "".join(page.text)


@pytest.mark.parametrize("missing", ["config.toml", "command.txt", "metrics.jsonl", "model.safetensors", "data"])
def test_what_is_missing_leaves_a_gap_and_says_so(tmp_path, pair, missing):
    data = table(tmp_path / "data")
    write_run(tmp_path / "run", data, steps=5)
    towers.save(pair, tmp_path / "run")
    (data if missing == "data" else tmp_path / "run" / missing).unlink()
    told = "".join(Page(write_report(tmp_path / "run").read_text("utf-8")).text)
    says = {
        "config.toml": "There are no search results because the run has no data.",
        "command.txt": "batch_size = 1024",
        "metrics.jsonl": "There are no curves",
        "model.safetensors": "must have a model.safetensors, got none: is the run complete?",
        "data": "There are no search results because of an error: No such file: ",
    }
    assert says[missing] in told
    assert ("There are no search results" in told) == (missing in ("config.toml", "model.safetensors", "data"))


def test_an_empty_run_has_a_page_and_a_folder_without_one_a_message(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert "neither command.txt nor config.toml" in write_report(tmp_path).read_text("utf-8")
    with pytest.raises(FileNotFoundError, match=r"No such folder: .*nowhere"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "config.toml").write_text("data = ")
    with pytest.raises(ValueError, match=r"config.toml is not a TOML file"):
        write_report(tmp_path)


def test_steps_that_were_done_again_count_once_and_losses_that_are_lost_are_named(tmp_path):
    for loss, steps in ((1.0, (1, 2, 3)), (2.0, (2, 3, 4))):
        for step in steps:
            results.append(tmp_path / "metrics.jsonl", {"step": step, "loss": math.nan if step == 4 else loss})
    results.append(tmp_path / "metrics.jsonl", {"step": 5, "loss": 2.0, "problem": "the embeddings <collapsed>"})
    read = results.read_run(tmp_path)
    assert read.problems == ["the embeddings <collapsed>"]
    assert "the embeddings &lt;collapsed&gt;" in write_report(tmp_path).read_text("utf-8")
    assert [(record["step"], record["loss"]) for record in read.training] == [(1, 1.0), (2, 2.0), (3, 2.0), (4, None), (5, 2.0)]
    assert "not finite at 1 steps, first at step 4" in write_report(tmp_path).read_text("utf-8")


def test_what_a_run_is_tested_on(tmp_path):
    def of(**config):
        return results.SavedRun(tmp_path, "", config, "", [], [])

    assert of(data="emoji").test_data == ("emoji", "test")
    assert of(data="x.csv").test_data == ("x.csv", None)  # what it was trained on
    assert of(data="x.csv", data_options={"texts": True}).test_options == {"texts": True}
    assert of().test_data is None
    assert of(data="emoji", validation="x.csv").test_data == ("x.csv", None)
    assert of(data="x.csv", validation="wordnet").test_data == ("wordnet", "test")
    assert of(data="emoji", data_options={"a": 1}, validation_options={"b": 2}).test_options == {"b": 2}
    with pytest.raises(ValueError, match="must have data"):
        of().test_set()


def test_data_is_found_from_another_working_directory(tmp_path, monkeypatch):
    (tmp_path / "pairs.csv").write_text("query,document\na,b\nc,d\n")
    (tmp_path / "config.toml").write_text('data = "pairs.csv"\n[data_options]\nroot = "."\n')
    (tmp_path / "environment.json").write_text(json.dumps({"directory": str(tmp_path)}))
    run = results.read_run(tmp_path)
    assert len(run.test_set()) == 2
    assert run.test_data == ("pairs.csv", None)  # as the user wrote it
    assert run.test_options == {"root": str(tmp_path)}
    monkeypatch.chdir(tmp_path)
    assert run.locate("pairs.csv") == "pairs.csv"


def test_a_curve_is_where_its_numbers_are_and_gaps_stay_gaps():
    pytest.importorskip("matplotlib", reason='pip install "megabatch[train]"')
    lines = [{"step": step, "loss": None if step == 3 else 8.0 - step, "scale": 10.0} for step in range(1, 6)]
    run = results.SavedRun(None, "", {}, "", lines, [])
    described, figure = curves._metric(run, "Loss", "loss", zero=False, smooth=True)
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
    assert [value for value in line.get_ydata() if value == value] == [7, 6, 4, 3]
    assert math.isnan(line.get_ydata()[2])
    assert described == "Loss: from 7 to 3"
    assert curves._metric(run, "Bias", "bias") is None
    _, figure = curves._metric(run, "Scale", "scale")
    assert figure.axes[0].get_ylim()[0] == 0


def test_a_noisy_curve_stands_behind_its_running_mean():
    pytest.importorskip("matplotlib", reason='pip install "megabatch[train]"')
    run = results.SavedRun(None, "", {}, "", [{"step": step, "loss": float(step % 2)} for step in range(100)], [])
    _, figure = curves._metric(run, "Loss", "loss", smooth=True)
    faint, mean = figure.axes[0].lines
    assert faint.get_alpha() < 1
    assert max(mean.get_ydata()[5:-5]) < 0.7


def test_smoothed_is_the_mean_of_the_values_that_are_there():
    found = curves.smooth_curve([1.0, 2.0, math.nan, 6.0], 3)
    assert found[:2] + found[3:] == [1.5, 1.5, 6.0]
    assert math.isnan(found[2])
    assert curves.smooth_curve([5.0], 9) == [5.0]


def test_without_matplotlib_the_page_has_its_tables_and_names_the_extra(tmp_path, monkeypatch):
    write_run(tmp_path / "run", table(tmp_path / "data"), steps=20)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(write_report(tmp_path / "run").read_text("utf-8"))
    told = "".join(page.text)
    assert 'matplotlib is not installed; pip install "megabatch[train]"' in told
    assert "plot" not in page.classes
    assert "text → image" in told
    assert "50.0%" in told


def test_a_report_can_be_cited(tmp_path):
    made = runs.trainer(tmp_path, observers=[MetricsFile()], validation=runs.Numbers(samples=20))
    made.fit()
    again = runs.trainer(tmp_path, {"steps": 8}, observers=[MetricsFile()])
    assert again.resume()
    again.fit()
    about = json.loads((tmp_path / "environment.json").read_text())
    assert about["started"] <= about["last_start"]
    told = "".join(Page(write_report(tmp_path).read_text("utf-8")).text)
    assert about["started"] in told
    parameters = sum(p.numel() for tower in made.pair.towers for p in tower.module.parameters())
    assert about["parameters"] == about["trained_parameters"] == parameters
    for words in (
        f"torch {about['machine']['torch']}",
        "time by phase",
        "by chance",
        about["machine"]["cpu"],
        f"{parameters:,}",
    ):
        assert words in told, words


def test_the_rank_of_the_true_match(tmp_path, pair):
    data = Table(table(tmp_path))
    shown = gallery(pair, data, data, ["anything"])
    assert shown.ranks[0] is None
    for query, row, rank in zip(shown.queries[1:], shown.found[1:], shown.ranks[1:], strict=True):
        places = [place for place, match in enumerate(row, 1) if match.right]
        assert not places or min(places) == rank, query
        assert 1 <= rank <= shown.searched


def test_embeddings_of_an_evaluation_give_the_same_search_results(tmp_path, pair):
    (tmp_path / "twice.jsonl").write_text(
        "".join(json.dumps({"anchor": f"word{i % 9}", "positive": f"meaning {i % 7}"}) + "\n" for i in range(30))
    )
    kept = []
    for data in (Table(table(tmp_path)), Table(tmp_path / "twice.jsonl")):  # the second has repeated queries and documents
        evaluate(pair, data, keep=kept.append)
        assert gallery(kept[-1], data, data) == gallery(pair, data, data)


def test_the_report_of_a_run_encodes_nothing_again(tmp_path, monkeypatch):
    word_pairs.enter(tmp_path, monkeypatch)
    arguments = ["train", "--config", "small.toml", "--steps", "2", "--validation", "pairs.jsonl", "--output"]
    assert cli.main([*arguments, "plain", "--no-report"]) == 0
    wanted = Page(write_report("plain").read_text("utf-8"))
    for name in ("load_saved", "embed", "encode"):
        monkeypatch.setattr(curves, name, None)
    assert cli.main([*arguments, "run"]) == 0
    found = Page((tmp_path / "run" / "report.html").read_text("utf-8"))
    assert found.classes.count("query") == 8
    start = found.text.index("Search results")
    assert found.text[start : start + 60] == wanted.text[wanted.text.index("Search results") :][:60]


def test_only_the_last_evaluation_is_kept_for_the_report(tmp_path):
    class Watch(runs.Memory):
        def on_evaluation(self, record):
            kept.append((record["step"], made.evaluated))

    kept = []
    validation = {"first": runs.Numbers(samples=20), "second": runs.Numbers(samples=16)}
    made = runs.trainer(tmp_path, {"evaluate_every": 3}, observers=[Watch()], validation=validation)
    made.fit()
    assert [(step, evaluated is None) for step, evaluated in kept] == [(3, True), (6, True), (7, False)]
    assert made.evaluated.dataset is validation["first"]
    saved = [embed(tower, validation["first"], side) for side, tower in enumerate(made.pair.towers)]  # the last weights
    assert all(torch.equal(*pair) for pair in zip(made.evaluated.embeddings, saved, strict=True))


def test_the_page_of_a_run_that_goes_on(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("data = 'nowhere.csv'\nbatch_size = 8\n")
    now, report, seen = [100.0], observers.LiveReport(), []
    monkeypatch.setattr(observers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(curves, "write_report", lambda *given, **options: seen.append(write_report(*given, **options)))
    report.start(types.SimpleNamespace(folder=folder))
    for step, (seconds, pages) in enumerate(
        ((1, 0), (observers.EVERY, 1), (observers.EVERY + 9, 1), (2 * observers.EVERY, 2)), 1
    ):
        results.append(folder / "metrics.jsonl", {"step": step, "loss": 1.0 / step, "pairs": 8})
        now[0] = 100.0 + seconds
        report.on_save(folder) if step % 2 else report.on_evaluation({})
        assert len(seen) == pages
    page = (folder / "report.html").read_text("utf-8")
    assert "Training curves" in page
    assert "Search results" not in page

    def fails(*given, **options):
        raise ValueError("a strange file")

    monkeypatch.setattr(curves, "write_report", fails)
    for _ in range(2):  # the run goes on, with one warning
        now[0] += observers.EVERY
        report.on_evaluation({})
    assert caplog.text.count("a strange file") == 1
