"""Measures pairs per second of complete training runs from files: `megabatch train`, open_clip's trainer, and only the towers.

The script makes webdataset shards of JPEGs from Flickr8k, repeated with other captions, or from noise. Each system runs in its
own process, with the command of a user:

- `megabatch train` with flags for the data, the model, the batch size and the steps, and with variants
- the trainer of open_clip with amp_bf16, with larger and larger batches until it runs out of memory
- only the towers, with chunks in device memory: without torch.compile, and with it and cut captions

The towers encode each chunk twice, as in gradient caching, and in other steps once, which is the upper bound. Rates exclude the
first steps. They are read from `metrics.jsonl` and from the log of open_clip. If a run reaches its time limit, it is ended, and
its steps until then count.
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
from megabatch_train.bench.measure import Record, arguments, chip, device_of, number_options, paragraphs
from megabatch_train.display import plots, tables
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import results

# JPEGs of the thumbnails of Flickr8k have about 18 KB, like photographs after img2dataset.
SIDE, QUALITY, WORKERS = 256, 94, 16
NOISE_SIDE = 64  # side length of an image of noise in pixels
HERE = Path(__file__).resolve().parent
OURS, THEIRS, BOUND = "megabatch", "open_clip", "towers alone"
# Every run writes ten checkpoints. In a run of eight steps they would take most of the time.
ONE_CHECKPOINT = ["--set", "checkpoint.every=1000000"]
VARIANTS = {
    "": [],
    "not compiled": ["--set", "compile=off"],
    "no graphs kept": ["--set", "memory.graphs=0"],
    "not augmented": ["--set", "augment=false"],
    "patch dropout 0.5": ["--set", "model_options.patch_dropout=0.5"],
    "patch dropout 0.75": ["--set", "model_options.patch_dropout=0.75"],
    "expandable segments": [],
    "fp32, not compiled, no workers": ["--precision", "fp32", "--set", "compile=off", "--set", "workers=0"],
}
VARIABLES = {"expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}  # environment of variants
# Flags of the trainer of open_clip for the variants that it has too.
OPEN_CLIP_VARIANTS = {f"patch dropout {share}": ["--force-patch-dropout", share] for share in ("0.5", "0.75")}
TINY_MODEL = "tiny-clip"
TINY_CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
TOWERS_HOW = {"compiled": True, "plain": False}
SKIPPED = 2  # first steps, which do not count, because of compilation and of the full buffers of open_clip's workers
GRACE = 60  # seconds between terminating and killing a process
LOG = re.compile(r"Data \(t\): ([\d.]+) Batch \(t\): ([\d.]+), ")
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")


def make_shards(folder: Path, samples: int, shards: int, source: Path | None) -> str:
    """Writes shards into a folder if they do not exist, and returns their pattern.

    Args:
        folder: folder of the shards. It is created if it does not exist.
        samples: total number of samples. After the last image, the images are repeated with other captions.
        shards: number of tar files.
        source: folder with a `.bin` file of encoded images and a `.json` file with `captions` and `offsets`, or None for noise.
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

    def enlarge(i: int) -> bytes:
        picture = pillow.open(io.BytesIO(data[offsets[i] : offsets[i + 1]])).convert("RGB")
        return _jpeg(picture.resize((SIDE, SIDE), pillow.Resampling.BICUBIC))

    with ThreadPoolExecutor(WORKERS) as pool:
        images = list(pool.map(enlarge, range(min(samples, len(captions)))))
    for way in itertools.count():
        for image, texts in zip(images, captions, strict=False):
            yield image, texts[way % len(texts)]


def _noise() -> Iterator[tuple[bytes, str]]:
    pillow: Any = extras.load("PIL.Image", purpose="Making JPEGs")
    for i in itertools.count():
        yield _jpeg(pillow.effect_noise((NOISE_SIDE, NOISE_SIDE), 100).convert("RGB")), f"picture {i} in words"


