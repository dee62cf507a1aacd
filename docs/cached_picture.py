"""Draws docs/cached.svg: the passes of `cached_backward` over time, without a memory budget and with a budget.

python docs/cached_picture.py
"""

from pathlib import Path
from typing import Any

CHUNKS, KEPT = 4, 2
FORWARD, BACKWARD, LOSS = 1.0, 2.0, 1.0  # durations; the unit is the forward pass of one chunk
WITHOUT_GRAPH, WITH_GRAPH, GRADIENT, LOSS_COLOR = "#a9cbb9", "#56a380", "#0b6e4f", "#c1440e"
MEANINGS = {
    WITHOUT_GRAPH: "forward without graph",
    WITH_GRAPH: "forward with graph",
    GRADIENT: "backward",
    LOSS_COLOR: "loss and its gradient",
}
TOWERS = ("image tower", "text tower")
END = len(TOWERS) * CHUNKS * (2 * FORWARD + BACKWARD) + LOSS


def draw(axes: Any, kept: int, title: str) -> None:
    """One panel. Time runs from left to right, and the first `kept` chunks of the image tower keep their graphs."""
    now = 0.0

    def add_box(row: int, duration: float, color: str, chunk: str = "") -> None:
        nonlocal now
        axes.broken_barh([(now + 0.07, duration - 0.14)], (row + 0.1, 0.8), color=color)
        text_color = "#222222" if color == WITHOUT_GRAPH else "white"
        axes.text(now + duration / 2, row + 0.52, chunk, ha="center", va="center", fontsize=10, color=text_color)
        now += duration

    for row in range(len(TOWERS)):
        for chunk in range(CHUNKS):
            add_box(row, FORWARD, WITH_GRAPH if row == 0 and chunk < kept else WITHOUT_GRAPH, str(chunk))
    add_box(len(TOWERS), LOSS, LOSS_COLOR)
    for chunk in range(kept):
        add_box(0, BACKWARD, GRADIENT, str(chunk))
    for row in range(len(TOWERS)):
        for chunk in range(kept if row == 0 else 0, CHUNKS):
            add_box(row, FORWARD, WITH_GRAPH, str(chunk))
            add_box(row, BACKWARD, GRADIENT, str(chunk))
    axes.set_title(title, fontsize=11, loc="left")
    axes.set(xlim=(0, END), ylim=(len(TOWERS) + 1, 0))
    axes.set_xticks(range(0, round(END) + 1, 4))
    axes.set_yticks([row + 0.5 for row in range(len(TOWERS) + 1)], [*TOWERS, "loss"])
    axes.tick_params(labelsize=10, length=3)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draws a panel without a budget, and a panel with a budget for two graphs."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    matplotlib.rcParams["svg.hashsalt"] = "cached"  # the same bytes every time
    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    draw(above, 0, "No budget: every chunk is encoded twice")
    draw(below, KEPT, "Budget for two graphs: two chunks are encoded once")
    above.tick_params(labelbottom=True)
    below.set_xlabel("time (1 = forward pass of one chunk)", fontsize=10)
    keys = [Patch(color=color, label=meaning) for color, meaning in MEANINGS.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    figure.savefig(Path(__file__).with_name("cached.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
