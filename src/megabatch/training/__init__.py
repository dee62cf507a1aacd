"""Training with batches of any size: the cached step and where its inputs come from. See docs/cached.md."""

from megabatch.training.cached import Progress, cached_backward
from megabatch.training.outputs import Encoded
from megabatch.training.replay import ReplayMismatchError, ReplaySource
from megabatch.training.sources import HostSource, Source

__all__ = ["Encoded", "HostSource", "Progress", "ReplayMismatchError", "ReplaySource", "Source", "cached_backward"]
