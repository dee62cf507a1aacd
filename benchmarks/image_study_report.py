"""Tables, plot and text of `image_study.py`, from its lines.

python benchmarks/image_study_report.py benchmarks/results/image_study.jsonl
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import reports

from megabatch.display import plots
from megabatch.display.tables import Table
from megabatch.evaluation import results

WAYS = {"text_to_image": "text → image", "image_to_text": "image → text"}
RECALLS = (1, 5, 10)
METRICS = [f"{way}_R@{k}" for way in WAYS for k in RECALLS]
RULES = {"none": "constant", "sqrt": "square root", "linear": "linear"}
COLOURS = {"none": plots.BLUE, "sqrt": plots.GREEN, "linear": plots.ORANGE}
LOSSES = {"megabatch": plots.GREEN, "open_clip": plots.ORANGE, "inf_cl": plots.VIOLET}
BASE, TRIAL = 1024, 1000
CLIP, SIGLIP = "megabatch", "siglip"
# Standard errors that chance exceeds in one of twenty cases, by degrees of freedom from 1 on (Student's distribution). The last
# serves more degrees too, for which it is a little too strict.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

Line = dict[str, Any]


def mean_recall(line: Line) -> float:
    """The mean of recall@1, 5 and 10 in both directions; 0 for a run whose loss was not finite."""
    return sum(line.get(name, 0.0) for name in METRICS) / len(METRICS)


class Value(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, lines: Sequence[Line], metric: Callable[[Line], float] = mean_recall) -> "Value":
        """Of at least one line."""
        values = [metric(line) for line in lines]
        mean = sum(values) / len(values)
        spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
        return cls(mean, spread**0.5, len(values))

    def __str__(self) -> str:
        """In per cent."""
        return f"{100 * self.mean:.1f} ± {100 * self.deviation:.1f}" if self.count > 1 else f"{100 * self.mean:.1f}"

    def differs(self, other: "Value") -> bool:
        """Whether the means are further apart than chance explains at 5 %, by Welch's test; never with one seed."""
        if min(self.count, other.count) < 2:
            return False
        parts = [value.deviation**2 / value.count for value in (self, other)]
        doubts = sum(part**2 / (value.count - 1) for part, value in zip(parts, (self, other), strict=True))
        freedom = int(sum(parts) ** 2 / doubts + 1e-9) if doubts > 0 else len(STUDENT)
        return abs(self.mean - other.mean) > STUDENT[min(freedom, len(STUDENT)) - 1] * sum(parts) ** 0.5 + 1e-9


