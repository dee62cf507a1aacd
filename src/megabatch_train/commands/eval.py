"""`megabatch eval`: recall and ranks of a model on data, and zero-shot classification."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch_train.commands import describe, model
from megabatch_train.commands.model import add_dim, add_model_arguments
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    from megabatch.world import World
    from megabatch_train.data.dataset import Dataset
    from megabatch_train.towers import Pair


LOG = logging.getLogger("megabatch")
FILE = "evaluation.jsonl"
DESCRIPTION = """
Evaluates retrieval: the rank of each text's own image among all images, and vice versa.

  megabatch eval runs/emoji                                 a run, on its own test data
  megabatch eval runs/flickr --data coco/val.csv            a run, on other data
  megabatch eval runs/flickr --data my.csv --columns image=file text=description
  megabatch eval open_clip:ViT-B-32@laion2b_s34b_b79k --data "coco/{00000..00004}.tar"
  megabatch eval runs/flickr --dim 128                      embeddings of --loss matryoshka, cut
  megabatch eval runs/emoji --zero-shot                     captions are class names
  megabatch eval runs/photos --zero-shot --data flowers/    a folder of images for each class
  megabatch eval runs/photos --zero-shot --data pets.csv --columns image=file text=breed
  megabatch eval runs/texts --data sts.csv                  scored pairs: Spearman's correlation
  torchrun --nproc-per-node 8 -m megabatch eval runs/flickr   on eight devices

Recall@k (R@k) is the fraction of queries whose match is among the first k; ranks count from 1. For
an image with several captions the best one counts. Unreadable samples are skipped and counted.
Memory grows linearly with the number of samples. The result is appended as a JSON line, with
open_clip's names, to evaluation.jsonl in the run's folder, or to --output.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch eval`."""
    describe(parser, DESCRIPTION)
    add_model_arguments(parser)
    add_dim(parser)
    parser.add_argument("--zero-shot", action="store_true", help="classify images; captions are the class names")
    parser.add_argument("--classes", metavar="FILE", help="class names, one per line (default: all captions of the data)")
    parser.add_argument(
        "--templates", metavar="FILE", help='prompts with "{}" for the class name, one per line (default: a few general ones)'
    )
    parser.add_argument("--output", metavar="FILE", help=f"file to append the result to (default: {FILE} in the run's folder)")


def run(args: argparse.Namespace) -> int:
    """Evaluates, prints and writes the result."""
    from megabatch.world import join_world
    from megabatch_train.display import tables
    from megabatch_train.evaluation import evaluate, results, sts

    given = next((name for name in ("classes", "templates") if getattr(args, name)), None)
    if given is not None and not args.zero_shot:
        raise ValueError(f"--{given} must come with --zero-shot, which classifies; without it nothing uses {given}")
    threads = ThreadPoolExecutor(args.workers) if args.workers else nullcontext(0)
    with join_world(args.device) as world, threads as workers:
        if world.rank != 0:
            LOG.setLevel(logging.WARNING)
        chosen = model.choose(args, world.device)
        if world.rank == 0 and args.data is None and chosen.folder is not None:
            _name_others(chosen.folder, chosen.data)
        if args.zero_shot:
            found = classify(chosen.pair, chosen.dataset, world, args, name=Path(redact(chosen.data)).stem, workers=workers)
        elif (scores := chosen.dataset.scores()) is not None:
            found = sts(chosen.pair, chosen.dataset, scores, chunk_size=args.chunk_size, workers=workers, group=world.group)
        else:
            found = evaluate(chosen.pair, chosen.dataset, chunk_size=args.chunk_size, workers=workers, group=world.group)
        if world.rank == 0:
            split = f", {chosen.split}" if chosen.split else ""
            dim = f", {args.dim} dimensions" if args.dim is not None else ""
            tables.table(found, f"{args.model} on {redact(chosen.data)}{split}{dim}").print()
            path = args.output or (None if chosen.folder is None else chosen.folder / FILE)
            if path is not None:
                about = {"model": args.model, "data": redact(chosen.data), "split": chosen.split}
                results.append(path, about | ({} if args.dim is None else {"dim": args.dim}) | found)
                tell(f"added to {path}")
    return 0


def _name_others(folder: Path, evaluated: str) -> None:
    """Logs the run's other validation sets; `--data` takes one."""
    from megabatch_train.evaluation import results

    sets = results.read_run(folder).config.get("validation")
    others = [name for name in sets if name != evaluated] if isinstance(sets, list) else []
    if others:
        LOG.info("evaluates on %s, the first validation set of the run; --data names another: %s", evaluated, ", ".join(others))


def classify(
    pair: Pair, dataset: Dataset, world: World, args: argparse.Namespace, *, name: str, workers: Any = 0
) -> dict[str, float]:
    """Zero-shot accuracy; samples are distributed over ranks."""
    import torch

    from megabatch_train.data.dataset import IMAGE
    from megabatch_train.evaluation import classifier, embed, encode, zero_shot
    from megabatch_train.evaluation.embedding import read_or_none
    from megabatch_train.evaluation.evaluate import TEMPLATES

    if dataset.sides[0] != IMAGE:
        raise ValueError(f"--zero-shot must have data with images, got {dataset.sides[0]} and {dataset.sides[1]}")
    captions = [read_or_none(dataset, index, 1) for index in range(len(dataset))]
    names = list(model.lines_of(args.classes)) if args.classes else sorted({text for text in captions if text is not None})
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"--classes must name each class once, got {twice!r} more than once in {args.classes}")
    numbers_of = {text: number for number, text in enumerate(names)}
    strange = next((text for text in captions if text is not None and text not in numbers_of), None)
    if strange is not None:
        raise ValueError(f"--classes must name every caption of the data, got none called {strange!r}")
    templates = model.lines_of(args.templates) if args.templates else TEMPLATES
    classes = classifier(lambda texts: encode(pair.second, texts), names, templates)
    ours = [index for index in range(world.rank, len(dataset), world.size) if captions[index] is not None]
    images = embed(pair.first, dataset, 0, ours, chunk_size=args.chunk_size, workers=workers)
    good = dataset.usable(ours).to(images.device)
    labels = torch.tensor([numbers_of[captions[index] or ""] for index in ours], device=images.device)
    found = zero_shot(images[good], labels[good], classes, name=name, group=world.group)
    without_image = world.sum([int((~good).sum())])[0]
    return {**found, "num_classes": len(names), "num_failed": int(without_image) + captions.count(None)}
