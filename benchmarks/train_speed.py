"""Pairs a second of whole training runs from files: `megabatch train`, open_clip's own trainer, and the towers alone.

webdataset shards of JPEGs are made of Flickr8k, repeated with other captions, or of noise. Each system runs in a process of its
own, as a user starts it: `megabatch train` with no flags but data, model, batch and steps, and with variants; open_clip's
trainer with amp_bf16 at growing batches until memory runs out; the towers alone over chunks that lie on the device, plain, and
compiled with captions cut. The towers encode each chunk twice, as a cached step does, and in other steps once, which is the
upper bound. Rates are those of the steps after the first ones, read from `metrics.jsonl` and from open_clip's log. A run that
takes longer than its limit is ended, and the steps it has made count.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_speed_child import OPEN_CLIP, PEAK, TOWERS

from megabatch import extras
from megabatch_train.bench.measure import Record, arguments, chip, device_of, paragraphs
from megabatch_train.display import plots, tables
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import results

# of JPEGs of Flickr8k's thumbnails: files of about 18 KB, as img2dataset makes them of photographs
SIDE, QUALITY, WORKERS = 256, 94, 16
NOISE_SIDE = 64  # pixels of an image of noise
HERE = Path(__file__).resolve().parent
OURS, THEIRS, BOUND = "megabatch", "open_clip", "towers alone"
# Ten checkpoints are in every run, however short: in one of eight steps they would be most of the time.
ONE_CHECKPOINT = ["--set", "checkpoint.every=1000000"]
VARIANTS = {
    "": [],
    "not compiled": ["--set", "compile=off"],
    "no graphs kept": ["--set", "memory.graphs=0"],
    "not augmented": ["--set", "augment=false"],
    "fp32, not compiled, no workers": ["--precision", "fp32", "--set", "compile=off", "--set", "workers=0"],
}
TINY_MODEL = "tiny-clip"
TINY_CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
TOWERS_HOW = {"compiled": True, "plain": False}
SKIPPED = 2  # steps that are not counted: the compiler's, and those that open_clip's readers have filled their buffers for
GRACE = 60  # seconds from asking a process to end to ending it
LOG = re.compile(r"Data \(t\): ([\d.]+) Batch \(t\): ([\d.]+), ")
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")


def make_shards(folder: Path, samples: int, shards: int, source: Path | None) -> str:
    """Writes shards into a folder, once, and returns their pattern.

    Args:
        folder: created if need be; shards that are there already are used.
        samples: in all. Images come again, with other captions, once all have been used.
        shards: tar files.
        source: a folder with a `.bin` of encoded images and a `.json` with `captions` and `offsets`; None for noise.
    """
    pattern, done = str(folder / f"{{00000..{shards - 1:05d}}}.tar"), folder / f"{samples}_samples"
    if done.exists():
        return pattern
    folder.mkdir(parents=True, exist_ok=True)
    pairs = itertools.islice(_noise() if source is None else _flickr8k(source, samples), samples)
    for number in range(shards):
        count = samples // shards + (number < samples % shards)
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for i, (image, caption) in enumerate(itertools.islice(pairs, count)):
                key = f"{number:05d}{i:05d}"
                for name, data in ((f"{key}.jpg", image), (f"{key}.txt", caption.encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    done.touch()
    return pattern


def _flickr8k(folder: Path, samples: int) -> Iterator[tuple[bytes, str]]:
    (about_file,) = folder.glob("*.json")
    about, data = json.loads(about_file.read_text()), about_file.with_suffix(".bin").read_bytes()
    captions, offsets = about["captions"], about["offsets"]
    pillow: Any = extras.load("PIL.Image", purpose="Making JPEGs")

    def enlarged(i: int) -> bytes:
        picture = pillow.open(io.BytesIO(data[offsets[i] : offsets[i + 1]])).convert("RGB")
        return _jpeg(picture.resize((SIDE, SIDE), pillow.Resampling.BICUBIC))

    with ThreadPoolExecutor(WORKERS) as pool:
        images = list(pool.map(enlarged, range(min(samples, len(captions)))))
    for way in itertools.count():
        for image, texts in zip(images, captions, strict=False):
            yield image, texts[way % len(texts)]


def _noise() -> Iterator[tuple[bytes, str]]:
    pillow: Any = extras.load("PIL.Image", purpose="Making JPEGs")
    for i in itertools.count():
        yield _jpeg(pillow.effect_noise((NOISE_SIDE, NOISE_SIDE), 100).convert("RGB")), f"picture {i} in words"


def _jpeg(picture: Any) -> bytes:
    room = io.BytesIO()
    picture.save(room, "JPEG", quality=QUALITY)
    return room.getvalue()


@dataclass
class Bench:
    """One call of the script: where things are, and how processes are started."""

    args: argparse.Namespace
    folder: Path  # for shards and runs
    device: str
    data: str = ""
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        """Makes the shards, and tells child processes where to look."""
        args = self.args
        self.data = make_shards(args.shards or self.folder / "shards", args.samples, args.files, args.data)
        places = [str(HERE.parent / "src"), *([str(args.peers.resolve())] if args.peers else [])]
        self.environment["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
        if args.model == TINY_MODEL:
            config = self.folder / f"{TINY_MODEL}.json"
            config.write_text(json.dumps(TINY_CONFIG))
            self.environment["TRAIN_SPEED_MODEL"] = str(config)
            self.environment["OMP_NUM_THREADS"] = "1"  # small products, and other programs

    def run(self, command: list[str], enough: int | None = None) -> tuple[str, bool]:
        """What a process has said, and whether it ended by itself and well.

        Args:
            command: of the process.
            enough: lines of open_clip's log after which it is ended.
        """
        process = subprocess.Popen(
            command, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        timers = [
            threading.Timer(self.args.limit, process.terminate),
            threading.Timer(self.args.limit + GRACE, _end, [process]),
        ]
        for timer in timers:
            timer.start()
        lines: list[str] = []
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if enough is not None and LOG.search(line):
                    enough -= 1
                    if enough == 0:
                        process.terminate()
            process.wait()
        finally:  # also on Ctrl-C
            for timer in timers:
                timer.cancel()
            _end(process)
        return "".join(lines), process.returncode == 0

    # The systems. Each returns a row: rate, steps, share of time spent waiting for data, peak; or "failed" and the reason.

    def megabatch(self, batch: int, flags: list[str]) -> dict[str, Any]:
        """`megabatch train`."""
        run = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        start = [sys.executable, "-m", "megabatch"]
        if self.args.model == TINY_MODEL:
            start = [sys.executable, str(HERE / "train_speed_child.py"), "megabatch"]
        wanted = ["--data", self.data, "--model", f"open_clip:{self.args.model}", "--batch-size", str(batch)]
        steps = ["--set", f"steps={self.args.steps + SKIPPED}", *ONE_CHECKPOINT, "--output", str(run), "--no-report"]
        told, _ = self.run([*start, "train", *wanted, *steps, *flags])
        metrics = run / "metrics.jsonl"
        return from_metrics(results.read(metrics) if metrics.exists() else [], told)

    def open_clip(self, batch: int) -> dict[str, Any]:
        """open_clip's trainer; a checkpoint is not written, and the learning rate is small."""
        steps = self.args.steps + SKIPPED
        command = [sys.executable, str(HERE / "train_speed_child.py"), OPEN_CLIP]
        data = ["--train-data", self.data, "--dataset-type", "webdataset", "--dataset-resampled"]
        command += ["--model", self.args.model, *data]
        command += ["--train-num-samples", str(batch * steps), "--batch-size", str(batch), "--precision", "amp_bf16"]
        command += ["--workers", str(self.args.workers), "--epochs", "1", "--warmup", "10", "--lr", "1e-4"]
        command += ["--log-every-n-steps", "1", "--logs", str(self.folder / "logs"), "--save-frequency", "0"]
        command += ["--device", self.device, "--local-loss", "--gather-with-grad"]
        # It is ended after enough steps: with several workers it makes more than it was asked for.
        return from_log(self.run(command, enough=steps)[0], batch)

    def towers(self, batch: int, *, compiled: bool) -> dict[str, dict[str, Any]]:
        """Forward and backward alone, in rows by how often a chunk is encoded."""
        about = {"model": f"open_clip:{self.args.model}", "data": self.data, "chunk": self.args.chunk, "batch": batch}
        about |= {"steps": self.args.steps, "compiled": compiled}
        told, well = self.run([sys.executable, str(HERE / "train_speed_child.py"), TOWERS, json.dumps(about)])
        return json.loads(told.strip().splitlines()[-1]) if well else {"": failed(told)}


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a process and the readers that it has left behind, which have its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def from_metrics(records: list[dict[str, Any]], told: str) -> dict[str, Any]:
    """The row of a run of ours."""
    steps = [record for record in records if "loss" in record]
    if len(steps) <= SKIPPED:
        return failed(told)
    first, last = steps[SKIPPED - 1], steps[-1]
    phases: dict[str, float] = {}
    for record in steps[SKIPPED:]:
        for name, seconds in record["phases"].items():
            phases[name] = phases.get(name, 0.0) + seconds
    row = {
        "rate": (last["pairs"] - first["pairs"]) / (last["seconds"] - first["seconds"]),
        "steps": len(steps) - SKIPPED,
        "data_share": phases.get("data", 0.0) / sum(phases.values()),
        "phases": phases,
        "peak_bytes": last["memory_bytes"],
    }
    return row | ({"mfu": last["mfu"]} if "mfu" in last else {})


