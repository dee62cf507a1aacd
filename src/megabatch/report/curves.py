"""A run's curves: loss, recall, and what else its metrics have."""

from collections.abc import Callable

from megabatch.display import numbers
from megabatch.report.plot import Series, plot, smoothed
from megabatch.report.run import Run

_COLOURS = ("blue", "orange", "green", "violet")


def curves(run: Run) -> str:
    """The plots, as far as there are numbers for them."""
    drawn = [
        _line(run, "Loss", "loss", zero=False, smooth=True),
        _recalls(run),
        _line(run, "Learning rate", "learning_rate"),
        _line(run, "Scale", "scale", zero=False),
        _line(run, "Bias", "bias", zero=False),
        _line(run, "Gradient norm", "gradient_norm", smooth=True),
        _line(run, "Pairs a second", "pairs_per_second", numbers.count, smooth=True),
        _line(run, "Memory, GiB", "memory_bytes", unit=2.0**30),
    ]
    found = "".join(drawn)
    return f'<h2>How it went</h2><div class="plots">{found}</div>' if found else ""


def known(run: Run, key: str) -> list[float]:
    """A metric of the training steps, where it is a number."""
    return [record[key] for record in run.training if isinstance(record.get(key), int | float)]


def _line(
    run: Run,
    title: str,
    key: str,
    form: Callable[[float], str] = numbers.short,
    *,
    zero: bool = True,
    smooth: bool = False,
    unit: float = 1.0,
) -> str:
    steps = [float(record["step"]) for record in run.training]
    values = [None if record.get(key) is None else record[key] / unit for record in run.training]
    name, window = title.split(",")[0].lower(), len(values) // 25
    lines = [Series(name, steps, values, "blue")]
    if smooth and window > 2:
        lines = [Series(name, steps, values, "blue faint"), Series(name, steps, smoothed(values, window), "blue")]
    return plot(title, lines, form, zero=zero, step=numbers.count)


def _recalls(run: Run) -> str:
    """A colour for each recall; the way back dashed."""
    if not run.evaluations:
        return ""
    last = run.evaluations[-1]["evaluation"]
    steps = [float(record["step"]) for record in run.evaluations]
    found = numbers.headline(last)
    if found is None:
        return ""
    way = found[0].split("R@")[0]
    names = sorted((name for name in last if "R@" in name or "-top" in name), key=lambda name: not name.startswith(way))
    shares = list(dict.fromkeys(_share(name) for name in names))
    lines = []
    for name in names:
        colour = _COLOURS[shares.index(_share(name)) % len(_COLOURS)]
        style = colour if name.startswith(way) else f"{colour} dashed"
        lines.append(Series(numbers.words(name), steps, [one["evaluation"].get(name) for one in run.evaluations], style))
    return plot("Recall", lines, _percent, zero=True, step=numbers.count)


def _share(name: str) -> str:
    return name.rsplit("_", 1)[-1].rsplit("-", 1)[-1]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
