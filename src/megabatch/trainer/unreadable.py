"""Samples that cannot be read: they are skipped, counted and named; a run that can hardly read any ends."""

import logging

from megabatch.data.dataset import IMAGE, Dataset
from megabatch.world import World

LOG = logging.getLogger("megabatch")
NAMED = 5  # unreadable samples that are named
JUDGED_AFTER = 1024  # pairs, after which most must have been readable


class Unreadable:
    """Logs the samples that this rank could not read, and ends a run that can hardly read any.

    Args:
        dataset: of the samples.
        pairs: of an epoch.
    """

    def __init__(self, dataset: Dataset, pairs: int) -> None:
        self._failures, self._images = dataset.failures, IMAGE in dataset.sides
        self._judged_after = min(pairs, JUDGED_AFTER)
        self._tried = self._read = self._named = 0

    def check(self, step: int, tried: int, read: int, world: World) -> None:
        """Raises an error on all ranks if no pair of the first batch could be read, or most pairs so far could not."""
        self._tried, self._read = self._tried + tried, self._read + read
        if self._read and (self._tried < self._judged_after or 2 * self._read >= self._tried):
            return
        reason = next((found for found in world.gather_objects(next(iter(self._failures.values()), None)) if found), "")
        hint = "; paths in a table are relative to its folder, or to --set data_options.root=FOLDER" if self._images else ""
        raise ValueError(
            f"the run stops at step {step}, because {self._tried - self._read:,} of {self._tried:,} pairs could not be read: "
            f"{reason}{hint}"
        )

    def name_new(self) -> None:
        """Logs new failures by name, the first few."""
        if self._named == min(NAMED, len(self._failures)):
            return
        for reason in list(self._failures.values())[self._named : NAMED]:
            LOG.warning("skipped: %s", reason)
            self._named += 1
        if self._named == NAMED:
            LOG.warning("further unreadable samples are counted, not named")

    def count(self) -> None:
        """Logs how many samples could not be read."""
        if self._failures:
            LOG.warning("%d samples could not be read and were skipped", len(self._failures))
