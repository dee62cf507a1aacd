"""The passes over a batch that is sharded over several ranks. See docs/ring.md.

`use_route` chooses the route, and `count_traffic` counts the bytes that are sent. A rank raises `RingError` if it loses the
connection to another rank.
"""

from megabatch.ring.ranks import RingError, Traffic, count_traffic, use_route

__all__ = ["RingError", "Traffic", "count_traffic", "use_route"]
