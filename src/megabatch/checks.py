"""Checks of the arguments of public functions. Each message names the argument, the expected value and the given value.

The checks run before any computation. They read only shapes, dtypes and devices, never values, so they do not synchronize
with a GPU.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from megabatch import dispatch
from megabatch.tiles.block import EAGER, SUPPORTED_DTYPES, TRITON, compute_precision
from megabatch.tiles.sums import MAX_K

BACKENDS = ("auto", EAGER, TRITON)
_DTYPE_NAMES = "float64, float32, bfloat16 or float16"


def embeddings(x: Any, y: Any, names: tuple[str, str] = ("x", "y"), *, same_rows: bool = False) -> None:
    """Checks the two sides of a pairwise operation."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype in SUPPORTED_DTYPES and x.dim() == 2:
        if x.shape == y.shape and x.shape[1] > 0 and x.dtype == y.dtype and x.device == y.device:
            return  # the usual case: shape, dtype and device agree, which takes a microsecond to check
    for name, tensor in zip(names, (x, y), strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor of embeddings, got {_kind(tensor)}")
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise TypeError(f"{name} must be {_DTYPE_NAMES}, got {_dtype(tensor)}")
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, (rows, embedding dim), got shape {_shape(tensor)}")
        if tensor.shape[1] == 0:
            raise ValueError(f"{name} must have an embedding dimension of at least 1, got shape {_shape(tensor)}")
    first, second = names
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{first} and {second} must have the same embedding dimension, got {x.shape[1]} and {y.shape[1]} "
            f"(shapes {_shape(x)} and {_shape(y)})"
        )
    if same_rows and x.shape[0] != y.shape[0]:
        raise ValueError(
            f"{first} and {second} must have the same number of rows, because row i of one belongs to row i of the other; "
            f"got {x.shape[0]} and {y.shape[0]}"
        )
    if x.device != y.device:
        raise ValueError(f"{first} and {second} must be on the same device, got {x.device} and {y.device}")
    precisions = [compute_precision(tensor) for tensor in (x, y)]
    if precisions[0] != precisions[1]:
        raise TypeError(
            f"{first} and {second} must have the same dtype, got {_dtype(x)} and {_dtype(y)}; convert one of them with .to() "
            "(under autocast, float32 and the autocast dtype may be mixed)"
        )


def at_least_one_pair(x: Tensor, name: str) -> None:
    """Raises if the tensor has no rows, because a mean needs at least one pair."""
    if x.shape[0] == 0:
        raise ValueError(f"{name} must have at least one row: the mean over no pairs is undefined, got shape {_shape(x)}")


def same_rows(value: Tensor, name: str, like: Tensor, side: str) -> None:
    """Checks that the value has as many rows as `like` and is on the same device."""
    if value.shape[0] != like.shape[0]:
        raise ValueError(f"{name} must have {like.shape[0]} rows, one for each row of {side}, got shape {_shape(value)}")
    _same_device(value, name, like)


