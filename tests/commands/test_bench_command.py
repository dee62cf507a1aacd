"""What is printed, drawn and written of a record."""

import argparse
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from megabatch_train import machine
from megabatch_train.bench import report
from megabatch_train.bench.measure import Record
from megabatch_train.bench.report import tables, verdict
from megabatch_train.commands import bench


def loss(system, batch, status="ok", seconds=0.2, peak=2**20, error=1e-7):
    timed = {"forward": seconds / 4, "backward": seconds * 3 / 4, "peak": peak} if status == "ok" else {}
    row = {"system": system, "batch": batch, "status": status, "forward": None, "backward": None, "peak": None}
    return row | {"loss": 1.0, "loss_error": error, "gradient_error": error} | timed


def record():
    level = {"status": "ok", "loss_error": 1e-8, "gradient_error": 1e-7}
    step = {"error": 1e-7, "scale_ratio": 1.0, "status": "ok"}
    return {
        "command": "megabatch bench",
        "machine": machine.describe(),
        "device": "cpu",
        "others": 0.02,
        "dtype": "float32",
        "width": 64,
        "losses": [
            loss("megabatch", 512),
            loss("open_clip", 512, seconds=0.3, peak=5 * 2**20),
            loss("checkpoint", 512, "WRONG", error=0.25),
            loss("inf_cl", 512, "not installed", error=None),
            loss("megabatch", 1024, seconds=0.8),
            loss("open_clip", 1024, "out of memory", error=None),
        ],
        "products": [{"batch": 512, "seconds": 0.1}, {"batch": 1024, "seconds": 0.4}],
        "levels": [
            level | {"system": "vanilla", "peak": 9 * 2**20, "seconds": 0.5},
            level | {"system": "ring, tiles", "peak": 2**20, "seconds": 0.3},
        ],
        "levels_of": {"batch": 512, "world": 2, "width": 64},
        "steps": [
            step | {"system": "plain step", "batch": 64, "seconds": 0.5, "peak": 2**22},
            step | {"system": "cached, budget 0", "batch": 64, "seconds": 0.7, "peak": 2**20},
            step | {"system": "accum-freq", "batch": 64, "seconds": None, "peak": None, "scale_ratio": 4.0, "status": "WRONG"},
        ],
        "steps_of": {"model": "tiny", "chunk": 16, "precision": "float32"},
    }


def test_tables_give_errors_and_no_speed_to_wrong_results():
    of_losses, of_levels, of_steps = tables(record()).values()
    by = {(row[0], row[1]): row for row in of_losses.rows}
    assert by["512", "megabatch"][2:] == ["50.0", "150", "200", "0.50", "1.00", "1.00", "1.0", "1e-07", "1e-07"]
    assert by["512", "open_clip"][6:9] == ["1.50", "5.00", "5.0"]
    assert by["512", "checkpoint"][2:] == ["WRONG", "", "", "", "", "", "", "2e-01", "2e-01"]
    assert by["1,024", "open_clip"][2] == "no memory"
    assert ("512", "inf_cl") not in by
    assert "Not installed, or not for this device: inf_cl." in of_losses.notes
    assert of_levels.rows[1] == ["ring, tiles", "1", "0.300", "1e-08", "1e-07"]
    assert of_steps.rows[2] == ["64", "accum-freq", "WRONG", "", "1e-07", "4.0000"]
    for table in (of_losses, of_levels, of_steps):
        assert {len(row) for row in table.rows} == {len(table.headings)}


@pytest.mark.parametrize(("batch", "device"), [(64, "cpu"), (262144, "cuda")])
def test_the_smallest_and_the_largest_batch_have_three_digits(batch, device):
    seconds = batch / 64 * 2.88e-4
    of_losses = tables(record() | {"device": device, "losses": [loss("megabatch", batch, seconds=seconds)]})["losses"]
    assert of_losses.headings[2:5] == ["forward ms", "backward ms", "total ms"]
    assert of_losses.rows[0][2:5] == (["0.072", "0.216", "0.288"] if batch == 64 else ["295", "885", "1,180"])


