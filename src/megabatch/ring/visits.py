"""Blocks of all ranks that are only looked at: nothing goes home but what each rank finds for its own rows."""

from collections.abc import Callable

from torch import Tensor

from megabatch.ring.lap import Lap, Tensors
from megabatch.ring.walks import RingWalks
from megabatch.tiles.backends import Walks

Look = Callable[[Tensors, bool], None]  # what travels of some blocks, and whether it is this rank's own


def visit_all(walks: Walks, own: list[Tensor], look: Look) -> None:
    """`look` at the own block, and then at those of all other ranks, if there are any."""
    if not isinstance(walks, RingWalks):
        look(own, True)
        return
    rank = walks.exchange.members.rank

    def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
        look(here, blocks == (rank,))
        return ()

    Lap(walks.schedule, walks.exchange, walks.census.columns).run(own, work, lambda sums, others: None)


def place_in_group(walks: Walks) -> tuple[int, int]:
    """(rank, size)."""
    return (walks.exchange.members.rank, walks.exchange.members.size) if isinstance(walks, RingWalks) else (0, 1)


def sum_over_ranks(walks: Walks, number: Tensor) -> Tensor:  # ()
    """Of one number each."""
    return sum(walks.exchange.everyone(number), start=number * 0) if isinstance(walks, RingWalks) else number
