"""Marks for `torch.compile` that do not import the compiler: its import takes longer than all of ours."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """A function that the compiler calls while it traces, and whose result it takes for a constant.

    The same as `torch.compiler.assume_constant_result`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
