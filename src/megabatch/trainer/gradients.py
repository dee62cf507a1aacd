"""Between the backward pass and the optimizer: gradients and statistics averaged over ranks, gradient norm, clipping."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.cached.dtensors import is_sharded, local
from megabatch.world import World


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Averages over ranks the gradients of parameters outside of DDP and FSDP2: scale and bias of the loss."""
    if world.group is None:
        return
    for parameter in parameters:
        if parameter.grad is None:  # another rank's share of the loss may depend on it
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=world.group)
        parameter.grad /= world.size


@torch.no_grad()
def average_statistics(statistics: Sequence[Tensor], world: World) -> None:
    """Averages running statistics over ranks, in one message: each rank has updated its own with its own pairs."""
    if world.group is None or not statistics:
        return
    flat = torch.cat([statistic.flatten() for statistic in statistics])
    dist.all_reduce(flat, group=world.group)
    flat /= world.size
    means = torch.split(flat, [statistic.numel() for statistic in statistics])
    for statistic, mean in zip(statistics, means, strict=True):
        statistic.copy_(mean.view_as(statistic))


@torch.no_grad()
def norm(parameters: Iterable[nn.Parameter], world: World) -> Tensor:  # ()
    """The gradient norm over all parameters, the same on all ranks."""
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (sharded if is_sharded(parameter.grad) else whole).append(_square(local(parameter.grad)))
    total = torch.stack(whole).sum() if whole else torch.zeros((), device=world.device)
    if sharded:
        parts = torch.stack(sharded).sum().to(world.device)  # from the host, if FSDP2 keeps gradients there
        dist.all_reduce(parts, group=world.group)
        total = total + parts
    return total.sqrt()


def _square(values: Tensor) -> Tensor:  # ()
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide.square().sum() if wide.numel() else wide.new_zeros(())


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], now: Tensor, longest: float) -> None:
    """Clips the gradient norm, now `now`, to `longest`. The host does not wait for the device."""
    share = (longest / now).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradient.mul_(share.to(gradient))
