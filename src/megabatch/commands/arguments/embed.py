"""The arguments of `megabatch embed`."""

import argparse

from megabatch.commands.arguments import model

DESCRIPTION = """
Writes the embeddings of one side of the data: float32, of unit length, in the order of the data.

  megabatch embed runs/photos --data photos/ --output photos.npy       a folder of images
  megabatch embed runs/photos --data pairs.csv --output photos.parquet
  megabatch embed runs/photos --data pairs.csv --side texts --output texts.npy
  megabatch search runs/photos "dog on a beach" --embeddings photos.npy

A .parquet file has a row for each sample: name, path, text, embedding. Beside a .npy file (one row
for each sample) the samples are in a .jsonl file, and model and data in a .json file. Rows of
samples that cannot be read are NaN.

Embeddings are collected in a folder beside the output, OUTPUT.work. A command that was stopped
continues where it was when it is called again. At the end the folder is removed.
"""
SIDES = ("images", "texts", "queries", "documents")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch embed`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    model.add_arguments(parser, model.IMAGES_ALONE)
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write, .npy or .parquet")
    parser.add_argument("--side", choices=SIDES, help="side of the data to embed (default: images or documents)")
