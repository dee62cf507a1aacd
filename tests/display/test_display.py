"""Observers: what a terminal, a file and TensorBoard are told, without and with their packages."""

import contextlib
import io
import sys
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megabatch import extras
from megabatch_train.display import ProgressDisplay, TensorBoardLog, WandbLog, tables
from megabatch_train.display.observers import TrackioLog


@dataclass
class Run:
    folder: Path
    total_steps: int = 100
    batch_size: int = 2048
    first_step: int = 0
    config: Any = field(default_factory=dict)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def record(step, **more):
    return {"step": step, "loss": 7.6543, "pairs_per_second": 12345.6, "memory_bytes": 3 * 2**30, "seconds": 1.0} | more


EVALUATION = {"image_to_text_R@1": 0.25, "text_to_image_R@1": 0.345, "text_to_image_R@10": 0.6, "num_samples": 9}


def test_a_run_that_fails_before_its_first_step_has_written_nothing(tmp_path):
    out = io.StringIO()
    display = ProgressDisplay(out)
    display.start(Run(tmp_path, first_step=40))
    display.finish(Run(tmp_path))
    assert "written to" not in out.getvalue()


def test_lines_come_at_intervals_and_at_the_end(tmp_path):
    out, clock = io.StringIO(), Clock()
    display = ProgressDisplay(out, line_seconds=10, clock=clock)
    display.start(Run(tmp_path, first_step=40))
    for step in range(41, 101):
        clock.now += 3
        display.step(record(step))
        if step == 60:
            display.on_evaluation({"step": 60, "evaluation": EVALUATION})
        if step in (50, 75, 100):
            display.on_save(tmp_path / f"step_{step}")
    display.on_save(tmp_path / "model.safetensors")
    (tmp_path / "step_100").mkdir()
    display.finish(Run(tmp_path))
    (tmp_path / "step_100").rmdir()  # as if the disk was full
    display.finish(Run(tmp_path))
    lines = out.getvalue().splitlines()
    assert lines[0] == f"run:           100 steps of 2,048 pairs, from step 40; folder {tmp_path}"
    # 3 s a step since step 40: 59 steps are left after the first.
    assert lines[1] == "step  41/100  loss 7.654  12.3k pairs/s  peak memory 3.00 GiB  2:57 left"
    steps = [int(line.split()[1].split("/")[0]) for line in lines if "/100" in line]
    assert steps == [*range(41, 100, 4), 100]  # 4 steps are the first 12 s of 10 or more
    assert "step 60: image → text R@1 25.0 %, text → image R@1/10 34.5 60.0 %" in lines
    assert lines.pop() == "60 steps in 3:00"
    assert "R@1 34.5%" in lines[-2]
    assert [line for line in lines if str(tmp_path) in line][1:] == [
        f"first checkpoint: {tmp_path / 'step_50'}",
        f"60 steps in 3:00; last checkpoint: {tmp_path / 'step_100'}",
    ]


def test_numbers_that_are_missing_or_not_finite_are_shown_as_such(tmp_path):
    out = io.StringIO()
    display = ProgressDisplay(out, line_seconds=0, clock=Clock())
    display.start(Run(tmp_path))
    display.step({"step": 1, "loss": None})
    display.step({"step": 2, "loss": float("nan"), "memory_bytes": 0, "pairs_per_second": None})
    display.on_evaluation({"step": 2, "evaluation": {"num_samples": 3}})
    assert out.getvalue().splitlines()[1:] == ["step   1/100  loss –  0 s left", "step   2/100  loss –  0 s left"]


