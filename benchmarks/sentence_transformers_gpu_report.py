"""The table and the plot of a run of `sentence_transformers_gpu.py`.

python benchmarks/sentence_transformers_gpu_report.py benchmarks/results/sentence_transformers_gpu.json
"""

from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.numbers import cell, gib, ratio
from megabatch.display.tables import Table

THEIRS, ALONE = "sentence-transformers", "towers alone"
COLOURS = {
    THEIRS: plots.ORANGE,
    "megabatch": plots.GREEN,
    "megabatch, budget auto": plots.MINT,
    "megabatch's loss in sentence-transformers": plots.BLUE,
    ALONE: plots.GREY,
}
HEADINGS = ["B", "system", "step, s", "pairs/s", "× sentence-transformers", "÷ towers alone", "peak GiB", "loss"]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    errors = {c["system"]: c.get("gradient_error") for c in record["checks"]}
    rows = []
    for (B,), group in sorted(reports.groups(record["results"], "B").items()):
        seconds = {r["system"]: r["seconds"] for r in group if "seconds" in r}
        for r in group:
            took = r.get("seconds")
            loss = r["loss"] if took and r["system"] != ALONE else None
            cells = [f"{B:,}", r["system"], cell(took, ".3f") or r["status"], ratio(B, took, ".0f")]
            cells += [ratio(seconds.get(THEIRS), took), ratio(seconds.get(ALONE), took, ".3f"), gib(r.get("peak_bytes"))]
            rows.append([*cells, cell(loss, ".4f"), cell(errors.get(r["system"]), ".0e")])
    about = (
        f"Chunks of {record['chunk']} texts of {record['tokens']} tokens, for all systems. × sentence-transformers: multiples "
        "of its pairs a second. Peak: memory beyond weights and gradients. Gradient error: relative to a plain step in float32 "
        "on a small batch. The losses of one batch differ in the fourth digit by dropout; sentence-transformers also rounds "
        "similarities and logits to bfloat16, under autocast."
    )
    return reports.paragraphs(
        Table([*HEADINGS, "gradient error"], rows, names=(1,)).markdown(),
        " ".join((about, record.get("note", ""))).strip(),
        _exchange(record["exchange"]) if record.get("exchange") else "",
    )


def _exchange(exchange: list[dict[str, Any]]) -> str:
    rows = []
    for r in exchange:
        calls = ", ".join(f"{number} {name}" for name, number in r["calls"].items())
        rows.append([r["world"], r["mini_batches"], r["system"], calls, f"{r['loss']:.6f}"])
    title = (
        "Collectives of a rank in one step, without the reduction of the encoder's gradients (ranks of a CPU with gloo, which "
        "has no reduce-scatter: a scatter from each rank stands for one):"
    )
    return Table(["ranks", "mini-batches", "system", "calls", "loss"], rows, title, names=(2, 3)).markdown()


def draw(record: dict[str, Any]) -> Any:
    """Speed and memory against the batch."""
    title = f"One step of a MiniLM-sized encoder; {reports.chip(record)}"
    figure, ((speed, memory),) = plots.figure(title, columns=2, size=(11, 4.6))
    for name, colour in COLOURS.items():
        rows = sorted((r for r in record["results"] if r["system"] == name and "seconds" in r), key=lambda r: r["B"])
        style = "--" if name == ALONE else "-"
        plots.line(speed, [(r["B"], r["B"] / r["seconds"]) for r in rows], name, colour, linestyle=style)
        plots.line(memory, [(r["B"], r["peak_bytes"] / 2**30) for r in rows], name, colour, linestyle=style)
    for axes, label in ((speed, "pairs a second"), (memory, "peak beyond weights and gradients, GiB")):
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["B"] for r in record["results"]])
    speed.set_ylim(0, None)
    plots.log_axis(memory)
    plots.legend(speed)
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
