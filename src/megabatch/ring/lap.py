"""One lap: the blocks of all ranks visit each rank, which works on them, and the sums return to the ranks that own the blocks.

This module moves tensors. The callers define what the tensors mean.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megabatch.ring.ranks import Parcel, Pending, Ranks
from megabatch.ring.routes import Hop, Route

Tensors = Sequence[Tensor]  # all tensors of a block, or of several concatenated blocks; the first dimension is the columns
Work = Callable[[tuple[int, ...], Tensors], Tensors]  # (blocks, their tensors) → sums over their columns
Merge = Callable[[Tensors, Tensors], None]  # adds the second argument to the first

# Whether messages are in flight while a rank works. If it is False, every step first waits for its messages. This is used to
# measure how much time the overlap saves.
OVERLAP = True


@dataclass
class _RingBuffers:
    """The receive buffers for the blocks of one step."""

    whole: list[Tensor]  # all blocks, concatenated
    parts: dict[int, Tensors]  # views of `whole`, by block
    pending: list[Pending] = field(default_factory=list)


class Lap:
    """The work and the messages of one rank along a route."""

    def __init__(self, route: Route, ranks: Ranks) -> None:
        self.route, self.ranks, self.columns = route, ranks, ranks.columns
        self.rank = ranks.rank
        self._block_hops, self._sum_hops = route.hops_of(self.rank)
        self._buffers: dict[int, _RingBuffers] = {}  # by the step that needs the blocks
        self._arriving_sums: dict[int, list[tuple[Hop, Tensors, Pending]]] = defaultdict(list)  # by the step that needs them
        self._in_flight: list[Pending] = []

    def run(self, own: Tensors, work: Work, merge: Merge) -> Tensors:
        """Works on all blocks, the own one first. Returns the sums of the own block, added up over all ranks."""
        own = [tensor.contiguous() for tensor in own]
        own_sums: Tensors = ()
        held_blocks, held_sums = _Held(self._block_hops, self.rank), _Held(self._sum_hops, self.rank)
        for step in range(self.route.steps):
            blocks = self.route.work(step, self.rank)
            here = self._receive(step) if step else own
            held_blocks.put(zip(blocks, self._split(here, blocks), strict=True))
            self._post_blocks(step, held_blocks, here)
            sums = work(blocks, here)
            own_sums = own_sums if step else sums
            held_sums.put(zip(blocks, self._split(sums, blocks), strict=True))
            self._merge_arrived(step, own_sums, held_sums, merge)
            self._post_sums(step, held_sums, own_sums)
            self._merge_arrived(step, own_sums, held_sums, merge)
            held_blocks.drop_after(step)
            held_sums.drop_after(step)
        for pending in self._in_flight:
            pending.wait()
        return own_sums

    def _post_blocks(self, step: int, held: "_Held", like: Tensors) -> None:
        hops = self._block_hops.get(step, [])
        arriving = [hop for hop in hops if hop.target == self.rank]
        receives = [
            Parcel(hop.source, self._part(self._buffers_for(hop.needed, like).parts[hop.block], hop)) for hop in arriving
        ]
        pending = self._post(hops, held, receives, f"at step {step + 1} of {self.route.steps}")
        for hop in arriving:
            self._buffers[hop.needed].pending.append(pending)

    def _post_sums(self, step: int, held: "_Held", like: Tensors) -> None:
        hops = self._sum_hops.get(step, [])
        arriving = [hop for hop in hops if hop.target == self.rank]
        receives = [Parcel(hop.source, _empty(like, hop.length(self.columns[hop.block]))) for hop in arriving]
        pending = self._post(hops, held, receives, f"after step {step + 1} of {self.route.steps}")
        for hop, receive in zip(arriving, receives, strict=True):
            self._arriving_sums[hop.needed].append((hop, receive.tensors, pending))

    def _post(self, hops: list[Hop], held: "_Held", receives: list[Parcel], where: str) -> Pending:
        leaving = [hop for hop in hops if hop.source == self.rank]
        sends = [Parcel(hop.target, self._part(held[hop.block], hop), self.route.crosses(hop)) for hop in leaving]
        pending = self.ranks.post(sends, receives, where=where)
        self._in_flight = [*(other for other in self._in_flight if other.is_in_flight), pending]
        if not OVERLAP:
            pending.wait()
        return pending

    def _receive(self, step: int) -> list[Tensor]:
        buffers = self._buffers.pop(step)
        for pending in buffers.pending:
            pending.wait()
        return buffers.whole

    def _merge_arrived(self, step: int, own_sums: Tensors, held: "_Held", merge: Merge) -> None:
        for hop, tensors, pending in self._arriving_sums.pop(step, ()):
            pending.wait()
            merge(self._part(own_sums if hop.block == self.rank else held[hop.block], hop), tensors)

    def _buffers_for(self, step: int, like: Tensors) -> _RingBuffers:
        if step not in self._buffers:
            blocks = self.route.work(step, self.rank)
            whole = _empty(like, sum(self.columns[block] for block in blocks))
            self._buffers[step] = _RingBuffers(whole, dict(zip(blocks, self._split(whole, blocks), strict=True)))
        return self._buffers[step]

    def _split(self, tensors: Tensors, blocks: Sequence[int]) -> list[Tensors]:
        """Returns the tensors of each block."""
        sizes = [self.columns[block] for block in blocks]
        return list(zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True)) if tensors else [()] * len(blocks)

    def _part(self, tensors: Tensors, hop: Hop) -> Tensors:
        return [tensor[hop.part(self.columns[hop.block])] for tensor in tensors]


class _Held:
    """The blocks, or their sums, that this rank still has to send."""

    def __init__(self, hops: dict[int, list[Hop]], rank: int) -> None:
        self._last = {hop.block: step for step in sorted(hops) for hop in hops[step] if hop.source == rank}
        self._here: dict[int, Tensors] = {}

    def put(self, blocks: Iterable[tuple[int, Tensors]]) -> None:
        self._here.update(blocks)

    def drop_after(self, step: int) -> None:
        self._here = {block: tensors for block, tensors in self._here.items() if self._last.get(block, -1) > step}

    def __getitem__(self, block: int) -> Tensors:
        return self._here[block]


def _empty(like: Tensors, columns: int) -> list[Tensor]:
    return [tensor.new_empty(columns, *tensor.shape[1:]) for tensor in like]