class Study:
    """The lines, by what they were run for."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        runs = [line for line in lines if line["seed"] != TRIAL]
        with_ids = [line for line in runs if line["loss"] == CLIP and line["ids"]]
        counts = [line["batch_size"] * line["steps"] for line in with_ids]
        self.samples = min(counts, default=0)  # the longer schedules see more
        self.trials = [line for line in lines if line["seed"] == TRIAL]
        self.equal = [line for line in with_ids if line["batch_size"] * line["steps"] == self.samples]
        self.longer = [line for line in with_ids if line["batch_size"] * line["steps"] > self.samples]
        self.losses = [line for line in runs if not line["ids"]]
        self.siglip = [line for line in runs if line["loss"] == SIGLIP]
        self.sizes = sorted({line["batch_size"] for line in self.equal})

    def of(self, size: int, rule: str) -> list[Line]:
        """Runs at equal samples; at the batch that the rate was chosen for, all rules are one."""
        return [line for line in self.equal if line["batch_size"] == size and (line["rule"] == rule or size == self.base)]

    @property
    def base(self) -> int:
        """The batch that the rate was chosen for."""
        return next((line["batch_size"] for line in self.trials), BASE)

    def best_rule(self, size: int) -> str:
        """By the mean over seeds."""
        known = [rule for rule in RULES if self.of(size, rule)]
        return max(known, key=lambda rule: Value.of(self.of(size, rule)).mean)

    def best_lines(self, size: int) -> list[Line]:
        """Runs of the best rule."""
        return self.of(size, self.best_rule(size))


def tables(study: Study) -> list[tuple[str, Table]]:
    """(title, table) of each part that has lines."""
    made = [("Tower, crops and rate", _choices(study)), ("Batch sizes and rules", _rules(study))]
    made += [("The best rule of each batch size", _recalls(study)), ("Longer schedules", _longer(study))]
    made += [("Losses", _losses(study)), ("SigLIP beside CLIP", _siglip(study))]
    return [(title, table) for title, table in made if table.rows]


def _choices(study: Study) -> Table:
    rows = [
        [
            line["tower"],
            f"{line['area']:g}",
            "yes" if line["flip"] else "no",
            f"{line['lr']:g}",
            f"{line['batch_size'] * line['steps']:,}",
            f"{100 * mean_recall(line):.1f}",
        ]
        for line in sorted(study.trials, key=mean_recall, reverse=True)
    ]
    notes = (
        f"{study.base:,} pairs, one seed that the study does not use. Tower: convolutions, blocks of a stage @ pixels. Towers "
        "get equal operations, so a larger one sees fewer pairs. Recall is among 1,000 training photographs kept apart for it."
    )
    return Table(["tower", "least area of a crop", "mirrored", "rate", "pairs seen", "mean recall, %"], rows, notes=notes)


def _rules(study: Study) -> Table:
    rows = []
    for size in study.sizes:
        cells = [f"{size:,}", f"{study.samples // size:,}"]
        for rule in RULES:
            found = study.of(size, rule)
            cells.append(str(Value.of(found)) if found else "")
        rate = max(line.get("pairs_per_second", 0.0) * line["beside"] for line in study.best_lines(size))
        rows.append([*cells, f"{rate:,.0f}"])
    notes = (
        f"Mean recall in per cent, mean ± standard deviation over seeds; {study.samples:,} pairs seen by every run. The last "
        "column is the rate of one run times the number of runs that shared the GPU."
    )
    headings = ["pairs in a batch", "steps", *(f"rate {name}" for name in RULES.values()), "pairs/s"]
    return Table(headings, rows, notes=notes)


def _cells(lines: Sequence[Line]) -> list[str]:
    return [str(Value.of(lines, lambda line, name=name: line.get(name, 0.0))) for name in METRICS]  # type: ignore[misc]


_HEADINGS = [f"{name} R@{k}" for name in WAYS.values() for k in RECALLS]


def _recalls(study: Study) -> Table:
    rows = [[f"{size:,}", RULES[study.best_rule(size)], *_cells(study.best_lines(size))] for size in study.sizes]
    return Table(["pairs in a batch", "rate", *_HEADINGS], rows, notes="Recall in per cent.")


def _longer(study: Study) -> Table:
    rows = []
    for size in sorted({line["batch_size"] for line in study.longer}):
        lines = [line for line in study.longer if line["batch_size"] == size]
        before = str(Value.of(study.best_lines(size))) if size in study.sizes else ""
        seen = size * lines[0]["steps"]
        rows.append([f"{size:,}", f"{lines[0]['steps']:,}", f"{seen / study.samples:g}", before, str(Value.of(lines))])
    notes = f"Mean recall in per cent; 1 × is {study.samples:,} pairs."
    return Table(["pairs in a batch", "steps", "pairs seen, ×", "with 1 ×", "with these steps"], rows, notes=notes)


def _losses(study: Study) -> Table:
    rows = []
    for loss in LOSSES:
        lines = [line for line in study.losses if line["loss"] == loss]
        whole = [line for line in lines if "failed" not in line]
        if whole:
            least = min(min(line["losses"]) for line in whole)
            rows.append(
                [loss, str(len(whole)), *_cells(lines), f"{least:.3f}", f"{sum(x['scale'] for x in whole) / len(whole):.1f}"]
            )
    headings = ["loss", "seeds", *_HEADINGS, "least value of the loss", "learned scale"]
    return Table(
        headings, rows, notes="4,096 pairs, the same seeds, no ids. Recall in per cent. A cross-entropy is never below 0."
    )


def _siglip(study: Study) -> Table:
    rows = []
    for size in sorted({line["batch_size"] for line in study.siglip}):
        lines = [line for line in study.siglip if line["batch_size"] == size]
        for name, found in (("CLIP", study.best_lines(size) if size in study.sizes else []), ("SigLIP", lines)):
            if found:
                rows.append([f"{size:,}", name, *_cells(found)])
    return Table(["pairs in a batch", "loss", *_HEADINGS], rows, notes="The same learning rate for both. Recall in per cent.")


def words(study: Study) -> str:
    """What the figures say. A difference that chance explains is not called one."""
    if not study.sizes:
        return ""
    values = {size: Value.of(study.best_lines(size)) for size in study.sizes}
    top = max(values, key=lambda size: values[size].mean)
    alike = [size for size in study.sizes if not values[size].differs(values[top])]
    rule = RULES[study.best_rule(top)]
    said = [
        f"At equal samples the best mean recall is {values[top]} % with {top:,} pairs in a batch (rate: {rule})."
        + (
            f" Not distinguishable from it: {', '.join(f'{size:,}' for size in alike if size != top)}."
            if len(alike) > 1
            else ""
        )
    ]
    largest = study.sizes[-1]
    if largest != top and values[largest].differs(values[top]):
        said.append(f"With {largest:,} pairs, and so {study.samples // largest:,} steps, it is {values[largest]} %.")
    rules = {size: study.best_rule(size) for size in study.sizes if size != study.base}
    for rule, name in RULES.items():
        won = [f"{size:,}" for size, best in rules.items() if best == rule]
        if won:
            said.append(f"The {name} rule is the best at {', '.join(won)} pairs.")
    for size in sorted({line["batch_size"] for line in study.longer}):
        lines = [line for line in study.longer if line["batch_size"] == size]
        now = Value.of(lines)
        verdict = "more than" if now.differs(values[top]) and now.mean > values[top].mean else "not more than"
        verdict = "less than" if now.differs(values[top]) and now.mean < values[top].mean else verdict
        said.append(f"{size:,} pairs with {lines[0]['steps']:,} steps reach {now} %, {verdict} the best at equal samples.")
    said += _words_of_losses(study)
    return "\n".join(f"- {sentence}" for sentence in said)


def _words_of_losses(study: Study) -> list[str]:
    of = {loss: [line for line in study.losses if line["loss"] == loss] for loss in LOSSES}
    if not of[CLIP]:
        return []
    ours, said = Value.of(of[CLIP]), []
    for loss, lines in of.items():
        if loss == CLIP or not lines:
            continue
        theirs = Value.of(lines)
        same = "differs from" if theirs.differs(ours) else "is within seed noise of"
        said.append(f"The same run with the loss of {loss} reaches {theirs} %, which {same} ours, {ours} %.")
    return said


def draw(study: Study) -> Any:
    """Recall against the batch size by rule, the best rule in detail, longer schedules, and losses step by step."""
    seeds = len({line["seed"] for line in study.equal})
    title = f"Flickr8k, 1,000 photographs held out: {study.samples:,} pairs seen by every run, {seeds} seeds"
    parts = [_draw_rules, _draw_best, *([_draw_longer] if study.longer else []), *([_draw_losses] if study.losses else [])]
    rows = -(-len(parts) // 2)
    figure, panels = plots.figure(title, rows=rows, columns=2, size=(12, 4.2 * rows))
    for part, axes in zip(parts, panels.flat, strict=False):
        part(study, axes)
    for axes in panels.flat[len(parts) :]:
        axes.set_visible(False)
    return figure


def _draw_rules(study: Study, by_rule: Any) -> None:
    for number, (rule, name) in enumerate(RULES.items()):
        points = [(size * 1.04 ** (number - 1), Value.of(study.of(size, rule))) for size in study.sizes if study.of(size, rule)]
        _bars(by_rule, points, f"rate {name}", COLOURS[rule])
    by_rule.set(title="three rules for the learning rate", ylabel="mean recall, %")
    _batches(study, by_rule)


def _draw_best(study: Study, detail: Any) -> None:
    for way, colour, style in zip(WAYS, (plots.GREEN, plots.BLUE), ("-", "--"), strict=True):
        for k, strength in zip(RECALLS, (1.0, 0.7, 0.45), strict=True):
            metric = f"{way}_R@{k}"
            found = [
                (size, Value.of(study.best_lines(size), lambda line, name=metric: line.get(name, 0.0)))  # type: ignore[misc]
                for size in study.sizes
            ]
            _bars(detail, found, f"{WAYS[way]} R@{k}", colour, linestyle=style, alpha=strength)
    detail.set(title="the best rule of each batch size", ylabel="recall, %")
    _batches(study, detail)


def _draw_longer(study: Study, longer: Any) -> None:
    _bars(longer, [(size, Value.of(study.best_lines(size))) for size in study.sizes], "equal samples", plots.GREEN)
    more = sorted({line["batch_size"] for line in study.longer})
    points = [(size, Value.of([line for line in study.longer if line["batch_size"] == size])) for size in more]
    _bars(longer, points, f"{study.longer[0]['steps']:,} steps each", plots.ORANGE)
    longer.set(title="longer schedules for large batches", ylabel="mean recall, %")
    _batches(study, longer)


def _batches(study: Study, axes: Any) -> None:
    """Batch sizes below, and a legend."""
    plots.batch_axis(axes, study.sizes, "pairs in a batch")
    plots.legend(axes, ncols=2)


def _draw_losses(study: Study, losses: Any) -> None:
    for loss, colour in LOSSES.items():
        lines = [line for line in study.losses if line["loss"] == loss and "failed" not in line]
        for number, line in enumerate(lines):
            every = line["steps"] / len(line["losses"])
            name = loss if number == 0 else "_"
            losses.plot([i * every for i in range(len(line["losses"]))], line["losses"], color=colour, label=name, alpha=0.7)
    losses.set(title="the loss of each run without ids", xlabel="step", ylabel="loss")
    plots.legend(losses)


def _bars(axes: Any, points: Sequence[tuple[float, Value]], name: str, colour: str, **style: Any) -> None:
    if points:
        sizes, values = zip(*points, strict=True)
        deviations = [100 * value.deviation for value in values]
        options = {"fmt": "o-", "capsize": 3, "elinewidth": 1.2, "markersize": 4.5} | style
        if "linestyle" in style:
            options["fmt"] = "o"
        axes.errorbar(sizes, [100 * value.mean for value in values], yerr=deviations, color=colour, label=name, **options)


def report(path: Path) -> None:
    """Writes `.md` and `.png` beside the lines."""
    lines = results.read(path) if path.exists() else []
    if not lines:
        print(f"{path} has no lines yet")
        return
    study = Study(lines)
    machines = "; ".join(dict.fromkeys(line["machine"] for line in lines))
    parts = [f"### {title}\n\n{table.markdown()}" for title, table in tables(study)]
    beside = max(line["beside"] for line in lines)
    about = f"Machine: {machines}.\n\nCommand: `python benchmarks/image_study.py --data FOLDER --beside {beside}`\n"
    path.with_suffix(".md").write_text(reports.paragraphs(words(study), *parts, about), "utf-8")
    if plots.available() and study.sizes:
        plots.save(draw(study), path.with_suffix(".png"))
    print(words(study))


if __name__ == "__main__":
    reports.main(__doc__, report)
