"""The table and the plot of a run of `loss_gpu.py`: python benchmarks/loss_gpu_report.py benchmarks/results/loss_gpu.json."""

from functools import partial
from typing import Any

import reports

from megabatch.display.numbers import cell, gib, ratio
from megabatch.display.tables import Table

OURS, BARE = "megabatch", "bare products"
LEGEND = (
    "Bare products: the matrix products that every exact loss needs, four for CLIP and three for SigLIP, by cuBLAS, {strips}. "
    "Bare ÷ time: their time ÷ the time of the system. × megabatch: multiples of megabatch's time. "
    "Extra GiB: peak memory beyond the inputs, gradients included. "
    "Errors: relative to float64, for gradients on sampled rows. WRONG: the error is larger than bf16 explains."
)
HEADINGS = ["loss", "B", "D", "system", "ms", "TFLOP/s", "bare ÷ time", "× megabatch", "extra GiB", "value", "error"]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    found = list(reports.groups(record["results"], "loss_name", "B", "D").values())
    rows = []
    for group in found:
        bare = next(r["ms"] for r in group if r["system"] == BARE)
        ours = next((r.get("ms") for r in group if r["system"] == OURS), None)
        for r in group:
            ms = r.get("ms")
            operations = (8 if r["loss_name"] == "clip" else 6) * r["B"] ** 2 * r["D"] / 1e9
            wrong = f"WRONG ({r['wrong_ms']:.0f} ms)" if "wrong_ms" in r else r["status"]
            cells = [r["loss_name"], f"{r['B']:,}", r["D"], r["system"], cell(ms, ".2f") or wrong, ratio(operations, ms, ".0f")]
            cells += [ratio(bare, ms, ".3f"), ratio(ms, ours), gib(r.get("peak_bytes")), cell(r.get("loss"), ".4f")]
            rows.append([*cells, *(cell(r.get(key), ".0e") for key in ("loss_error", "gradient_error"))])
    shapes = max(len(r["shapes"]) // 3 if "shapes" in r else 1 for r in record["results"] if r["system"] == BARE)
    strips = "in strips of 256 MiB" if shapes == 1 else f"each in the fastest of up to {shapes} shapes of strips"
    lines = [_forward(group) for group in found if "forward_ms" in group[0]] + [_large(r) for r in record.get("large", [])]
    return reports.paragraphs(
        "Contrastive losses on a GPU, forward + backward, bf16, B pairs of embeddings D wide.",
        Table([*HEADINGS, "gradient error"], rows, names=(0, 3)).markdown(),
        LEGEND.format(strips=strips),
        "Forward alone: time of the bare product S ÷ time.",
        "\n".join(lines),
    )


def _forward(group: list[dict[str, Any]]) -> str:
    bare = next(r["parts"]["S"] for r in group if r["system"] == BARE)
    ours = group[0]
    return f"- {ours['B']:,}×{ours['D']}: {bare / ours['forward_ms']:.3f} ({ours['forward_ms']:.2f} ms)"


def _large(r: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {value:.0e}" for name, value in r["errors"].items())
    against = f", {r['against_64k']:.3f} of (B/64k)² times the time at 64k" if "against_64k" in r else ""
    return (
        f"- B = {r['B']:,}, D = {r['D']}: {r['seconds']:.1f} s forward + backward{against}; "
        f"{r['peak_bytes'] / 2**30:.1f} GiB beyond the inputs, gradients included; loss {r['loss']:.4f}; "
        f"errors on sampled rows against float64: {errors}"
    )


def draw(record: dict[str, Any]) -> Any:
    """Time and memory of CLIP losses against the batch."""
    title = f"CLIP loss, forward + backward, bf16, D = 512; {reports.chip(record)}"
    rows = [r for r in record["results"] if r["loss_name"] == "clip" and r["D"] == 512]
    return reports.time_and_memory(title, rows, OURS, BARE)


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
