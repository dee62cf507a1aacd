"""Tables in a terminal: rich's where it is installed, plain columns otherwise."""

import sys
from collections.abc import Sequence

from megabatch import extras


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> None:
    """Prints a table; columns whose numbers are in `left` are aligned to the left, others to the right."""
    if sys.stdout.isatty() and extras.installed("rich"):
        _rich(title, header, rows, left)
        return
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(title)
    for row in (header, *rows) if any(header) else rows:
        cells = [text.ljust(width) if column in left else text.rjust(width) for column, (text, width) in _numbered(row, widths)]
        print("  " + "  ".join(cells).rstrip())


def _numbered(row: Sequence[str], widths: Sequence[int]) -> list[tuple[int, tuple[str, int]]]:
    return list(enumerate(zip(row, widths, strict=True)))


def _rich(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> None:
    tables = extras.load("rich.table", extra="train", purpose="A table")
    text = extras.load("rich.text", extra="train", purpose="A table").Text
    console = extras.load("rich.console", extra="train", purpose="A table").Console()
    box = extras.load("rich.box", extra="train", purpose="A table")
    drawn = tables.Table(title=text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, header_style="dim")
    drawn.show_header = any(header)
    for column, name in enumerate(header):
        drawn.add_column(text(name), justify="left" if column in left else "right")
    for row in rows:
        drawn.add_row(*(text(cell) for cell in row))
    console.print(drawn)
