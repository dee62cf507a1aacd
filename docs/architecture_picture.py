"""Draws docs/architecture.svg: the packages in layers, each above the packages that it imports.

python docs/architecture_picture.py
"""

from pathlib import Path

# From top to bottom; a package imports packages below it, and never above (tests/test_architecture.py).
LAYERS = [
    ("command line", "#5b4b8a", [("cli, commands", "megabatch train, eval, …")]),
    (
        "application",
        "#2a5caa",
        [
            ("trainer", "loop, checkpoints"),
            ("report", "one page per run"),
            ("export", "other programs"),
            ("planning", "what fits"),
            ("bench", "peers, truth"),
            ("integrations", "other trainers"),
        ],
    ),
    (
        "data and models",
        "#b8860b",
        [("evaluation", "recall, search"), ("towers", "encoders"), ("data", "shards, tables"), ("display", "tables, plots")],
    ),
    ("cached step", "#c1440e", [("cached", "encode, loss, encode again: chunk by chunk")]),
    (
        "losses",
        "#0b6e4f",
        [
            ("losses", "a few lines each"),
            ("pairwise", "public operations"),
            ("primitives", "one operator each"),
            ("operators", "autograd"),
        ],
    ),
    ("engine", "#444444", [("ring", "many devices: who has which block"), ("tiles", "one device: PyTorch or Triton")]),
]
WIDTH = 10.0


def main() -> None:
    """One row of boxes for each layer."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    matplotlib.rcParams["svg.hashsalt"] = "architecture"  # the same bytes every time
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for row, (layer, colour, boxes) in enumerate(LAYERS):
        height = len(LAYERS) - row
        axes.text(-0.2, height + 0.3, layer, ha="right", va="center", color=colour, fontsize=10)
        width = WIDTH / len(boxes)
        for column, (name, meaning) in enumerate(boxes):
            place = (column * width + 0.06, height)
            shape = FancyBboxPatch(place, width - 0.12, 0.6, boxstyle="round,pad=0.02", facecolor=colour, edgecolor="none")
            axes.add_patch(shape)
            middle = column * width + width / 2
            axes.text(middle, height + 0.4, name, ha="center", va="center", color="white", fontsize=10, fontweight="bold")
            axes.text(middle, height + 0.14, meaning, ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(-2.1, WIDTH + 0.1), ylim=(0.8, len(LAYERS) + 0.8))
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("architecture.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
