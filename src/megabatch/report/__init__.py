"""A run's report: `write_report(folder)` writes report.html, one page that needs no other file."""

from megabatch.report.page import write_report

__all__ = ["write_report"]
