"""`megabatch embed`: embeddings of one side of the data, as a NumPy or Parquet file."""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from megabatch.commands import model
from megabatch.commands.arguments.embed import SIDES
from megabatch.data.dataset import IMAGE, TEXT, Dataset
from megabatch.data.remote import is_url
from megabatch.evaluation import stored
from megabatch.evaluation.embedding import read_or_none, stored_or_none
from megabatch.names import shown
from megabatch.world import joined


def run(args: argparse.Namespace) -> int:
    """Embeds, and writes the file."""
    output = Path(args.output)
    stored.check_output(output)
    with joined(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch embed must be one process, got {world.size}; start it without torchrun")
        chosen = model.choose(args, world.device, images_alone=True)
        chosen.keep_data(stored.targets(output))
        dataset, side = chosen.dataset, side_of(chosen.dataset, args.side)
        chosen.check_kinds([side])
        about = {
            "model": args.model,
            "weights": stored.fingerprint(chosen.pair),
            "data": shown(chosen.data),
            "split": chosen.split,
            "sides": list(dataset.sides),
            "side": side,
            "samples": stored.digest((_key(dataset, index, side) for index in range(len(dataset))), len(dataset)),
        }
        work = stored.work_folder(output)
        stored.continue_or_begin(work, about)
        rows = stored.Stored(work / "rows", len(dataset))
        rows.fill(chosen.pair.towers[side], dataset, side, chunk_size=args.chunk_size, workers=args.workers)
    stored.write(output, rows, (sample(dataset, index, side) for index in range(len(dataset))), about)
    unreadable = int(rows.rows()[:, 0].isnan().sum())
    shutil.rmtree(work)
    print(
        f"{rows.done:,} embeddings of width {rows.width} in {output}"
        + (f"; {unreadable:,} samples could not be read, their rows are NaN" if unreadable else "")
    )
    return 0


def side_of(dataset: Dataset, name: str | None) -> int:
    """The side with this name: images and texts, or queries and documents."""
    known = SIDES[:2] if dataset.sides[0] == IMAGE else SIDES[2:]
    chosen = name or (known[0] if dataset.sides[0] == IMAGE else known[1])
    if chosen not in known:
        raise ValueError(f"--side must be {' or '.join(known)} for this data, got {chosen}")
    return known.index(chosen)


def sample(dataset: Dataset, index: int, side: int) -> dict[str, Any]:
    """Name, path and text of a sample; the text of an image is its caption."""
    text = read_or_none(dataset, index, side if dataset.sides[side] == TEXT else 1)
    found = dict(zip(stored.SAMPLE, (dataset.name(index), dataset.place(index), text), strict=True))
    # A path may have half of a surrogate pair, which UTF-8 has no code for.
    return {key: value and value.encode("utf-8", "backslashreplace").decode() for key, value in found.items()}


def _key(dataset: Dataset, index: int, side: int) -> Any:
    """What changes with a sample: of images that are files, size and date, so that a large folder is not read twice."""
    place = dataset.place(index) if dataset.sides[side] == IMAGE else None
    if place is None:
        return stored_or_none(dataset, index, side)
    if is_url(place):
        return place  # assumed not to change, as in the cache
    try:
        found = os.stat(place)
    except (OSError, ValueError):  # missing, or no path at all
        return place
    return place, found.st_size, found.st_mtime_ns
