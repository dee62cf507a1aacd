"""`megabatch eval`: measures recall and ranks of a model on data, or its zero-shot accuracy."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch_train import commands
from megabatch_train.commands import add_dim, add_json, add_model_arguments, describe, print_json
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    from megabatch.world import World
    from megabatch_train.data.dataset import Dataset
    from megabatch_train.towers import Pair


LOG = logging.getLogger("megabatch")
FILE = "evaluation.jsonl"
DESCRIPTION = """
Evaluates retrieval. Each text searches all images, and each image searches all texts. The result is
the rank of the match.

  megabatch eval runs/emoji                                 evaluate a run on its own test data
  megabatch eval runs/flickr --data coco/val.csv            evaluate a run on other data
  megabatch eval runs/flickr --data my.csv --columns image=file text=description
  megabatch eval open_clip:ViT-B-32@laion2b_s34b_b79k --data "coco/{00000..00004}.tar"
  megabatch eval runs/flickr --dim 128                      cut embeddings to 128 dimensions
  megabatch eval runs/emoji --zero-shot                     classify images
  megabatch eval runs/photos --zero-shot --data flowers/    flowers/ has one folder per class
  megabatch eval runs/photos --zero-shot --data pets.csv --columns image=file text=breed
  megabatch eval runs/texts --data sts.csv                  Spearman correlation of scored pairs
  megabatch eval runs/texts --corpus beir/scifact           search a corpus, with a folder of BEIR
  megabatch eval runs/texts --corpus corpus.jsonl --queries queries.jsonl --qrels qrels/test.tsv
  torchrun --nproc-per-node 8 -m megabatch eval runs/flickr   use eight devices

Recall@k (R@k) is the fraction of queries whose match is among the first k results. The best rank is
1. If an image has several captions, its best caption counts. Samples that cannot be read are
skipped and counted. Memory grows linearly with the number of samples.

--corpus searches all documents of a corpus for each query with relevance judgments, and computes
nDCG@10, MRR@10, recall@100 and MAP as trec_eval does. The files have the formats of BEIR: documents
and queries are JSON lines with "_id", "text" and optionally "title", and the judgments are a table
with tabs. Judgments in TREC's format are possible, too. Memory does not grow with the embeddings.