def _jpeg(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


@dataclass
class Bench:
    """One call of the script: its paths, its data, and the environment of its processes."""

    args: argparse.Namespace
    folder: Path  # temporary folder for shards and runs
    device: str
    data: str = ""
    cores: int | None = None  # cores that a run may use; None for all
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        """Makes the shards, and sets the environment of child processes."""
        args = self.args
        self.data = make_shards(args.shards or self.folder / "shards", args.samples, args.files, args.data)
        places = [str(HERE.parent / "src"), *([str(args.peers.resolve())] if args.peers else [])]
        self.environment["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
        if args.model == TINY_MODEL:
            config = self.folder / f"{TINY_MODEL}.json"
            config.write_text(json.dumps(TINY_CONFIG))
            self.environment["TRAIN_SPEED_MODEL"] = str(config)
            self.environment["OMP_NUM_THREADS"] = "1"  # matmuls are small, and other programs use the cores

    def run(self, command: list[str], enough: int | None = None, variables: dict[str, str] | None = None) -> tuple[str, bool]:
        """Runs a process. Returns its output, and whether its exit status is 0.

        Args:
            command: command of the process.
            enough: number of lines in the log of open_clip after which the process is ended.
            variables: further environment variables.
        """
        if self.cores is not None:
            allowed = sorted(os.sched_getaffinity(0))[: self.cores]
            command = ["taskset", "--cpu-list", ",".join(map(str, allowed)), *command]
        process = subprocess.Popen(
            command,
            env={**self.environment, **(variables or {})},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
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
        finally:  # including Ctrl-C
            for timer in timers:
                timer.cancel()
            _end(process)
        return "".join(lines), process.returncode == 0

    # The systems. Each returns a row with rate, steps, share of waiting for data and peak, or with "failed" and the reason.

    def megabatch(self, batch: int, flags: list[str], variables: dict[str, str] | None = None) -> dict[str, Any]:
        """Runs `megabatch train`."""
        run = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        start = [sys.executable, "-m", "megabatch"]
        if self.args.model == TINY_MODEL:
            start = [sys.executable, str(HERE / "train_speed_child.py"), "megabatch"]
        flags_of_run = ["--data", self.data, "--model", f"open_clip:{self.args.model}", "--batch-size", str(batch)]
        steps = ["--set", f"steps={self.args.steps + SKIPPED}", *ONE_CHECKPOINT, "--output", str(run), "--no-report"]
        output, _ = self.run([*start, "train", *flags_of_run, *steps, *flags], variables=variables)
        metrics = run / "metrics.jsonl"
        return from_metrics(results.read(metrics) if metrics.exists() else [], output)

    def open_clip(self, batch: int, flags: list[str]) -> dict[str, Any]:
        """Runs the trainer of open_clip, without checkpoints and with a small learning rate."""
        steps = self.args.steps + SKIPPED
        command = [sys.executable, str(HERE / "train_speed_child.py"), OPEN_CLIP]
        data = ["--train-data", self.data, "--dataset-type", "webdataset", "--dataset-resampled"]
        command += ["--model", self.args.model, *data]
        command += ["--train-num-samples", str(batch * steps), "--batch-size", str(batch), "--precision", "amp_bf16"]
        command += ["--workers", str(self.cores or self.args.workers), "--epochs", "1", "--warmup", "10", "--lr", "1e-4"]
        command += ["--log-every-n-steps", "1", "--logs", str(self.folder / "logs"), "--save-frequency", "0"]
        command += ["--device", self.device, "--local-loss", "--gather-with-grad", *flags]
        # The process is ended after enough steps, because with several workers it makes more steps than it should.
        return from_log(self.run(command, enough=steps)[0], batch)

    def towers(self, batch: int, *, compiled: bool) -> dict[str, dict[str, Any]]:
        """Runs only the forward and backward passes of the towers. Returns rows by how often a chunk is encoded."""
        about = {"model": f"open_clip:{self.args.model}", "data": self.data, "chunk": self.args.chunk, "batch": batch}
        about |= {"steps": self.args.steps, "compiled": compiled}
        output, succeeded = self.run([sys.executable, str(HERE / "train_speed_child.py"), TOWERS, json.dumps(about)])
        return json.loads(output.strip().splitlines()[-1]) if succeeded else {"": row_of_failure(output)}


def _end(process: "subprocess.Popen[str]") -> None:
    """Kills a process and its data-loader workers, which have the same session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def from_metrics(records: list[dict[str, Any]], output: str) -> dict[str, Any]:
    """Returns the row of a run of megabatch."""
    steps = [record for record in records if "loss" in record]
    if len(steps) <= SKIPPED:
        return row_of_failure(output)
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
        "start": steps[0].get("start", {}),
    }
    return row | ({"mfu": last["mfu"]} if "mfu" in last else {})


def from_log(output: str, batch: int) -> dict[str, Any]:
    """Returns the row of a run of the trainer of open_clip."""
    steps = [(float(data), float(step_seconds)) for data, step_seconds in LOG.findall(output)][SKIPPED:]
    if not steps:
        return row_of_failure(output)
    seconds = sum(step_seconds for _, step_seconds in steps)
    peak = [int(line.removeprefix(PEAK)) for line in output.splitlines() if line.startswith(PEAK)]
    row = {"rate": batch * len(steps) / seconds, "steps": len(steps), "data_share": sum(data for data, _ in steps) / seconds}
    return row | ({"peak_bytes": peak[-1]} if peak else {})


def row_of_failure(output: str) -> dict[str, Any]:
    """Returns the row of a run without enough steps."""
    if any(sign in output for sign in OUT_OF_MEMORY):
        return {"failed": "out of memory"}
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if ERROR.match(line)] or lines
    return {"failed": re.sub(r"/[\w./-]+/", "…/", lines[-1])[:200] if lines else "no output"}


def measure(record: Record, bench: Bench, args: argparse.Namespace) -> None:
    """Makes all runs, until the time limit."""

    def add(system: str, batch: int, variant: str, row: dict[str, Any]) -> dict[str, Any]:
        row = {"system": system, "batch": batch, "variant": variant, **row}
        record["results"].append(row)
        record.save()
        outcome = row.get("failed") or f"{row['rate']:,.0f} pairs/s"
        record.say(f"{system}{f', {variant}' if variant else ''}, batch {batch:,}: {outcome}")
        return row

    def time_left() -> bool:
        return record.seconds_left() > 0

    for bench.cores in args.cores:
        for system, batches, run in ((OURS, args.batches, bench.megabatch), (THEIRS, args.open_clip, bench.open_clip)):
            for batch in batches:
                if time_left():
                    add(system, batch, f"{bench.cores} cores", run(batch, []))
    if args.cores:
        return
    for batch in args.batches:
        if time_left():
            add(OURS, batch, "", bench.megabatch(batch, []))
    fits = None  # the largest batch of open_clip that does not run out of memory
    for batch in args.open_clip:
        if time_left() and "failed" in add(THEIRS, batch, "", bench.open_clip(batch, [])):
            break
        fits = batch
    for compiled in [TOWERS_HOW[name] for name in args.towers]:
        if time_left():
            variant = "compiled, captions cut" if compiled else "plain"
            for passes, row in bench.towers(args.batches[0], compiled=compiled).items():
                add(BOUND, args.batches[0], f"{variant}, {passes}" if passes else variant, row)
    for variant in args.variants:
        if time_left():
            add(OURS, args.batches[0], variant, bench.megabatch(args.batches[0], VARIANTS[variant], VARIABLES.get(variant)))
        if time_left() and fits is not None and variant in OPEN_CLIP_VARIANTS:
            add(THEIRS, fits, variant, bench.open_clip(fits, OPEN_CLIP_VARIANTS[variant]))


COLORS = {"megabatch": plots.GREEN, "open_clip": plots.ORANGE, "towers alone": plots.GREY}
HEADINGS = ["system, batch", "pairs/s", "× best of open_clip", "waiting for data", "MFU", "peak, GiB", "steps"]


def name(row: dict[str, Any]) -> str:
    """Returns the system, its variant and its batch size."""
    return f"{row['system']}{', ' + row['variant'] if row['variant'] else ''}, {tables.pairs(row['batch'])}"


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record: a table of the runs, and the time by phase of the runs of megabatch."""
    rows = record["results"]
    about = (
        f"# Speed of training\n\n{record['model']}, {record['samples']:,} pairs of JPEGs and captions in webdataset shards, "
        f"{chip(record)}. Rates exclude the first two steps. The trainer of open_clip has {record['workers']} workers. "
        '"Towers alone" reads no data and computes no loss. Gradient caching encodes each chunk twice, unless it keeps a graph '
        "for it. Encoding each chunk once is the upper bound."
    )
    phases = [f"- {name(row)}: {shares(row['phases'])}" for row in rows if "phases" in row]
    starts = [f"- {name(row)}: {start_of(row)}" for row in rows if row.get("start")]
    table = TextTable(HEADINGS, [cells(row, _baseline(row, rows)) for row in rows]).markdown()
    return paragraphs(about, table, "Time by phase:\n\n" + "\n".join(phases) if phases else "", starts_of(starts))


def _baseline(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Returns the best rate of open_clip with the patch dropout or the cores of the row, or None if there is no such run."""
    theirs = [other for other in rows if other["system"] == THEIRS]
    variant = row["variant"] if any(other["variant"] == row["variant"] for other in theirs) else ""
    rates = [other["rate"] for other in theirs if other["variant"] == variant and "rate" in other]
    return max(rates, default=None)


def cells(row: dict[str, Any], theirs: float | None) -> list[str]:
    """Returns a row of the table. `theirs` is the best rate of open_clip."""
    if "failed" in row:
        return [name(row), row["failed"], *[""] * (len(HEADINGS) - 2)]
    of_time = [tables.percent(row[key]) if key in row else "" for key in ("data_share", "mfu")]
    rate, ratio = f"{row['rate']:,.0f}", tables.ratio(row["rate"], theirs)
    return [name(row), rate, ratio, *of_time, tables.gib(row.get("peak_bytes"), ".1f"), str(row["steps"])]


def start_of(row: dict[str, Any]) -> str:
    """Returns the seconds of each phase of the start, of which the last one is the first step."""
    phases = {phase.replace("_", " "): seconds for phase, seconds in row["start"].items()}
    return f"{sum(phases.values()):.1f} s: " + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())


def starts_of(starts: list[str]) -> str:
    """Returns the paragraph about the starts of the runs. The first run has a cold compiler cache."""
    about = (
        "Seconds from the command to the end of the first step. The first run of the table starts with a cold compiler cache:"
    )
    return about + "\n\n" + "\n".join(starts) if starts else ""


def shares(phases: dict[str, float]) -> str:
    """Returns the phases as text, the longest first."""
    total = sum(phases.values())
    longest = sorted(phases.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{key} {tables.percent(seconds / total)}" for key, seconds in longest)


def draw(record: dict[str, Any]) -> Any:
    """Draws a bar for each run that has a rate."""
    rows = [row for row in record["results"] if "rate" in row]
    bars = [(name(row), row["rate"]) for row in rows]
    if len(bars) < 2:
        return None
    about = f"{record['model']}, {chip(record)}"
    title = "Pairs per second of complete training steps"
    figure, (axes,) = plots.panels(title, 1, height=1.0 + 0.4 * len(bars), width=7.5, about=about)
    plots.bars(axes, bars, "{:,.0f}", [COLORS[row["system"]] for row in rows])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, "train_speed", 560)
    add = parser.add_argument
    add("--data", type=Path, help="folder with the .bin and .json files of Flickr8k (default: images of noise)")
    add("--shards", type=Path, help="folder for the shards, which the next call can use (default: a temporary folder)")
    add("--peers", type=Path, help="folder with open_clip, open_clip_train and webdataset, which is added to PYTHONPATH")
    add("--model", default="ViT-B-32", help="model of open_clip (default: ViT-B-32)")
    number_options(
        parser,
        samples=(32768, "number of pairs in the shards"),
        files=(64, "number of shards, at least as many as workers of open_clip"),
        batches=([4096, 16384], "batch sizes of megabatch"),
        open_clip=([1024, 2048, 4096, 8192], "batch sizes of open_clip"),
        chunk=(512, "number of samples that only the towers encode at once"),
        steps=(8, f"number of steps of each run, in addition to the first {SKIPPED}"),
        workers=(len(os.sched_getaffinity(0)), "data-loader workers of open_clip; the default is the number of cores"),
    )
    cores = "measure only complete runs with these numbers of cores (taskset); open_clip has as many workers"
    add("--cores", nargs="*", type=int, default=[], metavar="N", help=cores)
    add("--variants", nargs="*", choices=[name for name in VARIANTS if name], default=["not compiled"])
    add(
        "--towers",
        nargs="*",
        choices=list(TOWERS_HOW),
        default=list(TOWERS_HOW),
        help="how to run only the towers (default: both)",
    )
    add("--limit", type=float, default=120, help="time limit of a run in seconds (default: 120)")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.samples, args.files, args.batches, args.open_clip = TINY_MODEL, 64, 4, [32], [16]
        args.variants, args.chunk, args.steps, args.workers = [], 16, 2, 1
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder), device_of(args))
        record = Record.of_script(
            "train_speed", args, args.seconds, model=args.model, samples=args.samples, workers=args.workers
        )
        record.say(f"{args.samples:,} pairs in {args.files} shards were made in {time.perf_counter() - start:.0f} s")
        measure(record, bench, args)
    record.finish(markdown, draw)


if __name__ == "__main__":
    main()
