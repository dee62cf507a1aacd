"""One lap: blocks visit a rank, it works on them, and their sums go home. The code knows what travels, not what it means."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megabatch.ring.ranks import Parcel, Pending, Ranks
from megabatch.ring.routes import Hop, Route

Tensors = Sequence[Tensor]  # all of a block, or of some blocks one after another; their first dimension is its columns
Work = Callable[[tuple[int, ...], Tensors], Tensors]  # blocks and what travels of them → what was summed for their columns
Merge = Callable[[Tensors, Tensors], None]  # adds to the first

# Whether messages are under way while a rank works. Off, every step waits for its messages first: for measuring what it saves.
OVERLAP = True


@dataclass
class _RingBuffers:
    """Where the blocks of one step arrive."""

    whole: list[Tensor]
    parts: dict[int, Tensors]
    pending: list[Pending] = field(default_factory=list)


class Lap:
    """The way of one rank through a route."""

    def __init__(self, route: Route, ranks: Ranks) -> None:
        self.route, self.ranks, self.columns = route, ranks, ranks.columns
        self.rank = ranks.rank
        self._block_hops, self._sum_hops = route.hops_of(self.rank)
        self._rooms: dict[int, _RingBuffers] = {}
        self._sums_coming: dict[int, list[tuple[Hop, Tensors, Pending]]] = defaultdict(list)
        self._going: list[Pending] = []

    def run(self, own: Tensors, work: Work, merge: Merge) -> Tensors:
        """Works on all blocks, the own one first, and returns its sums, to which those of all other ranks have been added."""
        own = [tensor.contiguous() for tensor in own]
        home: Tensors = ()
        blocks_here, sums_here = _Stock(self._block_hops, self.rank), _Stock(self._sum_hops, self.rank)
        for step in range(self.route.steps):
            blocks = self.route.work(step, self.rank)
            here = self._receive(step) if step else own
            blocks_here.put(zip(blocks, self._split(here, blocks), strict=True))
            self._post_blocks(step, blocks_here, here)
            sums = work(blocks, here)
            home = home if step else sums
            sums_here.put(zip(blocks, self._split(sums, blocks), strict=True))
            self._merge_arrived(step, home, sums_here, merge)
            self._post_sums(step, sums_here, home)
            self._merge_arrived(step, home, sums_here, merge)
            blocks_here.forget_after(step)
            sums_here.forget_after(step)
        for pending in self._going:
            pending.wait()
        return home

    def _post_blocks(self, step: int, stock: "_Stock", like: Tensors) -> None:
        hops = self._block_hops.get(step, [])
        arriving = [hop for hop in hops if hop.target == self.rank]
        receives = [Parcel(hop.source, self._part(self._room(hop.needed, like).parts[hop.block], hop)) for hop in arriving]
        pending = self._post(hops, stock, receives, f"at step {step + 1} of {self.route.steps}")
        for hop in arriving:
            self._rooms[hop.needed].pending.append(pending)

    def _post_sums(self, step: int, stock: "_Stock", like: Tensors) -> None:
        hops = self._sum_hops.get(step, [])
        arriving = [hop for hop in hops if hop.target == self.rank]
        receives = [Parcel(hop.source, _empty(like, hop.length(self.columns[hop.block]))) for hop in arriving]
        pending = self._post(hops, stock, receives, f"after step {step + 1} of {self.route.steps}")
        for hop, receive in zip(arriving, receives, strict=True):
            self._sums_coming[hop.needed].append((hop, receive.tensors, pending))

    def _post(self, hops: list[Hop], stock: "_Stock", receives: list[Parcel], where: str) -> Pending:
        leaving = [hop for hop in hops if hop.source == self.rank]
        sends = [Parcel(hop.target, self._part(stock[hop.block], hop), self.route.crosses(hop)) for hop in leaving]
        pending = self.ranks.post(sends, receives, where=where)
        self._going = [*(other for other in self._going if other.is_under_way), pending]
        if not OVERLAP:
            pending.wait()
        return pending

    def _receive(self, step: int) -> list[Tensor]:
        room = self._rooms.pop(step)
        for pending in room.pending:
            pending.wait()
        return room.whole

    def _merge_arrived(self, step: int, home: Tensors, stock: "_Stock", merge: Merge) -> None:
        for hop, tensors, pending in self._sums_coming.pop(step, ()):
            pending.wait()
            merge(self._part(home if hop.block == self.rank else stock[hop.block], hop), tensors)

    def _room(self, step: int, like: Tensors) -> _RingBuffers:
        if step not in self._rooms:
            blocks = self.route.work(step, self.rank)
            whole = _empty(like, sum(self.columns[block] for block in blocks))
            self._rooms[step] = _RingBuffers(whole, dict(zip(blocks, self._split(whole, blocks), strict=True)))
        return self._rooms[step]

    def _split(self, tensors: Tensors, blocks: Sequence[int]) -> list[Tensors]:
        """By block."""
        sizes = [self.columns[block] for block in blocks]
        return list(zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True)) if tensors else [()] * len(blocks)

    def _part(self, tensors: Tensors, hop: Hop) -> Tensors:
        return [tensor[hop.part(self.columns[hop.block])] for tensor in tensors]


class _Stock:
    """What is here and has still to be sent on."""

    def __init__(self, hops: dict[int, list[Hop]], rank: int) -> None:
        self._last = {hop.block: step for step in sorted(hops) for hop in hops[step] if hop.source == rank}
        self._here: dict[int, Tensors] = {}

    def put(self, blocks: Iterable[tuple[int, Tensors]]) -> None:
        self._here.update(blocks)

    def forget_after(self, step: int) -> None:
        self._here = {block: tensors for block, tensors in self._here.items() if self._last.get(block, -1) > step}

    def __getitem__(self, block: int) -> Tensors:
        return self._here[block]


def _empty(like: Tensors, columns: int) -> list[Tensor]:
    return [tensor.new_empty(columns, *tensor.shape[1:]) for tensor in like]
