"""An evaluation's metrics for people: names, the most important one, the table."""

import math
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
    counts = [name for name in evaluation if name.rpartition("/")[2].startswith("num_")]
    notes = ", ".join(f"{words(name.replace('num_', ''))}: {evaluation[name]:,}" for name in counts)
    if (loss := evaluation.get("clip_val_loss")) is not None:
        notes += f", loss: {numbers.short(loss)}"
    ways = list(dict.fromkeys(name.rsplit("_R@", 1)[0] for name in evaluation if "_R@" in name))
    if not ways:
        rows = [[name, _cell(name, value)] for name, value in evaluation.items() if name not in counts]
        return Table(["", ""], rows, title, notes)
    columns = list(
        dict.fromkeys(name.removeprefix(f"{way}_") for way in ways for name in evaluation if name.startswith(f"{way}_"))
    )
    columns.sort(key=lambda name: "R@" not in name)
    rows = [[words(way), *(_cell(name, evaluation.get(f"{way}_{name}")) for name in columns)] for way in ways]
    if samples := evaluation.get("num_samples"):
        texts = evaluation.get("num_texts", samples)
        for way in ways if texts != samples else ways[:1]:
            queries, found = (samples, texts) if way.endswith("_to_text") else (texts, samples)
            named = "by chance" if texts == samples else f"{words(way)} by chance"
            rows.append([named, *(_cell(name, chance(name, found, max(1.0, found / queries))) for name in columns)])
    return Table(["", *map(words, columns)], rows, title, notes)


def chance(metric: str, samples: int, matches: float = 1) -> float | None:
    """The mean recall or rank in a random order of `samples`, of which `matches` are right; None for other metrics."""
    if "R@" in metric:
        k = int(metric.rpartition("@")[2])
        missed = (max(0.0, samples - matches - i) / (samples - i) for i in range(min(k, samples)))
        return k / samples if matches == 1 and k < samples else 1 - math.prod(missed)
    if metric == "median_rank" and matches > 1:
        return None
    return (samples - matches) / (matches + 1) + 1 if metric in ("mean_rank", "median_rank") else None


def by_dataset(evaluation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics of each dataset by its name; the first has none."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in evaluation.items():
        name, _, metric = key.rpartition("/")
        found.setdefault(name, {})[metric] = value
    return found


def line(evaluation: Mapping[str, Any]) -> str:
    """Recalls and accuracies of one dataset in at most 90 columns: "text → image R@1/5/10 12.0 31.5 40.2 %"."""
    ways: dict[str, list[tuple[str, float]]] = {}
    for name, value in evaluation.items():
        if is_share(name) and "/" not in name:
            way, mark, k = name.rpartition("R@" if "R@" in name else "top")
            ways.setdefault(words(f"{way}{mark}"), []).append((k, value))
    parts = []
    for way, found in ways.items():
        values = " ".join(numbers.percent(value).removesuffix("%") for _, value in found)
        parts.append(f"{way}{'/'.join(k for k, _ in found)} {values} %")
    return ", ".join(parts)


def _cell(name: str, value: Any) -> str:
    return numbers.percent(value) if is_share(name) else numbers.short(value)
