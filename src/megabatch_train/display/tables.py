"""Formats numbers, metrics and tables as text for people."""

import html
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megabatch import extras
from megabatch_train.evaluation.evaluate import expect_rank, expect_recall
from megabatch_train.names import escape, redact, sanitize

# ----------------------------------------------------------------------------------------------------------------------
# Numbers as text.

MISSING = "–"


def count(value: float) -> str:
    """Formats a count, as in "1,234", "12.3k" or "4.6M". A fractional value below 10 has two significant digits."""
    if value < 10 and value % 1:
        return f"{value:.2g}"
    if value < 1e4:
        return f"{value:,.0f}"
    power, letter = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0])
    return f"{value / power:,.1f}{letter}".replace(".0", "")


def pairs(value: float) -> str:
    """Formats a batch size in powers of two: "512", "64k" for 65,536, "1M" for 1,048,576."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % (unit / 4) == 0:
            return f"{value / unit:g}{letter}"
    return f"{value:,g}" if value < 1e6 else f"{value:,.0f}"


def size(value: float) -> str:
    """Formats bytes in a suitable unit, such as "1.5 GiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 2**power:
            return f"{value / 2**power:.1f} {unit}"
    return f"{value:.0f} B"


def gibibytes(value: float) -> str:
    """Formats bytes in GiB with two decimals, for columns in which the unit must not change."""
    return f"{value / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """Formats a duration, as in "4 s", "1:02", "3:04:05" or "2 d 3 h"."""
    if not math.isfinite(seconds) or seconds < 0:
        return MISSING
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60}:{total % 60:02d}"
    if total < 86400:
        return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"
    return f"{total // 86400} d {total // 3600 % 24} h"


def short(value: Any) -> str:
    """Formats a number with four significant digits, or as a dash for None, NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def percent(value: Any) -> str:
    """Formats a fraction as a percentage with one decimal, or with one significant digit below 0.1%.

    None, NaN and infinity become a dash.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    decimals = max(1, math.ceil(-math.log10(100 * value))) if 0 < value < 1e-3 else 1
    return f"{value:.{decimals}%}"


def cell(value: float | None, form: str) -> str:
    """Returns `format(value, form)`, or an empty text for None."""
    return "" if value is None else format(value, form)


def ratio(value: float | None, base: float | None, form: str = ".2f") -> str:
    """Formats `value / base`, or returns an empty text if one of them is None or zero."""
    return format(value / base, form) if value and base else ""


def gib(value: float | None, form: str = ".2f") -> str:
    """Formats bytes in GiB without the unit, or returns an empty text for None."""
    return "" if value is None else format(value / 2**30, form)


# ----------------------------------------------------------------------------------------------------------------------
# A table for terminals, text files, Markdown and HTML.


OURS, WRONG = "ours", "wrong"  # marks of rows, which a terminal and a page show in bold and in red
TEXT_WIDTH = 80  # most characters in a line of a plain-text table whose headings are not wrapped
NAME_WIDTH = 9  # fewest characters of a column of names in a narrow terminal


@dataclass(frozen=True)
class TextTable:
    """A table with headings and rows. A cell is shown as `str(cell)`, without control characters and credentials.

    Args:
        headings: heading of each column. If all are empty, the table has no headings.
        rows: cells of each row, as many as `headings`.
        title: line above the table.
        notes: paragraph below the table.
        names: indices of columns with text, which are aligned to the left. Other columns are aligned to the right.
        marks: OURS or WRONG by the index of a row.

    Example: `TextTable(["system", "ms"], [["megabatch", 1.5]]).markdown()`
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    notes: str = ""
    names: Sequence[int] = (0,)
    marks: Mapping[int, str] = field(default_factory=dict)

    def text(self) -> str:
        """Returns plain text. If the table is wider than `TEXT_WIDTH`, headings are wrapped and columns are closer together."""
        rows = self._cells()
        widths = [max(map(len, column)) for column in zip(self.headings, *rows, strict=True)]
        header, gap = [list(self.headings)], "  "
        if sum(width + 2 for width in widths) > TEXT_WIDTH:
            widths, gap = self._least_widths(), " "
            wrapped = [textwrap.wrap(name, width) for name, width in zip(self.headings, widths, strict=True)]
            height = max(map(len, wrapped))
            header = [list(line) for line in zip(*([""] * (height - len(lines)) + lines for lines in wrapped), strict=True)]
        lines = [sanitize(self.title)] if self.title else []
        for row in (*header, *rows) if any(self.headings) else rows:
            aligned = [
                cell.ljust(width) if column in self.names else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append((gap + gap.join(aligned)).rstrip())
        return "\n".join([*lines, *([textwrap.fill(self.notes, TEXT_WIDTH)] if self.notes else [])])

    def markdown(self) -> str:
        """Returns a Markdown table, with the title and the notes as paragraphs."""
        rules = ["---" if column in self.names else "---:" for column in range(len(self.headings))]
        lines = ["| " + " | ".join(row) + " |" for row in (self.headings, *self._cells())]
        table = "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])
        return "\n\n".join(part for part in (self.title, table, self.notes) if part)

    def html(self) -> str:
        """Returns a `<table>` without the title and the notes."""
        head = self._html_row("th", list(self.headings), "")
        body = "".join(self._html_row("td", cells, self.marks.get(i, "")) for i, cells in enumerate(self._cells()))
        return f'<div class="card table"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'

    def print(self) -> None:
        """Prints the table to standard output, with rich in a terminal, or else as plain text."""
        if sys.stdout.isatty() and extras.is_installed("rich"):
            self._print_rich()
        else:
            print(self.text())

    def _cells(self) -> list[list[str]]:
        return [[escape(redact(str(cell)), keep="") for cell in row] for row in self.rows]

    def _least_widths(self) -> list[int]:
        """Returns the width of each column if headings are wrapped between words and cells are not wrapped."""
        columns = zip(*self._cells(), strict=True) if self.rows else ((),) * len(self.headings)
        return [max(map(len, (*name.split(), *cells, " "))) for name, cells in zip(self.headings, columns, strict=True)]

    def _html_row(self, tag: str, cells: Sequence[str], mark: str) -> str:
        kinds = [f"{tag} class=name" if column in self.names else tag for column in range(len(cells))]
        inside = "".join(f"<{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr class={mark}>{inside}</tr>" if mark else f"<tr>{inside}</tr>"

    def _print_rich(self) -> None:
        rich, console, text, box = (
            extras.load(f"rich.{name}", purpose="A table") for name in ("table", "console", "text", "box")
        )
        drawn = rich.Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), show_header=any(self.headings))
        widths = self._least_widths()
        for column, (heading, width) in enumerate(zip(self.headings, widths, strict=True)):
            if column in self.names:
                widths[column] = min(width, NAME_WIDTH)
                drawn.add_column(text.Text(heading), overflow="fold", min_width=widths[column])
            else:
                drawn.add_column(text.Text(heading), justify="right", min_width=width)
        for i, cells in enumerate(self._cells()):
            style = {OURS: "bold", WRONG: "red"}.get(self.marks.get(i, ""))
            drawn.add_row(*map(text.Text, cells), style=style)
        out = console.Console(highlight=False, markup=False)
        if self.title:
            out.print(text.Text(sanitize(self.title), style="bold"))
        # If the terminal is too narrow, it wraps the lines of the table. rich would cut off numbers instead.
        fits = sum(width + 2 for width in widths) + 2 <= out.width
        (out if fits else console.Console(highlight=False, markup=False, width=1000)).print(drawn)
        if self.notes:
            out.print(self.notes)


