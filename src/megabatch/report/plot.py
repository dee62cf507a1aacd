"""Line plots as SVG in a page: colours come from the page's style, so they follow light and dark; widths from its place."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 430, 250  # of the drawing; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 12, 24  # margins around the axes
MOST = 500  # points of a line; more than a screen shows
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class Series(NamedTuple):
    """A line. `style` is a class of the page: its colour, "dashed", "faint"."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]  # None is a gap
    style: str


@dataclass(frozen=True)
class Axes:
    """The part of the plane that is drawn."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """In the drawing."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        along = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - along * (HEIGHT - TOP - BOTTOM)


def plot(
    title: str, series: Sequence[Series], form: Callable[[float], str], *, zero: bool = False, step: Callable[[float], str]
) -> str:
    """A figure with its title, legend and lines; an empty string where nothing can be drawn.

    Args:
        title: above the figure.
        series: lines; those whose style has "faint" are behind, and neither in the legend nor read out.
        form: of numbers on the vertical axis, for people.
        zero: whether the vertical axis begins at 0.
        step: of numbers on the horizontal axis.
    """
    lines = [Series(one.name, *thinned(one.x, one.y), one.style) for one in series]
    finite = [value for line in lines for value in line.y if value is not None]
    if not finite:
        return ""
    ticks_y = ticks(min(0.0, *finite) if zero else min(finite), max(finite), 5)
    every_x = [value for line in lines for value in line.x]
    ticks_x = [value for value in ticks(min(every_x), max(every_x), 6) if min(every_x) <= value <= max(every_x)]
    axes = Axes((min(every_x), max(every_x)), (ticks_y[0], ticks_y[-1]))
    shown = [line for line in lines if "faint" not in line.style]
    drawing = [_grid(axes, ticks_x, ticks_y, form, step)]
    drawing += [f'<path class="line {line.style}" d="{_path(axes, line)}"/>' for line in lines]
    drawing += [_dots(axes, line) for line in shown if sum(value is not None for value in line.y) < 30]
    legend = "".join(f'<span class="key {line.style}">{escape(line.name)}</span>' for line in shown) if len(shown) > 1 else ""
    return (
        f'<figure class="card plot"><figcaption><b>{escape(title)}</b><span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_told(title, shown, form))}">{"".join(drawing)}'
        f'<g class="cursor"><line y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></g></svg>'
        f'<output>step</output><script type="application/json">{_points(axes, shown, form, step)}</script></figure>'
    )


def thinned(x: Sequence[float], y: Sequence[float | None], most: int = MOST) -> tuple[list[float], list[float | None]]:
    """At most that many points: of each stretch the lowest and the highest, so that no peak is lost, and gaps stay gaps."""
    if len(x) <= most:
        return list(x), list(y)
    size = math.ceil(2 * len(x) / most)
    kept: list[int] = []
    for start in range(0, len(x), size):
        stretch = range(start, min(start + size, len(x)))
        known = [(value, i) for i in stretch if (value := y[i]) is not None]
        gap = next((i for i in stretch if y[i] is None), None)
        chosen = {min(known)[1], max(known)[1]} if known else set()
        kept += sorted(chosen if gap is None else chosen | {gap})
    return [x[i] for i in kept], [y[i] for i in kept]


def smoothed(y: Sequence[float | None], window: int) -> list[float | None]:
    """The mean over a window around each point; what is missing does not count."""
    found: list[float | None] = []
    for i in range(len(y)):
        known = [value for value in y[max(0, i - window // 2) : i + window // 2 + 1] if value is not None]
        found.append(None if y[i] is None else sum(known) / len(known))
    return found


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers that enclose an interval, at most `most` + 2 of them."""
    if not high > low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(step for step in _STEPS if step * power >= rough * (1 - 1e-9)) * power
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(number * size, 12 - math.floor(math.log10(size))) for number in range(first, last + 1)]


def _grid(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], form: Callable[[float], str], step: Callable[[float], str]
) -> str:
    parts = []
    for value in ys:
        _, y = axes.place(axes.x[0], value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(form(value))}</text>')
    for value in xs:
        x, _ = axes.place(value, axes.y[0])
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(step(value))}</text>'
        )
    return "".join(parts)


def _path(axes: Axes, line: Series) -> str:
    commands, begun = [], False
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            begun = False
            continue
        across, along = axes.place(x, y)
        commands.append(f"{'L' if begun else 'M'}{across:.1f} {along:.1f}")
        begun = True
    return "".join(commands)


def _dots(axes: Axes, line: Series) -> str:
    places = [axes.place(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
    return "".join(f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places)


def _points(axes: Axes, shown: Sequence[Series], form: Callable[[float], str], step: Callable[[float], str]) -> str:
    """What the page reads out under the pointer: place, and text."""
    points = []
    for i, x in enumerate(shown[0].x):
        values = [(line.name, line.y[i]) for line in shown if i < len(line.y) and line.x[i] == x]
        told = " · ".join(f"{name} {form(value)}" for name, value in values if value is not None)
        points.append([round(axes.place(x, axes.y[0])[0], 1), f"step {step(x)} · {told or 'no number'}"])
    return json.dumps(points, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _told(title: str, shown: Sequence[Series], form: Callable[[float], str]) -> str:
    """The plot in words, for those who do not see it."""
    parts = []
    for line in shown:
        known = [value for value in line.y if value is not None]
        if known:
            parts.append(f"{line.name} from {form(known[0])} to {form(known[-1])}")
    return f"{title}: {', '.join(parts)}"