def test_lines_say_how_long_the_device_waits_for_data_and_how_busy_it_is(tmp_path):
    out = io.StringIO()
    display = ProgressDisplay(out, clock=Clock())
    display.start(Run(tmp_path))
    display.step(record(1, phases={"data": 0.5, "forward": 1.0, "backward": 2.5}, mfu=0.314))
    assert "12.3k pairs/s  waiting for data 12.5%  MFU 31.4%  peak memory 3.00 GiB" in out.getvalue()


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    pytest.importorskip("rich", reason='pip install "megabatch[train]"')
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    display = ProgressDisplay(out, clock=Clock())
    display.start(Run(tmp_path))
    display.on_evaluation({"step": 1, "evaluation": EVALUATION})
    for step in range(1, 101):
        display.step(record(step))
    display.on_evaluation({"step": 100, "evaluation": dict.fromkeys(EVALUATION, 0.5)})
    display.finish(Run(tmp_path))
    shown = out.getvalue()
    stays = shown.rpartition("100/100")[2]  # in the terminal, when all is done
    assert "loss 7.654 · 12.3k pairs/s · peak memory 3.00 GiB · R@1 50.0% · 0 s left" in stays
    assert "text → image R@1/10 34.5 60.0 %" in shown
    assert "\x1b[?25h" in shown  # the cursor is back


