"""AdaFactor as in "Scaling Vision Transformers" (arXiv 2106.04560): the quality of Adam with a quarter of its memory.

The second moment of a matrix is stored as the means of its rows and columns; their product over the overall mean approximates
it. The first moment is stored in bfloat16. Steps are not scaled by the size of parameters. In step t, with gradient g:

    β = min(1 − t^−0.8, 0.999)
    r ← β·r + (1 − β)·mean_columns(g² + ε)        c ← β·c + (1 − β)·mean_rows(g² + ε)
    m ← β₁·m + (1 − β₁)·g / √(r·c / mean(r))
    p ← p − lr·(m + weight decay · p)

A parameter with fewer than two dimensions, or short ones, has a full second moment. docs/log.md says why timm's and
PyTorch's versions do not replace this one.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megabatch.cached.dtensors import is_sharded

DECAY_EXPONENT = 0.8
DECAY_CAP = 0.999
SHORTEST = 32  # shorter dimensions are not factored
EPSILON = 1e-30
MOMENTUM_DTYPE = torch.bfloat16


class AdaFactor(Optimizer):
    """The optimizer above.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: β₁; 0 for no first moment.
        weight_decay: decoupled and times the learning rate, as in AdamW.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; the momentum keeps its dtype instead of the parameter's."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "momentum" in state:
                state["momentum"] = state["momentum"].to(MOMENTUM_DTYPE)


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
    beta = min(1 - float(state["step"]) ** -DECAY_EXPONENT, DECAY_CAP)
    change = gradient / _root_mean_square(gradient, state, beta)
    if group["momentum"]:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, dtype=MOMENTUM_DTYPE)
        change = state["momentum"].to(change.dtype).lerp_(change, 1 - group["momentum"])
        state["momentum"].copy_(change)
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(change, alpha=-group["lr"])


def _root_mean_square(gradient: Tensor, state: dict[str, Any], beta: float) -> Tensor:
    """Updates the second moment and returns its root, which broadcasts against the gradient."""
    squares = gradient.square().add_(EPSILON)
    dims = factored_dims(gradient.shape)
    if dims is None:
        return _averaged(state, "second", squares, beta).sqrt()
    long, longest = dims
    rows = _averaged(state, "rows", _mean(squares, longest), beta)
    columns = _averaged(state, "columns", _mean(squares, long), beta)
    # The root of each factor: their product may underflow in float32.
    return (rows / _mean(rows, long)).sqrt() * columns.sqrt()


def factored_dims(shape: Iterable[int]) -> tuple[int, int] | None:
    """The two longest dimensions, the longest last; None if they are too short. Other dimensions are batch dimensions."""
    sizes = list(shape)
    order = sorted(range(len(sizes)), key=lambda dim: sizes[dim])
    if len(sizes) < 2 or sizes[order[-2]] < SHORTEST:
        return None
    return order[-2], order[-1]


def _averaged(state: dict[str, Any], name: str, now: Tensor, beta: float) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(now)
    average: Tensor = state[name].lerp_(now, 1 - beta)
    return average


def _mean(values: Tensor, dim: int) -> Tensor:
    """The mean over a dimension, kept with length 1; over all ranks if the dimension is sharded."""
    total = values.sum(dim, keepdim=True)
    if is_sharded(total):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if place.is_partial() else place for place in total.placements]  # type: ignore[attr-defined]
        total = total.redistribute(placements=whole)  # type: ignore[attr-defined]
    return total / values.shape[dim]
