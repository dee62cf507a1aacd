"""The blocks that a tower repeats, such as a transformer's layers, and activation checkpointing of them.

A checkpointed block keeps its inputs alone for the backward pass, and computes its activations again there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def layers(module: nn.Module) -> list[nn.Module]:
    """The blocks of a tower's lists of equal blocks, or else the tower itself."""
    found: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        if isinstance(part, nn.ModuleList | nn.Sequential) and _repeats(list(part)):
            found.extend(part)
        else:
            for child in part.children():
                walk(child)

    walk(module)
    return found or [module]


def _repeats(parts: list[nn.Module]) -> bool:
    """Whether these are blocks of one class, made of several modules each."""
    return len(parts) > 1 and len({type(part) for part in parts}) == 1 and all(any(part.children()) for part in parts)


def set_checkpointing(modules: Sequence[nn.Module], on: bool) -> None:
    """Turns activation checkpointing of the towers' blocks on or off; names of parameters stay as they are."""
    for layer in {id(layer): layer for module in modules for layer in layers(module)}.values():
        own: Any = vars(layer)
        before = own.get("forward")  # set on the instance, as Accelerate does
        if isinstance(before, _Checkpointed):
            if not on:
                del own["forward"]
                if before.own is not None:
                    own["forward"] = before.own
        elif on:
            own["forward"] = _Checkpointed(layer.forward, before)


class _Checkpointed:
    """A block's `forward`; `own` is the one that was set on the instance before."""

    def __init__(self, forward: Callable[..., Any], own: Callable[..., Any] | None) -> None:
        self.forward, self.own = forward, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
