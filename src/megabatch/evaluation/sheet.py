"""A contact sheet as PNG: a row for each query, with its matches, their names and scores; credits at the bottom."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megabatch import extras
from megabatch.data import cache
from megabatch.data.images import to_pillow

Shown = str | Tensor  # a text, or an image as (3, H, W) uint8


@dataclass(frozen=True)
class Found:
    """One match on a sheet."""

    shown: Shown
    name: str
    score: float
    right: bool | None = None  # a right match gets a frame; None if unknown


@dataclass(frozen=True)
class Look:
    """Sizes in pixels, and colours."""

    picture: int = 96
    gap: int = 14
    query_width: int = 190
    text_size: int = 14
    small_size: int = 11
    background: str = "white"
    ink: str = "#1c2733"
    faint: str = "#6b7a89"
    line: str = "#e3e8ed"
    right: str = "#1a9850"


def draw(
    path: str | Path,
    queries: Sequence[Shown],
    found: Sequence[Sequence[Found]],
    *,
    title: str = "",
    credits: Sequence[str] = (),
    look: Look | None = None,
) -> None:
    """Writes the sheet as PNG, one row per query."""
    if len(queries) != len(found) or not queries:
        raise ValueError(f"queries and found must be of the same length, at least 1, got {len(queries)} and {len(found)}")
    sheet = _Sheet(look or Look(), max(len(row) for row in found), len(queries), title, credits)
    for number, (query, row) in enumerate(zip(queries, found, strict=True)):
        sheet.row(number, query, row)
    cache.write(Path(path), lambda file: sheet.image.save(file, format="PNG"))


class _Sheet:
    def __init__(self, look: Look, columns: int, rows: int, title: str, credits: Sequence[str]) -> None:
        pillow = extras.load("PIL.Image", extra="data", purpose="Drawing a contact sheet")
        drawing = extras.load("PIL.ImageDraw", extra="data", purpose="Drawing a contact sheet")
        fonts = extras.load("PIL.ImageFont", extra="data", purpose="Drawing a contact sheet")
        self.look = look
        self.font, self.small = fonts.load_default(look.text_size), fonts.load_default(look.small_size)
        self.line_height = round(look.small_size * 1.3)
        self.cell = look.picture + look.gap
        self.row_height = look.picture + 3 * self.line_height + look.gap
        self.top = look.gap + (round(look.text_size * 2.2) if title else 0)
        width = look.gap + look.query_width + columns * self.cell + look.gap
        self._pen = drawing.Draw(pillow.new("RGB", (1, 1)))
        foot = [line for credit in credits for line in self._lines(credit, width - 2 * look.gap, self.small, most=3)]
        height = self.top + rows * self.row_height + len(foot) * self.line_height + look.gap
        self.image: Any = pillow.new("RGB", (width, height), look.background)
        self._pen = drawing.Draw(self.image)
        if title:
            self._pen.text((look.gap, look.gap), title, fill=look.ink, font=fonts.load_default(round(look.text_size * 1.2)))
        for number, line in enumerate(foot):
            place = (look.gap, self.top + rows * self.row_height + number * self.line_height)
            self._pen.text(place, line, fill=look.faint, font=self.small)

    def row(self, number: int, query: Shown, found: Sequence[Found]) -> None:
        """One query and its matches."""
        look, top = self.look, self.top + number * self.row_height
        if number:
            self._pen.line(
                [(look.gap, top - look.gap // 2), (self.image.width - look.gap, top - look.gap // 2)], fill=look.line
            )
        if isinstance(query, str):
            self._text(query, look.gap, top, look.query_width - look.gap, look.picture)
        else:
            self._picture(query, look.gap, top)
        for column, match in enumerate(found):
            left = look.gap + look.query_width + column * self.cell
            if isinstance(match.shown, str):
                self._text(match.shown, left, top, look.picture, look.picture)
            else:
                self._picture(match.shown, left, top)
            colour = look.right if match.right else look.ink
            if match.right:
                box = (left - 3, top - 3, left + look.picture + 2, top + look.picture + 2)
                self._pen.rectangle(box, outline=look.right, width=2)
            below = top + look.picture + 4
            for line in self._lines(match.name, look.picture + look.gap // 2, self.small, most=2):
                self._pen.text((left, below), line, fill=colour, font=self.small)
                below += self.line_height
            self._pen.text((left, below), f"{match.score:.2f}", fill=look.faint, font=self.small)

    def _picture(self, image: Tensor, left: int, top: int) -> None:
        pillow = extras.load("PIL.Image", extra="data", purpose="Drawing a contact sheet")
        picture, side = to_pillow(image), self.look.picture
        share = side / max(picture.size)
        size = tuple(max(1, round(length * share)) for length in picture.size)
        picture = picture.resize(size, pillow.Resampling.LANCZOS)
        self.image.paste(picture, (left + (side - size[0]) // 2, top + (side - size[1]) // 2))

    def _text(self, text: str, left: int, top: int, width: int, height: int) -> None:
        step = round(self.look.text_size * 1.3)
        lines = self._lines(text, width, self.font, most=max(1, height // step))
        top += max(0, (height - step * len(lines)) // 2)
        for number, line in enumerate(lines):
            self._pen.text((left, top + number * step), line, fill=self.look.ink, font=self.font)

    def _lines(self, text: str, width: int, font: Any, *, most: int) -> list[str]:
        """The text in lines that fit the width; text beyond the last line becomes an ellipsis."""
        lines: list[str] = []
        for word in text.split():
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self._pen.textlength(longer, font=font) <= width:
                lines[-1] = longer
            else:
                lines.append(word)
        shown = lines[:most]
        if len(lines) > most:
            shown[-1] += "…"
        return [self._shortened(line, width, font) for line in shown]

    def _shortened(self, line: str, width: int, font: Any) -> str:
        if self._pen.textlength(line, font=font) <= width:
            return line
        while line and self._pen.textlength(line + "…", font=font) > width:
            line = line[:-1]
        return line + "…"