def test_every_run_begins_at_64_pairs():
    assert {sizes.batches[0] for sizes in report.SIZES.values()} == {64}


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_terminal_is_too_narrow_for_a_number(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bench._show(record())
    shown = capsys.readouterr().out
    for number in ("50.0", "150", "200", "2e-01", "4.0000"):
        assert number in shown
    assert "…" not in shown


def test_where_it_is_without_a_terminal(capsys, monkeypatch, tmp_path):
    def losses(sizes, device, say):
        say("512 pairs", 0.5)
        return {"losses": [], "products": []}

    monkeypatch.setattr(report, "run_losses", losses)
    monkeypatch.setattr(bench, "LINE_SECONDS", 0.0)
    args = argparse.Namespace(parts=["losses"], quick=True, cpu=True, batches=None, width=None, output=tmp_path)
    bench._measure(args, report.SIZES["cpu", True], "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["losses: starting", "losses: 512 pairs"]


def test_a_sentence_for_each_part():
    of_losses, of_levels, of_steps = verdict(record())
    for sentence, figures in (
        (of_losses, ("512 pairs", "0.2 s", "1 MiB", "open_clip, takes 1.50 times", "open_clip takes 5.0 times")),
        (of_levels, ("512 pairs on 2 ranks", "1 MiB per rank", "with all logits 9.0 times")),
        (of_steps, ("64 pairs", "1 MiB and 0.7 s", "plain step takes 4 MiB and 0.5 s")),
    ):
        assert all(figure in sentence for figure in figures), sentence


@pytest.mark.parametrize("part", bench.PARTS)
def test_a_part_that_was_not_run_is_not_spoken_of(part):
    whole, without = record(), record() | {other: [] for other in bench.PARTS if other != part}
    assert verdict(without) == [verdict(whole)[bench.PARTS.index(part)]]
    assert len(tables(without)) == 1


def test_a_machine_that_others_use():
    quiet = verdict(record())
    *same, warning = verdict(record() | {"others": 0.42})
    assert same == quiet
    assert "42% of the cores" in warning
    assert verdict(record() | {"others": None}) == quiet
    assert verdict(record() | {"others": 0.42, "device": "cuda"}) == quiet


def test_what_others_use(monkeypatch):
    moments = iter([(100.0, 40.0, 5.0), (300.0, 140.0, 55.0), None])
    monkeypatch.setattr(machine, "_processor_seconds", lambda: next(moments))
    others = machine.OtherPrograms()
    assert others.share() == pytest.approx((100 - 50) / 200)
    assert others.share() is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says")
def test_the_work_of_this_program_and_its_children_is_its_own():
    before = machine._processor_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    possible, used, own = (after - earlier for earlier, after in zip(before, machine._processor_seconds(), strict=True))
    assert own > 0
    assert 0 <= used <= possible + 1e-6  # seconds since the start of the machine, which round


def test_nothing_to_compare_with():
    alone = record() | {"losses": [loss("megabatch", 512)], "levels": [], "steps": record()["steps"][1:]}
    of_losses, of_steps = verdict(alone)
    assert "0.2 s and 1 MiB. No baseline" in of_losses
    assert "1 MiB and 0.7 s. The plain step could not be measured" in of_steps


def nothing_right():
    made = record()
    losses = [loss("megabatch", 512, "WRONG"), loss("open_clip", 512)]
    for row in made["steps"]:
        row |= {"status": "WRONG", "seconds": None, "peak": None}
    for row in made["levels"]:
        row |= {"status": "failed: rank 1: Traceback\n  in line 3\nOSError: no [port] left", "seconds": None, "peak": None}
    return made | {"losses": losses}


def test_when_ours_is_not_right(tmp_path, capsys):
    made = nothing_right()
    assert [sentence.rsplit(" ", 1)[-1] for sentence in verdict(made)] == ["WRONG.", "failed.", "WRONG."]
    bench._show(made)
    assert "Failed, because: OSError: no [port] left" in " ".join(capsys.readouterr().out.split())
    written = Record(tmp_path / "bench.json", made["command"])
    written.contents = made
    assert bench._write(written)[-1] == "4 plots as PNG and SVG"
    made["losses"] = made["losses"][:1]
    assert bench._write(written)[-1] == "0 plots as PNG and SVG"


def test_rows_of_ours_and_wrong_ones_stand_out():
    marked = [
        (table.rows[row][table.names[0]], mark) for table in tables(record()).values() for row, mark in table.marks.items()
    ]
    assert sorted(set(marked)) == [
        *(("accum-freq", "wrong"), ("cached, budget 0", "ours"), ("checkpoint", "wrong"), ("megabatch", "ours")),
        ("ring, tiles", "ours"),
    ]


class Links(HTMLParser):
    """What a page would fetch, and whether its tags are closed."""

    def __init__(self):
        super().__init__()
        self.sources, self.open, self.plots = [], [], 0

    def handle_starttag(self, tag, attributes):
        if tag != "a":  # a link is not fetched
            self.sources += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        self.plots += tag == "svg"
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.thorough
def test_files(tmp_path, capsys):
    written = Record(tmp_path / "bench.json", "megabatch bench")
    written.contents = record()
    names = bench._write(written)
    assert names == ["bench.html", "bench.json", "7 plots as PNG and SVG"]
    assert len(list(tmp_path.glob("*.png"))) == len(list(tmp_path.glob("*.svg"))) == 7
    assert json.loads((tmp_path / "bench.json").read_text())["width"] == 64
    page = Links()
    page.feed((tmp_path / "bench.html").read_text())
    assert page.open == []
    assert page.plots == 7
    assert all(source.startswith("#") for source in page.sources)  # needs no other file
    bench._show(record())
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_exit_status_says_whether_ours_is_right():
    assert bench._ours_is_right(record())
    for part, row, status, right in (
        ("losses", 0, "WRONG", False),
        ("losses", 0, "no time left", True),
        ("losses", 4, "out of memory", True),
        ("losses", 1, "WRONG", True),  # somebody else's
        ("levels", 1, "failed: rank 0", False),
        ("steps", 1, "WRONG", False),
    ):
        changed = record()
        changed[part][row]["status"] = status
        assert bench._ours_is_right(changed) == right, (part, row, status)


def run(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(words))


@pytest.mark.thorough
def test_the_whole_command(tmp_path, capsys):
    assert (
        run("--quick", "--cpu", "--parts", "losses", "--batches", "64", "128", "--width", "16", "--output", str(tmp_path)) == 0
    )
    out = capsys.readouterr().out
    assert "CLIP loss, forward and backward, float32, D = 16" in out
    assert "Written to" in out
    assert {path.name for path in tmp_path.iterdir()} >= {"bench.html", "bench.json", "loss_memory.svg", "products.png"}


@pytest.mark.thorough
def test_levels_over_ranks():
    sizes = report.SIZES["cpu", True]
    found = report.run_levels(sizes, "cpu", lambda text, share: None)
    assert [r["status"] for r in found["levels"]] == ["ok"] * 4
    peaks = [r["peak"] for r in found["levels"]]
    assert peaks == sorted(peaks, reverse=True)  # each level takes something away
    assert peaks[2] > 1.5 * peaks[3]  # tiles, too, which a block no larger than one would not show


def test_missing_packages_are_named(monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("--quick") == 2
    assert 'megabatch bench needs rich and matplotlib; pip install "megabatch[train]" installs them' in capsys.readouterr().err


def test_sizes_that_cannot_be_are_refused_and_the_command_is_written_down(capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    for wrong in (["--batches", "64", "0"], ["--width", "0"], ["--width", "wide"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
        assert f"must be a whole number of at least 1, got {wrong[-1]!r}" in capsys.readouterr().err
    assert bench._quote_command(parser.parse_args(["--quick"])) == "megabatch bench --quick"
    words = ["--cpu", "--parts", "losses", "--batches", "64", "128", "--width", "32"]
    assert bench._quote_command(parser.parse_args(words)) == " ".join(["megabatch bench", *words])
