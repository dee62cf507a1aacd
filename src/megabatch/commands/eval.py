"""`megabatch eval`: recall and ranks of a model on data, and zero-shot classification."""

import argparse
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from megabatch.commands import model
from megabatch.commands.arguments.eval import FILE
from megabatch.data.dataset import IMAGE, Dataset
from megabatch.data.tables import Table
from megabatch.display import metrics
from megabatch.evaluation import classifier, embed, encode, evaluate, results, sts, zero_shot
from megabatch.evaluation.embedding import read_or_none
from megabatch.evaluation.zero_shot import TEMPLATES
from megabatch.names import shown
from megabatch.report import saved_run
from megabatch.towers import Pair
from megabatch.world import World, joined

LOG = logging.getLogger("megabatch")


def run(args: argparse.Namespace) -> int:
    """Evaluates, prints and writes the result."""
    given = next((name for name in ("classes", "templates") if getattr(args, name)), None)
    if given is not None and not args.zero_shot:
        raise ValueError(f"--{given} must come with --zero-shot, which classifies; without it nothing uses {given}")
    threads = ThreadPoolExecutor(args.workers) if args.workers else nullcontext(0)
    with joined(args.device) as world, threads as workers:
        if world.rank != 0:
            LOG.setLevel(logging.WARNING)
        chosen = model.choose(args, world.device)
        if world.rank == 0 and args.data is None and chosen.folder is not None:
            _name_others(chosen.folder, chosen.data)
        if args.zero_shot:
            found = classified(chosen.pair, chosen.dataset, world, args, name=Path(shown(chosen.data)).stem, workers=workers)
        elif (scores := scores_of(chosen.dataset)) is not None:
            found = sts(chosen.pair, chosen.dataset, scores, chunk_size=args.chunk_size, workers=workers, group=world.group)
        else:
            found = evaluate(chosen.pair, chosen.dataset, chunk_size=args.chunk_size, workers=workers, group=world.group)
        if world.rank == 0:
            split = f", {chosen.split}" if chosen.split else ""
            metrics.table(found, f"{args.model} on {shown(chosen.data)}{split}").print()
            path = args.output or (None if chosen.folder is None else chosen.folder / FILE)
            if path is not None:
                results.append(path, {"model": args.model, "data": shown(chosen.data), "split": chosen.split, **found})
                print(f"added to {path}")
    return 0


def _name_others(folder: Path, evaluated: str) -> None:
    """Logs the run's other validation sets; `--data` takes one."""
    sets = saved_run.read(folder).config.get("validation")
    others = [name for name in sets if name != evaluated] if isinstance(sets, list) else []
    if others:
        LOG.info("evaluates on %s, the first validation set of the run; --data names another: %s", evaluated, ", ".join(others))


def scores_of(dataset: Dataset) -> torch.Tensor | None:
    """The scores of a table of scored pairs of texts; None for other data."""
    return dataset.scores() if isinstance(dataset, Table) else None


def classified(
    pair: Pair, dataset: Dataset, world: World, args: argparse.Namespace, *, name: str, workers: Any = 0
) -> dict[str, float]:
    """Zero-shot accuracy; samples are distributed over ranks."""
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
