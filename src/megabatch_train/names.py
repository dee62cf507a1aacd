"""Names of data and models as users write them, and texts as they may be printed. Imports little: help appears at once."""

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

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
    "open_clip:MODEL or open_clip:MODEL@WEIGHTS (image–text, such as open_clip:ViT-B-32; MODEL may be a config, FILE.json)",
    "hf:NAME (text–text, a transformers encoder with its weights) or hf:IMAGES+TEXTS (image–text, two of them)",
    "hf-config:FOLDER or hf-config:IMAGES+TEXTS (the same with random weights, from a folder's config.json)",
)

# A colon without a port after it begins a password, even one with a slash, which a URL must not have.
_USER = re.compile(r"(\w[\w+.-]*://)(?:[^/?#\s]*@|[^/?#\s\[]*:(?!\d*(?:[/?#\s]|$))\S*?@)")
# " + " is between sources of a mixture, and a quotation mark may end a URL.
_QUERY = re.compile(r"(https?://(?:(?! \+ |'[\s,;:)\]])[^?\"\n])*)\?[^\s\"]+?(?=\"|'?[,;:.)\]}]*(?:\s|$))", re.IGNORECASE)
# Control characters except tab and newline, marks that change the direction of text, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def redact(value: Any) -> Any:
    """A text without the users, passwords and HTTP queries of its URLs; or tables and lists with such texts."""
    if isinstance(value, str):
        return _QUERY.sub(r"\1", _USER.sub(r"\1", value))
    if isinstance(value, Mapping):
        return {key: redact(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        found = [redact(entry) for entry in value]
        return found if isinstance(value, list) else tuple(found)
    return value


def escape(text: str, *, keep: str = "\n\t") -> str:
    """The text with escape sequences in place of control characters, which could change what a terminal shows."""
    for mark, written in (("\n", "\\n"), ("\t", "\\t")):
        text = text if mark in keep else text.replace(mark, written)
    return _CONTROL.sub(lambda found: _escape_code(ord(found[0])), text)


def _escape_code(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def sanitize(text: str) -> str:
    """The text as it may be printed and published: redacted and escaped."""
    return escape(redact(text))


def format_row(label: str, value: str) -> str:
    """A line of the header of a run: the label, and the value in a column of its own."""
    return f"{label + ':':<15}{value}"


def tell(text: str, file: TextIO | None = None) -> None:
    """Prints a text as `sanitize` to standard output or another stream."""
    print(sanitize(text), file=file or sys.stdout, flush=True)


def has_weights(model: str) -> bool:
    """Whether a model of this name starts from trained weights."""
    family, _, name = model.partition(":")
    return family == "hf" or (family == "open_clip" and "@" in name and not name.endswith(".json"))


def nearest(word: str, known: Iterable[str]) -> str:
    """The words "; did you mean …" if a known name is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}" if near else ""
