"""Losses over ranks that only `ring.py` measures: Inf-CL's scheme, one ring for each direction; megabatch with other exchanges.

`two_rings` follows the scheme of Inf-CL (arXiv 2410.17243): row sums of x against the travelling y, then of y against the
travelling x. Backward makes one lap for each again, in which a block's gradient makes R hops. Similarities are computed in
megabatch's tiles, so that only the schemes differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megabatch
from megabatch import ring
from megabatch.bench import levels
from megabatch.bench.loss_systems import Loss
from megabatch.ring import lap
from megabatch.ring.ranks import Parcel, Ranks
from megabatch.tiles import eager
from megabatch.tiles.block import Block, ColumnGradients, Needs
from megabatch.tiles.logsum import LogSum

SYNCHRONOUS, GATHER, TWO_RINGS = "ring, synchronous", "gather, tiles", "two rings"
ABOUT = {  # in the order of the table
    levels.VANILLA: levels.ABOUT[levels.VANILLA],
    levels.LOCAL: levels.ABOUT[levels.LOCAL],
    TWO_RINGS: "Inf-CL's exchange, one ring for each direction, in our tiles",
    levels.BLOCKS: levels.ABOUT[levels.BLOCKS],
    SYNCHRONOUS: "tiles, without overlap: every message is waited for",
    GATHER: "tiles, after an all-gather",
    levels.TILES: levels.ABOUT[levels.TILES],
}


@contextmanager
def synchronous(rows: int) -> Iterator[Loss]:
    lap.OVERLAP, before = False, lap.OVERLAP
    try:
        yield levels.ring_loss
    finally:
        lap.OVERLAP = before


def gather_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    with ring.using("gather"):
        return megabatch.clip_loss(image, text, scale, group=dist.group.WORLD)


def two_rings(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The same loss as `clip_loss` over the default group, for ranks with equally many pairs."""
    match = scale * (image * text).sum(1)
    row: Tensor = _RowSums.apply(image, text, scale)
    col: Tensor = _RowSums.apply(text, image, scale)
    return ((row - match) + (col - match)).mean() / 2


class _RowSums(torch.autograd.Function):
    """log Σ_j exp s_ij over the columns of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        ranks = _ranks(x)
        sums = LogSum.empty(len(x), dtype=x.dtype, device=x.device)
        here = y.contiguous()
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else _pass_on(ranks, here)
            sums.add_(eager.logsumexp_statistics(Block(x, here, scale, "float32"))[0])
            if coming is not None:
                here = coming()
        ctx.save_for_backward(x, y, scale, sums.pack())
        return sums.value()

    @staticmethod
    def backward(ctx: Any, drow: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, scale, packed = ctx.saved_tensors
        ranks, row = _ranks(x), LogSum.unpack(packed)
        dx, dscale = torch.zeros_like(x), torch.zeros_like(scale)
        here, dy_coming = y.contiguous(), None
        nothing = LogSum.empty(len(y), dtype=x.dtype, device=x.device)
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else _pass_on(ranks, here)
            dy = torch.zeros_like(y)
            block = Block(x, here, scale, "float32")
            sums, needs = ColumnGradients(dy, None), Needs(True, True, True)
            for rows, dx_rows, dscale_rows, _ in eager.logsumexp_gradients(block, row, nothing, drow, None, sums, needs):
                assert dx_rows is not None
                assert dscale_rows is not None
                dx[rows] += dx_rows
                dscale += dscale_rows.sum()
            if dy_coming is not None:
                dy += dy_coming()
            dy_coming = _pass_on(ranks, dy)
            if coming is not None:
                here = coming()
        assert dy_coming is not None
        return dx * scale, dy_coming() * scale, dscale


def _ranks(x: Tensor) -> Ranks:
    return Ranks(x.device, dist.group.WORLD, "two rings")


def _pass_on(ranks: Ranks, tensor: Tensor) -> Any:
    """Starts sending to the next rank; the returned function waits for the previous rank's tensor and returns it."""
    rank, size = ranks.rank, ranks.size
    if size == 1:
        return lambda: tensor
    received = torch.empty_like(tensor)
    sends, receives = [Parcel((rank + 1) % size, [tensor])], [Parcel((rank - 1) % size, [received])]
    pending = ranks.post(sends, receives, where="on the way")

    def wait() -> Tensor:
        pending.wait()
        return received

    return wait


SYSTEMS = levels.SYSTEMS | {
    SYNCHRONOUS: synchronous,
    GATHER: partial(levels.unchanged, gather_loss),
    TWO_RINGS: partial(levels.unchanged, two_rings),
}
