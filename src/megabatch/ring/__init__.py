"""Many ranks: the same passes over a batch that several processes share. See docs/ring.md.

`use_route` chooses the route; `count_traffic` counts what is sent; `RingError` is what a rank raises when another has gone.
"""

from megabatch.ring.ranks import RingError, Traffic, count_traffic, use_route

__all__ = ["RingError", "Traffic", "count_traffic", "use_route"]
