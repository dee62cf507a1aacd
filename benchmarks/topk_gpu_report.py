"""The table and the plot of a run of `topk_gpu.py`; the argument is the path of its JSON file."""

from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.numbers import cell, gib, ratio
from megabatch.display.tables import Table

OURS, BARE = "megabatch", "bare product"
LEGEND = (
    "Bare ÷ time: the time of the bare product ÷ the time of the system. × megabatch: multiples of megabatch's time. All rows: "
    "extrapolated to as many rows as columns. Extra GiB: peak memory beyond the inputs. Error: of the products of the columns "
    "found, against float64."
)
HEADINGS = [
    "columns",
    "D",
    "k",
    "rows",
    "system",
    "ms",
    "TFLOP/s",
    "bare ÷ time",
    "× megabatch",
    "all rows, s",
    "extra GiB",
    "error",
]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    rows = []
    for group in reports.groups(record["results"], "M", "D", "k").values():
        bare, ours = (next((r.get("ms") for r in group if r["system"] == name), None) for name in (BARE, OURS))
        for r in group:
            ms = r.get("ms")
            cells = [f"{r['M']:,}", r["D"], r["k"], f"{r['rows']:,}", r["system"], cell(ms, ".1f") or r["status"]]
            cells += [ratio(2 * r["rows"] * r["M"] * r["D"] / 1e9, ms, ".3g"), ratio(bare, ms, ".3f"), ratio(ms, ours)]
            whole = None if ms is None or not r["rows"] else ms * r["M"] / r["rows"] / 1000
            rows.append([*cells, cell(whole, ".2f"), gib(r.get("peak_bytes")), cell(r.get("error"), ".0e")])
    return reports.paragraphs(
        f"The k largest products of each row on a {'CPU, float32' if record.get('device') == 'cpu' else 'GPU, bf16'}.",
        Table(HEADINGS, rows, names=(4,)).markdown(),
        LEGEND,
        "\n".join(_tuned(t) for t in record.get("tuned", [])),
    )


def _tuned(tried: dict[str, Any]) -> str:
    size = "{M:,} columns, D = {D}, k = {k}".format(**tried)
    parts = "".join(f"; {name} {ms:.1f}" for name, ms in tried.get("parts", {}).items())
    return f"- {size}, {tried['change']}: {tried['ms']:.1f} ms{parts}"


def draw(record: dict[str, Any]) -> Any:
    """The time of each system, in multiples of the bare product's."""
    sizes = list(reports.groups(record["results"], "M", "D", "k").items())
    figure, panels = plots.figure(
        f"Top-k, time in multiples of the bare product's; {reports.chip(record)}",
        rows=max(len(sizes), 1),
        size=(8, 1 + 1.3 * len(sizes)),
    )
    for (axes,), (size, group) in zip(panels, sizes, strict=False):
        bare = next((r.get("ms") for r in group if r["system"] == BARE), None)
        plots.bars(axes, [(r["system"], r["ms"] / bare) for r in group if r.get("ms") and bare], "%.2f")
        axes.set_title("{:,} columns, D = {}, k = {}".format(*size), fontsize=9)
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