# ----------------------------------------------------------------------------------------------------------------------
# Metrics of an evaluation: their names, the headline metric, the table and the chance level.


_HEADLINES = ("text_to_image_R@1", "query_to_text_R@1")  # recall@1 of a search by text
_OF_DIRECTION = re.compile(r"(.+)_(R@(\d+)|mean_rank|median_rank)")  # metrics that have a chance level


def is_share(metric: str) -> bool:
    """Whether the metric is a recall or an accuracy, so that its value is between 0 and 1."""
    return "R@" in metric or "-top" in metric


def headline(evaluation: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns the name and the value of the headline metric: recall@1 of a search by text, or the first recall or accuracy."""
    shares = [name for name in evaluation if is_share(name)]
    name = next((name for name in (*_HEADLINES, *shares) if isinstance(evaluation.get(name), int | float)), None)
    return None if name is None else (name, float(evaluation[name]))


def words(metric: str) -> str:
    """Returns the name of a metric for people, such as "text → image R@1"."""
    return metric.replace("_to_", " → ").replace("_", " ")


def tell(metric: str, value: Any) -> str:
    """Returns the name and the value of a metric, such as "text → image R@1 12.0%"."""
    return f"{words(metric)} {_cell(metric, value)}"


def describe(evaluation: Mapping[str, Any], metric: str) -> str:
    """Returns the name and the chance level of a metric, such as "text → image R@1, 0.1% by chance"."""
    level = chance(evaluation, metric)
    return words(metric) if level is None else f"{words(metric)}, {percent(level)} by chance"


def table(evaluation: Mapping[str, Any], title: str = "") -> TextTable:
    """Returns a table with directions as rows, and recalls and ranks as columns. The notes are the numbers of samples.

    Below the rows it shows the chance level. If there is no recall, each metric has a row, and the chance level is a column.
    """
    counts = [name for name in evaluation if name.rpartition("/")[2].startswith("num_")]
    notes = ", ".join(f"{words(name.replace('num_', ''))}: {evaluation[name]:,}" for name in counts)
    if (loss := evaluation.get("clip_val_loss")) is not None:
        notes += f", loss: {short(loss)}"
    directions = list(dict.fromkeys(name.rsplit("_R@", 1)[0] for name in evaluation if "_R@" in name))
    if not directions:
        named = [(name, value, chance(evaluation, name)) for name, value in evaluation.items() if name not in counts]
        if any(level is not None for *_, level in named):
            cells = [[name, _cell(name, value), _cell(name, level)] for name, value, level in named]
            return TextTable(["", "", "by chance"], cells, title, notes)
        return TextTable(["", ""], [[name, _cell(name, value)] for name, value, _ in named], title, notes)
    columns = list(
        dict.fromkeys(
            name.removeprefix(f"{direction}_")
            for direction in directions
            for name in evaluation
            if name.startswith(f"{direction}_")
        )
    )
    columns.sort(key=lambda name: "R@" not in name)
    rows: list[list[str]] = []
    for dataset in dict.fromkeys(direction.rpartition("/")[0] for direction in directions):
        of_dataset = [direction for direction in directions if direction.rpartition("/")[0] == dataset]
        rows += [
            [words(direction), *(_cell(name, evaluation.get(f"{direction}_{name}")) for name in columns)]
            for direction in of_dataset
        ]
        rows += _chance_rows(evaluation, dataset, of_dataset, columns)
    return TextTable(["", *map(words, columns)], rows, title, notes)


def _chance_rows(evaluation: Mapping[str, Any], dataset: str, directions: list[str], columns: list[str]) -> list[list[str]]:
    """Returns a row for all directions of a dataset if their chance levels agree, or else one row for each direction.

    Unknown chance levels have no row.
    """
    levels = {direction: [chance(evaluation, f"{direction}_{name}") for name in columns] for direction in directions}
    if len({tuple(values) for values in levels.values()}) == 1:
        levels = {f"{dataset}/" if dataset else "": levels[directions[0]]}
    return [
        [f"{words(direction)} by chance".replace("/ ", "/").strip(), *map(_cell, columns, values)]
        for direction, values in levels.items()
        if any(value is not None for value in values)
    ]


def chance(evaluation: Mapping[str, Any], metric: str) -> float | None:
    """Returns the value of a metric for random results, or None if it is unknown.

    Args:
        evaluation: metrics, and the numbers of samples, texts and pairs, or of classes.
        metric: name of the metric, such as "text_to_image_R@1", or "coco/text_to_image_R@1" for a dataset with a name.
    """
    dataset, slash, name = metric.rpartition("/")
    samples, texts, pairs, classes = (
        evaluation.get(f"{dataset}{slash}num_{what}") for what in ("samples", "texts", "pairs", "classes")
    )
    if "-top" in name:
        return expect_recall(int(name.rpartition("-top")[2]), classes) if classes else None
    match = _OF_DIRECTION.fullmatch(name)
    if match is None or not samples:
        return None
    direction, kind, k = match.groups()
    queries, candidates = (samples, texts or samples) if direction.endswith("_to_text") else (texts or samples, samples)
    correct = (pairs or max(queries, candidates)) / queries  # correct candidates per query, on average
    if k is not None:
        return expect_recall(int(k), candidates, correct)
    return None if kind == "median_rank" and correct > 1 else expect_rank(candidates, correct)


def by_dataset(evaluation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the metrics of each dataset by its name. The first dataset has the name ""."""
    datasets: dict[str, dict[str, Any]] = {}
    for key, value in evaluation.items():
        name, _, metric = key.rpartition("/")
        datasets.setdefault(name, {})[metric] = value
    return datasets


def line(evaluation: Mapping[str, Any]) -> str:
    """Returns recalls and accuracies of one dataset in at most 90 characters: "text → image R@1/5/10 12.0 31.5 40.2 %"."""
    directions: dict[str, list[tuple[str, float]]] = {}
    for name, value in evaluation.items():
        if is_share(name) and "/" not in name:
            direction, mark, k = name.rpartition("R@" if "R@" in name else "top")
            directions.setdefault(words(f"{direction}{mark}"), []).append((k, value))
    parts = []
    for direction, shares in directions.items():
        values = " ".join(percent(value).removesuffix("%") for _, value in shares)
        parts.append(f"{direction}{'/'.join(k for k, _ in shares)} {values} %")
    return ", ".join(parts)


def _cell(name: str, value: Any) -> str:
    return percent(value) if is_share(name) else short(value)
