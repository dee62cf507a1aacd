"""Draws docs/tiles.svg: one tile of the logits, and the sums or gradients that the tile adds to.

python docs/tiles_picture.py
"""

from pathlib import Path
from typing import Any

ROWS, AT = 6, (2, 3)  # tiles per side, and the tile that is computed
EMBEDDING, SUM, TILE, ABSENT = "#a9cbb9", "#b8860b", "#0b6e4f", "#dddddd"


def square(axes: Any, x: float, y: float, width: float, height: float, color: str, **options: Any) -> None:
    """Adds a rectangle with its upper left corner at (x, y); y points down."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x + 0.06, -y - height + 0.06), width - 0.12, height - 0.12, facecolor=color, **options))


def draw(axes: Any, title: str, *, back: bool) -> None:
    """Draws one pass: embeddings at the left and above, their sums or gradients at the right and below."""
    dotted = {"edgecolor": ABSENT, "linestyle": ":", "linewidth": 1}
    for i in range(ROWS):
        for j in range(ROWS):
            now = (i, j) == AT
            square(axes, j, i, 1, 1, TILE if now else "none", **({} if now else dotted))
        alpha = 1.0 if i == AT[0] else 0.45
        square(axes, -1.7, i, 1.4, 1, EMBEDDING, alpha=alpha)
        square(axes, ROWS + 0.3, i, 1.4 if back else 0.4, 1, SUM, alpha=alpha)
        alpha = 1.0 if i == AT[1] else 0.45
        square(axes, i, -1.7, 1, 1.4, EMBEDDING, alpha=alpha)
        square(axes, i, ROWS + 0.3, 1, 1.4 if back else 0.4, SUM, alpha=alpha)
    i, j = AT
    axes.text(j + 0.5, -i - 0.5, "tile", ha="center", va="center", color="white", fontsize=9)
    axes.text(-1.9, -ROWS / 2, "images, B × D", rotation=90, ha="right", va="center", fontsize=9)
    axes.text(ROWS / 2, 1.9, "texts, B × D", ha="center", fontsize=9)
    axes.text(
        ROWS + (1.9 if back else 0.9), -ROWS / 2, "gradient" if back else "Σ over columns", rotation=90, va="center", fontsize=9
    )
    axes.text(ROWS / 2, -ROWS - (2.2 if back else 1.2), "gradient" if back else "Σ over rows", ha="center", fontsize=9)
    arrow = {"arrowstyle": "->", "color": "#c1440e", "linewidth": 1.6}
    axes.annotate("", (ROWS + 0.35, -i - 0.5), (j + 0.95, -i - 0.5), arrowprops=arrow)
    axes.annotate("", (j + 0.5, -ROWS - 0.35), (j + 0.5, -i - 0.95), arrowprops=arrow)
    axes.set_title(title, fontsize=11)
    axes.set(xlim=(-2.8, ROWS + 2.6), ylim=(-ROWS - (2.6 if back else 1.6), 2.5), aspect="equal")
    axes.axis("off")


def main() -> None:
    """Draws the forward pass and the backward pass, one below the other."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "tiles"  # the same bytes every time
    figure = Figure(figsize=(4.6, 8), layout="constrained")
    above, below = figure.subplots(2, 1)
    draw(above, "Forward: a tile adds to row sums and column sums", back=False)
    draw(below, "Backward: the tile is recomputed\nand adds to both gradients", back=True)
    figure.savefig(Path(__file__).with_name("tiles.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
