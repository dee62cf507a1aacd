"""A vector summed over all ranks of a group, whose gradient is the sum of all ranks' gradients."""

from typing import Any

import torch
from torch import Tensor

from megabatch.operators.transforms import apply, differentiable
from megabatch.ring.agreement import agree
from megabatch.ring.ranks import Ranks


@torch.library.custom_op("megabatch::total", mutates_args=())
def total(values: Tensor, group: str) -> Tensor:  # (K,)
    """Σ over ranks, in their order, so that all of them have the same bits."""
    if not group:
        return values.clone()
    ranks = Ranks.at(group, "sum over ranks", values.device)
    agree(ranks, {"the length": len(values), "the dtype": values.dtype}, 0, 0)
    return torch.stack(ranks.all_gather(values.contiguous())).sum(0)


@total.register_fake
def _(values: Tensor, group: str) -> Tensor:
    return torch.empty_like(values)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
    return apply(total, dtotal, ctx.group), None


differentiable(total, _backward, _save)
