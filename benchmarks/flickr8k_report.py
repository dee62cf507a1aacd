"""The table and the plot of a run of `flickr8k.py`: python benchmarks/flickr8k_report.py benchmarks/results/flickr8k.json."""

import statistics
from pathlib import Path
from typing import Any

import reports

OURS, THEIRS, AGAIN = "megabatch", "open_clip", "open_clip, half chunks"
COLOURS = {OURS: "#0b6e4f", THEIRS: "#c1440e"}
RECALLS = ("image_to_text_R@1", "image_to_text_R@10", "text_to_image_R@1", "text_to_image_R@10")


def table(record: dict[str, Any]) -> str:
    """Markdown."""
    headings = ["model", "batch", "loss", "steps", "first loss", "last loss", "largest difference from open_clip"]
    headings += ["error of the loss", "pairs/s", "peak of a step, GiB", "loss alone, ms", "loss alone, GiB"]
    headings += ["i→t R@1, R@10", "t→i R@1, R@10"]
    lines = ["| " + " | ".join(headings) + " |", "|---|---:|---|" + "---:|" * (len(headings) - 3)]
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
            cells += [", ".join(shown[:2]), ", ".join(shown[2:])]
            lines.append("| " + " | ".join(cells) + " |")
    about = (
        f"Data: {record['data']}; a part is held out for recall. All make the cached step on the same batches from the same "
        "weights, without ids: an image that is in a batch several times is its own negative, as in open_clip. Half chunks: "
        "rounding alone. Error: of a loss against float64 on the embeddings it was given, the largest of all steps. Peak: "
        "beyond weights, gradients and the optimizer's state."
    )
    for check in record["checks"]:
        about += f" {check['model']}: gradients of both losses differ by {check['gradient_error']:.0e} in float32."
    repeats = ", ".join(f"{run['repeated']:,} of {run['batch']:,}" for run in finished(record))
    return "\n".join([*lines, "", f"{about} Pairs whose image is in the batch already: {repeats}."])


def finished(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs that have steps."""
    return [run for run in record["runs"] if run["systems"][THEIRS]]


def apart(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Of two curves, step by step as far as both go."""
    return [abs(a["loss"] - b["loss"]) for a, b in zip(steps, others, strict=False)]


def seconds(steps: list[dict[str, Any]]) -> float:
    """Of a step; the first one compiles."""
    return statistics.median(step["seconds"] for step in steps[1:] or steps)


def draw(record: dict[str, Any], path: Path) -> None:
    """For each run both curves, and what lies between them."""
    from matplotlib.figure import Figure

    runs = finished(record)
    figure = Figure(figsize=(11, 3.6 * len(runs)), layout="constrained")
    chip = record["machine"]["gpu"] or record["machine"]["cpu"]
    figure.suptitle(f"Training on {record['data']}: two losses, the same seeds; {chip}")
    for (left, right), run in zip(figure.subplots(len(runs), 2, squeeze=False), runs, strict=True):
        ours, theirs = (run["systems"][system] for system in (OURS, THEIRS))
        numbers = [step["step"] for step in ours][: len(theirs)]
        left.plot(
            numbers, [step["loss"] for step in theirs], "o", color=COLOURS[THEIRS], markersize=7, label=f"{THEIRS}, dense"
        )
        left.plot(numbers, [step["loss"] for step in ours][: len(theirs)], "-", color=COLOURS[OURS], linewidth=2, label=OURS)
        left.set(title=f"{run['model']}, batch {run['batch']:,}", xlabel="step", ylabel="loss")
        right.plot(numbers, apart(ours, theirs), "-", color="black", marker=".", label="between the curves")
        if run["systems"].get(AGAIN):
            again = apart(run["systems"][AGAIN], theirs)
            right.plot(numbers[: len(again)], again, "--", color="#8e44ad", marker=".", label="open_clip in half chunks")
        for system in (OURS, THEIRS):
            errors = [abs(step["error"]) for step in run["systems"][system]][: len(theirs)]
            right.plot(numbers, errors, ":", color=COLOURS[system], marker=".", label=f"{system} against float64")
        right.set(title="difference", xlabel="step", yscale="log")
        bottom, top = right.get_ylim()
        right.set_ylim(bottom, top * (top / bottom) ** 0.3)  # room for the legend
        for axes, where in ((left, "upper right"), (right, "upper center")):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(frameon=False, fontsize=8, loc=where, ncols=1 if axes is left else 2)
    figure.savefig(path, dpi=150)


def report(path: Path) -> None:
    """Writes both beside the JSON file."""
    reports.write(path, table, draw)


if __name__ == "__main__":
    reports.main(__doc__, report)
