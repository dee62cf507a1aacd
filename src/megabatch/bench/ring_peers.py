"""Peers of the ring: open_clip's losses over a gathered batch, and Inf-CL's scheme, a ring for each direction.

`two_rings` follows the scheme of Inf-CL (arXiv 2410.17243): row sums of x against the travelling y, then of y against the
travelling x; in backward again one lap for each, in which a block's gradient makes R hops. Similarities are computed in the
same tiles as megabatch's, so that only the schemes differ.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.ring.ranks import Parcel, Ranks
from megabatch.tiles import eager
from megabatch.tiles.block import Block, ColumnGradients, Needs
from megabatch.tiles.logsum import LogSum


def open_clip_loss(image: Tensor, text: Tensor, scale: Tensor, *, local: bool) -> Tensor:
    """Dense, over the gathered batch: every rank its own rows (`local`), or every rank all rows."""
    from open_clip.loss import ClipLoss

    world = dist.get_world_size()
    loss = ClipLoss(local_loss=local, gather_with_grad=True, rank=dist.get_rank(), world_size=world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # open_clip gathers with a deprecated function of PyTorch
        value: Tensor = loss(image, text, scale)
    return value


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
