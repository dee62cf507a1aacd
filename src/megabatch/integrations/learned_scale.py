"""A temperature that learns inside a loss whose backward pass is over before the trainer's begins."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.world import default_group


class LearnedScale(nn.Module):
    """1 / temperature as a parameter, by its logarithm.

    Its gradient is computed during the trainer's forward pass, before gradient accumulation and loss scaling apply their
    factors. So the gradient is kept, and added to the graph of the loss that the trainer backpropagates.

    Args:
        beginning: the first value.
        largest: it is never more.
    """

    gradient: Tensor | None = None

    def __init__(self, beginning: float, largest: float) -> None:
        super().__init__()
        if not 0 < beginning <= largest:
            raise ValueError(f"largest_scale must be at least the scale at the beginning, {beginning}, got {largest}")
        self.bias = nn.Parameter(torch.tensor(math.log(beginning)))  # so called because trainers decay no biases
        self.largest = largest

    def forward(self) -> Tensor:  # ()
        """The logarithm now, in bounds, apart from the parameter."""
        with torch.no_grad():
            self.bias.clamp_(max=math.log(self.largest))
        return self.bias.detach().requires_grad_()

    def keep(self, gradient: Tensor) -> None:
        """Keeps the gradient from the loss, averaged over ranks, because no wrapper does that for this parameter."""
        if default_group() is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        self.gradient = gradient

    def joined(self, loss: Tensor) -> Tensor:  # ()
        """The same value, from which backward also reaches the parameter."""
        assert self.gradient is not None, "the loss has been computed"
        gradient, self.gradient = self.gradient, None
        return loss + (self.bias - self.bias.detach()) * gradient


def differentiated(
    loss_of: Callable[[float | Tensor], Tensor], scale: float, learned: LearnedScale | None, *, with_backward: bool
) -> Tensor:  # ()
    """The loss; and if asked, the gradients of the embeddings and of the scale, each where it belongs."""
    logarithm = None if learned is None else learned()
    loss = loss_of(scale if logarithm is None else logarithm.exp())
    if not with_backward:
        return loss
    with torch.autocast(loss.device.type, enabled=False):  # backward takes its types from forward
        loss.backward()  # type: ignore[no-untyped-call]
    if learned is not None:
        assert logarithm is not None
        assert logarithm.grad is not None
        learned.keep(logarithm.grad)
    return loss.detach()


def joined(loss: Tensor, learned: LearnedScale | None) -> Tensor:  # ()
    """The loss for the trainer's backward pass; unchanged in evaluation, and without a learned scale."""
    return loss if learned is None or not torch.is_grad_enabled() else learned.joined(loss)
