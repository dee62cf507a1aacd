"""One type of table, for terminals, text files, Markdown and HTML."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from megabatch import extras

OURS, WRONG = "ours", "wrong"  # marks of rows: bold, red
TEXT_WIDTH = 80  # columns of a plain-text table before its headings are wrapped
NAME_WIDTH = 9  # a narrow terminal may wrap names to this many characters


@dataclass(frozen=True)
class Table:
    """Rows below headings. Cells are shown as `str(cell)`.

    Args:
        headings: one for each column; all empty for a table without headings.
        rows: each as long as `headings`.
        title: a line above the table.
        notes: a paragraph below the table.
        names: columns of text, aligned to the left; others hold numbers and are aligned to the right.
        marks: {number of a row: OURS or WRONG}.

    Example: `Table(["system", "ms"], [["megabatch", 1.5]]).markdown()`
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    notes: str = ""
    names: Sequence[int] = (0,)
    marks: Mapping[int, str] = field(default_factory=dict)

    def text(self) -> str:
        """Plain columns, closer together and with wrapped headings if the table would be wider than `TEXT_WIDTH`."""
        rows = self._cells()
        widths = [max(map(len, column)) for column in zip(self.headings, *rows, strict=True)]
        head, gap = [list(self.headings)], "  "
        if sum(width + 2 for width in widths) > TEXT_WIDTH:
            widths, gap = self._least_widths(), " "
            wrapped = [textwrap.wrap(name, width) for name, width in zip(self.headings, widths, strict=True)]
            height = max(map(len, wrapped))
            head = [list(line) for line in zip(*([""] * (height - len(lines)) + lines for lines in wrapped), strict=True)]
        lines = [self.title] if self.title else []
        for row in (*head, *rows) if any(self.headings) else rows:
            placed = [
                cell.ljust(width) if column in self.names else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append((gap + gap.join(placed)).rstrip())
        return "\n".join([*lines, *([textwrap.fill(self.notes, TEXT_WIDTH)] if self.notes else [])])

    def markdown(self) -> str:
        """A Markdown table, with the title and the notes as paragraphs."""
        rules = ["---" if column in self.names else "---:" for column in range(len(self.headings))]
        lines = ["| " + " | ".join(row) + " |" for row in (self.headings, *self._cells())]
        table = "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])
        return "\n\n".join(part for part in (self.title, table, self.notes) if part)

    def html(self) -> str:
        """A `<table>`. The title and the notes are left to the page."""
        head = self._html_row("th", list(self.headings), "")
        body = "".join(self._html_row("td", cells, self.marks.get(i, "")) for i, cells in enumerate(self._cells()))
        return f'<div class="card table"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'

    def print(self) -> None:
        """Prints to standard output: with rich in a terminal, as plain text elsewhere."""
        if sys.stdout.isatty() and extras.installed("rich"):
            self._print_rich()
        else:
            print(self.text())

    def _cells(self) -> list[list[str]]:
        return [list(map(str, row)) for row in self.rows]

    def _least_widths(self) -> list[int]:
        """The width of each column whose heading is wrapped between words and whose cells are not."""
        columns = zip(*self._cells(), strict=True) if self.rows else ((),) * len(self.headings)
        return [max(map(len, (*name.split(), *cells, " "))) for name, cells in zip(self.headings, columns, strict=True)]

    def _html_row(self, tag: str, cells: Sequence[str], mark: str) -> str:
        kinds = [f"{tag} class=name" if column in self.names else tag for column in range(len(cells))]
        inside = "".join(f"<{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr class={mark}>{inside}</tr>" if mark else f"<tr>{inside}</tr>"

    def _print_rich(self) -> None:
        rich, console, text, box = (
            extras.load(f"rich.{name}", extra="train", purpose="A table") for name in ("table", "console", "text", "box")
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
            out.print(text.Text(self.title, style="bold"))
        # A terminal that is too narrow wraps the lines of the table; rich would cut numbers.
        fits = sum(width + 2 for width in widths) + 2 <= out.width
        (out if fits else console.Console(highlight=False, markup=False, width=1000)).print(drawn)
        if self.notes:
            out.print(self.notes)
