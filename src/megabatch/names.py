"""Names of data and models as users write them, for help and error messages. Imports little: help appears at once."""

import difflib
import re
from collections.abc import Iterable

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")  # endings
DATA = (
    "emoji (drawings by two artists and their names)",
    "wordnet (words and definitions)",
    f"a table of pairs, a folder with one, or a pattern ({', '.join(TABLES)})",
    "a folder of images with captions beside them (.txt, .json), or with a folder for each class, whose name is the caption",
    'webdataset shards, as in "data/{00000..00099}.tar" or "data/*.tar", or a folder of them',
    "tables and shards by address (s3://, gs://, hf://, https://)",
    "datasets:PATH or datasets:PATH@SPLIT (Hugging Face datasets), or a folder of save_to_disk",
    'several of them mixed, as in "3 * photos.csv + 1 * s3://bucket/*.tar"',
)
MODELS = (
    "small (a convolutional network and a bag of n-grams, for a CPU)",
    "open_clip:MODEL or open_clip:MODEL@WEIGHTS (image–text, such as open_clip:ViT-B-32)",
    "hf:NAME (text–text, a transformers encoder with its weights) or hf:IMAGES+TEXTS (image–text, two of them)",
    "hf-config:FOLDER or hf-config:IMAGES+TEXTS (the same with random weights, from a folder's config.json)",
)

_USER = re.compile(r"(\w[\w+.-]*://)[^/?#\s\"']*@")
_QUERY = re.compile(r"(https?://(?:(?! \+ )[^?\"'\n])*)\?[^\s\"']+", re.IGNORECASE)  # " + " is between sources of a mixture


def shown(text: str) -> str:
    """The text with its addresses as they may be printed and published: without queries, users and passwords."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def nearest(word: str, known: Iterable[str]) -> str:
    """The words "; did you mean …" if a known name is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}" if near else ""
