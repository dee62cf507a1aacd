"""Launches kernels repeatedly and looks up the compiled kernel only once.

For every launch, Triton inspects each argument to find the kernel that was compiled for such arguments. This takes the host
longer than the launch itself. A `Launcher` lets Triton do this at the first launch, and then starts the same compiled kernel
again.

`compiled[grid]` also starts a compiled kernel. But for every launch, it prepares a description for hooks, such as the hooks of
a profiler, and calls the chains of hooks, even if they are empty. So if there are no hooks, a `Launcher` calls `compiled.run`
directly and passes None for the description and for the hooks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

Argument = Any  # a tensor, a descriptor of a tensor (Triton and Gluon have one class each), or None

_MAX_LAUNCHERS = 4096  # number of launchers that `launch` stores
_LAUNCHERS: dict[Any, "Launcher"] = {}
# Whether `compiled.run` takes these arguments: the grid, the stream, the function, the metadata of the kernel, the metadata of
# the launch, two hooks that may be None, and the arguments of the kernel. This was checked for Triton 3.6 and 3.8. With newer
# versions, kernels are started by `compiled[grid]`.
_CAN_CALL_RUN = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 8)


def kinds(*tensors: Argument) -> tuple[Any, ...]:
    """Returns the properties of tensors that decide how a kernel is compiled.

    For a tensor, these are its dtype and whether its address is a multiple of 16 bytes. For a descriptor, these are the dtype
    and the shape of its block, which decide the layout of the block.
    """
    return tuple([None if tensor is None else _kind(tensor) for tensor in tensors])


def _kind(tensor: Argument) -> tuple[Any, ...]:
    if isinstance(tensor, Tensor):
        return tensor.dtype, tensor.data_ptr() % 16 == 0
    return tensor.base.dtype, *tensor.block_shape


class Launcher:
    """A kernel with its grid, numbers and constants. It is called with the tensors.

    The tensors of all calls must be on one device and have the same `kinds`. The parameters of a kernel are tensors, then
    numbers, then compile-time constants.

    Args:
        kernel: a Triton or Gluon kernel.
        grid: the number of programs in each dimension.
        numbers: the arguments between the tensors and the constants.
        options: the constants, and launch options such as num_warps.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], **options: Any) -> None:
        names = list(kernel.arg_names)
        constants = [name for name in names if name in options]
        self._tensor_count = len(names) - len(numbers) - len(constants)
        assert names[self._tensor_count + len(numbers) :] == constants, "a compiled kernel takes its arguments by position"
        self._launch_by_triton: Callable[..., Any] = lambda *tensors: kernel[grid](*tensors, *numbers, **options)
        self._launch_compiled: Callable[..., Any] | None = None
        self._grid = (*grid, 1, 1)[:3]
        self._numbers_and_constants = *numbers, *(options[name] for name in constants)

    def __call__(self, *tensors: Argument) -> None:
        """Launches the kernel."""
        if self._launch_compiled is not None:
            self._launch_compiled(*tensors)
            return
        assert len(tensors) == self._tensor_count
        compiled = self._launch_by_triton(*tensors)
        if isinstance(compiled, CompiledKernel):  # an interpreted kernel returns None
            plain = all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors)
            self._launch_compiled = _bind_launch(compiled, self._grid, self._numbers_and_constants, plain=plain)


def _bind_launch(compiled: CompiledKernel, grid: tuple[int, ...], rest: tuple[Any, ...], *, plain: bool) -> Callable[..., Any]:
    """Returns a function that starts a compiled kernel on the current device. Its arguments are the tensors.

    Args:
        compiled: the kernel.
        grid: the number of programs in each of three dimensions.
        rest: the arguments of the kernel after the tensors.
        plain: whether there are no descriptors among the tensors. If there are none, the addresses of the tensors are
            passed, because Triton would ask the driver at every launch whether the GPU can read a tensor.
    """
    run_with_hooks = compiled[grid]
    if not _CAN_CALL_RUN:
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
    """Returns whether a hook has something to call: it is a function, or a chain of functions that is not empty."""
    return bool(getattr(hook, "calls", hook))


def launch(kernel: Any, grid: tuple[int, ...], tensors: Sequence[Argument], numbers: tuple[Any, ...], **options: Any) -> None:
    """Launches through the `Launcher` that is stored for this kernel, device, grid, numbers, options and `kinds` of tensors."""
    first = next(tensor for tensor in tensors if tensor is not None)
    device = first.device if isinstance(first, Tensor) else first.base.device
    # The key contains the id of the kernel, because Triton hashes a kernel by the text of its source. The id stays valid,
    # because the launcher keeps its kernel alive.
    key = id(kernel), device, grid, numbers, tuple(options.values()), kinds(*tensors)
    launcher = _LAUNCHERS.get(key)
    if launcher is None:
        if len(_LAUNCHERS) >= _MAX_LAUNCHERS:
            _LAUNCHERS.clear()
        launcher = _LAUNCHERS[key] = Launcher(kernel, grid, numbers, **options)
    launcher(*tensors)
