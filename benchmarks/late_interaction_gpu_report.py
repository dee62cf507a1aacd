"""The table and the plot of a run of `late_interaction_gpu.py`; the argument is the path of its JSON file."""

from functools import partial
from typing import Any

import reports

from megabatch.display.numbers import cell, gib, ratio
from megabatch.display.tables import Table

OURS, BARE = "megabatch", "bare products"
LEGEND = (
    "Bare products: the product of all vectors twice, and the two products of a dense gradient. Bare ÷ time: their time ÷ the "
    "time of the system. × megabatch: multiples of megabatch's time. Extra GiB: peak memory beyond the inputs, gradients "
    "included. Error: of sampled gradients, relative to float64."
)
HEADINGS = ["B", "Lq", "Ld", "system", "ms", "bare ÷ time", "× megabatch", "extra GiB", "loss", "gradient error"]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    rows, lines = [], []
    for group in reports.groups(record["results"], "B", "Lq", "Ld").values():
        bare = next((r["ms"] for r in group if r["system"] == BARE), None)
        ours = next((r for r in group if r["system"] == OURS), {})
        for r in group:
            ms = r.get("ms")
            cells = [f"{r['B']:,}", r["Lq"], r["Ld"], r["system"], cell(ms, ".2f") or r["status"], ratio(bare, ms, ".3f")]
            cells += [ratio(ms, ours.get("ms")), gib(r.get("peak_bytes")), cell(r.get("loss"), ".4f")]
            rows.append([*cells, cell(r.get("gradient_error"), ".0e")])
        if "forward_ms" in ours:
            lines.append(_details(ours, next(r["parts"]["S"] for r in group if r["system"] == BARE)))
    return reports.paragraphs(
        "Late interaction on a GPU, forward + backward, bf16, D = 128: B queries of Lq vectors, B documents of Ld.",
        Table(HEADINGS, rows, names=(3,)).markdown(),
        LEGEND,
        "Forward alone, against one bare product; memory against inputs and gradients; logsumexps against float64:",
        "\n".join(lines),
        "\n".join(_parts(part) for part in record.get("parts", [])),
        "\n".join(
            f"- {t['kernel']}: {t['tile']}: {t['ms']:.2f} ms{'' if t.get('right', True) else ', WRONG'}"
            for t in record.get("tuned", [])
        ),
    )


def _details(ours: dict[str, Any], bare: float) -> str:
    gigabytes = {name: ours[name] / 2**30 for name in ("input_bytes", "peak_bytes") if name in ours}
    memory = f"{gigabytes.get('peak_bytes', 0):.2f} GiB beyond {gigabytes['input_bytes']:.2f} GiB of inputs"
    told = {True: "the same bits in two runs", False: "DIFFERENT BITS in two runs", None: "one run"}
    return (
        f"- {ours['B']:,} pairs, {ours['Lq']} × {ours['Ld']}: {bare / ours['forward_ms']:.3f} ({ours['forward_ms']:.2f} ms); "
        f"{memory}; {ours.get('row_error', float('nan')):.0e}; {told[ours.get('same_bits')]}"
    )


def _parts(part: dict[str, Any]) -> str:
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in part["TFLOP/s of one product"].items())
    return f"- one strip at {part['B']:,} pairs, {part['Lq']} × {part['Ld']}, TFLOP/s as one product: {speeds}"


def draw(record: dict[str, Any]) -> Any:
    """Time and memory against the batch, for the lengths of queries and documents with most batches; None for one batch."""
    if not record["results"]:  # of a run that only compared tiles
        return None
    (Lq, Ld), rows = max(reports.groups(record["results"], "Lq", "Ld").items(), key=lambda group: len(_batches(group[1])))
    title = f"Late interaction, {Lq} × {Ld} vectors, forward + backward, bf16; {reports.chip(record)}"
    return reports.time_and_memory(title, rows, OURS, BARE) if len(_batches(rows)) > 1 else None


def _batches(rows: list[dict[str, Any]]) -> set[int]:
    return {row["B"] for row in rows}


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
