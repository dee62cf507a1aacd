"""Launches that are repeated: the compiled kernel is looked up once.

For every launch, Triton looks at each argument to find the kernel compiled for such arguments, which takes the host longer than
the launch itself. A `Launcher` does that the first time, and then starts the same compiled kernel again.

`compiled[grid]` starts a compiled kernel too, but it describes each launch for hooks, such as a profiler's, and calls them even
if there are none. Without hooks, `compiled.run` is called as `compiled[grid]` calls it, and gets neither.
"""

from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

Argument = Any  # a tensor, a descriptor of one (Triton and Gluon have a class each), or None

_MOST = 4096  # launchers that `launch` keeps
_KNOWN: dict[Any, "Launcher"] = {}
# Whether `compiled.run` takes the grid, stream, function, metadata of the kernel, metadata of the launch, two hooks, and the
# arguments, and a hook may be None: true of 3.6 and of 3.8. Newer versions keep `compiled[grid]` until someone has looked.
_RUN_IS_KNOWN = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 8)


def kinds(*tensors: Argument) -> tuple[Any, ...]:
    """What the compiler is told of tensors: their types, and whether they start at a multiple of 16 bytes.

    Of a descriptor: the type and the shape of a block, which decide its layout.
    """
    return tuple([None if tensor is None else _kind(tensor) for tensor in tensors])


def _kind(tensor: Argument) -> tuple[Any, ...]:
    if isinstance(tensor, Tensor):
        return tensor.dtype, tensor.data_ptr() % 16 == 0
    return tensor.base.dtype, *tensor.block_shape


class Launcher:
    """A kernel with its grid, numbers and constants; it takes tensors, on one device, whose `kinds` must not change.

    A kernel's parameters are tensors, then numbers, then constants; `given` are the constants, and options such as num_warps.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], **given: Any) -> None:
        names = list(kernel.arg_names)
        constants = [name for name in names if name in given]
        self._tensors = len(names) - len(numbers) - len(constants)
        assert names[self._tensors + len(numbers) :] == constants, "a compiled kernel takes its arguments by position"
        self._first: Callable[..., Any] = lambda *tensors: kernel[grid](*tensors, *numbers, **given)
        self._again: Callable[..., Any] | None = None
        self._grid = (*grid, 1, 1)[:3]
        self._rest = *numbers, *(given[name] for name in constants)

    def __call__(self, *tensors: Argument) -> None:
        """Launches the kernel."""
        if self._again is not None:
            self._again(*tensors)
            return
        assert len(tensors) == self._tensors
        compiled = self._first(*tensors)
        if isinstance(compiled, CompiledKernel):  # not if it was interpreted
            plain = all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors)
            self._again = _bind_launch(compiled, self._grid, self._rest, plain=plain)


def _bind_launch(compiled: CompiledKernel, grid: tuple[int, ...], rest: tuple[Any, ...], *, plain: bool) -> Callable[..., Any]:
    """Starts a compiled kernel on the current device; takes tensors, which come before the rest of the arguments.

    Of plain tensors it passes addresses. Given a tensor, Triton asks the driver at every launch whether the GPU can read it.
    """
    run_with_hooks = compiled[grid]
    if not _RUN_IS_KNOWN:
        return lambda *tensors: run_with_hooks(*tensors, *rest)
    run, fixed = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    hooks, device, stream_of = triton.knobs.runtime, driver.active.get_current_device(), driver.active.get_current_stream

    def start(*tensors: Argument) -> None:
        if _is_set(hooks.launch_enter_hook) or _is_set(hooks.launch_exit_hook):
            run_with_hooks(*tensors, *rest)
        elif plain:
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            run(*grid, stream_of(device), *fixed, *addresses, *rest)
        else:
            run(*grid, stream_of(device), *fixed, *tensors, *rest)

    return start


def _is_set(hook: Any) -> bool:
    """Whether there is something to call: a function, or a chain of them that is not empty."""
    return bool(getattr(hook, "calls", hook))


def launch(kernel: Any, grid: tuple[int, ...], tensors: Sequence[Argument], numbers: tuple[Any, ...], **given: Any) -> None:
    """Launches a kernel by the launcher of such arguments."""
    first = next(tensor for tensor in tensors if tensor is not None)
    device = first.device if isinstance(first, Tensor) else first.base.device
    # By its id, because Triton hashes a kernel by the text of its source. A launcher keeps its kernel alive.
    key = id(kernel), device, grid, numbers, tuple(given.values()), kinds(*tensors)
    launcher = _KNOWN.get(key)
    if launcher is None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        launcher = _KNOWN[key] = Launcher(kernel, grid, numbers, **given)
    launcher(*tensors)
