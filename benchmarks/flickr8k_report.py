"""The table and the plot of a run of `flickr8k.py`: python benchmarks/flickr8k_report.py benchmarks/results/flickr8k.json."""

import statistics
from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.tables import Table

OURS, THEIRS, AGAIN = "megabatch", "open_clip", "open_clip, half chunks"
COLOURS = {OURS: plots.GREEN, THEIRS: plots.ORANGE}
RECALLS = ("image_to_text_R@1", "image_to_text_R@10", "text_to_image_R@1", "text_to_image_R@10")


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    headings = ["model", "batch", "loss", "steps", "first loss", "last loss", "largest difference from open_clip"]
    headings += ["error of the loss", "pairs/s", "peak of a step, GiB", "loss alone, ms", "loss alone, GiB"]
    headings += ["i→t R@1, R@10", "t→i R@1, R@10"]
    rows = []
    for run in finished(record):
        for system, steps in run["systems"].items():
            off = max(apart(steps, run["systems"][THEIRS]))
            cells = [run["model"], f"{run['batch']:,}", system, str(len(steps))]
            cells += [f"{steps[0]['loss']:.5f}", f"{steps[-1]['loss']:.5f}", "" if system == THEIRS else f"{off:.1e}"]
            cells += [f"{max(abs(step['error']) for step in steps):.1e}", f"{run['batch'] / seconds(steps):.0f}"]
            cells.append(f"{max(step['peak_bytes'] for step in steps) / 2**30:.2f}")
            alone, recall = run.get("alone", {}).get(system), run.get("recall", {}).get(system)
            cells += [f"{alone['loss_ms']:.2f}", f"{alone['loss_peak_bytes'] / 2**30:.2f}"] if alone else ["", ""]
            shown = [f"{100 * recall[name]:.1f} %" for name in RECALLS] if recall else [""] * 4
            rows.append([*cells, ", ".join(shown[:2]), ", ".join(shown[2:])])
    about = (
        f"Data: {record['data']}; a part is held out for recall. All systems run the cached step on the same batches from the "
        "same weights, without ids: an image that occurs twice in a batch is its own negative, as in open_clip. Half chunks: "
        "the same loss in other chunks, to show the effect of rounding alone. Error: the largest error of all steps, of the "
        "loss relative to float64 on the same embeddings. Peak: memory beyond weights, gradients and optimizer state."
    )
    for check in record["checks"]:
        about += f" {check['model']}: gradients of both losses differ by {check['gradient_error']:.0e} in float32."
    repeats = ", ".join(f"{run['repeated']:,} of {run['batch']:,}" for run in finished(record))
    about += f" Pairs whose image is in the batch already: {repeats}."
    return Table(headings, rows, notes=about, names=(0, 2)).markdown()


def finished(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs that have steps."""
    return [run for run in record["runs"] if run["systems"][THEIRS]]


def apart(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Differences of two loss curves, as far as both go."""
    return [abs(a["loss"] - b["loss"]) for a, b in zip(steps, others, strict=False)]


def seconds(steps: list[dict[str, Any]]) -> float:
    """Median time of a step without the first, which compiles."""
    return statistics.median(step["seconds"] for step in steps[1:] or steps)


def draw(record: dict[str, Any]) -> Any:
    """For each run, both loss curves and their difference."""
    runs = finished(record)
    title = f"Training on {record['data']}: two losses, the same seeds; {reports.chip(record)}"
    figure, grid = plots.figure(title, rows=len(runs), columns=2, size=(11, 3.6 * len(runs)))
    for (left, right), run in zip(grid, runs, strict=True):
        ours, theirs = (run["systems"][system] for system in (OURS, THEIRS))
        numbers = [step["step"] for step in ours][: len(theirs)]

        def points(values: list[float], numbers: list[int] = numbers) -> list[tuple[float, float]]:
            return list(zip(numbers, values, strict=False))

        dots = {"linestyle": "", "markersize": 7}
        plots.line(left, points([step["loss"] for step in theirs]), f"{THEIRS}, dense", COLOURS[THEIRS], **dots)
        plots.line(left, points([step["loss"] for step in ours]), OURS, COLOURS[OURS], marker=None, linewidth=2)
        left.set(title=f"{run['model']}, batch {run['batch']:,}", xlabel="step", ylabel="loss")
        plots.line(right, points(apart(ours, theirs)), "between the curves", plots.INK, marker=".")
        again = apart(run["systems"].get(AGAIN, []), theirs)
        plots.line(right, points(again), "open_clip in half chunks", plots.VIOLET, marker=".", linestyle="--")
        for system in (OURS, THEIRS):
            errors = [abs(step["error"]) for step in run["systems"][system]]
            plots.line(right, points(errors), f"{system} against float64", COLOURS[system], marker=".", linestyle=":")
        right.set(title="difference", xlabel="step", yscale="log")
        bottom, top = right.get_ylim()
        right.set_ylim(bottom, top * (top / bottom) ** 0.3)  # room for the legend
        for axes, where in ((left, "upper right"), (right, "upper center")):
            axes.xaxis.get_major_locator().set_params(integer=True)
            plots.legend(axes, loc=where, ncols=1 if axes is left else 2)
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
