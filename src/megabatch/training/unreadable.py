"""Samples that cannot be read, named while a run goes on: the first few when they are met, all of them by their number."""

import logging

from megabatch.data.dataset import Dataset

LOG = logging.getLogger("megabatch")
NAMED = 5


class Unreadable:
    """What this rank has met of a dataset's failures."""

    def __init__(self, dataset: Dataset) -> None:
        self._failures = dataset.failures
        self._named = 0

    def name_new(self) -> None:
        """Those that came since, as long as they are few."""
        if self._named == min(NAMED, len(self._failures)):
            return
        for reason in list(self._failures.values())[self._named : NAMED]:
            LOG.warning("left out: %s", reason)
            self._named += 1
        if self._named == NAMED:
            LOG.warning("further samples that cannot be read are counted, not named")

    def count(self) -> None:
        """How many there were."""
        if self._failures:
            LOG.warning("%d samples could not be read and were left out", len(self._failures))
