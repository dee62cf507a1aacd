"""The report of a run that goes on: an observer that writes the page every few minutes, without search results."""

import logging
import time
from pathlib import Path
from typing import Any

from megabatch.report.page import NAME, write_report

LOG = logging.getLogger("megabatch")
EVERY = 300.0  # seconds between two pages: drawing one takes about a second of the training thread


class LiveReport:
    """An observer that writes report.html after a checkpoint or an evaluation, at most every `EVERY` seconds."""

    def __init__(self) -> None:
        self._folder, self._written, self._works = Path(), 0.0, True

    def start(self, run: Any) -> None:
        """The run begins; its first page comes after `EVERY` seconds."""
        self._folder, self._written = run.folder, time.monotonic()
        LOG.info("report, every %d minutes: %s", EVERY / 60, self._folder / NAME)

    def step(self, record: dict[str, Any]) -> None:
        """Does nothing."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """There is a new evaluation."""
        self._write()

    def saved(self, path: Path) -> None:
        """There is a new checkpoint."""
        self._write()

    def finish(self, run: Any) -> None:
        """Does nothing: the last page, with search results, is written after the run."""

    def _write(self) -> None:
        if not self._works or time.monotonic() - self._written < EVERY:
            return
        self._written = time.monotonic()
        try:
            write_report(self._folder, load=None)
        except OSError:
            raise  # a full disk: the run tries again
        except Exception as error:  # a page is not worth a run
            self._works = False
            LOG.warning("the report is not written while the run goes on: %s", error)
