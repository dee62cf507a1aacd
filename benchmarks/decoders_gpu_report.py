"""The table and the plot of a run of `decoders_gpu.py`.

python benchmarks/decoders_gpu_report.py benchmarks/results/decoders_gpu.json
"""

from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.numbers import cell, gib, percent, ratio
from megabatch.display.tables import Table

THEIRS = "sentence-transformers"
HEADINGS = [
    "model",
    "B",
    "system",
    "step, s",
    "pairs/s",
    "× best of sentence-transformers",
    "peak GiB",
    "share of the chip's peak",
]
COLOURS = (plots.GREEN, plots.ORANGE, plots.OCHRE, plots.MINT, plots.BLUE, plots.VIOLET, plots.GREY)


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    errors: dict[str, float] = {}
    for check in record["checks"]:
        errors[check["system"]] = max(errors.get(check["system"], 0.0), check.get("gradient_error", 0.0))
    rows = []
    models = _measured(record)
    results = sorted(  # measured in another order: the most important ones first
        (r for r in record["results"] if r["model"] in models), key=lambda r: (models.index(r["model"]), r["B"])
    )
    for (model, B), group in reports.groups(results, "model", "B").items():
        best = min((r["seconds"] for r in group if "seconds" in r and r["system"].startswith(THEIRS)), default=None)
        for r in group:
            took = r.get("seconds")
            cells = [model, f"{B:,}", r["system"], cell(took, ".2f") or r["status"], ratio(B, took, ".0f"), ratio(best, took)]
            share = r.get("share_of_peak")
            cells += [gib(r.get("peak_bytes")), "" if share is None else percent(share)]
            rows.append([*cells, cell(r.get("loss"), ".4f"), cell(errors.get(r["system"]), ".0e")])
    trained = "; ".join(
        f"{name}: {about['parameters'] / 1e6:,.0f} M parameters, trained: {about['trained']} "
        f"({about['trained_parameters'] / 1e6:,.1f} M)"
        for name, about in record["models"].items()
        if name in models
    )
    about = (
        f"{trained}. Each pair has a hard negative; all of them are negatives of every query. Chunks: the fastest of several "
        "sizes for each system. Peak: memory beyond weights and gradients. Share of the chip's peak: operations without "
        "recomputation and padding. Gradient error: relative to a plain step in float32, of a small decoder."
    )
    return reports.paragraphs(
        Table([*HEADINGS, "loss", "gradient error"], rows, names=(0, 2)).markdown(),
        " ".join((about, _largest(results), _compiling(record))).strip(),
    )


def _measured(record: dict[str, Any]) -> list[str]:
    """The models with a measurement; a run may end before the last of them."""
    return list(dict.fromkeys(r["model"] for r in record["results"] if "seconds" in r))


def _largest(results: list[dict[str, Any]]) -> str:
    """What a further pair costs in memory, by the two largest batches of each system. Smaller ones do not fill a chunk."""
    said = []
    for (model, system), group in reports.groups([r for r in results if "seconds" in r], "model", "system").items():
        largest = sorted(group, key=lambda r: r["B"])[-2:]
        if len(largest) == 2:
            few, many = largest
            each = (many["peak_bytes"] - few["peak_bytes"]) / (many["B"] - few["B"])
            said.append(f"{model}, {system}: {each / 2**10:,.0f} KiB")
    return f"Memory of one pair more, between the two largest batches: {'; '.join(said)}." if said else ""


def _compiling(record: dict[str, Any]) -> str:
    """How long users wait before the first step."""
    models = tuple(_measured(record))
    said = [
        f"{what}: {count} in {seconds:.0f} s" for what, count, seconds in record.get("compiling", ()) if what.startswith(models)
    ]
    return f"Compilations, with the first steps: {'; '.join(said)}." if said else ""


def draw(record: dict[str, Any]) -> Any:
    """Speed of each model against the batch."""
    models = _measured(record)
    title = f"One step with hard negatives; {reports.chip(record)}"
    figure, (panels,) = plots.figure(title, columns=max(1, len(models)), size=(5.5 * max(1, len(models)), 4.6))
    for axes, model in zip(panels, models, strict=False):
        rows = [r for r in record["results"] if r["model"] == model]
        for name, colour in zip(dict.fromkeys(r["system"] for r in rows), COLOURS, strict=False):
            points = sorted((r["B"], r["B"] / r["seconds"]) for r in rows if r["system"] == name and "seconds" in r)
            plots.line(axes, points, name, colour)
        axes.set_ylabel(f"pairs a second, {model}")
        plots.batch_axis(axes, [r["B"] for r in rows])
        axes.set_ylim(0, None)
    plots.legend(panels[0])
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
