"""The record of `megabatch bench` as one HTML page: sentences, plots, tables, machine."""

from typing import Any

from megabatch import machine
from megabatch.bench.tables import tables, verdict
from megabatch.display import pages

BESIDE = {  # the plots above each part's table
    "losses": ("loss_memory", "loss_time", "split", "products"),
    "levels": ("levels",),
    "steps": ("step_memory", "step_speed"),
}


def page(record: dict[str, Any], figures: dict[str, tuple[str, Any]]) -> str:
    """The whole file.

    Args:
        record: of the benchmark.
        figures: {name: (title, figure)} of `bench.figures`.
    """
    sections = [pages.paragraph(sentence) for sentence in verdict(record)]
    for part, table in tables(record).items():
        plots = pages.figures(figures[name] for name in BESIDE[part] if name in figures)
        sections.append(pages.section(table.title, plots, pages.table(table)))
    about = pages.faint(f"{machine.summary(record['machine'])}.")
    return pages.page(
        "megabatch bench", [*sections, pages.section("Machine and command", about, pages.code(record["command"]))]
    )