def without_gradient(values: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raises if a tensor that never receives a gradient requires one."""
    for name, value in zip(names, values, strict=True):
        if value.requires_grad:
            raise ValueError(f"{name} must not require a gradient, because it gets none; pass {name}.detach()")


def number(value: Any, name: str, like: Tensor) -> None:
    """Checks a scale or a bias, which is a float or a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a float or a tensor of one element, got shape {_shape(value)}")
        if not value.dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating-point tensor, got {_dtype(value)}")
        _same_device(value, name, like)
    elif isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a float or a tensor of one element, got {_kind(value)}")


def offsets(value: Any, name: str, like: Tensor, side: str) -> None:
    """Checks a tensor of one number for each row of `like`, or None."""
    if value is None:
        return
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point tensor or None, got {_kind(value)}")
    _one_each(value, name, like, side)


def ids(value: Any, name: str, like: Tensor, side: str, *, two_columns: bool = False) -> None:
    """Checks one integer for each row of `like`, or None. With `two_columns`, two integers for each row are also valid."""
    if value is None:
        return
    if two_columns and isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 2:
        value = value[:, 0]
    _identifiers(value, name, like, side, expected="a tensor of integers or None")


def _identifiers(value: Any, name: str, like: Tensor, side: str, *, expected: str) -> None:
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be {expected} (int64, int32, int16, int8 or uint8), got {_kind(value)}")
    _one_each(value, name, like, side)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def exclude(value: Any, x: Tensor, y: Tensor, sides: tuple[str, str] = ("x", "y")) -> None:
    """Checks that the value is None, "diagonal" or a pair (row ids, column ids)."""
    if value is None or (isinstance(value, str) and value == "diagonal"):
        return
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        description = repr(value) if isinstance(value, str) else _kind(value)
        raise ValueError(f'exclude must be None, "diagonal" or a pair (row ids, column ids), got {description}')
    for name, part, like, side in zip(("exclude[0]", "exclude[1]"), value, (x, y), sides, strict=True):
        _identifiers(part, name, like, side, expected="a tensor of integers")


def exclude_from_symmetric(value: Any, z: Tensor) -> None:
    """Checks `exclude` of an operation on one set of rows: None, "diagonal" or a tensor of ids."""
    if value is None or (isinstance(value, str) and value == "diagonal"):
        return
    if isinstance(value, str):
        raise ValueError(f'exclude must be None, "diagonal" or a tensor of integers, got {value!r}')
    _identifiers(value, "exclude", z, "z", expected='None, "diagonal" or a tensor of integers')


def best(k: Any) -> None:
    """Checks the k of a top-k operation."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise ValueError(f"k must be an integer from 1 to {MAX_K}, got {k!r}")


def bound(value: Any, name: str, x: Tensor, side: str = "x") -> None:
    """Checks a bound, which is a number or a tensor of one number for each row of x. A bound must not require a gradient."""
    if isinstance(value, Tensor) and value.numel() != 1:
        offsets(value, name, x, side)
    elif value is not None:
        number(value, name, x)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name} must not be nan, because no value is larger or smaller than nan")
    if isinstance(value, Tensor):
        without_gradient([value], [name])


def reduction(value: Any) -> None:
    """Checks the reduction over the rows of a loss."""
    if value not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {value!r}")


def labels(value: Any, z: Tensor) -> None:
    """Checks a tensor of one integer for each row of z."""
    _identifiers(value, "labels", z, "z", expected="a tensor of integers")


def backend(value: Any, precision: str, device: torch.device) -> None:
    """Checks the name of a backend. Raises if the named backend cannot serve the call, because there is no silent fallback."""
    if value not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {value!r}")
    reason = dispatch.why_not_triton(precision, device) if value == TRITON else None
    if reason is not None:
        raise ValueError(f'backend="triton" cannot serve this call: {reason}. Use backend="auto"')


def group(value: Any) -> None:
    """Checks that the value is None, a process group or a one-dimensional mesh."""
    if value is None:
        return
    if isinstance(value, DeviceMesh):
        if value.ndim != 1:
            raise ValueError(
                f"group must be a DeviceMesh with one dimension, got {value.ndim} dimensions (shape {tuple(value.shape)}); "
                'pass the dimension over which the batch is split, as in mesh["dp"]'
            )
        return
    if isinstance(value, int):
        raise ValueError("group must contain this process, got a group of other processes")
    if not isinstance(value, distributed.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed process group, a DeviceMesh or None, got {_kind(value)}")


def _one_each(value: Tensor, name: str, like: Tensor, side: str) -> None:
    if value.dim() != 1 or value.shape[0] != like.shape[0]:
        raise ValueError(
            f"{name} must have shape ({like.shape[0]},), one entry for each row of {side}, got shape {_shape(value)}"
        )
    _same_device(value, name, like)


def number_in_range(name: str, value: Any, expected: str, *, below: float = math.inf, at_most: float = math.inf) -> float:
    """Checks a number of at least 0, less than `below` and at most `at_most`. `expected` names this range in the message."""
    number = float(value) if isinstance(value, (float, Real)) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= at_most or number >= below:
        raise ValueError(f"{name} must be a number {expected}, got {value!r}")
    return number


def check_smoothing(value: Any, **excluding: Any) -> float:
    """Checks `label_smoothing` and returns it as a float.

    If it is above 0, the arguments in `excluding` must be None. They would exclude pairs, but smoothing averages over all keys.
    """
    if type(value) is float and value == 0.0:
        return value  # the default; the checks below would take 3 µs, which matters in a small step
    amount = number_in_range("label_smoothing", value, "from 0 to 1", at_most=1)
    for name, given in excluding.items():
        if amount > 0 and given is not None:
            raise ValueError(
                f"{name} must be None with label smoothing, whose mean is taken over all keys of the batch, got "
                f"{type(given).__name__}"
            )
    return amount


def _same_device(value: Tensor, name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, where the embeddings are, got {value.device}; move it with .to()")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    return f"a tensor of {_dtype(value)}" if isinstance(value, Tensor) else type(value).__name__
