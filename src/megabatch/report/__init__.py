"""A run on one page: `write_report(folder)` makes report.html of what is in the folder; it needs no other file."""

from megabatch.report.page import write_report

__all__ = ["write_report"]
