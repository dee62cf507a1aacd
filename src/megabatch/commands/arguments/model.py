"""The arguments MODEL and --data, and how both are read."""

import argparse

from megabatch import names
from megabatch.commands.arguments.options import add_columns, whole

IMAGES_ALONE = "a folder of images without captions"


def add_arguments(parser: argparse.ArgumentParser, *further: str) -> None:
    """Adds the arguments that name the model and the data, which may be of further kinds."""
    parser.add_argument(
        "model", metavar="MODEL", help=f"folder of a run or a checkpoint, or towers by name: {'; '.join(names.MODELS)}"
    )
    parser.add_argument(
        "--data", help=f"{'; '.join((*names.DATA, *further))} (default: the run's validation data, or else its training data)"
    )
    add_columns(parser)
    parser.add_argument("--split", choices=("train", "test", "all"), help="split of emoji and wordnet (default: test)")
    parser.add_argument("--device", default="auto", help='"cpu", "cuda" or "auto" (default): CUDA if there is a device')
    parser.add_argument("--chunk-size", type=whole, default=256, metavar="N", help="samples encoded at once (default: 256)")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="threads that read data (default: 0, the main thread)"
    )
