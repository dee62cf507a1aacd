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

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import permutations, product
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


@dataclass(frozen=True)
class Route:
    """Who works on what, and what travels. Hops are in the order in which they are posted."""

    work: tuple[tuple[tuple[int, ...], ...], ...]  # work[step][rank]: blocks, worked on as one; at step 0 the rank's own
    blocks: tuple[Hop, ...]  # from a rank that has worked on the block, or begins to, to one that does at step `needed`
    sums: tuple[Hop, ...]  # to a rank that works on the block at step `needed`, or to the block's own rank
    node_of: tuple[int, ...]  # of each rank

    @property
    def steps(self) -> int:
        """How many blocks, or groups of blocks, each rank works on."""
        return len(self.work)

    @cached_property
    def hops_of(self) -> list[tuple[dict[int, list[Hop]], dict[int, list[Hop]]]]:
        """For each rank: the hops of blocks and of sums that it takes part in, by the step at which they leave."""
        result: list[tuple[dict[int, list[Hop]], dict[int, list[Hop]]]] = [({}, {}) for _ in self.node_of]
        for kind, hops in enumerate((self.blocks, self.sums)):
            for hop in hops:
                for rank in (hop.source, hop.target):
                    result[rank][kind].setdefault(hop.leaves, []).append(hop)
        return result

    def crosses(self, hop: Hop) -> bool:
        """Whether it goes over a link between nodes."""
        return self.node_of[hop.source] != self.node_of[hop.target]


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
    work, blocks, sums = [], [], []
    for step in range(k * size):
        lap, inner = divmod(step, size)
        at: list[tuple[int, ...]] = [()] * (k * size)
        for n, place in product(range(k), range(size)):
            rank, following = nodes[n][place], nodes[n][(place + 1) % size]
            entered, block = (nodes[(n - lap) % k][i % size] for i in (place, place - inner))
            at[rank] = (block,)
            if inner < size - 1:
                blocks.append(Hop(block, rank, following, step, step + 1))
            if lap < k - 1:
                blocks.append(Hop(entered, rank, nodes[(n + 1) % k][place], step, (lap + 1) * size, inner, size))
            if rank == block:
                continue  # what a rank finds in its own block stays
            if inner < size - 1:
                sums.append(Hop(block, rank, following, step, step + 1))
            elif lap == k - 1:
                sums.append(Hop(block, rank, block, step, step))  # after the last step of all, home at once
            elif lap == 0:
                sums.append(Hop(block, rank, block, step, step + 1))
            else:
                sums += [Hop(block, rank, block, step + i, step + i + 1, i, size) for i in range(size)]
        work.append(tuple(at))
    return Route(tuple(work), tuple(blocks), tuple(sums), _node_of(nodes))


@cache
def gather(nodes: Nodes) -> Route:
    """Own block first, while all blocks are sent to all ranks; then all other blocks at once."""
    node_of = _node_of(nodes)
    ranks = range(len(node_of))
    own = tuple((rank,) for rank in ranks)
    if len(node_of) == 1:
        return Route((own,), (), (), node_of)
    others = tuple(tuple(block for block in ranks if block != rank) for rank in ranks)
    blocks = tuple(Hop(a, a, b, 0, 1) for a, b in permutations(ranks, 2))
    sums = tuple(Hop(b, a, b, 1, 1) for a, b in permutations(ranks, 2))
    return Route((own, others), blocks, sums, node_of)


def _node_of(nodes: Nodes) -> tuple[int, ...]:
    by_rank = {rank: n for n, node in enumerate(nodes) for rank in node}
    return tuple(by_rank[rank] for rank in range(len(by_rank)))
