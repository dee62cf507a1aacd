"""The arguments of `megabatch search`."""

import argparse

from megabatch.commands.arguments import model

DESCRIPTION = """
Searches data with a model. A query is a text or the path of an image.

  megabatch search runs/emoji "smiling cat" "red heart"     texts find images
  megabatch search runs/emoji cat.png                       an image finds texts
  megabatch search runs/photos "dog on a beach" photo.jpg   both
  megabatch search runs/emoji cat.png --among images        an image finds images like it
  megabatch search runs/wordnet "animal with a trunk"       a query finds documents
  megabatch search runs/photos "red car" --data new.csv --columns image=file text=description
  megabatch search runs/photos "red car" --data holidays/    a folder of images
  megabatch search runs/photos "red car" --embeddings photos.npy --json
  megabatch search open_clip:ViT-B-32@laion2b_s34b_b79k "dog on a beach" --data photos.csv

Prints the matches of each query, best first, with their cosine similarity, and draws a contact
sheet (PNG) with one row per query. Only the best matches are in memory, so any amount of data can
be searched. With --embeddings, a file of `megabatch embed`, only the queries are embedded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch search`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    model.add_arguments(parser, model.IMAGES_ALONE)
    parser.add_argument("queries", nargs="+", metavar="QUERY", help="a text, or the path of an image")
    parser.add_argument("-k", type=int, default=8, help="matches per query (default: %(default)s)")
    parser.add_argument(
        "--among",
        choices=("images", "texts"),
        help="side of the data to search (default: images or documents for texts, texts for images)",
    )
    parser.add_argument("--embeddings", metavar="FILE", help="file of `megabatch embed` to search, instead of --data")
    parser.add_argument(
        "--json", action="store_true", help="print the matches as JSON: rank, similarity, index, name, path, text"
    )
    parser.add_argument("--sheet", metavar="PNG", help="file of the contact sheet (default: found.png; none with --json)")
