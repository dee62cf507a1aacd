"""Arguments as the operators take them: tensors of the type that sums are kept in."""

import torch
from torch import Tensor

from megabatch import validation
from megabatch.tiles.precision import accumulator_dtype


def number(value: float | Tensor, name: str, x: Tensor) -> Tensor:  # ()
    """A scale or bias as a 0-d tensor, made on the device: a copy from the host would make CUDA wait."""
    validation.number(value, name, x)
    dtype = accumulator_dtype(x.dtype)
    if isinstance(value, Tensor):
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype, device=x.device)


def offsets(value: Tensor | None, x: Tensor) -> Tensor | None:
    """One number for each row or column, or none."""
    return None if value is None else value.to(accumulator_dtype(x.dtype))
