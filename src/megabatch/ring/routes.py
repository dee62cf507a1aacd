"""Routes: for every step, the block that each rank works on, and the messages between ranks. Pure data, no process group.

A block is a rank's shard of the columns. Its owner is the rank whose columns it contains. A block is sent in two parts:
- The inputs (y, biases, ids) are only read. They leave a rank when the rank begins to work on them, so the message overlaps
  with the work.
- Every rank adds to the sums (column sums, or gradients). They leave after the work. The next rank merges them after its own
  work, so this message overlaps as well.

Every rank begins with its own block, and its contribution to that block stays. The contributions of the other ranks begin at
the next rank, pass from rank to rank, and are added at the owner at the end. So both parts make R − 1 hops, not R.

`ring`      makes one lap round all ranks.
`two_level` makes laps inside each node, for the blocks of one node after another. The rank at which a block enters a node
            forwards it to the next node, one piece in each step. So a block has a whole inner lap to cross a link between
            nodes, and it enters each node once. Sums stay inside the node and return to the owner after the inner lap, also
            in pieces. A step never waits for more than one piece over a slow link.
`gather`    sends all blocks to all ranks, which then work on all other blocks at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each node


class Hop(NamedTuple):
    """A message with one block, or its sums, from one rank to another."""

    block: int
    source: int
    target: int
    leaves: int  # the step in which it is sent: a block before the work, sums after the work
    needed: int  # the step in which it must have arrived: a block before the work, sums after the work
    piece: int = 0
    pieces: int = 1  # number of pieces that the columns are cut into

    def part(self, columns: int) -> slice:
        """Returns the columns of the block that are sent."""
        return slice(columns * self.piece // self.pieces, columns * (self.piece + 1) // self.pieces)

    def length(self, columns: int) -> int:
        """Returns the number of columns that are sent."""
        return columns * (self.piece + 1) // self.pieces - columns * self.piece // self.pieces


Sent = tuple[list[Hop], list[Hop]]  # blocks and sums


@dataclass(frozen=True, eq=False)
class Route:
    """The blocks that each rank works on, and the messages between ranks.

    Messages are computed for one rank at a time, because 1,024 ranks send two million of them.
    """

    ranks: tuple[int, ...]  # in the order in which their hops are posted
    node_of: tuple[int, ...]  # the node of each rank
    steps: int  # number of blocks, or groups of blocks, that each rank works on
    work: Callable[[int, int], tuple[int, ...]]  # (step, rank) → blocks, worked on as one; at step 0 the rank's own block
    # (step, rank) → (blocks, sums) that the rank sends. It has worked on these blocks or works on them in this step, and the
    # target works on them at step `needed`. The target of sums works on the block at step `needed`, or owns the block. A hop
    # may leave later than this step.
    sends: Callable[[int, int], Sent]
    senders: Callable[[int, int], set[int]]  # (step, rank) → all ranks whose `sends` of this step may target the rank

    @property
    def blocks(self) -> list[Hop]:
        """Returns all hops of blocks, in the order in which they are posted."""
        return [hop for step in range(self.steps) for rank in self.ranks for hop in self.sends(step, rank)[0]]

    @property
    def sums(self) -> list[Hop]:
        """Returns all hops of sums, in the order in which they are posted."""
        return [hop for step in range(self.steps) for rank in self.ranks for hop in self.sends(step, rank)[1]]

    def hops_of(self, rank: int) -> tuple[dict[int, list[Hop]], dict[int, list[Hop]]]:
        """Returns the hops of blocks and of sums from or to a rank, by the step at which they leave."""
        return _hops_of(self, rank)

    def crosses(self, hop: Hop) -> bool:
        """Returns whether a hop uses a link between nodes."""
        return self.node_of[hop.source] != self.node_of[hop.target]


@cache
def _hops_of(route: Route, rank: int) -> tuple[dict[int, list[Hop]], dict[int, list[Hop]]]:
    hops_by_step: tuple[dict[int, list[Hop]], dict[int, list[Hop]]] = {}, {}  # of blocks, of sums
    position = {other: number for number, other in enumerate(route.ranks)}
    for step in range(route.steps):
        for source in sorted({rank, *route.senders(step, rank)}, key=position.__getitem__):
            for by_step, hops in zip(hops_by_step, route.sends(step, source), strict=True):
                for hop in hops:
                    if rank in (hop.source, hop.target):
                        by_step.setdefault(hop.leaves, []).append(hop)
    return hops_by_step


@cache
def ring(nodes: Nodes) -> Route:
    """Makes one lap round all ranks, node by node. At step t, the r-th rank works on the block of the (r − t)-th rank."""
    lap = two_level((tuple(rank for node in nodes for rank in node),))
    return replace(lap, node_of=_node_of(nodes))


@cache
def two_level(nodes: Nodes) -> Route:
    """At lap o and step i, the l-th rank of node n works on the block of the (l − i)-th rank of node n − o.

    Args:
        nodes: the ranks of each node. All nodes have the same number of ranks.
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
            return blocks, sums  # the sums of a rank's own block stay
        if inner < size - 1:
            sums.append(Hop(block, rank, following, step, step + 1))
        elif lap == k - 1:
            sums.append(Hop(block, rank, block, step, step))  # the last step: all sums return to the owner at once
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
    """Works on the own block while all blocks are sent to all ranks, then on all other blocks at once."""
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
