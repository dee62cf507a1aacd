"""A run's curves: loss, recall, and its other metrics."""

from collections.abc import Sequence
from typing import Any

from megabatch.display import metrics, numbers, pages, plots
from megabatch.report.saved_run import SavedRun

SIZE = (5.0, 2.9)  # inches of a plot
DOTS = 30  # a curve of fewer points has a marker at each


def curves(run: SavedRun) -> str:
    """The section with plots of all metrics that the run has; a sentence if matplotlib is missing."""
    title = "Training curves"
    if not run.training and not run.evaluations:
        return ""
    if not plots.available():
        told = f'No curves: matplotlib is not installed; pip install "megabatch[{plots.EXTRA}]" installs it.'
        return pages.section(title, pages.faint(told))
    drawn = [
        loss(run),
        recalls(run),
        _metric(run, "Learning rate", "learning_rate"),
        _metric(run, "Scale", "scale", zero=False),
        _metric(run, "Bias", "bias", zero=False),
        _metric(run, "Gradient norm", "gradient_norm", smooth=True),
        _metric(run, "Pairs a second", "pairs_per_second", smooth=True),
        _metric(run, "Model FLOPs utilisation, %", "mfu", smooth=True, unit=0.01),
        _metric(run, "Memory, GiB", "memory_bytes", unit=2.0**30),
        _phases(run),
    ]
    return pages.section(title, pages.figures(one for one in drawn if one is not None))


def loss(run: SavedRun) -> tuple[str, Any] | None:
    """The loss of each step, in words and as a figure; None if there is none."""
    return _metric(run, "Loss", "loss", zero=False, smooth=True)


def known(run: SavedRun, key: str) -> list[float]:
    """A metric of the training steps, without missing values."""
    return [record[key] for record in run.training if isinstance(record.get(key), int | float)]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean over a window around each value, without NaN; NaN stays NaN."""
    found = []
    for i, value in enumerate(values):
        near = [other for other in values[max(0, i - window // 2) : i + window // 2 + 1] if other == other]
        found.append(sum(near) / len(near) if value == value else value)
    return found


def _metric(
    run: SavedRun, title: str, key: str, *, zero: bool = True, smooth: bool = False, unit: float = 1.0
) -> tuple[str, Any] | None:
    """A metric of the training steps against the step; with `smooth`, the values are faint behind their running mean."""
    found = [value / unit for value in known(run, key)]
    if not found:
        return None
    figure, axes = _axes(title)
    steps = [record["step"] for record in run.training]
    values = [record[key] / unit if isinstance(record.get(key), int | float) else float("nan") for record in run.training]
    window = len(values) // 25
    if smooth and window > 2:
        axes.plot(steps, values, color=plots.BLUE, linewidth=1, alpha=0.35)
        values = smoothed(values, window)
    _line(axes, steps, values, "", plots.BLUE)
    if zero:
        bottom = min(0.0, *found)
        axes.set_ylim(bottom, bottom + 1.08 * (max(found) - bottom) or 1.0)
    return f"{title}: from {numbers.short(found[0])} to {numbers.short(found[-1])}", figure


def phase_shares(run: SavedRun) -> list[tuple[str, float]]:
    """The share of each phase of a step of the time, in per cent, largest first."""
    total: dict[str, float] = {}
    for record in run.training:
        for name, seconds in record.get("phases", {}).items():
            total[name] = total.get(name, 0.0) + seconds
    whole = sum(total.values())
    return sorted(((name, 100 * seconds / whole) for name, seconds in total.items() if whole), key=lambda pair: -pair[1])


def _phases(run: SavedRun) -> tuple[str, Any] | None:
    """A bar for each phase of a step."""
    shares = phase_shares(run)
    if not shares:
        return None
    figure, ((axes,),) = plots.figure("Time by phase, %", size=SIZE)
    plots.bars(axes, shares, "%.1f")
    return "Time by phase: " + ", ".join(f"{name} {share:.1f} %" for name, share in shares), figure


def recalls(run: SavedRun) -> tuple[str, Any] | None:
    """One colour for each k; the direction of the headline solid, the other dashed."""
    last = run.evaluations[-1]["evaluation"] if run.evaluations else {}
    first = metrics.headline(last)
    if first is None:
        return None
    way = first[0].split("R@")[0]
    names = sorted((name for name in last if metrics.is_share(name)), key=lambda name: not name.startswith(way))
    shares = list(dict.fromkeys(_share(name) for name in names))
    figure, axes = _axes("Recall")
    steps = [record["step"] for record in run.evaluations]
    for name in names:
        colour = plots.PALETTE[shares.index(_share(name)) % len(plots.PALETTE)]
        values = [float("nan") if (value := one["evaluation"].get(name)) is None else value for one in run.evaluations]
        _line(axes, steps, values, metrics.words(name), colour, linestyle="-" if name.startswith(way) else "--")
    axes.set_xlim(0, 1.05 * steps[-1])  # also with a single evaluation
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    plots.legend(axes, fontsize=7, handlelength=3)
    return f"Recall: {metrics.words(first[0])} {numbers.percent(first[1])} at the end", figure


def _axes(title: str) -> tuple[Any, Any]:
    figure, ((axes,),) = plots.figure(title, size=SIZE)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: numbers.count(value))
    return figure, axes


def _line(axes: Any, steps: Sequence[int], values: Sequence[float], name: str, colour: str, **style: Any) -> None:
    dots = "o" if len(values) < DOTS else None
    plots.line(axes, list(zip(steps, values, strict=True)), name, colour, marker=dots, markersize=3, **style)


def _share(name: str) -> str:
    return name.rsplit("_", 1)[-1].rsplit("-", 1)[-1]
