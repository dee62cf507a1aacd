"""Draws docs/architecture.svg: the packages in layers, each above the packages that it imports.

    python docs/architecture_picture.py

The layers follow from the import rules in tests/test_architecture.py.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = {"__init__", "__main__"}
MEANINGS = {
    "tiles": "PyTorch engine",
    "kernels": "Triton engine",
    "ring": "several ranks",
    "operators": "forward, backward",
    "dispatch": "engine and path",
    "checks": "arguments",
    "primitives": "one operator each",
    "pairwise": "public operations",
    "late": "late interaction",
    "losses": "a few lines each",
    "cached": "gradient caching",
    "integrations": "other trainers",
    "reference": "dense, for tests",
    "data": "tables, shards",
    "towers": "encoders",
    "evaluation": "recall, search",
    "trainer": "loop, checkpoints",
    "display": "tables, plots",
    "export": "other programs",
    "planning": "memory, time",
    "bench": "comparison",
    "commands": "train, eval, search, …",
    "cli": "megabatch",
}
COLORS = {"megabatch_train": "#2a5caa", "megabatch": "#0b6e4f"}  # from top to bottom
ROW = 0.42  # height of a layer, in inches


def find_layers(rules: Mapping[str, set[str]], tolerated: set[tuple[str, str]]) -> list[list[str]]:
    """Packages by layer, from the lowest: each is one layer above the highest package that it imports."""
    layer: dict[str, int] = {}

    def place(package: str) -> int:
        if package not in layer:
            below = [other for other in rules[package] - HIDDEN if other in rules and (package, other) not in tolerated]
            layer[package] = 1 + max(map(place, below), default=-1)
        return layer[package]

    shown = [package for package in rules if package not in HIDDEN]
    count = 1 + max(map(place, shown))
    return [[package for package in shown if layer[package] == number] for number in range(count)]


def main() -> None:
    """One row of boxes for each layer. The command is above the library, because its packages import the library."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    sys.path.insert(0, str(ROOT / "tests"))
    from test_architecture import LIBRARY, TOLERATED, TRAIN

    matplotlib.rcParams["svg.hashsalt"] = "architecture"  # the same bytes every time
    matplotlib.rcParams["svg.fonttype"] = "none"  # names stay text
    tolerated = {(package, other) for (_, package), (_, other) in TOLERATED}
    layers = {"megabatch_train": find_layers(TRAIN, set()), "megabatch": find_layers(LIBRARY, tolerated)}
    rows = sum(map(len, layers.values())) + len(layers)
    figure = Figure(figsize=(5, ROW * rows), layout="constrained")  # 360 pixels, so that a phone shows it without scaling
    axes = figure.subplots()
    top = float(rows)
    for root, found in layers.items():
        color = COLORS[root]
        top -= 1
        axes.text(0.5, top + 0.35, root, ha="center", va="center", color=color, fontsize=12, fontweight="bold")
        for packages in reversed(found):
            top -= 1
            width = 1 / len(packages)
            for number, name in enumerate(packages):
                box = FancyBboxPatch(
                    (number * width + 0.01, top + 0.06),
                    width - 0.02,
                    0.84,
                    boxstyle="round,pad=0,rounding_size=0.01",
                    mutation_aspect=rows,
                    facecolor=color,
                    edgecolor="none",
                )
                axes.add_patch(box)
                middle = (number + 0.5) * width
                axes.text(middle, top + 0.66, name, ha="center", va="center", color="white", fontsize=10, fontweight="bold")
                axes.text(middle, top + 0.27, MEANINGS[name], ha="center", va="center", color="white", fontsize=9)
    axes.set(xlim=(0, 1), ylim=(0, rows))
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("architecture.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
