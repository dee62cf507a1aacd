"""Plots with matplotlib, HTML pages that contain them, and contact sheets. matplotlib is imported when a plot is drawn."""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

import megabatch
from megabatch import extras, file_io
from megabatch_train.data.media.images import to_pillow
from megabatch_train.display import tables
from megabatch_train.display.tables import TextTable

# ----------------------------------------------------------------------------------------------------------------------
# Plots with the same style for reports, benchmarks and plans.
#
# A plot is a matplotlib `Figure`. `save` writes it to files, and `svg` returns it for a page. `svg` replaces colors with CSS
# variables of the page, so that the plot follows the light or dark style of the page.

GREEN, MINT, ORANGE, BLUE, VIOLET, OCHRE = "#0b6e4f", "#2fa37c", "#c1440e", "#2563c9", "#7a4fc4", "#b8860b"
INK, GREY, LINE = "#17202b", "#64717f", "#e2e7ec"  # text, labels, grid
PAPER = "#ffffff"  # background of the names of lines
PALETTE = (GREEN, ORANGE, BLUE, VIOLET, OCHRE, MINT, GREY)
_VARIABLES = {  # CSS variables of page.css
    GREEN: "--green",
    MINT: "--mint",
    ORANGE: "--orange",
    BLUE: "--blue",
    VIOLET: "--violet",
    OCHRE: "--ochre",
    INK: "--ink",
    GREY: "--faint",
    LINE: "--line",
    PAPER: "--card",
}
# An SVG contains text, not outlines. The salt makes ids depend only on the content, so equal ids mean equal content.
_SVG = {"svg.fonttype": "none", "svg.hashsalt": "megabatch"}
_PROLOGUE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>", re.DOTALL)


def available() -> bool:
    """Whether matplotlib is installed."""
    return extras.is_installed("matplotlib")


def figure(
    title: str, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.0), about: str = ""
) -> tuple[Any, Any]:
    """Returns a figure and its array of axes with the shape (rows, columns).

    Args:
        title: title above the figure.
        rows: number of rows of axes.
        columns: number of columns of axes.
        size: width and height in inches.
        about: line in a small font below the title.
    """
    module = extras.load("matplotlib.figure", purpose="A plot")
    drawing = module.Figure(figsize=size, layout="constrained")
    drawing.suptitle(textwrap.fill(title, int(11 * size[0])), color=INK, fontsize=11)
    grid = drawing.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color=LINE)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(GREY)
        axes.tick_params(colors=GREY)
        axes.ticklabel_format(useOffset=False)  # ticks show full values, without an offset such as "+1.427e1" above the axis
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set_color(GREY)
        axes.title.set_color(INK)
    if about:
        grid[0, 0].set_title(about, fontsize=9, color=GREY)
    return drawing, grid


PANEL_WIDTH = 5.6  # inches; the text of a panel is readable on a screen of 390 pixels


def panels(
    title: str, count: int, *, height: float = 3.2, width: float = PANEL_WIDTH, about: str = ""
) -> tuple[Any, list[Any]]:
    """Returns a figure and a list of panels, one per row. `label_lines` has space for names to the right of a panel.

    Args:
        title: title above the figure.
        count: number of panels.
        height: height of a panel in inches.
        width: width of the figure in inches. Panels with long names beside bars need more than the default.
        about: line in a small font below the title.
    """
    drawing, grid = figure(title, rows=count, size=(width, 0.5 + height * count), about=about)
    return drawing, list(grid[:, 0])


def line(axes: Any, points: Sequence[tuple[float, float]], name: str, color: str, **style: Any) -> None:
    """Draws a line with a marker at each (x, y). Draws nothing if there are no points. `style` is for matplotlib."""
    if points:
        style = {"marker": "o", "markersize": 4} | style
        axes.plot(*zip(*points, strict=True), color=color, label=name, **style)


