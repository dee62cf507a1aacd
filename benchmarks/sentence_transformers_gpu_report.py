"""The table and the plot of a run of `sentence_transformers_gpu.py`.

python benchmarks/sentence_transformers_gpu_report.py benchmarks/results/sentence_transformers_gpu.json
"""

from pathlib import Path
from typing import Any

import reports

THEIRS, ALONE = "sentence-transformers", "towers alone"
COLOURS = {
    THEIRS: "#c1440e",
    "megabatch": "#0b6e4f",
    "megabatch, budget auto": "#2fa37c",
    "megabatch's loss in sentence-transformers": "#5b6fb5",
    ALONE: "#999999",
}


def table(record: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| B | system | step, s | pairs/s | × sentence-transformers | ÷ towers alone | peak GiB | loss | gradient error |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    errors = {c["system"]: c.get("gradient_error") for c in record["checks"]}
    for B in sorted({r["B"] for r in record["results"]}):
        rows = [r for r in record["results"] if r["B"] == B]
        seconds = {r["system"]: r["seconds"] for r in rows if "seconds" in r}
        for r in rows:
            took, error = r.get("seconds"), errors.get(r["system"])
            cells = [f"{B:,}", r["system"], f"{took:.3f}" if took else r["status"], f"{B / took:.0f}" if took else ""]
            cells += [f"{seconds[THEIRS] / took:.2f}" if took and THEIRS in seconds else ""]
            cells += [f"{seconds[ALONE] / took:.3f}" if took and ALONE in seconds else ""]
            cells += [f"{r['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in r else ""]
            cells += [f"{r['loss']:.4f}" if took and r["system"] != ALONE else "", f"{error:.0e}" if error is not None else ""]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", " ".join((_about(record), record.get("note", ""))).strip()]
    if record.get("exchange"):
        lines += ["", *_exchange(record["exchange"])]
    return "\n".join(lines)


def _about(record: dict[str, Any]) -> str:
    return (
        f"Chunks of {record['chunk']} texts of {record['tokens']} tokens, for all systems. × sentence-transformers: pairs a "
        "second in units of theirs. Peak: beyond weights and gradients. Gradient error: against a plain step in float32 on a "
        "small batch, by length. Losses of one batch differ by dropout, in the fourth digit, and theirs by similarities and "
        "logits that autocast rounds to bfloat16."
    )


def _exchange(exchange: list[dict[str, Any]]) -> list[str]:
    about = (
        "How often a rank talks to the others in one step, without the reduction of the encoder's gradients (ranks of a CPU, "
        "gloo, which has no reduce-scatter: a scatter from each rank stands for one):"
    )
    lines = [about, "", "| ranks | mini-batches | system | calls | loss |", "|---:|---:|---|---|---:|"]
    for r in exchange:
        calls = ", ".join(f"{number} {name}" for name, number in r["calls"].items())
        lines.append(f"| {r['world']} | {r['mini_batches']} | {r['system']} | {calls} | {r['loss']:.6f} |")
    return lines


def draw(record: dict[str, Any], path: Path) -> None:
    """Speed and memory against the batch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle(f"One step of a MiniLM-sized encoder; {record['machine']['gpu'] or record['machine']['cpu']}")
    speed, memory = figure.subplots(1, 2)
    ticks = sorted({r["B"] for r in record["results"]})
    for name, colour in COLOURS.items():
        rows = sorted((r for r in record["results"] if r["system"] == name and "seconds" in r), key=lambda r: r["B"])
        style = {"color": colour, "marker": "o", "markersize": 4, "label": name, "linestyle": "--" if name == ALONE else "-"}
        if rows:
            speed.plot([r["B"] for r in rows], [r["B"] / r["seconds"] for r in rows], **style)
            memory.plot([r["B"] for r in rows], [r["peak_bytes"] / 2**30 for r in rows], **style)
    for axes, label in ((speed, "pairs a second"), (memory, "peak beyond weights and gradients, GiB")):
        axes.set(xscale="log", xlabel="batch, pairs", ylabel=label)
        axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    speed.set_ylim(0, None)
    memory.set(yscale="log")
    memory.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    memory.yaxis.set_major_formatter("{x:g}")
    speed.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def report(path: Path) -> None:
    """Writes both beside the JSON file."""
    reports.write(path, table, draw)


if __name__ == "__main__":
    reports.main(__doc__, report)