def from_log(told: str, batch: int) -> dict[str, Any]:
    """The row of a run of open_clip's trainer."""
    steps = [(float(data), float(whole)) for data, whole in LOG.findall(told)][SKIPPED:]
    if not steps:
        return failed(told)
    seconds = sum(whole for _, whole in steps)
    peak = [int(line.removeprefix(PEAK)) for line in told.splitlines() if line.startswith(PEAK)]
    row = {"rate": batch * len(steps) / seconds, "steps": len(steps), "data_share": sum(data for data, _ in steps) / seconds}
    return row | ({"peak_bytes": peak[-1]} if peak else {})


def failed(told: str) -> dict[str, Any]:
    """The row of a run without enough steps."""
    if any(sign in told for sign in OUT_OF_MEMORY):
        return {"failed": "out of memory"}
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    lines = [line for line in lines if ERROR.match(line)] or lines
    return {"failed": re.sub(r"/[\w./-]+/", "…/", lines[-1])[:200] if lines else "no output"}


def measure(record: Record, bench: Bench, args: argparse.Namespace) -> None:
    """All runs, as long as there is time."""

    def add(system: str, batch: int, variant: str, row: dict[str, Any]) -> dict[str, Any]:
        row = {"system": system, "batch": batch, "variant": variant, **row}
        record["results"].append(row)
        record.save()
        told = row.get("failed") or f"{row['rate']:,.0f} pairs/s"
        record.say(f"{system}{f', {variant}' if variant else ''}, batch {batch:,}: {told}")
        return row

    def time_left() -> bool:
        return record.seconds_left() > 0

    for batch in args.batches:
        if time_left():
            add(OURS, batch, "", bench.megabatch(batch, []))
    for batch in args.open_clip:
        if time_left() and "failed" in add(THEIRS, batch, "", bench.open_clip(batch)):
            break
    for compiled in [TOWERS_HOW[name] for name in args.towers]:
        if time_left():
            variant = "compiled, captions cut" if compiled else "plain"
            for passes, row in bench.towers(args.batches[0], compiled=compiled).items():
                add(BOUND, args.batches[0], f"{variant}, {passes}" if passes else variant, row)
    for variant in args.variants:
        if time_left():
            add(OURS, args.batches[0], variant, bench.megabatch(args.batches[0], VARIANTS[variant]))


