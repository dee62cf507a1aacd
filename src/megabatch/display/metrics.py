"""An evaluation's metrics for people: names, the most important one, the table."""

from collections.abc import Mapping
from typing import Any

from megabatch.display import numbers
from megabatch.display.tables import Table

_FIRST = ("text_to_image_R@1", "query_to_text_R@1")  # recall@1 of a search by text


def is_share(metric: str) -> bool:
    """Whether the metric is a recall or an accuracy, between 0 and 1."""
    return "R@" in metric or "-top" in metric


def headline(evaluation: Mapping[str, Any]) -> tuple[str, float] | None:
    """Name and value of the one number to show: recall@1 of a search by text, or the first recall or accuracy."""
    shares = [name for name in evaluation if is_share(name)]
    name = next((name for name in (*_FIRST, *shares) if isinstance(evaluation.get(name), int | float)), None)
    return None if name is None else (name, float(evaluation[name]))


def words(metric: str) -> str:
    """A metric's name for people: "text → image R@1"."""
    return metric.replace("_to_", " → ").replace("_", " ")


def table(evaluation: Mapping[str, Any], title: str = "") -> Table:
    """Directions as rows, recalls and ranks as columns; sample counts as notes. Without recalls: one row a metric."""
    counts = [name for name in evaluation if name.startswith("num_")]
    notes = ", ".join(f"{words(name.removeprefix('num_'))}: {evaluation[name]:,}" for name in counts)
    ways = list(dict.fromkeys(name.rsplit("_R@", 1)[0] for name in evaluation if "_R@" in name))
    if not ways:
        rows = [[name, _cell(name, value)] for name, value in evaluation.items() if name not in counts]
        return Table(["", ""], rows, title, notes)
    columns = list(
        dict.fromkeys(name.removeprefix(f"{way}_") for way in ways for name in evaluation if name.startswith(f"{way}_"))
    )
    columns.sort(key=lambda name: "R@" not in name)
    rows = [[words(way), *(_cell(name, evaluation.get(f"{way}_{name}")) for name in columns)] for way in ways]
    return Table(["", *map(words, columns)], rows, title, notes)


def _cell(name: str, value: Any) -> str:
    return numbers.percent(value) if is_share(name) else numbers.short(value)
