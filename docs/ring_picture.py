"""Draws docs/ring.svg from the routes: the block that each rank computes in each step, and the blocks in transit.

python docs/ring_picture.py
"""

from pathlib import Path
from typing import Any

from megabatch.ring.routes import Route, ring, two_level

COLORS = ("#0b6e4f", "#c1440e", "#2a5caa", "#b8860b")
NODES = ((0, 1), (2, 3))


def draw(axes: Any, route: Route, title: str) -> None:
    """Ranks from top to bottom, steps from left to right. Arrows are blocks in transit during a step."""
    ranks = len(route.node_of)
    row = {rank: ranks - 1 - rank - 0.35 * route.node_of[rank] for rank in range(ranks)}
    for step in range(route.steps):
        for rank in range(ranks):
            (block,) = route.work(step, rank)
            own = "own" if rank == block else f"y{block}"
            box = {"boxstyle": "round,pad=0.45", "facecolor": COLORS[block], "edgecolor": "none"}
            axes.text(2 * step, row[rank], own, color="white", ha="center", va="center", bbox=box, family="monospace", zorder=3)
    for hop in route.blocks:
        style = "--" if hop.pieces > 1 else "-"
        start, end = (2 * hop.leaves + 0.32, row[hop.source]), (2 * min(hop.needed, hop.leaves + 1) - 0.34, row[hop.target])
        arrow = {"arrowstyle": "->", "color": COLORS[hop.block], "linestyle": style, "shrinkA": 2, "shrinkB": 2, "alpha": 0.9}
        axes.annotate("", end, start, arrowprops=arrow, zorder=2)
    for rank, height in row.items():
        axes.text(-1.35, height, f"rank {rank}", ha="center", va="center")
    for step in range(route.steps):
        axes.text(2 * step, ranks - 0.35, f"step {step + 1}", ha="center", va="center", color="#555555")
    if len(set(route.node_of)) > 1:
        axes.axhline(1.325, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_title(title, fontsize=11)
    axes.set(xlim=(-2, 2 * route.steps - 1.2), ylim=(-0.95, ranks))
    axes.axis("off")


def main() -> None:
    """Draws both routes, one below the other."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ring"  # the same bytes every time
    figure = Figure(figsize=(5, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1)
    draw(above, ring(((0, 1, 2, 3),)), 'Route "ring"')
    draw(below, two_level(NODES), 'Route "two_level", two nodes with two ranks each')
    figure.savefig(Path(__file__).with_name("ring.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
