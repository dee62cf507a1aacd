"""Numbers as text for people."""

import math
from typing import Any

MISSING = "–"


def count(value: float) -> str:
    """1,234, or 12.3k, 4.6M."""
    if value < 1e4:
        return f"{value:,.0f}"
    power, letter = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0])
    return f"{value / power:,.1f}{letter}".replace(".0", "")


def pairs(value: float) -> str:
    """A batch size in powers of two: 512, 64k for 65,536, 1M for 1,048,576."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % (unit / 4) == 0:
            return f"{value / unit:g}{letter}"
    return f"{value:,g}" if value < 1e6 else f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in the unit that fits."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 2**power:
            return f"{value / 2**power:.1f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """4 s, 1:02, 3:04:05, 2 d 3 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def short(value: Any) -> str:
    """Four significant digits; a dash for None, NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def percent(value: Any) -> str:
    """A fraction as a percentage with one decimal; a dash for None, NaN and infinity."""
    return f"{value:.1%}" if isinstance(value, int | float) and math.isfinite(value) else MISSING


def cell(value: float | None, form: str) -> str:
    """`format(value, form)`, or an empty cell for None."""
    return "" if value is None else format(value, form)


def ratio(value: float | None, base: float | None, form: str = ".2f") -> str:
    """`value / base`, or an empty cell if one of them is missing or zero."""
    return format(value / base, form) if value and base else ""


def gib(value: float | None, form: str = ".2f") -> str:
    """Bytes as GiB without the unit, or an empty cell for None."""
    return "" if value is None else format(value / 2**30, form)
