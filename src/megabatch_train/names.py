"""Names of data and models as users write them, and functions that make text safe to print.

The module imports little, so that `--help` prints at once.
"""

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

PYTHON = "python:"  # prefix of models from code of the user
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")  # suffixes of table files
DATA = (
    "emoji (drawings by two artists and their names)",
    "wordnet (words and definitions)",
    f"a table of pairs, a folder with such a table, or a pattern ({', '.join(TABLES)})",
    "a folder of images with a caption file for each (.txt, .json), or with a subfolder for each class, named by its caption",
    'webdataset shards, as in "data/{00000..00099}.tar" or "data/*.tar", or a folder of shards',
    "URLs of tables and shards (s3://, gs://, hf://, https://)",
    "datasets:PATH or datasets:PATH@SPLIT (Hugging Face datasets), or a folder that save_to_disk wrote",
    'a mixture of several sources, as in "3 * photos.csv + 1 * s3://bucket/*.tar"',
)
MODELS = (
    "small (a convolutional network and a bag of n-grams, for a CPU)",
    "open_clip:MODEL or open_clip:MODEL@WEIGHTS (image–text, such as open_clip:ViT-B-32; MODEL can be a file, FILE.json)",
    "hf:NAME (a transformers model with its weights: text–text, an encoder; image–text, such as CLIP; audio–text, CLAP)",
    "hf:NAME (texts, images and both together, a vision-language model of transformers such as Qwen3-VL)",
    "hf:IMAGES+TEXTS (image–text, two transformers encoders with their weights)",
    "python:MODULE:FUNCTION (any data, a function of your own that returns both towers, as in python:package.module:build)",
    "hf-config:FOLDER or hf-config:IMAGES+TEXTS (like hf:, but with random weights, from the config.json of a folder)",
)

# A colon that is not followed by a port begins a password. The password may contain a slash, although URLs do not allow it.
_USER = re.compile(r"(\w[\w+.-]*://)(?:[^/?#\s]*@|[^/?#\s\[]*:(?!\d*(?:[/?#\s]|$))\S*?@)")
# " + " separates the sources of a mixture, and a quotation mark can end a URL.
_QUERY = re.compile(r"(https?://(?:(?! \+ |'[\s,;:)\]])[^?\"\n])*)\?[^\s\"]+?(?=\"|'?[,;:.)\]}]*(?:\s|$))", re.IGNORECASE)
# Control characters except tab and newline, characters that change the direction of text, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def redact(value: Any) -> Any:
    """Removes users, passwords and HTTP queries from the URLs in a text, or in all texts of a mapping or a list."""
    if isinstance(value, str):
        return _QUERY.sub(r"\1", _USER.sub(r"\1", value))
    if isinstance(value, Mapping):
        return {key: redact(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        redacted = [redact(entry) for entry in value]
        return redacted if isinstance(value, list) else tuple(redacted)
    return value


def escape(text: str, *, keep: str = "\n\t") -> str:
    """Replaces control characters, which could change the display of a terminal, with escape sequences."""
    for character, sequence in (("\n", "\\n"), ("\t", "\\t")):
        text = text if character in keep else text.replace(character, sequence)
    return _CONTROL.sub(lambda match: _escape_code(ord(match[0])), text)


def _escape_code(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def sanitize(text: str) -> str:
    """Redacts and escapes a text, so that it can be printed and published."""
    return escape(redact(text))


def format_row(label: str, value: str) -> str:
    """Returns a line of the header of a run: the label, and the value in a second column."""
    return f"{label + ':':<15}{value}"


def tell(text: str, file: TextIO | None = None) -> None:
    """Prints a text after `sanitize`, to standard output or to another stream."""
    print(sanitize(text), file=file or sys.stdout, flush=True)


def has_weights(model: str) -> bool:
    """Whether a model with this name starts from trained weights."""
    family, _, name = model.partition(":")
    return family == "hf" or (family == "open_clip" and "@" in name and not name.endswith(".json"))


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …" with the most similar of the known names, or "" if none is similar."""
    similar = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {similar[0]}" if similar else ""
