"""A learned temperature for a loss that runs its backward pass inside the trainer's forward pass."""

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
        initial: the first value.
        largest: upper bound.
    """

    gradient: Tensor | None = None

    def __init__(self, initial: float, largest: float) -> None:
        super().__init__()
        if not 0 < initial <= largest:
            raise ValueError(f"largest_scale must be at least the initial scale, {initial}, got {largest}")
        self.bias = nn.Parameter(torch.tensor(math.log(initial)))  # so called because trainers decay no biases
        self.largest = largest

    def forward(self) -> Tensor:  # ()
        """The logarithm, clamped, as a leaf apart from the parameter."""
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
        """The same value, with a graph through which backward also reaches the parameter."""
        assert self.gradient is not None, "the loss has been computed"
        gradient, self.gradient = self.gradient, None
        return loss + (self.bias - self.bias.detach()) * gradient


def differentiated(
    loss_of: Callable[[float | Tensor], Tensor], scale: float, learned: LearnedScale | None, *, with_backward: bool
) -> Tensor:  # ()
    """The loss. `with_backward` computes the gradients: of the embeddings in their `.grad`, of the scale in `learned`."""
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
