"""Label smoothing: a part of the target is spread evenly over all that a query is compared with.

With the part ε, a cross-entropy becomes itself plus ε·(s_ii − mean_j s_ij). The mean needs no walk: it is the similarity to the
mean of all keys.
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megabatch import operators, validation
from megabatch.tiles.precision import HALF_DTYPE, accumulator_dtype, compute_precision


def check_smoothing(value: Any, **unsupported: Any) -> float:
    """A number from 0 to 1, which is returned; and where it is not 0, nothing that leaves pairs out."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"label_smoothing must be a number from 0 to 1, got {value!r}")
    for name, other in unsupported.items():
        if float(value) > 0 and other is not None:
            raise ValueError(f"{name} must be None with label smoothing, whose mean is taken over all keys of the batch")
    return float(value)


def mean_similarity(
    x: Tensor,  # (N, D)
    others: Sequence[tuple[Tensor, Tensor | None]],  # keys (M, D), and what is subtracted from their similarities (M,)
    scale: Tensor,  # ()
    group: Any,
) -> Tensor:  # (N,)
    """The mean of each row's similarities to all of the others, on all ranks."""
    rows, columns = _as_multiplied(x), [_as_multiplied(keys) for keys, _ in others]
    with torch.autocast(validation.autocast_device(x), enabled=False):
        sums = torch.stack([keys.sum(0) for keys in columns]).sum(0)
        subtracted = [sums.new_zeros(()) if log_q is None else log_q.sum() for _, log_q in others]
        count = sums.new_full((), sum(map(len, columns)))
        packed = torch.cat((sums, torch.stack((torch.stack(subtracted).sum(), count))))
        whole = operators.apply(operators.total, packed, validation.group(group))
        mean: Tensor = (rows @ (whole[:-2] * scale) - whole[-2]) / whole[-1]
        return mean


def _as_multiplied(values: Tensor) -> Tensor:
    """As the products see them, in the type of sums; TF32's rounding, which does not matter to a mean, is left out."""
    half = HALF_DTYPE.get(compute_precision(values.dtype, validation.autocast_device(values)))
    return (values if half is None else values.to(half)).to(accumulator_dtype(values.dtype))
