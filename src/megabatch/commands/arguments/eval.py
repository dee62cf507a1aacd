"""The arguments of `megabatch eval`."""

import argparse

from megabatch.commands.arguments import model

DESCRIPTION = """
Evaluates retrieval: the rank of each text's own image among all images, and vice versa.

  megabatch eval runs/emoji                                 a run, on its own test data
  megabatch eval runs/flickr --data coco/val.csv            a run, on other data
  megabatch eval runs/flickr --data my.csv --columns image=file text=description
  megabatch eval open_clip:ViT-B-32@laion2b_s34b_b79k --data "coco/{00000..00004}.tar"
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
FILE = "evaluation.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch eval`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    model.add_arguments(parser)
    parser.add_argument("--zero-shot", action="store_true", help="classify images; captions are the class names")
    parser.add_argument("--classes", metavar="FILE", help="class names, one per line (default: all captions of the data)")
    parser.add_argument(
        "--templates", metavar="FILE", help='prompts with "{}" for the class name, one per line (default: a few general ones)'
    )
    parser.add_argument("--output", metavar="FILE", help=f"file to append the result to (default: {FILE} in the run's folder)")