def batch_axis(axes: Any, values: Sequence[int], label: str = "batch, pairs", *, most: int = 9) -> None:
    """Makes the horizontal axis logarithmic, with at most `most` ticks at the values, such as 512, 4k, 1M."""
    ticks = sorted(set(values))
    ticks = ticks[:: 1 + len(ticks) // most]
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(ticks, [tables.pairs(tick) for tick in ticks])
    axes.minorticks_off()


def log_axis(axes: Any, which: Literal["x", "y"] = "y") -> None:
    """Makes an axis logarithmic with plain numbers. Ticks are at 1, 10, … for many decades, and at 1, 2, 5, … for few."""
    ticker = extras.load("matplotlib.ticker", purpose="A plot")
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1,) if decades > 4 else (1, 2, 5) if decades > 1 else (1, 1.5, 2, 3, 4, 5, 7)
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def legend(axes: Any, **style: Any) -> None:
    """Draws the legend if a line has a name. `style` is for matplotlib."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**{"frameon": False, "fontsize": 8, "labelcolor": INK} | style)


LABEL_POINTS = 9  # font size of the names of lines
NEAR_EDGE = 0.85  # fraction of the width of a panel; a line that ends before it has its name inside the panel


def label_lines(axes: Any) -> None:
    """Writes the name of each line next to its end, in the color of the line. The names replace a legend.

    If a line reaches the right edge, its name is outside the axes. These names keep a distance, and a thin line connects each
    name with the end of its line. Call this function last, because it fixes the limits of the axes.
    """
    lines = [one for one in axes.lines if not one.get_label().startswith("_") and len(one.get_xdata())]
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_fraction = (axes.transData + axes.transAxes.inverted()).transform
    ends = sorted(((*to_fraction(one.get_xydata()[-1]), one) for one in lines), key=lambda end: end[1])
    rows = axes.get_subplotspec().get_gridspec().nrows
    distance = 1.25 * LABEL_POINTS / 72 / (0.75 * axes.figure.get_figheight() / rows)  # between names, in heights of a panel
    paper = {"facecolor": PAPER, "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
    columns: dict[float, list[tuple[float, float, Any]]] = {}  # lines by the position of their names
    for end in ends:
        columns.setdefault(1.03 if end[0] >= NEAR_EDGE else round(end[0], 2) + 0.015, []).append(end)
    for position, column in columns.items():
        for (x, y, one), height in zip(column, _spread([y for _, y, _ in column], distance), strict=True):
            leader = {"arrowstyle": "-", "color": one.get_color(), "alpha": 0.4, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3}
            axes.annotate(
                one.get_label(),
                (x, y),
                xytext=(position, height),
                xycoords="axes fraction",
                textcoords="axes fraction",
                color=one.get_color(),
                fontsize=LABEL_POINTS,
                va="center",
                annotation_clip=False,
                arrowprops=leader if position > 1 else None,
                bbox=paper,
            )


def _spread(heights: Sequence[float], least: float) -> list[float]:
    """Moves ascending heights so that their distance is at least `least`. Heights that are too close keep their mean."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _lowest(groups[-1], least) < _lowest(groups[-2], least) + least * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_lowest(group, least) + i * least for group in groups for i in range(len(group))]


def _lowest(group: list[float], least: float) -> float:
    """Returns the lowest height of a group after spreading it with a distance of `least` around its mean."""
    return sum(group) / len(group) - least * (len(group) - 1) / 2


def bars(axes: Any, values: Sequence[tuple[str, float]], form: str = "%.0f", colors: str | Sequence[str] = GREEN) -> None:
    """Draws a horizontal bar for each (name, value), from top to bottom, with the value at its end."""
    artists = axes.barh([name for name, _ in values], [value for _, value in values], color=colors)
    axes.bar_label(artists, fmt=form, padding=3, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def save(figure: Any, *paths: Path) -> None:
    """Writes the figure to each path, in the format of the suffix."""
    matplotlib = extras.load("matplotlib", purpose="A plot")
    with matplotlib.rc_context(_SVG):
        for path in paths:
            figure.savefig(path, dpi=150, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))


