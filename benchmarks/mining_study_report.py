"""Tables, plot and text of `mining_study.py`, from its lines.

python benchmarks/mining_study_report.py benchmarks/results/mining_study.jsonl
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reports
from image_study_report import RECALLS, Value

from megabatch.display import plots
from megabatch.display.tables import Table
from megabatch.evaluation import results

BASE, CONTROL, MINED, UNFILTERED = ARMS = ("base", "control", "mined", "unfiltered")
COLOURS = {BASE: plots.GREY, CONTROL: plots.BLUE, MINED: plots.GREEN, UNFILTERED: plots.ORANGE}
TITLES = {"wordnet": "WordNet", "flickr8k": "Flickr8k"}
WAYS = {
    "wordnet": {"query_to_text": "word → definition", "text_to_query": "definition → word"},
    "flickr8k": {"image_to_text": "image → text", "text_to_image": "text → image"},
}

Line = dict[str, Any]


class Part:
    """The lines of one data set; of a seed that began again, the last."""

    def __init__(self, name: str, lines: Sequence[Line]) -> None:
        self.title, self.ways = TITLES[name], WAYS[name]
        self.metrics = {f"{way}_R@{k}": f"{told} R@{k}" for way, told in self.ways.items() for k in RECALLS}
        last = {(line["arm"], line["seed"]): line for line in lines if line["data"] == name}
        self.of = {arm: {seed: line for (found, seed), line in last.items() if found == arm} for arm in ARMS}
        self.arms = [arm for arm in ARMS if self.of[arm]]
        self.any = next(iter(last.values()))
        mined = next(iter(self.of[MINED].values()), None)
        self.trained = self.any["pairs"] if mined is None else (mined["found"] + mined["missing"]) // mined["negatives"]

    def mean_recall(self, line: Line) -> float:
        """The mean of recall@1, 5 and 10 in both directions."""
        return sum(line[metric] for metric in self.metrics) / len(self.metrics)

    def value(self, arm: str, metric: str | None = None) -> Value:
        """A recall over the seeds, or the mean recall."""
        return Value.of(list(self.of[arm].values()), self.mean_recall if metric is None else lambda line: line[metric])

    def change(self, arm: str, metric: str | None = None) -> list[float]:
        """Points more than the control of the same seed, of each seed that has both."""
        of = self.mean_recall if metric is None else lambda line: line[metric]
        pairs = [(line, self.of[CONTROL].get(seed)) for seed, line in self.of[arm].items()]
        return [100 * (of(line) - of(control)) for line, control in pairs if control is not None]

    def table(self) -> Table:
        """A row for each arm."""
        rows = [
            [arm, str(len(self.of[arm])), str(self.value(arm)), *(str(self.value(arm, metric)) for metric in self.metrics)]
            for arm in self.arms
        ]
        line = self.any
        notes = (
            f"Recall in per cent among {line['num_samples']:,} held-out samples, mean ± standard deviation over seeds. "
            f"Model: {line['model']}. Base: {line['steps']:,} steps of {line['batch_size']:,} pairs; the others: "
            f"{line['further']:,} steps more from its weights. {line['negatives']} mined negatives for each of "
            f"{self.trained:,} pairs."
        )
        return Table(["model", "seeds", "mean recall", *self.metrics.values()], rows, notes=notes)

    def words(self) -> list[str]:
        """What the figures say. A change within two standard errors over the seeds is not called one."""
        said = []
        for arm in (MINED, UNFILTERED):
            changes = self.change(arm) if arm in self.arms else []
            if not changes:
                continue
            found = Value.of([{"change": change} for change in changes], lambda line: line["change"])
            clear = found.count > 1 and abs(found.mean) > 2 * found.deviation / found.count**0.5
            verdict = ("more" if found.mean > 0 else "less") if clear else "not distinguishable"
            than = f"{verdict} than the control's" if clear else f"{verdict} from the control's"
            filtered = "with the filter" if arm == MINED else "without a filter"
            said.append(
                f"{self.title}: mined negatives {filtered} have a mean recall of {self.value(arm)} %, {than} "
                f"{self.value(CONTROL)} % ({found.mean:+.2f} points; by seed {', '.join(f'{c:+.2f}' for c in changes)})."
            )
        return [*said, *self._counts()]

    def _counts(self) -> list[str]:
        """How many negatives were found, and how many are known to be wrong."""
        told = []
        for arm in (MINED, UNFILTERED):
            lines = list(self.of[arm].values())
            if not lines:
                continue
            found, missing = (sum(line[key] for line in lines) for key in ("found", "missing"))
            text = f"{arm}: {found / (found + missing):.1%} of the wanted negatives were found"
            if "known_false" in lines[0]:
                wrong = sum(line["known_false"] for line in lines)
                text += f", and {wrong / found:.2%} of them are other definitions of the same word"
            told.append(text)
        return [f"{self.title}, {'; '.join(told)}."] if told else []


def draw(parts: Sequence[Part]) -> Any:
    """For each data set, the recalls of all models, and what mined negatives change by seed."""
    seeds = max(len(part.of[BASE]) for part in parts)
    title = f"Hard negatives of megabatch mine: recall after further training, {seeds} seeds"
    figure, grid = plots.figure(title, rows=len(parts), columns=2, size=(12.5, 4.4 * len(parts)))
    for part, (recalls, changes) in zip(parts, grid, strict=True):
        width = 0.8 / len(part.arms)
        for number, arm in enumerate(part.arms):
            values = [part.value(arm, metric) for metric in part.metrics]
            places = [i + (number - (len(part.arms) - 1) / 2) * width for i in range(len(values))]
            heights, errors = [100 * value.mean for value in values], [100 * value.deviation for value in values]
            recalls.bar(places, heights, 0.92 * width, yerr=errors, color=COLOURS[arm], label=arm, ecolor=plots.INK, capsize=2)
        for number, arm in enumerate(arm for arm in (MINED, UNFILTERED) if arm in part.arms):
            for i, metric in enumerate([None, *part.metrics]):
                found, place = part.change(arm, metric), i + 0.26 * (number - 0.5)
                if found:
                    mean = sum(found) / len(found)
                    changes.plot([place] * len(found), found, "o", color=COLOURS[arm], alpha=0.45, markersize=5)
                    changes.plot(
                        [place - 0.09, place + 0.09], [mean, mean], color=COLOURS[arm], linewidth=3, label=arm * (not i)
                    )
        changes.axhline(0, color=plots.BLUE, linewidth=1.5)
        changes.text(6.45, 0, "control ", color=plots.BLUE, ha="right", va="bottom", fontsize=8)
        names = [name.replace(" → ", "\n→ ").replace(" R@", "\nR@") for name in part.metrics.values()]
        recalls.set(title=f"{part.title}: recall of {part.any['num_samples']:,} held-out samples", ylabel="recall, %")
        changes.set(title=f"{part.title}: difference from the control, each seed and the mean", ylabel="points of recall")
        recalls.set_xticks(range(len(names)), names, fontsize=7.5)
        changes.set_xticks(range(len(names) + 1), ["mean\nrecall", *names], fontsize=7.5)
        for axes in (recalls, changes):
            axes.grid(visible=False, axis="x")
            plots.legend(axes, ncols=2)
    return figure


def report(path: Path) -> None:
    """Writes `.md` and `.png` beside the lines."""
    lines = results.read(path) if path.exists() else []
    if not lines:
        print(f"{path} has no lines yet")
        return
    parts = [Part(name, lines) for name in TITLES if any(line["data"] == name for line in lines)]
    words = "\n".join(f"- {sentence}" for part in parts for sentence in part.words())
    tables = [f"### {part.title}\n\n{part.table().markdown()}" for part in parts]
    machines = "; ".join(dict.fromkeys(line["machine"] for line in lines))
    names = " ".join(name for name in TITLES if any(line["data"] == name for line in lines))
    about = f"Machine: {machines}.\n\nCommand: `python benchmarks/mining_study.py --parts {names} --name {path.stem}`\n"
    path.with_suffix(".md").write_text(reports.paragraphs(words, *tables, about), "utf-8")
    if plots.available():
        plots.save(draw(parts), path.with_suffix(".png"))
    print(words)


if __name__ == "__main__":
    reports.main(__doc__, report)
