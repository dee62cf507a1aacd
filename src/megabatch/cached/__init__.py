"""Gradient caching (GradCache) for batches of any size, with the activations of one chunk in memory. See docs/cached.md."""

from megabatch.cached.replay import ReplayMismatchError, ReplaySource
from megabatch.cached.second_pass import Budget
from megabatch.cached.sources import HostSource, Source
from megabatch.cached.step import Progress, cached_backward
from megabatch.cached.tower import Encoded

__all__ = ["Budget", "Encoded", "HostSource", "Progress", "ReplayMismatchError", "ReplaySource", "Source", "cached_backward"]