COLOURS = {"megabatch": plots.GREEN, "open_clip": plots.ORANGE, "towers alone": plots.GREY}
HEADINGS = ["system, batch", "pairs/s", "× open_clip's best", "waiting for data", "MFU", "peak, GiB", "steps"]


def name(row: dict[str, Any]) -> str:
    """The system, its variant and its batch."""
    return f"{row['system']}{', ' + row['variant'] if row['variant'] else ''}, {tables.pairs(row['batch'])}"


def markdown(record: dict[str, Any]) -> str:
    """One table: rate, ratio to open_clip's best, wait for data, share of the peak rate, memory; and the phases of ours."""
    rows = record["results"]
    theirs = max((row["rate"] for row in rows if row["system"] == "open_clip" and "rate" in row), default=None)
    about = (
        f"# Speed of training\n\n{record['model']}, {record['samples']:,} pairs of JPEGs and captions in webdataset shards, "
        f"{chip(record)}. Rates are over the steps after the first two; open_clip's trainer has {record['workers']} workers. "
        "The towers alone read no data and compute no loss. A cached step encodes each chunk twice, unless it keeps its graph; "
        "encoded once is the upper bound."
    )
    phases = [f"- {name(row)}: {shares(row['phases'])}" for row in rows if "phases" in row]
    table = TextTable(HEADINGS, [cells(row, theirs) for row in rows]).markdown()
    return paragraphs(about, table, "Time by phase:\n\n" + "\n".join(phases) if phases else "")