def test_a_terminal_without_rich_gets_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda module: False)
    out = Terminal()
    display = ProgressDisplay(out, clock=Clock())
    display.start(Run(tmp_path))
    display.step(record(1))
    assert "step   1/100" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_tensorboard_has_every_number_and_a_continued_run_replaces_what_it_repeats(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    (tmp_path / "config.toml").write_text('data = "emoji"\n')
    for first, last, loss in ((0, 4, 1.0), (2, 6, 2.0)):
        log = TensorBoardLog()
        log.start(Run(tmp_path, first_step=first))
        for step in range(first + 1, last + 1):
            log.step(record(step, loss=loss, bias=None, phases={"data": 0.25}))
        log.on_evaluation({"step": last, "evaluation": EVALUATION})
        log.on_save(tmp_path)
        log.finish(Run(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("training/loss")] == [
        (1, 1.0),
        (2, 1.0),
        *((step, 2.0) for step in range(3, 7)),
    ]
    assert {"training/memory_bytes", "phases/data", "evaluation/text_to_image_R@1"} <= set(events.Tags()["scalars"])
    assert not {"training/step", "training/seconds", "training/bias"} & set(events.Tags()["scalars"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
@pytest.mark.parametrize("fails", ["write", "flush"])
def test_a_full_disk_leaves_no_thread_of_tensorboard_behind(tmp_path, monkeypatch, fails):
    """A failed write ends the writer's thread, a failed flush does not."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self, *data):
        raise OSError(28, "No space left on device")

    before = set(threading.enumerate())
    log = TensorBoardLog()
    log.start(Run(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(RecordWriter, fails, full)
        with pytest.raises(OSError, match="No space left on device"):
            log.on_evaluation({"step": 1, "evaluation": EVALUATION})
        assert set(threading.enumerate()) == before
    log.finish(Run(tmp_path))
    assert set(threading.enumerate()) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_tensorboard_has_every_number_once_a_full_disk_has_room_again(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, full = RecordWriter.write, False

    def limited(self, data):
        if full:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", limited)
    log = TensorBoardLog()
    log.start(Run(tmp_path))
    log.step(record(1))
    log.on_save(tmp_path)
    full = True
    for step in (2, 3, 4):
        with contextlib.suppress(OSError):  # TensorBoard notices some time after the first
            log.step(record(step))
    with pytest.raises(OSError, match=r"No space left|waits"):
        log.on_evaluation({"step": 4, "evaluation": EVALUATION})
    full = False
    with pytest.raises(OSError, match="TensorBoard continues at the next checkpoint"):
        log.step(record(5))
    log.on_save(tmp_path)
    log.step(record(6))
    log.finish(Run(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("training/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("evaluation/text_to_image_R@1")] == [4]


def test_a_missing_tensorboard_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert not TensorBoardLog.available()
    with pytest.raises(ModuleNotFoundError, match=r'log for TensorBoard needs .* pip install "tensorboard>='):
        TensorBoardLog()


class FakeWandb(types.ModuleType):
    """Notes what it is told."""

    def __init__(self):
        super().__init__("wandb")
        self.started, self.logged, self.id, self.finished = [], [], "abc", 0

    def init(self, **settings):
        self.started.append(settings)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for first in (0, 3):
        log = WandbLog("emoji", mode="offline")
        log.start(Run(tmp_path, first_step=first, config=Run(Path("x"), config={"data": ["https://h/a?token=x"]})))
        log.step(record(first + 1, phases={"data": 0.25}, start={"data": 2.5}))
        log.on_evaluation({"step": first + 1, "evaluation": EVALUATION})
        log.on_save(tmp_path)
        log.finish(Run(tmp_path))
    assert [settings["id"] for settings in wandb.started] == [None, "abc"]
    assert wandb.started[0]["mode"] == "offline"
    assert wandb.started[0]["config"]["batch_size"] == 2048
    assert wandb.started[0]["config"]["config"] == {"data": ["https://h/a"]}
    assert wandb.logged[0][0] == 1
    assert wandb.logged[0][1]["training/loss"] == 7.6543
    assert wandb.logged[0][1]["start/data"] == 2.5
    assert wandb.logged[0][1]["phases/data"] == 0.25
    assert wandb.logged[1][1]["evaluation/text_to_image_R@1"] == 0.345
    assert wandb.finished == 2
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "wandb>='):
        WandbLog()


def test_trackio_continues_the_same_run(tmp_path, monkeypatch):
    trackio = FakeWandb()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for first in (0, 3):
        log = TrackioLog("emoji")
        log.start(Run(tmp_path, first_step=first, config=Run(Path("x"), config={"data": ["https://h/a?token=x"]})))
        log.step(record(first + 1, phases={"data": 0.25}))
        log.on_evaluation({"step": first + 1, "evaluation": EVALUATION})
        log.on_save(tmp_path)
        log.finish(Run(tmp_path))
    for settings in trackio.started:
        assert (settings["project"], settings["name"], settings["resume"]) == ("emoji", tmp_path.name, "allow")
        assert settings["config"]["config"] == {"data": ["https://h/a"]}
    assert [step for step, _ in trackio.logged] == [1, 1, 4, 4]
    assert trackio.logged[0][1]["training/loss"] == 7.6543
    assert trackio.logged[0][1]["phases/data"] == 0.25
    assert trackio.logged[1][1]["evaluation/text_to_image_R@1"] == 0.345
    assert trackio.finished == 2
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "trackio>='):
        TrackioLog()


def test_trackio_itself_stores_the_curves_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    log = TrackioLog("emoji")
    log.start(Run(tmp_path, first_step=0, config={}))
    log.step(record(1))
    log.finish(Run(tmp_path))
    assert list((tmp_path / "trackio").glob("*.db"))


def test_wandb_without_a_login_is_told_at_once(monkeypatch):
    wandb = FakeWandb()
    wandb.Error = type("Error", (Exception,), {})
    wandb.login = Mock(side_effect=wandb.Error("No API key configured. Use `wandb login` to log in."))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ValueError, match=r"--wandb needs a login. Run `wandb login`.*wandb reports: No API key configured"):
        WandbLog("emoji")
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbLog("emoji")  # logs into the folder of the run, without a login
    assert wandb.login.call_count == 1


def test_numbers_for_people():
    assert [tables.count(value) for value in (0, 999, 9999, 10000, 12345, 2.5e6, 3e9)] == [
        *("0", "999", "9,999", "10k", "12.3k", "2.5M", "3G")
    ]
    assert [tables.count(value) for value in (0.04321, 0.5, 3.14159, 9.7, 42.4)] == ["0.043", "0.5", "3.1", "9.7", "42"]
    assert [tables.size(value) for value in (12, 2048, 5 * 2**20, 2**31)] == ["12 B", "2.0 KiB", "5.0 MiB", "2.0 GiB"]
    assert [tables.duration(value) for value in (3.4, 62, 59.6, 3723, 200000, float("inf"), -1)] == [
        *("3 s", "1:02", "1:00", "1:02:03", "2 d 7 h", "–", "–")
    ]
    assert [tables.short(value) for value in (0, 0.00012, 3.14159, 123456, None, float("nan"), True)] == [
        *("0", "1.20e-04", "3.142", "1.23e+05", "–", "–", "–")
    ]
    assert [tables.pairs(value) for value in (100, 1024, 1536, 65536, 3 * 2**19, 1_000_000)] == [
        *("100", "1k", "1.5k", "64k", "1.5M", "1,000,000")
    ]
    assert [tables.cell(None, ".2f"), tables.cell(0.0, ".2f"), tables.gib(None), tables.gib(2**30)] == [
        "",
        "0.00",
        "",
        "1.00",
    ]
    assert [tables.ratio(3, 2), tables.ratio(None, 2), tables.ratio(3, None, ".1f"), tables.ratio(3, 0)] == [
        "1.50",
        "",
        "",
        "",
    ]


def test_metrics_for_people():
    assert tables.headline(EVALUATION) == ("text_to_image_R@1", 0.345)
    assert tables.headline({"x": 1, "emoji-zeroshot-val-top1": 0.5}) == ("emoji-zeroshot-val-top1", 0.5)
    assert tables.headline({}) is None
    made = tables.table(EVALUATION, "title")
    assert made.text().splitlines() == [
        "title",
        "                  R@1    R@10",
        "  image → text  25.0%       –",
        "  text → image  34.5%   60.0%",
        "  by chance     11.1%  100.0%",
        "samples: 9",
    ]
    assert tables.describe(EVALUATION, "text_to_image_R@1") == "text → image R@1, 11.1% by chance"
    assert tables.describe({}, "text_to_image_R@1") == "text → image R@1"


def test_chance_level_stands_in_the_table_of_each_dataset():
    evaluation = {f"{way}_{name}": 1.0 for way in ("image_to_text", "text_to_image") for name in ("R@10", "mean_rank")}
    evaluation |= {"num_samples": 10, "num_texts": 20}  # two captions of each image
    lines = tables.table(evaluation).text().splitlines()
    assert [line.split()[-2:] for line in lines if "by chance" in line] == [["76.3%", "7"], ["100.0%", "5.5"]]
    other = {"coco/image_to_text_R@10": 1.0, "coco/text_to_image_R@10": 1.0, "coco/num_samples": 40}
    lines = tables.table(evaluation | other).text().splitlines()
    assert [line.split()[-2:] for line in lines if "coco/by chance" in line] == [["25.0%", "20.5"]]
    zero_shot = {"pets-zeroshot-val-top1": 0.5, "pets-zeroshot-val-top5": 0.75, "num_classes": 50}
    lines = tables.table(zero_shot).text().splitlines()
    assert [line.split()[-1] for line in lines] == ["chance", "2.0%", "10.0%", "50"]
    assert tables.chance(evaluation, "text_to_image_MRR") is None
    assert tables.chance({"text_to_image_R@1": 1.0}, "text_to_image_R@1") is None


@pytest.mark.parametrize(("value", "told"), [(0.0, "0.0%"), (0.0009, "0.09%"), (1 / 32768, "0.003%"), (None, "–")])
def test_a_small_percentage_keeps_a_digit(value, told):
    assert tables.percent(value) == told


def test_an_evaluation_is_a_line_of_a_hundred_columns():
    names = [f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    line = tables.line({**dict.fromkeys(names, 1.0), "text_to_image_mean_rank": 3.0})
    assert line == "image → text R@1/5/10 100.0 100.0 100.0 %, text → image R@1/5/10 100.0 100.0 100.0 %"
    assert len(f"step 1,000,000: {line}") <= 100
    assert tables.line({"imagenet-zeroshot-val-top1": 0.5, "imagenet-zeroshot-val-top5": 0.75}) == (
        "imagenet-zeroshot-val-top1/5 50.0 75.0 %"
    )
    assert tables.table({"loss": 1.5, "num_classes": 3}).text().splitlines() == ["  loss  1.5", "classes: 3"]
