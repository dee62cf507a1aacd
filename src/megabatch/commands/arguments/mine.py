"""The arguments of `megabatch mine`."""

import argparse

from megabatch.commands.arguments import model
from megabatch.commands.arguments.options import whole

DESCRIPTION = """
Finds hard negatives: for each pair, the most similar texts other than its match.

  megabatch mine runs/wordnet --data wordnet --split train --negatives 8
  megabatch mine runs/qa --data pairs.csv --negatives 4 --absolute-margin 0.05 --output mined.jsonl
  megabatch mine runs/qa --data pairs.csv --range-min 10 --range-max 100 --sampling random

Writes a table in JSON lines or Parquet. Each row has the two sides of a pair ("query" and
"document", or "image" and "caption") and its negatives as texts, negative_1 … negative_K, best
first; null where fewer were found. Texts of pairs that share a side with the pair are no negatives
of it. JSON lines name the images by path or address; Parquet holds the images themselves.

Embeddings are kept in a folder beside the output, OUTPUT.work. A command that was stopped continues
where it was when it is called again. At the end the folder is removed; with --keep-embeddings it
stays, and the same command with other filters begins with the search. Memory grows with the number
of texts, not with their pairs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch mine`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    model.add_arguments(parser)
    parser.add_argument("--negatives", type=whole, default=8, metavar="K", help="negatives per pair (default: %(default)s)")
    parser.add_argument(
        "--output", default="mined.jsonl", metavar="FILE", help="the table, .jsonl or .parquet (default: %(default)s)"
    )
    parser.add_argument("--range-min", type=int, default=0, metavar="N", help="skip the N most similar texts (default: 0)")
    parser.add_argument(
        "--range-max", type=int, metavar="N", help="consider only the N most similar texts (default: as many as needed)"
    )
    parser.add_argument("--max-score", type=float, metavar="S", help="leave out texts with a similarity above S")
    parser.add_argument("--min-score", type=float, metavar="S", help="leave out texts with a similarity below S")
    parser.add_argument(
        "--absolute-margin", type=float, metavar="S", help="leave out texts above s - S, where s is the pair's similarity"
    )
    parser.add_argument(
        "--relative-margin", type=float, metavar="R", help="leave out texts above s - R·|s|, where s is the pair's similarity"
    )
    parser.add_argument(
        "--sampling",
        choices=("top", "random"),
        default="top",
        help="the most similar, or random ones of the range (default: top)",
    )
    parser.add_argument("--keep-embeddings", action="store_true", help="keep the folder OUTPUT.work for another call")