def cells(row: dict[str, Any], theirs: float | None) -> list[str]:
    """A row of the table; `theirs` is open_clip's best rate."""
    if "failed" in row:
        return [name(row), row["failed"], *[""] * (len(HEADINGS) - 2)]
    of_time = [tables.percent(row[key]) if key in row else "" for key in ("data_share", "mfu")]
    rate, ratio = f"{row['rate']:,.0f}", tables.ratio(row["rate"], theirs)
    return [name(row), rate, ratio, *of_time, tables.gib(row.get("peak_bytes"), ".1f"), str(row["steps"])]


def shares(phases: dict[str, float]) -> str:
    """Phases in words, the longest first."""
    whole = sum(phases.values())
    longest = sorted(phases.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{key} {tables.percent(seconds / whole)}" for key, seconds in longest)


def draw(record: dict[str, Any]) -> Any:
    """A bar for each run that has a rate."""
    rows = [row for row in record["results"] if "rate" in row]
    bars = [(name(row), row["rate"]) for row in rows]
    if len(bars) < 2:
        return None
    about = f"{record['model']}, {chip(record)}"
    title = "Pairs a second, from files to the optimizer"
    figure, (axes,) = plots.panels(title, 1, height=1.0 + 0.4 * len(bars), about=about)
    plots.bars(axes, bars, "{:,.0f}", [COLOURS[row["system"]] for row in rows])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, "train_speed", 560)
    add = parser.add_argument
    add("--data", type=Path, help="folder with a .bin and a .json of Flickr8k (default: images of noise)")
    add("--shards", type=Path, help="folder to write the shards to, and to find them again (default: a temporary one)")
    add("--peers", type=Path, help="folder with open_clip, open_clip_train and webdataset, for PYTHONPATH")
    add("--model", default="ViT-B-32", help="of open_clip (ViT-B-32)")
    add("--samples", type=int, default=32768, help="pairs in the shards (32768)")
    add("--files", type=int, default=64, help="shards (64); open_clip needs at least as many as workers")
    add("--batches", type=int, nargs="+", default=[4096, 16384], help="of megabatch (4096 16384)")
    add("--open-clip", type=int, nargs="*", default=[1024, 2048, 4096, 8192], help="batches of open_clip (1024 … 8192)")
    add("--variants", nargs="*", choices=[name for name in VARIANTS if name], default=["not compiled"])
    add("--towers", nargs="*", choices=list(TOWERS_HOW), default=list(TOWERS_HOW), help="how the towers alone run (both)")
    add("--chunk", type=int, default=512, help="samples at once of the towers alone (512)")
    add("--steps", type=int, default=8, help=f"steps of each run, beside the first {SKIPPED} (8)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="of open_clip (as many as cores)")
    add("--limit", type=float, default=120, help="seconds of one run (120)")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.samples, args.files, args.batches, args.open_clip = TINY_MODEL, 64, 4, [32], [16]
        args.variants, args.chunk, args.steps, args.workers = [], 16, 2, 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(args, Path(place), device_of(args))
        record = Record.of_script(
            "train_speed", args, args.seconds, model=args.model, samples=args.samples, workers=args.workers
        )
        record.say(f"{args.samples:,} pairs in {args.files} shards, made in {time.perf_counter() - began:.0f} s")
        measure(record, bench, args)
    record.finish(markdown, draw)


if __name__ == "__main__":
    main()
