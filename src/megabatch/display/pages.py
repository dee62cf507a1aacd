"""One HTML page: a title, sections, and the style sheet inside, so that the file needs no other file."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

import megabatch
from megabatch.display import plots
from megabatch.display.tables import Table


def page(title: str, sections: Iterable[str], *, subtitle: str = "") -> str:
    """The whole file. Empty sections are left out.

    Args:
        title: of the page, as text.
        sections: HTML.
        subtitle: a line below the title, as text.
    """
    style = resources.files("megabatch.display").joinpath("page.css").read_text("utf-8")
    body = "\n".join(part for part in sections if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>\n"
        f"<h1>{escape(title)}</h1>{faint(subtitle)}\n{body}\n"
        f"<footer>Made by megabatch {escape(megabatch.__version__)}.</footer>\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading with HTML below it; nothing if all parts are empty."""
    return f"<h2>{escape(title)}</h2>{''.join(parts)}" if any(parts) else ""


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def faint(text: str) -> str:
    """A paragraph of small importance."""
    return f'<p class="faint">{escape(text)}</p>' if text else ""


def warning(text: str) -> str:
    """A paragraph that should not be overlooked."""
    return f'<div class="card warning">{escape(text)}</div>'


def code(text: str) -> str:
    """A block of code."""
    return f'<pre class="card">{escape(text)}</pre>'


def items(texts: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Large numbers in a row, each with its name below; the first is the most important."""
    cells = (f'<div class="card tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in values)
    return f'<div class="tiles">{"".join(cells)}</div>' if values else ""


def table(made: Table) -> str:
    """The table, with its notes below it; its title is for `section`."""
    return made.html() + (f'<p class="notes">{escape(made.notes)}</p>' if made.notes else "")


def figures(drawn: Iterable[tuple[str, Any]]) -> str:
    """Plots side by side.

    Args:
        drawn: (the plot in words, matplotlib figure) of each.
    """
    cells = "".join(f'<figure class="card plot">{plots.svg(figure, described)}</figure>' for described, figure in drawn)
    return f'<div class="plots">{cells}</div>' if cells else ""
