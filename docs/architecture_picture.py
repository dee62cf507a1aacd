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
    "cached": "encode, loss, encode again",
    "integrations": "other trainers",
    "reference": "dense, for tests",
    "data": "tables, shards",
    "towers": "encoders",
    "evaluation": "recall, search",
    "trainer": "loop, checkpoints",
    "display": "tables, plots, report",
    "export": "other programs",
    "planning": "what fits",
    "bench": "baselines, truth",
    "commands": "train, eval, search, …",
    "cli": "megabatch",
}
COLOURS = {"megabatch_train": "#2a5caa", "megabatch": "#0b6e4f"}
WIDTH = 10.0


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
    """One row of boxes for each layer, the library beside the command, whose packages import from it."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    sys.path.insert(0, str(ROOT / "tests"))
    from test_architecture import LIBRARY, TOLERATED, TRAIN

    matplotlib.rcParams["svg.hashsalt"] = "architecture"  # the same bytes every time
    matplotlib.rcParams["svg.fonttype"] = "none"  # names stay text
    tolerated = {(package, other) for (_, package), (_, other) in TOLERATED}
    columns = {"megabatch": find_layers(LIBRARY, tolerated), "megabatch_train": find_layers(TRAIN, set())}
    most = max(map(len, columns.values()))
    figure = Figure(figsize=(12, 0.62 * (most + 1)), layout="constrained")
    axes = figure.subplots()
    for left, (root, layers) in zip((0.0, WIDTH + 0.6), columns.items(), strict=True):
        axes.text(left + WIDTH / 2, -0.45, root, ha="center", va="center", color=COLOURS[root], fontsize=12, fontweight="bold")
        for height, names in enumerate(layers):
            width = WIDTH / len(names)
            for number, name in enumerate(names):
                place = (left + number * width + 0.06, height)
                axes.add_patch(
                    FancyBboxPatch(
                        place, width - 0.12, 0.6, boxstyle="round,pad=0.02", facecolor=COLOURS[root], edgecolor="none"
                    )
                )
                middle = left + number * width + width / 2
                axes.text(middle, height + 0.41, name, ha="center", va="center", color="white", fontsize=10, fontweight="bold")
                axes.text(middle, height + 0.15, MEANINGS[name], ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(-0.1, 2 * WIDTH + 0.7), ylim=(-0.8, most))
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("architecture.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