def svg(figure: Any, described: str) -> str:
    """Returns the figure as an `<svg>` element.

    Args:
        figure: figure of matplotlib.
        described: description of the plot for screen readers.
    """
    matplotlib = extras.load("matplotlib", purpose="A plot")
    buffer = io.StringIO()
    with matplotlib.rc_context(_SVG):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    element = _PROLOGUE.sub("", buffer.getvalue())
    for color, variable in _VARIABLES.items():
        element = element.replace(color, f"var({variable})")
    return element.replace("<svg ", f'<svg role="img" aria-label="{escape(described)}" ', 1)


# ----------------------------------------------------------------------------------------------------------------------
# An HTML page with a title and sections. It contains its style sheet, so it needs no other file.


def page(title: str, sections: Iterable[str], *, subtitle: str = "") -> str:
    """Returns the HTML of a page. Skips empty sections.

    Args:
        title: title of the page, as text.
        sections: HTML of the sections.
        subtitle: line below the title, as text.
    """
    style = resources.files("megabatch_train.display").joinpath("page.css").read_text("utf-8")
    body = "\n".join(part for part in sections if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>\n"
        f"<h1>{escape(title)}</h1>{faint(subtitle)}\n{body}\n"
        f"<footer>This page was made by megabatch {escape(megabatch.__version__)}. "
        '<a href="https://github.com/megabatch/megabatch/blob/main/docs/runs.md">The documentation</a> explains its numbers.'
        "</footer>\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Returns a heading with parts below it, or an empty text if all parts are empty."""
    return f"<h2>{escape(title)}</h2>{''.join(parts)}" if any(parts) else ""


def paragraph(text: str) -> str:
    """Returns a paragraph."""
    return f"<p>{escape(text)}</p>"


def faint(text: str) -> str:
    """Returns a paragraph in a faint color."""
    return f'<p class="faint">{escape(text)}</p>' if text else ""


def warning(text: str) -> str:
    """Returns a paragraph in a warning style."""
    return f'<div class="card warning">{escape(text)}</div>'


def code(text: str) -> str:
    """Returns a block of code."""
    return f'<pre class="card">{escape(text)}</pre>'


def items(texts: Iterable[str]) -> str:
    """Returns a list."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Returns a row of large numbers with their names below. The first should be the most important."""
    cells = (f'<div class="card tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in values)
    return f'<div class="tiles">{"".join(cells)}</div>' if values else ""


def table(content: TextTable) -> str:
    """Returns the table and its notes, without its title."""
    return content.html() + (f'<p class="notes">{escape(content.notes)}</p>' if content.notes else "")


def figures(drawn: Iterable[tuple[str, Any]]) -> str:
    """Returns plots side by side.

    Args:
        drawn: (description, matplotlib figure) of each plot.
    """
    cells = "".join(f'<figure class="card plot">{svg(figure, described)}</figure>' for described, figure in drawn)
    return f'<div class="plots">{cells}</div>' if cells else ""


# ----------------------------------------------------------------------------------------------------------------------
# A contact sheet as PNG: each query has a row with its matches, their names and scores. Credits are at the bottom.


PICTURE, GAP, QUERY_WIDTH, TEXT_SIZE, SMALL_SIZE = 96, 14, 190, 14, 11  # in pixels
LINE_HEIGHT = round(SMALL_SIZE * 1.3)
ROW_HEIGHT = PICTURE + 3 * LINE_HEIGHT + GAP
MOST_MATCHES, MOST_QUERIES = 12, 100  # limits, so that the image has at most 1,538 × 15,100 pixels

Shown = str | Tensor  # a text, or an image as (3, H, W) uint8


@dataclass(frozen=True)
class Found:
    """One match on a sheet."""

    shown: Shown
    name: str
    score: float
    right: bool | None = None  # whether the match is the one that belongs to the query; None if unknown


def draw_sheet(
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
        self._write(foot, GAP, bottom, GREY)

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
            self._write([f"{match.score:.2f}"], left, below + len(name) * LINE_HEIGHT, GREY)

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
