"""Plots with matplotlib, which is imported when a plot is drawn, and HTML pages around them."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import megabatch
from megabatch import extras
from megabatch_train.display import tables
from megabatch_train.display.tables import TextTable

# ----------------------------------------------------------------------------------------------------------------------
# Plots with matplotlib: one look for reports, benchmarks and plans. matplotlib is imported when a plot is drawn.
#
# A plot is a matplotlib `Figure`. `save` writes it to files, `svg` returns it for a page: its colours become the page's CSS
# variables, so that plots follow the page's light and dark style.

GREEN, MINT, ORANGE, BLUE, VIOLET, OCHRE = "#0b6e4f", "#2fa37c", "#c1440e", "#2563c9", "#7a4fc4", "#b8860b"
INK, GREY, LINE = "#17202b", "#64717f", "#e2e7ec"  # text, labels, grid
PAPER = "#ffffff"  # behind the names of lines
PALETTE = (GREEN, ORANGE, BLUE, VIOLET, OCHRE, MINT, GREY)
_VARIABLES = {  # of page.css
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
# Text stays text. The salt makes ids depend on the content alone, so that equal ids in one page mean equal content.
_SVG = {"svg.fonttype": "none", "svg.hashsalt": "megabatch"}
_PROLOGUE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>", re.DOTALL)


def available() -> bool:
    """Whether matplotlib is installed."""
    return extras.is_installed("matplotlib")


def figure(
    title: str, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.0), about: str = ""
) -> tuple[Any, Any]:
    """A figure and its (rows, columns) array of axes.

    Args:
        title: above the figure.
        rows: of axes.
        columns: of axes.
        size: inches.
        about: a line in small print below the title.
    """
    module = extras.load("matplotlib.figure", purpose="A plot")
    made = module.Figure(figsize=size, layout="constrained")
    made.suptitle(title, color=INK)
    grid = made.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color=LINE)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(GREY)
        axes.tick_params(colors=GREY)
        axes.ticklabel_format(useOffset=False)  # full values at the ticks, and no "+1.427e1" above the axis
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set_color(GREY)
        axes.title.set_color(INK)
    if about:
        grid[0, 0].set_title(about, fontsize=9, color=GREY)
    return made, grid


def panels(title: str, count: int, *, height: float = 3.2, about: str = "") -> tuple[Any, list[Any]]:
    """A figure with one panel per row, each wide enough for the names of its lines (`label_lines`).

    Args:
        title: above the figure.
        count: of panels.
        height: of a panel, inches.
        about: a line in small print below the title.
    """
    made, grid = figure(title, rows=count, size=(8.0, 0.5 + height * count), about=about)
    return made, list(grid[:, 0])


def line(axes: Any, points: Sequence[tuple[float, float]], name: str, colour: str, **style: Any) -> None:
    """A line with a marker at each (x, y); nothing without points. `style` is matplotlib's."""
    if points:
        style = {"marker": "o", "markersize": 4} | style
        axes.plot(*zip(*points, strict=True), color=colour, label=name, **style)


