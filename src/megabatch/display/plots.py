"""Plots with matplotlib: one look for reports, benchmarks and plans. matplotlib is imported when a plot is drawn.

A plot is a matplotlib `Figure`. `save` writes it to files, `svg` returns it for a page: its colours become the page's CSS
variables, so that plots follow the page's light and dark style.
"""

import io
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from megabatch import extras
from megabatch.display import numbers

EXTRA = "train"  # the extra that installs matplotlib
GREEN, MINT, ORANGE, BLUE, VIOLET, OCHRE = "#0b6e4f", "#2fa37c", "#c1440e", "#2563c9", "#7a4fc4", "#b8860b"
INK, GREY, LINE = "#17202b", "#64717f", "#e2e7ec"  # text, labels, grid
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
}
_PROLOGUE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>", re.DOTALL)


def available() -> bool:
    """Whether matplotlib is installed."""
    return extras.installed("matplotlib")


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
    module = extras.load("matplotlib.figure", extra=EXTRA, purpose="A plot")
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
    axes.set_xticks(ticks, [numbers.pairs(tick) for tick in ticks])
    axes.minorticks_off()


def log_axis(axes: Any, which: Literal["x", "y"] = "y") -> None:
    """A logarithmic axis with plain numbers: at 1, 10, … over many decades, at 1, 2, 5, … over few, at more within one."""
    ticker = extras.load("matplotlib.ticker", extra=EXTRA, purpose="A plot")
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


def bars(axes: Any, values: Sequence[tuple[str, float]], form: str = "%.0f", colours: str | Sequence[str] = GREEN) -> None:
    """A horizontal bar for each (name, value), from top to bottom, with its value beside it."""
    drawn = axes.barh([name for name, _ in values], [value for _, value in values], color=colours)
    axes.bar_label(drawn, fmt=form, padding=3, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def save(figure: Any, *paths: Path) -> None:
    """Writes the figure to every path, in the format of its suffix."""
    for path in paths:
        figure.savefig(path, dpi=150)


def svg(figure: Any, described: str) -> str:
    """The figure as an `<svg>` element.

    Args:
        figure: of `figure`.
        described: the plot in words, for screen readers.
    """
    matplotlib = extras.load("matplotlib", extra=EXTRA, purpose="A plot")
    buffer = io.StringIO()
    # Text stays text. The salt makes ids depend on the content alone, so that equal ids in one page mean equal content.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megabatch"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = _PROLOGUE.sub("", buffer.getvalue())
    for colour, variable in _VARIABLES.items():
        drawn = drawn.replace(colour, f"var({variable})")
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(described)}" ', 1)
