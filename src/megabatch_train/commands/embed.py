"""`megabatch embed`: embeddings of one side of the data, as a NumPy or Parquet file."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch_train.commands import describe, model
from megabatch_train.commands.model import add_dim, add_model_arguments
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    from megabatch_train.data.dataset import Dataset


SIDES = ("images", "texts", "queries", "documents")
DESCRIPTION = """
Writes the embeddings of one side of the data: float32, of unit length, in the order of the data.

  megabatch embed runs/photos --data photos/ --output photos.npy       a folder of images
  megabatch embed runs/photos --data pairs.csv --output photos.parquet
  megabatch embed runs/photos --data pairs.csv --side texts --output texts.npy
  megabatch embed runs/photos --data photos/ --dim 128 --output small.npy   of --loss matryoshka
  megabatch search runs/photos "dog on a beach" --embeddings photos.npy

A .parquet file has a row for each sample: name, path, text, embedding. Beside a .npy file (one row
for each sample) the samples are in a .jsonl file, and model and data in a .json file. Rows of
samples that cannot be read are NaN.

Embeddings are collected in a folder beside the output, OUTPUT.work. A command that was stopped
continues where it was when it is called again. At the end the folder is removed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch embed`."""
    describe(parser, DESCRIPTION)
    add_model_arguments(parser)
    add_dim(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write, .npy or .parquet")
    parser.add_argument("--side", choices=SIDES, help="side of the data to embed (default: images or documents)")


def run(args: argparse.Namespace) -> int:
    """Embeds, and writes the file."""
    from megabatch.world import join_world
    from megabatch_train.evaluation import embedding

    output = Path(args.output)
    embedding.check_output(output)
    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch embed must be one process, got {world.size}; start it without torchrun")
        chosen = model.choose(args, world.device, images_alone=True)
        chosen.keep_data(embedding.targets(output))
        dataset, side = chosen.dataset, side_of(chosen.dataset, args.side)
        chosen.check_kinds([side])
        about = {
            "model": args.model,
            "weights": embedding.fingerprint(chosen.pair),
            "data": redact(chosen.data),
            "split": chosen.split,
            "sides": list(dataset.sides),
            "side": side,
            "dim": args.dim,
            "samples": embedding.digest((_key(dataset, index, side) for index in range(len(dataset))), len(dataset)),
        }
        work = embedding.work_folder(output)
        embedding.continue_or_begin(work, about)
        rows = embedding.Stored(work / "rows", len(dataset))
        rows.fill(chosen.pair.towers[side], dataset, side, chunk_size=args.chunk_size, workers=args.workers)
    embedding.write(output, rows, (sample(dataset, index, side) for index in range(len(dataset))), about)
    unreadable = int(rows.rows()[:, 0].isnan().sum())
    shutil.rmtree(work)
    tell(
        f"{rows.done:,} embeddings of {rows.dim} dimensions in {output}"
        + (f"; {unreadable:,} samples could not be read, their rows are NaN" if unreadable else "")
    )
    return 0


def side_of(dataset: Dataset, name: str | None) -> int:
    """The side with this name: images and texts, or queries and documents."""
    from megabatch_train.data.dataset import IMAGE

    known = SIDES[:2] if dataset.sides[0] == IMAGE else SIDES[2:]
    chosen = name or (known[0] if dataset.sides[0] == IMAGE else known[1])
    if chosen not in known:
        raise ValueError(f"--side must be {' or '.join(known)} for this data, got {chosen}")
    return known.index(chosen)


def sample(dataset: Dataset, index: int, side: int) -> dict[str, Any]:
    """Name, path and text of a sample; the text of an image is its caption."""
    from megabatch_train.data.dataset import TEXT
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.embedding import read_or_none

    text = read_or_none(dataset, index, side if dataset.sides[side] == TEXT else 1)
    found = dict(zip(embedding.SAMPLE, (redact(dataset.name(index)), redact(dataset.place(index)), text), strict=True))
    # A path may have half of a surrogate pair, which UTF-8 has no code for.
    return {key: value and value.encode("utf-8", "backslashreplace").decode() for key, value in found.items()}


def _key(dataset: Dataset, index: int, side: int) -> Any:
    """What changes with a sample: of images that are files, size and date, so that a large folder is not read twice."""
    from megabatch_train.data.dataset import IMAGE
    from megabatch_train.data.paths import is_url
    from megabatch_train.evaluation.embedding import read_stored_or_none

    place = dataset.place(index) if dataset.sides[side] == IMAGE else None
    if place is None:
        return read_stored_or_none(dataset, index, side)
    if is_url(place):
        return redact(place)  # assumed not to change, as in the cache; a token may change
    try:
        found = os.stat(place)
    except (OSError, ValueError):  # missing, or no path at all
        return place
    return place, found.st_size, found.st_mtime_ns