def batch_axis(axes: Any, values: Sequence[int], label: str = "batch, pairs", *, most: int = 9) -> None:
    """A logarithmic horizontal axis with ticks at the values: 512, 4k, 1M."""
    ticks = sorted(set(values))
    ticks = ticks[:: 1 + len(ticks) // most]
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(ticks, [tables.pairs(tick) for tick in ticks])
    axes.minorticks_off()


def log_axis(axes: Any, which: Literal["x", "y"] = "y") -> None:
    """A logarithmic axis with plain numbers: at 1, 10, … over many decades, at 1, 2, 5, … over few, at more within one."""
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
    """The legend, if a line has a name. `style` is matplotlib's."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**{"frameon": False, "fontsize": 8, "labelcolor": INK} | style)


LABEL_POINTS = 8  # size of a line's name
NEAR_EDGE = 0.85  # share of the width of a panel; the name of a line that ends before it is inside the panel


def label_lines(axes: Any) -> None:
    """Writes the name of each line beside its end, in the line's colour, instead of a legend.

    The names of lines that reach the right edge are beside the axes. They keep a distance from each other, and a thin line
    leads from the end of a line to its name. Call this function last, because it fixes the limits of the axes.
    """
    named = [one for one in axes.lines if not one.get_label().startswith("_") and len(one.get_xdata())]
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_fraction = (axes.transData + axes.transAxes.inverted()).transform
    ends = sorted(((*to_fraction(one.get_xydata()[-1]), one) for one in named), key=lambda end: end[1])
    rows = axes.get_subplotspec().get_gridspec().nrows
    least = 1.25 * LABEL_POINTS / 72 / (0.75 * axes.figure.get_figheight() / rows)  # between names, in heights of a panel
    paper = {"facecolor": PAPER, "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
    columns: dict[float, list[tuple[float, float, Any]]] = {}  # lines whose names are above one another
    for end in ends:
        columns.setdefault(1.03 if end[0] >= NEAR_EDGE else round(end[0], 2) + 0.015, []).append(end)
    for place, column in columns.items():
        for (x, y, one), height in zip(column, _spread([y for _, y, _ in column], least), strict=True):
            leader = {"arrowstyle": "-", "color": one.get_color(), "alpha": 0.4, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3}
            axes.annotate(
                one.get_label(),
                (x, y),
                xytext=(place, height),
                xycoords="axes fraction",
                textcoords="axes fraction",
                color=one.get_color(),
                fontsize=LABEL_POINTS,
                va="center",
                annotation_clip=False,
                arrowprops=leader if place > 1 else None,
                bbox=paper,
            )


def _spread(heights: Sequence[float], least: float) -> list[float]:
    """Ascending heights, moved so that they are at least `least` apart; heights that are too close keep their mean."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _lowest(groups[-1], least) < _lowest(groups[-2], least) + least * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_lowest(group, least) + i * least for group in groups for i in range(len(group))]


def _lowest(group: list[float], least: float) -> float:
    """The first of as many heights with distances of `least` that have the mean of the group."""
    return sum(group) / len(group) - least * (len(group) - 1) / 2


def bars(axes: Any, values: Sequence[tuple[str, float]], form: str = "%.0f", colours: str | Sequence[str] = GREEN) -> None:
    """A horizontal bar for each (name, value), from top to bottom, with its value beside it."""
    drawn = axes.barh([name for name, _ in values], [value for _, value in values], color=colours)
    axes.bar_label(drawn, fmt=form, padding=3, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def save(figure: Any, *paths: Path) -> None:
    """Writes the figure to every path, in the format of its suffix."""
    matplotlib = extras.load("matplotlib", purpose="A plot")
    with matplotlib.rc_context(_SVG):
        for path in paths:
            figure.savefig(path, dpi=150, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))


def svg(figure: Any, described: str) -> str:
    """The figure as an `<svg>` element.

    Args:
        figure: of `figure`.
        described: the plot in words, for screen readers.
    """
    matplotlib = extras.load("matplotlib", purpose="A plot")
    buffer = io.StringIO()
    with matplotlib.rc_context(_SVG):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = _PROLOGUE.sub("", buffer.getvalue())
    for colour, variable in _VARIABLES.items():
        drawn = drawn.replace(colour, f"var({variable})")
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(described)}" ', 1)


# ----------------------------------------------------------------------------------------------------------------------
# One HTML page: a title, sections, and the style sheet inside, so that the file needs no other file.


def page(title: str, sections: Iterable[str], *, subtitle: str = "") -> str:
    """The whole file. Empty sections are left out.

    Args:
        title: of the page, as text.
        sections: HTML.
        subtitle: a line below the title, as text.
    """
    style = resources.files("megabatch_train.display").joinpath("page.css").read_text("utf-8")
    body = "\n".join(part for part in sections if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>\n"
        f"<h1>{escape(title)}</h1>{faint(subtitle)}\n{body}\n"
        f"<footer>Made by megabatch {escape(megabatch.__version__)}.</footer>\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading with HTML below it; nothing if all parts are empty."""
    return f"<h2>{escape(title)}</h2>{''.join(parts)}" if any(parts) else ""


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def faint(text: str) -> str:
    """A paragraph of small importance."""
    return f'<p class="faint">{escape(text)}</p>' if text else ""


def warning(text: str) -> str:
    """A paragraph that should not be overlooked."""
    return f'<div class="card warning">{escape(text)}</div>'


def code(text: str) -> str:
    """A block of code."""
    return f'<pre class="card">{escape(text)}</pre>'


def items(texts: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Large numbers in a row, each with its name below; the first is the most important."""
    cells = (f'<div class="card tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in values)
    return f'<div class="tiles">{"".join(cells)}</div>' if values else ""


def table(made: TextTable) -> str:
    """The table, with its notes below it; its title is for `section`."""
    return made.html() + (f'<p class="notes">{escape(made.notes)}</p>' if made.notes else "")


def figures(drawn: Iterable[tuple[str, Any]]) -> str:
    """Plots side by side.

    Args:
        drawn: (the plot in words, matplotlib figure) of each.
    """
    cells = "".join(f'<figure class="card plot">{svg(figure, described)}</figure>' for described, figure in drawn)
    return f'<div class="plots">{cells}</div>' if cells else ""
