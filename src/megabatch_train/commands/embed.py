"""`megabatch embed`: writes the embeddings of one side of the data to a NumPy or Parquet file."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch_train import commands
from megabatch_train.commands import add_dim, add_model_arguments, describe
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    from megabatch_train.data.dataset import Dataset


SIDES = ("images", "texts", "queries", "documents")
DESCRIPTION = """
Writes the embeddings of one side of the data. They are float32, have unit length, and keep the
order of the data.

  megabatch embed runs/photos --data photos/ --output photos.npy       a folder of images
  megabatch embed runs/photos --data pairs.csv --output photos.parquet
  megabatch embed runs/photos --data pairs.csv --side texts --output texts.npy
  megabatch embed runs/photos --data photos/ --dim 128 --output small.npy
  megabatch search runs/photos "dog on a beach" --embeddings photos.npy

A .parquet file has one row per sample with the columns name, path, text and embedding. A .npy file
has one row per sample, too. Two files in the same folder describe it: a .jsonl file lists the
samples, and a .json file names the model and the data. If a sample cannot be read, its row is NaN.

The command collects embeddings in the folder OUTPUT.work and removes this folder at the end. If the
command was stopped, call it again to continue.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch embed`."""
    describe(parser, DESCRIPTION)
    add_model_arguments(parser)
    add_dim(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write, with the suffix .npy or .parquet")
    parser.add_argument("--side", choices=SIDES, help="side of the data to embed (default: images, or documents of text pairs)")


def run(args: argparse.Namespace) -> int:
    """Computes the embeddings and writes the file."""
    from megabatch.world import join_world
    from megabatch_train.evaluation import embedding

    output = Path(args.output)
    embedding.check_output(output)
    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch embed must run in one process, got {world.size}; start it without torchrun")
        inputs = commands.choose(args, world.device, allow_images_only=True)
        inputs.keep_data(embedding.targets(output))
        dataset, side = inputs.dataset, find_side(inputs.dataset, args.side)
        inputs.check_kinds([side])
        about = {
            "model": args.model,
            "weights": embedding.fingerprint(inputs.pair),
            "data": redact(inputs.data),
            "split": inputs.split,
            "sides": list(dataset.sides),
            "side": side,
            "dim": args.dim,
            "samples": embedding.digest((_identify(dataset, index, side) for index in range(len(dataset))), len(dataset)),
        }
        work = embedding.work_folder(output)
        embedding.continue_or_begin(work, about)
        rows = embedding.Stored(work / "rows", len(dataset))
        rows.fill(inputs.pair.towers[side], dataset, side, chunk_size=args.chunk_size, workers=args.workers)
    embedding.write(output, rows, (sample(dataset, index, side) for index in range(len(dataset))), about)
    unreadable = int(rows.rows()[:, 0].isnan().sum())
    shutil.rmtree(work)
    tell(
        f"wrote {rows.done:,} embeddings of {rows.dim} dimensions to {output}"
        + (f"; {unreadable:,} samples could not be read, so their rows are NaN" if unreadable else "")
    )
    return 0


def find_side(dataset: Dataset, name: str | None) -> int:
    """Returns the index of the side with this name. The names are images and texts, or queries and documents."""
    from megabatch_train.data.dataset import IMAGE

    sides = SIDES[:2] if dataset.sides[0] == IMAGE else SIDES[2:]
    side = name or (sides[0] if dataset.sides[0] == IMAGE else sides[1])
    if side not in sides:
        raise ValueError(f"--side must be {' or '.join(sides)} for this data, got {side}")
    return sides.index(side)


def sample(dataset: Dataset, index: int, side: int) -> dict[str, Any]:
    """Returns the name, the path and the text of a sample. The text of an image is its caption."""
    from megabatch_train.data.dataset import TEXT
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.embedding import read_or_none

    text = read_or_none(dataset, index, side if dataset.sides[side] == TEXT else 1)
    values = dict(zip(embedding.SAMPLE, (redact(dataset.name(index)), redact(dataset.place(index)), text), strict=True))
    # A path may contain half of a surrogate pair, which UTF-8 cannot encode.
    return {key: value and value.encode("utf-8", "backslashreplace").decode() for key, value in values.items()}


def _identify(dataset: Dataset, index: int, side: int) -> Any:
    """Returns a value that changes with the sample. For an image file it is path, size and date, so no file is read."""
    from megabatch_train.data.dataset import IMAGE
    from megabatch_train.data.paths import is_url
    from megabatch_train.evaluation.embedding import read_stored_or_none

    path = dataset.place(index) if dataset.sides[side] == IMAGE else None
    if path is None:
        return read_stored_or_none(dataset, index, side)
    if is_url(path):
        return redact(path)  # as in the cache, the file at a URL is assumed not to change; a token in the URL may change
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # the file is missing, or the text is not a path
        return path
    return path, status.st_size, status.st_mtime_ns