The result is appended as a JSON line to evaluation.jsonl in the folder of the run, or to --output.
The metrics have the same names as in open_clip.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch eval`."""
    describe(parser, DESCRIPTION)
    add_model_arguments(parser)
    add_dim(parser)
    add_json(parser, "the result")
    parser.add_argument("--zero-shot", action="store_true", help="classify images; the captions are the class names")
    parser.add_argument(
        "--classes", metavar="FILE", help="file with class names, one per line (default: all captions of the data)"
    )
    parser.add_argument(
        "--templates",
        metavar="FILE",
        help='file with prompts, one per line, with "{}" for the class name, or "imagenet" for the 80 prompts of CLIP '
        "(default: general prompts)",
    )
    parser.add_argument(
        "--corpus", metavar="PATH", help="corpus to search: JSON lines, or a folder with the three files of a BEIR dataset"
    )
    parser.add_argument("--queries", metavar="FILE", help="queries for --corpus (default: queries.jsonl in its folder)")
    parser.add_argument(
        "--qrels", metavar="FILE", help="relevance judgments for --corpus (default: qrels/test.tsv in its folder)"
    )
    parser.add_argument(
        "--output", metavar="FILE", help=f"file to append the result to (default: {FILE} in the folder of the run)"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluates the model, prints the result and appends it to a file."""
    from megabatch.world import join_world
    from megabatch_train.display import tables
    from megabatch_train.evaluation import evaluate, results, sts

    option = next((name for name in ("classes", "templates") if getattr(args, name)), None)
    if option is not None and not args.zero_shot:
        raise ValueError(f"--{option} needs --zero-shot, because only zero-shot classification uses {option}")
    if args.corpus is None and (option := next((name for name in ("queries", "qrels") if getattr(args, name)), None)):
        raise ValueError(f"--{option} needs --corpus, because only a search in a corpus uses {option}")
    if args.corpus is not None and (args.zero_shot or args.data is not None):
        raise ValueError(f"--corpus must not be set with --zero-shot or --data, got --corpus {args.corpus}")
    context = ThreadPoolExecutor(args.workers) if args.workers else nullcontext(0)
    with join_world(args.device) as world, context as workers:
        if world.rank != 0:
            LOG.setLevel(logging.WARNING)
        if args.corpus is not None:
            _search_corpus(args, world, workers)
            return 0
        inputs = commands.choose(args, world.device)
        if world.rank == 0 and args.data is None and inputs.folder is not None:
            _name_others(inputs.folder, inputs.data)
        if args.zero_shot:
            result = classify(inputs.pair, inputs.dataset, world, args, name=Path(redact(inputs.data)).stem, workers=workers)
        elif (scores := inputs.dataset.scores()) is not None:
            result = sts(inputs.pair, inputs.dataset, scores, chunk_size=args.chunk_size, workers=workers, group=world.group)
        else:
            result = evaluate(inputs.pair, inputs.dataset, chunk_size=args.chunk_size, workers=workers, group=world.group)
        if world.rank == 0:
            split = f", {inputs.split}" if inputs.split else ""
            dim = f", {args.dim} dimensions" if args.dim is not None else ""
            about = {"model": args.model, "data": redact(inputs.data), "split": inputs.split}
            about |= {} if args.dim is None else {"dim": args.dim}
            if args.json:
                print_json(about | result)
            else:
                tables.table(result, f"{args.model} on {redact(inputs.data)}{split}{dim}").print()
            path = args.output or (None if inputs.folder is None else inputs.folder / FILE)
            if path is not None:
                results.append(path, about | result)
                tell(f"appended the result to {path}", sys.stderr if args.json else None)
    return 0


def _search_corpus(args: argparse.Namespace, world: World, workers: Any) -> None:
    """Evaluates the search in a corpus, prints the result and appends it to a file."""
    from megabatch_train.display import tables
    from megabatch_train.evaluation import results
    from megabatch_train.evaluation.corpus import RetrievalConfig, RetrievalTask, evaluate_corpus

    config = RetrievalConfig(args.corpus, args.queries or "", args.qrels or "")
    task, folder = RetrievalTask(config), commands.run_of(args.model)
    pair = commands.load_pair(args.model, world.device, None, trust=args.trust_remote_code)
    if args.dim is not None:
        commands.truncate_pair(pair, args.dim, folder)
    result = evaluate_corpus(pair, task, chunk_size=args.chunk_size, workers=workers, group=world.group)
    if world.rank == 0:
        files = dict(zip(("corpus", "queries", "qrels"), map(str, config.paths()), strict=True))
        line = {"model": args.model, **files, **({} if args.dim is None else {"dim": args.dim}), **result}
        if args.json:
            print_json(line)
        else:
            tables.table(result, f"{args.model} on {args.corpus}").print()
        path = args.output or (None if folder is None else folder / FILE)
        if path is not None:
            results.append(path, line)
            tell(f"appended the result to {path}", sys.stderr if args.json else None)


def _name_others(folder: Path, evaluated: str) -> None:
    """Logs the other validation sets of the run, which `--data` can select."""
    from megabatch_train.evaluation import results

    sets = results.read_run(folder).config.get("validation")
    others = [name for name in sets if name != evaluated] if isinstance(sets, list) else []
    if others:
        LOG.info("evaluating on %s, the first validation set of the run; others for --data: %s", evaluated, ", ".join(others))


def classify(
    pair: Pair, dataset: Dataset, world: World, args: argparse.Namespace, *, name: str, workers: Any = 0
) -> dict[str, float]:
    """Returns the zero-shot accuracy. The samples are distributed over ranks."""
    import torch

    from megabatch_train.data.dataset import TEXT
    from megabatch_train.evaluation import classifier, embed, encode, zero_shot
    from megabatch_train.evaluation.embedding import read_or_none
    from megabatch_train.evaluation.evaluate import TEMPLATES
    from megabatch_train.evaluation.suites import TEMPLATE_SETS

    if dataset.sides[0] == TEXT or dataset.sides[1] != TEXT:
        raise ValueError(
            f"--zero-shot needs data with images or recordings, and texts, got {dataset.sides[0]} and {dataset.sides[1]}"
        )
    captions = [read_or_none(dataset, index, 1) for index in range(len(dataset))]
    names = list(commands.lines_of(args.classes)) if args.classes else sorted({text for text in captions if text is not None})
    duplicate = next((name for name, count in Counter(names).items() if count > 1), None)
    if duplicate is not None:
        raise ValueError(f"--classes must name each class once, got {duplicate!r} more than once in {args.classes}")
    numbers_of = {text: number for number, text in enumerate(names)}
    unknown = next((text for text in captions if text is not None and text not in numbers_of), None)
    if unknown is not None:
        raise ValueError(f"--classes must contain every caption of the data, but {unknown!r} is missing")
    templates = TEMPLATE_SETS.get(args.templates) or (commands.lines_of(args.templates) if args.templates else TEMPLATES)
    classes = classifier(lambda texts: encode(pair.second, texts), names, templates)
    indices = [index for index in range(world.rank, len(dataset), world.size) if captions[index] is not None]
    images = embed(pair.first, dataset, 0, indices, chunk_size=args.chunk_size, workers=workers)
    is_usable = dataset.usable(indices).to(images.device)
    labels = torch.tensor([numbers_of[captions[index] or ""] for index in indices], device=images.device)
    result = zero_shot(images[is_usable], labels[is_usable], classes, name=name, group=world.group)
    without_image = world.sum([int((~is_usable).sum())])[0]
    return {**result, "num_classes": len(names), "num_failed": int(without_image) + captions.count(None)}
