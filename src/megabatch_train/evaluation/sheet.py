"""A contact sheet as PNG: each query has a row with its matches, their names and scores. Credits are at the bottom."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megabatch import extras, file_io
from megabatch_train.data.images import to_pillow

PICTURE, GAP, QUERY_WIDTH, TEXT_SIZE, SMALL_SIZE = 96, 14, 190, 14, 11  # in pixels
LINE_HEIGHT = round(SMALL_SIZE * 1.3)
ROW_HEIGHT = PICTURE + 3 * LINE_HEIGHT + GAP
MOST_MATCHES, MOST_QUERIES = 12, 100  # limits, so that the image has at most 1,538 × 15,100 pixels
INK, FAINT, LINE = "#1c2733", "#6b7a89", "#e3e8ed"

Shown = str | Tensor  # a text, or an image as (3, H, W) uint8


@dataclass(frozen=True)
class Found:
    """One match on a sheet."""

    shown: Shown
    name: str
    score: float
    right: bool | None = None  # whether the match is the one that belongs to the query; None if unknown


def draw(
    path: str | Path,
    queries: Sequence[Shown],
    found: Sequence[Sequence[Found]],
    *,
    title: str = "",
    credits: Sequence[str] = (),
) -> None:
    """Writes the sheet as PNG with one row per query. Only the first queries and matches are drawn, to limit its size."""
    if len(queries) != len(found) or not queries:
        raise ValueError(f"queries and found must be of the same length, at least 1, got {len(queries)} and {len(found)}")
    queries, found = queries[:MOST_QUERIES], [row[:MOST_MATCHES] for row in found[:MOST_QUERIES]]
    sheet = _Sheet(max(len(row) for row in found), len(queries), title, credits)
    for number, (query, row) in enumerate(zip(queries, found, strict=True)):
        sheet.row(number, query, row)
    file_io.write(Path(path), lambda file: sheet.image.save(file, format="PNG"))


class _Sheet:
    def __init__(self, columns: int, rows: int, title: str, credits: Sequence[str]) -> None:
        self.pillow, drawing, fonts = (
            extras.load(f"PIL.{name}", purpose="Drawing a contact sheet") for name in ("Image", "ImageDraw", "ImageFont")
        )
        self.font, self.small = fonts.load_default(TEXT_SIZE), fonts.load_default(SMALL_SIZE)
        self.top = GAP + (round(TEXT_SIZE * 2.2) if title else 0)
        width = GAP + QUERY_WIDTH + columns * (PICTURE + GAP) + GAP
        self._pen = drawing.Draw(self.pillow.new("RGB", (1, 1)))
        foot = [line for credit in credits for line in self._lines(credit, width - 2 * GAP, self.small, most=3)]
        bottom = self.top + rows * ROW_HEIGHT
        self.image: Any = self.pillow.new("RGB", (width, bottom + len(foot) * LINE_HEIGHT + GAP), "white")
        self._pen = drawing.Draw(self.image)
        self._pen.text((GAP, GAP), title, fill=INK, font=fonts.load_default(round(TEXT_SIZE * 1.2)))
        self._write(foot, GAP, bottom, FAINT)

    def row(self, number: int, query: Shown, found: Sequence[Found]) -> None:
        """Draws one query and its matches."""
        top = self.top + number * ROW_HEIGHT
        if number:
            self._pen.line([(GAP, top - GAP // 2), (self.image.width - GAP, top - GAP // 2)], fill=LINE)
        self._show(query, GAP, top, QUERY_WIDTH - GAP)
        for column, match in enumerate(found):
            left = GAP + QUERY_WIDTH + column * (PICTURE + GAP)
            self._show(match.shown, left, top, PICTURE)
            name = self._lines(match.name, PICTURE + GAP // 2, self.small, most=2)
            below = top + PICTURE + 4
            self._write(name, left, below, INK)
            self._write([f"{match.score:.2f}"], left, below + len(name) * LINE_HEIGHT, FAINT)

    def _show(self, shown: Shown, left: int, top: int, width: int) -> None:
        """Draws a text within the width, or an image scaled to a square. Both are vertically centered."""
        if isinstance(shown, str):
            step = round(TEXT_SIZE * 1.3)
            lines = self._lines(shown, width, self.font, most=max(1, PICTURE // step))
            top += max(0, (PICTURE - step * len(lines)) // 2)
            for number, line in enumerate(lines):
                self._pen.text((left, top + number * step), line, fill=INK, font=self.font)
            return
        picture = to_pillow(shown)
        share = PICTURE / max(picture.size)
        size = tuple(max(1, round(length * share)) for length in picture.size)
        picture = picture.resize(size, self.pillow.Resampling.LANCZOS)
        self.image.paste(picture, (left + (PICTURE - size[0]) // 2, top + (PICTURE - size[1]) // 2))

    def _write(self, lines: Sequence[str], left: int, top: int, color: str) -> None:
        for number, line in enumerate(lines):
            self._pen.text((left, top + number * LINE_HEIGHT), line, fill=color, font=self.small)

    def _lines(self, text: str, width: int, font: Any, *, most: int) -> list[str]:
        """Breaks a text into lines that fit the width. An ellipsis replaces text beyond the last line."""
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
        return [self._shorten(line, width, font) for line in shown]

    def _shorten(self, line: str, width: int, font: Any) -> str:
        if self._pen.textlength(line, font=font) <= width:
            return line
        while line and self._pen.textlength(line + "…", font=font) > width:
            line = line[:-1]
        return line + "…"
