"""`megabatch data`: reads all samples once, and reports broken samples, sizes, duplicates and the reading speed."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from megabatch import extras
from megabatch_train.commands import DATA_HELP, add_columns, add_json, describe, parse_positive_int, print_json
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    from megabatch_train.data.dataset import Dataset

BROKEN = 1  # exit status if samples are broken
NAMED = 10  # largest number of broken samples that are listed
BLOCK = 256  # samples that a thread reads before it reports
SIZES = {  # names of the sizes of a sample, by its kind
    "image": ("width", "height"),
    "text": ("characters", "words"),
    "image+text": ("characters", "words", "width", "height"),  # 0 for a sample without a text or without an image
    "audio": ("milliseconds", "samples per second"),
    "file": ("bytes",),
    "value": (),
}
DESCRIPTION = """
Reads every sample once, as training does, and reports

  - broken samples, with the reason for the first ten,
  - the sizes of images, and the lengths of texts and recordings,
  - duplicates: files with the same bytes, equal texts, and equal pairs,
  - the reading speed: pairs per second that one data-loader worker reads and decodes.

  megabatch data pairs.csv
  megabatch data "cc12m/{00000..01242}.tar" --workers 16
  megabatch data photos/ --json > report.json

The reading speed is computed from the CPU time. It does not include waiting for a disk or a
network, resizing and tokenization. The exit status is 1 if a sample is broken, and otherwise 0.
Training skips broken samples.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch data`."""
    describe(parser, DESCRIPTION)
    parser.add_argument("data", metavar="DATA", help=DATA_HELP)
    add_columns(parser)
    parser.add_argument("--split", choices=("train", "test", "all"), help="split of emoji or wordnet (default: all)")
    parser.add_argument(
        "--workers", type=parse_positive_int, metavar="N", help="number of threads that read (default: the number of cores)"
    )
    add_json(parser, "the report")


class Reading(NamedTuple):
    """The values of one sample that the report uses."""

    number: int
    sides: tuple[Side, ...]  # empty for a broken sample
    seconds: float  # CPU time
    reason: str = ""  # why the sample is broken


class Side(NamedTuple):
    """One side of a sample, with the numbers that `SIZES` names."""

    digest: int
    sizes: tuple[int, ...]


def run(args: argparse.Namespace) -> int:
    """Reads the data and prints the report. Returns `BROKEN` if samples are broken."""
    import torch

    from megabatch_train.data import load as data

    split = args.split or ("all" if args.data in data.WITH_SPLITS else None)
    dataset = data.load(args.data, split, **({} if args.columns is None else {"columns": args.columns}))
    torch.set_num_threads(1)  # each thread decodes with one core
    workers = args.workers or os.cpu_count() or 1
    if len(dataset):
        read_sample(dataset, 0)  # imports the decoders, which is not a part of the reading speed
    readings = _show_progress(read(dataset, workers), len(dataset))
    report = {"data": redact(args.data), "split": split} | summarize(dataset, readings)
    if args.json:
        print_json(report)
    else:
        tell("\n".join(format_report(report)))
    return BROKEN if report["broken"] else 0


def read(dataset: Dataset, workers: int) -> Iterator[Reading]:
    """Yields a reading of each sample, in order. The threads read a few blocks ahead."""
    blocks = [range(first, min(first + BLOCK, len(dataset))) for first in range(0, len(dataset), BLOCK)]
    with ThreadPoolExecutor(workers, thread_name_prefix="megabatch-data") as pool:
        for first in range(0, len(blocks), workers):
            for readings in pool.map(lambda block: [read_sample(dataset, i) for i in block], blocks[first : first + workers]):
                yield from readings


def read_sample(dataset: Dataset, index: int) -> Reading:
    """Reads and decodes both sides of a sample."""
    from megabatch_train.data.dataset import UnreadableSampleError

    start = time.thread_time()
    try:
        sides = tuple(_read_side(dataset.read_stored(index, side), dataset.sides[side]) for side in (0, 1))
    except UnreadableSampleError as error:
        return Reading(index, (), time.thread_time() - start, str(error))
    return Reading(index, sides, time.thread_time() - start)


def _read_side(value: Any, kind: str) -> Side:
    from megabatch_train.data.media import audio, images

    if kind == "value":
        return Side(_digest(repr(value).encode("utf-8", "surrogatepass")), ())
    if kind == "text":
        return Side(_digest(value.encode("utf-8", "surrogatepass")), (len(value), len(value.split())))
    if kind == "image+text":
        text, image = _read_side(value.text, "text"), None if value.image is None else _read_side(value.image, "image")
        digests = f"{text.digest} {'' if image is None else image.digest}"
        return Side(_digest(digests.encode()), (*text.sizes, *((0, 0) if image is None else image.sizes)))
    if kind == "audio":
        recording = audio.decode(value)
        return Side(_digest(value.data), (1000 * len(recording.samples) // recording.rate, recording.rate))
    if kind == "file":
        return Side(_digest(value.data), (len(value.data),))
    stored = value.data if isinstance(value, images.EncodedImage) else value.numpy().tobytes()
    pixels = images.decode(value) if isinstance(value, images.EncodedImage) else value
    return Side(_digest(stored), (pixels.shape[2], pixels.shape[1]))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _show_progress(readings: Iterable[Reading], total: int) -> Iterable[Reading]:
    """Shows a progress bar on standard error if it is a terminal and rich is installed."""
    if not sys.stderr.isatty() or not extras.is_installed("rich"):
        return readings
    progress, console = (extras.load(f"rich.{name}", purpose="A progress bar") for name in ("progress", "console"))
    shown: Iterable[Reading] = progress.track(readings, "reading", total, console=console.Console(stderr=True), transient=True)
    return shown


def summarize(dataset: Dataset, readings: Iterable[Reading]) -> dict[str, Any]:
    """Returns the report. Memory grows by about 150 bytes for each sample."""
    digests: tuple[set[int], set[int]] = (set(), set())
    pairs: set[tuple[int, int]] = set()
    sizes: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    broken: list[dict[str, Any]] = []
    count, seconds = 0, 0.0
    for reading in readings:
        if not reading.sides:
            broken.append(
                {"index": reading.number, "name": redact(dataset.name(reading.number)), "reason": redact(reading.reason)}
            )
            continue
        count, seconds = count + 1, seconds + reading.seconds
        first, second = reading.sides
        pairs.add((first.digest, second.digest))
        for side, own, lengths in zip(reading.sides, digests, sizes, strict=True):
            own.add(side.digest)
            lengths.append(side.sizes)
    return {
        "samples": len(dataset),
        "broken": len(broken),
        "first_broken": broken[:NAMED],
        "problems": [redact(problem) for problem in dataset.problems],
        "duplicate_pairs": count - len(pairs),
        "sides": [
            {"kind": kind, "duplicates": count - len(own), **_describe_sizes(kind, lengths)}
            for kind, own, lengths in zip(dataset.sides, digests, sizes, strict=True)
        ],
        "pairs_per_second_of_a_worker": count / seconds if seconds else None,
    }


def _describe_sizes(kind: str, sizes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    names = SIZES[kind]
    columns = zip(*sizes, strict=True) if sizes else ((),) * len(names)
    described: dict[str, Any] = {name: _describe_numbers(sorted(values)) for name, values in zip(names, columns, strict=True)}
    return described | {"empty": sum(words == 0 for _, words in sizes)} if kind == "text" else described


def _describe_numbers(ordered: Sequence[int]) -> dict[str, int] | None:
    if not ordered:
        return None
    last = len(ordered) - 1
    return {"min": ordered[0], "median": ordered[last // 2], "p95": ordered[last * 95 // 100], "max": ordered[-1]}


def format_report(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f"samples:     {report['samples']:,}, {report['broken']:,} of them broken"
    for sample in report["first_broken"]:
        yield f"             sample {sample['index']:,}, {sample['name']}: {sample['reason']}"
    if report["broken"] > len(report["first_broken"]):
        yield f"             and {report['broken'] - len(report['first_broken']):,} more"
    yield from (f"problem:     {problem}" for problem in report["problems"])
    for number, side in enumerate(report["sides"], 1):
        parts = [
            f"{name} {numbers['min']:,} to {numbers['max']:,}, median {numbers['median']:,}, 95 % up to {numbers['p95']:,}"
            for name, numbers in side.items()
            if isinstance(numbers, dict)
        ]
        if side.get("empty"):
            parts.append(f"{side['empty']:,} empty")
        kind = {"audio": "recordings", "image+text": "images with texts"}.get(side["kind"], f"{side['kind']}s")
        yield f"side {number}:      {kind}, {side['duplicates']:,} duplicates" + "".join(f"; {part}" for part in parts)
    yield f"pairs:       {report['duplicate_pairs']:,} duplicates of an earlier pair"
    if (rate := report["pairs_per_second_of_a_worker"]) is not None:
        yield f"reading:     {rate:,.0f} pairs/s for each data-loader worker, without resizing and tokenization"
