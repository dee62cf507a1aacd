"""Many ranks: the same walks over a batch that several processes share. See docs/ring.md.

`using` chooses the schedule; `counted` counts what is sent; `RingError` is what a rank raises when another has gone.
"""

from megabatch.ring.exchange import RingError, Traffic, counted
from megabatch.ring.topology import using

__all__ = ["RingError", "Traffic", "counted", "using"]
