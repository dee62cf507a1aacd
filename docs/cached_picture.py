"""Draws docs/cached.svg: the timeline of a cached step, with and without a memory budget.

python docs/cached_picture.py
"""

from pathlib import Path
from typing import Any

CHUNKS, KEPT = 6, 2
ENCODE, AGAIN, KEEP, LOSS = "#a9cbb9", "#0b6e4f", "#b8860b", "#c1440e"


def draw(axes: Any, kept: int, title: str) -> None:
    """Time runs from left to right. Light boxes are chunks encoded without a graph, dark boxes with a graph."""
    now = 0.0

    def box(row: float, width: float, colour: str, text: str) -> None:
        nonlocal now
        axes.broken_barh([(now + 0.04, width - 0.08)], (row, 0.8), color=colour)
        dark = colour != ENCODE
        axes.text(
            now + width / 2, row + 0.4, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "#222222"
        )
        now += width

    for row in (2, 1):
        for i in range(CHUNKS):
            box(row, 1.0, KEEP if row == 2 and i < kept else ENCODE, str(i))
    box(0, 1.2, LOSS, "loss")
    for _ in range(kept):
        box(2, 2.0, KEEP, "back")
    for row in (2, 1):
        for i in range(kept if row == 2 else 0, CHUNKS):
            box(row, 3.0, AGAIN, f"{i} again")
    for row, name in ((2, "image tower"), (1, "text tower"), (0, "all embeddings")):
        axes.text(-0.3, row + 0.4, name, ha="right", va="center", fontsize=9)
    axes.set(title=title, xlim=(-6, 2 * CHUNKS + 1.2 + 6 * CHUNKS + 0.5), ylim=(-0.2, 3))
    axes.axis("off")


def main() -> None:
    """Without a budget, and with one for two graphs."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "cached"  # the same bytes every time
    figure = Figure(figsize=(10, 4), layout="constrained")
    above, below = figure.subplots(2, 1)
    draw(above, 0, "no budget: every chunk is encoded twice, one graph at a time")
    draw(below, KEPT, "a budget for two graphs: those chunks are encoded once")
    figure.savefig(Path(__file__).with_name("cached.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
