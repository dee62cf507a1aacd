"""The record of a benchmark as one HTML file that needs nothing else: tables, and plots inside it."""

import base64
import html
import io
from typing import Any

from megabatch import machine
from megabatch.bench.tables import Table, kind, tables, verdict

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd } th { border-bottom: 2px solid #888 }
.name { text-align: left } .ours { font-weight: 600; color: #0b6e4f } .wrong { color: #b3261e }
.plots { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0; flex: 1 1 26rem } img { width: 100% }
.notes { color: #555; font-size: .85rem }
"""
BESIDE = {  # which plots stand above which table
    "CLIP loss": ("loss_memory", "loss_time", "split", "products"),
    "Levels": ("levels",),
    "A training step": ("step_memory", "step_speed"),
}


def page(record: dict[str, Any], figures: dict[str, tuple[str, Any]]) -> str:
    """The whole file."""
    parts = ["<h1>megabatch bench</h1>\n" + "".join(f"<p>{_safe(said)}</p>" for said in verdict(record))]
    for table in tables(record):
        names = next(names for start, names in BESIDE.items() if table.title.startswith(start))
        plots = "".join(_plot(*figures[name]) for name in names if name in figures)
        parts.append(f'<h2>{_safe(table.title)}</h2>\n<div class="plots">{plots}</div>\n{_table(table)}')
    about = f"{_safe(machine.summary(record['machine']))}.<br>Command: <code>{_safe(record['command'])}</code>"
    parts.append(f'<h2>Machine</h2>\n<p class="notes">{about}</p>')
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>megabatch bench</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _plot(title: str, figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{_safe(title)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}</figure>"


def _table(table: Table) -> str:
    named = {i for i, heading in enumerate(table.headings) if heading == "system"}

    def row(cells: list[str], tag: str) -> str:
        inside = "".join(f"<{tag}{' class=name' if i in named else ''}>{_safe(cell)}</{tag}>" for i, cell in enumerate(cells))
        return f'<tr class="{kind(cells)}">{inside}</tr>'

    body = "".join(row(cells, "td") for cells in table.rows)
    return f'<table>{row(table.headings, "th")}{body}</table><p class="notes">{_safe(table.notes)}</p>'


def _safe(text: str) -> str:
    return html.escape(text)
