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
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = _norm([gradient for gradient in gradients if not is_sharded(gradient)], world.device)
    sharded = [local(gradient) for gradient in gradients if is_sharded(gradient)]
    if not sharded:
        return whole
    squares = _norm(sharded, world.device).square()
    dist.all_reduce(squares, group=world.group)
    return (whole.square() + squares).sqrt()


def _norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:  # ()
    """Of all tensors as one vector, in a few launches on a GPU. On `device`, though FSDP2 may keep gradients on the host."""
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors if tensor.numel()]
    return nn.utils.get_total_norm(wide).to(device)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], now: Tensor, longest: float) -> None:
    """Clips the gradient norm, now `now`, to `longest`. The host does not wait for the device."""
    share = (longest / now).clamp(max=1.0)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), some in groups.items():
        torch._foreach_mul_(some, share.to(device, dtype))  # a few launches
