"""Arguments as the operators take them: tensors of the type that sums are kept in."""

import torch
from torch import Tensor

from megabatch import validation
from megabatch.tiles.precision import accumulator_dtype


def number(value: float | Tensor, name: str, x: Tensor, *, shared: bool = False) -> Tensor:  # ()
    """A scale or bias as a 0-d tensor, made on the device: a copy from the host would make CUDA wait.

    One that several operators share is float64, and stays it. Their gradients are then added before they are rounded, which
    matters where they nearly cancel.
    """
    validation.number(value, name, x)
    shared = shared or (isinstance(value, Tensor) and value.dtype == torch.float64)
    dtype = torch.float64 if shared else accumulator_dtype(x.dtype)
    if isinstance(value, Tensor):
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype, device=x.device)


def offsets(value: Tensor | None, x: Tensor) -> Tensor | None:
    """One number for each row or column, or none."""
    return None if value is None else value.to(accumulator_dtype(x.dtype))
