"""Routes: for every step, the block that each rank works on, and the messages between ranks. Pure data, no process group.

A block is a rank's share of the columns. Two parts of it travel:
- its inputs (y, offsets, ids), which are only read. They leave a rank when the rank begins to work on them, so the message
  overlaps with the work.
- its sums (column sums, or gradients), which every rank adds to. They leave after the work, and are merged at the next rank
  after that rank's work, so this message overlaps as well.

Every rank begins with its own block, and its contribution to that block stays. The contributions of the other ranks begin at
the next rank, pass from rank to rank, and are added at the block's own rank at the end. So both parts make R − 1 hops, not R.

`ring`      one lap round all ranks.
`two_level` laps inside each node, for the blocks of one node after another. The rank at which a block enters a node sends it on
            to the next node, one piece in each step. So a block has a whole inner lap to cross a link between nodes, and it
            crosses into each node once. Sums stay inside the node and go home after the inner lap, in pieces as well. A step
            never waits for more than a piece over a slow link.
`gather`    all blocks to all ranks, then work on all other blocks at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each node


class Hop(NamedTuple):
    """One block, or its sums, going from one rank to another."""

    block: int
    source: int
    target: int
    leaves: int  # blocks: when this step begins; sums: after its work
    needed: int  # blocks: when this step begins; sums: after its work
    piece: int = 0
    pieces: int = 1  # into how many the columns are cut

    def part(self, columns: int) -> slice:
        """Which of the block's columns go."""
        return slice(columns * self.piece // self.pieces, columns * (self.piece + 1) // self.pieces)

    def length(self, columns: int) -> int:
        """How many of them."""
        return columns * (self.piece + 1) // self.pieces - columns * self.piece // self.pieces


Sent = tuple[list[Hop], list[Hop]]  # blocks and sums


@dataclass(frozen=True, eq=False)
class Route:
    """Who works on what, and what travels. A rank asks for its own part alone: of 1,024 ranks there are two million hops."""

    ranks: tuple[int, ...]  # in the order in which their hops are posted
    node_of: tuple[int, ...]  # of each rank
    steps: int  # how many blocks, or groups of blocks, each rank works on
    work: Callable[[int, int], tuple[int, ...]]  # (step, rank) → blocks, worked on as one; at step 0 the rank's own
    # (step, rank) → blocks, which the rank has worked on or begins to, for a rank that does at step `needed`; and sums, for a
    # rank that works on the block at step `needed`, or for the block's own rank. They may leave later than this step.
    sends: Callable[[int, int], Sent]
    senders: Callable[[int, int], set[int]]  # (step, rank) → all ranks whose `sends` of this step may be for the rank

    @property
    def blocks(self) -> list[Hop]:
        """All hops of blocks, in the order in which they are posted."""
        return [hop for step in range(self.steps) for rank in self.ranks for hop in self.sends(step, rank)[0]]

    @property
    def sums(self) -> list[Hop]:
        """All hops of sums, in the order in which they are posted."""
        return [hop for step in range(self.steps) for rank in self.ranks for hop in self.sends(step, rank)[1]]

    def hops_of(self, rank: int) -> tuple[dict[int, list[Hop]], dict[int, list[Hop]]]:
        """The hops of blocks and of sums that a rank takes part in, by the step at which they leave."""
        return _hops_of(self, rank)

    def crosses(self, hop: Hop) -> bool:
        """Whether it goes over a link between nodes."""
        return self.node_of[hop.source] != self.node_of[hop.target]


@cache
def _hops_of(route: Route, rank: int) -> tuple[dict[int, list[Hop]], dict[int, list[Hop]]]:
    found: tuple[dict[int, list[Hop]], dict[int, list[Hop]]] = {}, {}
    place = {other: number for number, other in enumerate(route.ranks)}
    for step in range(route.steps):
        for source in sorted({rank, *route.senders(step, rank)}, key=place.__getitem__):
            for by_step, hops in zip(found, route.sends(step, source), strict=True):
                for hop in hops:
                    if rank in (hop.source, hop.target):
                        by_step.setdefault(hop.leaves, []).append(hop)
    return found


@cache
def ring(nodes: Nodes) -> Route:
    """One lap round all ranks, node by node: at step t, the r-th of them works on the block of the (r − t)-th."""
    lap = two_level((tuple(rank for node in nodes for rank in node),))
    return replace(lap, node_of=_node_of(nodes))


@cache
def two_level(nodes: Nodes) -> Route:
    """At lap o and step i, the l-th rank of node n works on the block of the (l − i)-th rank of node n − o.

    Args:
        nodes: the ranks of each node, equally many.
    """
    k, size = len(nodes), len(nodes[0])
    assert all(len(node) == size for node in nodes)
    places = {rank: (n, place) for n, node in enumerate(nodes) for place, rank in enumerate(node)}

    def work(step: int, rank: int) -> tuple[int, ...]:
        (n, place), (lap, inner) = places[rank], divmod(step, size)
        return (nodes[(n - lap) % k][(place - inner) % size],)

    def sends(step: int, rank: int) -> Sent:
        (n, place), (lap, inner) = places[rank], divmod(step, size)
        following, entered, (block,) = nodes[n][(place + 1) % size], nodes[(n - lap) % k][place], work(step, rank)
        blocks: list[Hop] = []
        sums: list[Hop] = []
        if inner < size - 1:
            blocks.append(Hop(block, rank, following, step, step + 1))
        if lap < k - 1:
            blocks.append(Hop(entered, rank, nodes[(n + 1) % k][place], step, (lap + 1) * size, inner, size))
        if rank == block:
            return blocks, sums  # what a rank finds in its own block stays
        if inner < size - 1:
            sums.append(Hop(block, rank, following, step, step + 1))
        elif lap == k - 1:
            sums.append(Hop(block, rank, block, step, step))  # after the last step of all, home at once
        elif lap == 0:
            sums.append(Hop(block, rank, block, step, step + 1))
        else:
            sums += [Hop(block, rank, block, step + i, step + i + 1, i, size) for i in range(size)]
        return blocks, sums

    def senders(step: int, rank: int) -> set[int]:
        (n, place), lap = places[rank], step // size
        before, works_on_own = nodes[n][place - 1], nodes[(n + lap) % k][place - 1]  # the latter at the end of each inner lap
        return {before, nodes[n - 1][place], works_on_own}

    ranks = tuple(rank for node in nodes for rank in node)
    return Route(ranks, _node_of(nodes), k * size, work, sends, senders)


@cache
def gather(nodes: Nodes) -> Route:
    """Own block first, while all blocks are sent to all ranks; then all other blocks at once."""
    node_of = _node_of(nodes)
    ranks = tuple(range(len(node_of)))

    def others(rank: int) -> tuple[int, ...]:
        return tuple(other for other in ranks if other != rank)

    def work(step: int, rank: int) -> tuple[int, ...]:
        return others(rank) if step else (rank,)

    def sends(step: int, rank: int) -> Sent:
        if step:
            return [], [Hop(other, rank, other, 1, 1) for other in others(rank)]
        return [Hop(rank, rank, other, 0, 1) for other in others(rank)], []

    return Route(ranks, node_of, min(2, len(ranks)), work, sends, lambda step, rank: set(others(rank)))


def _node_of(nodes: Nodes) -> tuple[int, ...]:
    by_rank = {rank: n for n, node in enumerate(nodes) for rank in node}
    return tuple(by_rank[rank] for rank in range(len(by_rank)))
