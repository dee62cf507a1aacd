"""Lines in the log while samples or files are worked through one by one."""

import logging
import time
from datetime import timedelta

LOG = logging.getLogger("megabatch")
SECONDS = 5.0  # between two lines of progress


class Progress:
    """Logs every few seconds how much is done, and the time left.

    Args:
        told: what is done, such as "images embedded".
        total: number of images, or of whatever it is.
    """

    def __init__(self, told: str, total: int) -> None:
        self._told, self._total = told, total
        self._began = self._last = time.monotonic()

    def tell(self, done: int) -> None:
        """So many are done."""
        now = time.monotonic()
        if done < self._total and now - self._last >= SECONDS:
            self._last, left = now, (now - self._began) / done * (self._total - done)
            LOG.info("%s of %s %s, %s left", f"{done:,}", f"{self._total:,}", self._told, timedelta(seconds=round(left)))
