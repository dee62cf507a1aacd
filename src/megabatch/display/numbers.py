"""Numbers as people read them, and which of an evaluation's to show first."""

import math
from collections.abc import Mapping
from typing import Any

_FIRST = ("text_to_image_R@1", "query_to_text_R@1")  # what a search by text finds at once


def count(value: float) -> str:
    """1,234, or 12.3k, 4.6M."""
    if value < 1e4:
        return f"{value:,.0f}"
    power, letter = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0])
    return f"{value / power:,.1f}{letter}".replace(".0", "")


def size(value: float) -> str:
    """Bytes in the unit that fits."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 2**power:
            return f"{value / 2**power:.1f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """4 s, 1:02, 3:04:05, 2 d 3 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def short(value: Any) -> str:
    """A number with four digits that mean something; a dash where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def percent(value: Any) -> str:
    """A share as a percentage with one decimal."""
    return f"{value:.1%}" if isinstance(value, int | float) and math.isfinite(value) else "–"


def headline(evaluation: Mapping[str, Any]) -> tuple[str, float] | None:
    """The name and value of the one number to show: recall@1 of a search by text, or the first share there is."""
    shares = [name for name in evaluation if "R@" in name or "-top" in name]
    name = next((name for name in (*_FIRST, *shares) if isinstance(evaluation.get(name), int | float)), None)
    return None if name is None else (name, float(evaluation[name]))


def words(metric: str) -> str:
    """A metric's name for people: "text → image R@1"."""
    return metric.replace("_to_", " → ").replace("_", " ")


def as_table(evaluation: Mapping[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """An evaluation as header and rows, ways as rows and shares and ranks as columns; and the rest, how many there were."""
    counts = [name for name in evaluation if name.startswith("num_")]
    rest = [f"{words(name.removeprefix('num_'))}: {evaluation[name]:,}" for name in counts]
    ways = list(dict.fromkeys(name.rsplit("_R@", 1)[0] for name in evaluation if "_R@" in name))
    if not ways:
        rows = [[name, _cell(name, value)] for name, value in evaluation.items() if name not in counts]
        return ["", ""], rows, rest
    columns = list(
        dict.fromkeys(name.removeprefix(f"{way}_") for way in ways for name in evaluation if name.startswith(f"{way}_"))
    )
    columns.sort(key=lambda name: "R@" not in name)
    cells = [[words(way), *(_cell(name, evaluation.get(f"{way}_{name}")) for name in columns)] for way in ways]
    return ["", *map(words, columns)], cells, rest


def _cell(name: str, value: Any) -> str:
    return percent(value) if "R@" in name or "-top" in name else short(value)
