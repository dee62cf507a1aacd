"""Many ranks: the same passes over a batch that several processes share. See docs/ring.md.

`using` chooses the route; `counted` counts what is sent; `RingError` is what a rank raises when another has gone.
"""

from megabatch.ring.ranks import RingError, Traffic, counted
from megabatch.ring.topology import using

__all__ = ["RingError", "Traffic", "counted", "using"]
