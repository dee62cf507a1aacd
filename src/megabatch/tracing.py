"""What `torch.compile` and `torch.func` need to be told or asked, without an import of the compiler, which is slow."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """A function that the compiler calls while it traces, and whose result it takes for a constant.

    The same as `torch.compiler.assume_constant_result`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def transforms_are_active() -> bool:
    """Whether a transform of `torch.func`, or a level of dual numbers, surrounds the call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
