"""Launches that are repeated: the compiled kernel is looked up once.

For every launch, Triton looks at each argument to find the kernel compiled for such arguments, which takes the host longer than
the launch itself. A `Launcher` does that the first time, and then starts the same compiled kernel again.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel


def kinds(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What the compiler is told of tensors: their types, and whether they start at a multiple of 16 bytes."""
    return tuple(None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)


class Launcher:
    """A kernel with its grid, numbers and constants; it takes tensors, on one device, whose `kinds` must not change.

    A kernel's parameters are tensors, then numbers, then constants.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: dict[str, Any], **options: Any
    ) -> None:
        assert list(kernel.arg_names)[-len(constants) :] == list(constants), "a compiled kernel takes arguments by position"
        self._first: Callable[..., Any] = lambda *tensors: kernel[grid](*tensors, *numbers, **constants, **options)
        self._grid = (*grid, 1, 1)[:3]
        self._rest = *numbers, *constants.values()
        self._tensors = len(kernel.arg_names) - len(self._rest)
        self._again: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launches the kernel."""
        if self._again is not None:
            self._again(*tensors, *self._rest)
            return
        assert len(tensors) == self._tensors
        compiled = self._first(*tensors)
        if isinstance(compiled, CompiledKernel):  # not if it was interpreted
            self._again = compiled[self._grid]
