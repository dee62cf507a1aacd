"""Comparison of both passes: a tower that gives other embeddings in the second pass has wrong gradients."""

from collections.abc import Iterable
from warnings import warn

import torch
from torch import Tensor


class Comparison:
    """Compares the last embedding of each chunk of one tower. The numbers stay on the device until `warn`."""

    def __init__(self) -> None:
        self._first: dict[int, Tensor] = {}  # (D,) by the number of the pass
        self._difference: Tensor | None = None  # (), the largest relative difference so far

    def remember(self, i: int, embeddings: Tensor) -> None:  # (n, D)
        """Keeps the last embedding of a chunk in the first pass."""
        self._first[i] = embeddings.detach()[-1].clone()

    def compare(self, i: int, embeddings: Tensor) -> None:  # (n, D)
        """Compares a chunk in the second pass; a dummy pass has nothing to compare with."""
        if i not in self._first:
            return
        dtype = torch.float64 if embeddings.dtype == torch.float64 else torch.float32
        before, now = self._first.pop(i).to(dtype), embeddings.detach()[-1].to(dtype)
        found = (now - before).norm() / before.norm().clamp_min(torch.finfo(dtype).tiny)
        self._difference = found if self._difference is None else torch.maximum(self._difference, found)

    def warn(self, name: str, parameters: Iterable[Tensor]) -> None:
        """Warns of a difference beyond rounding, in the name of the tower that has these parameters."""
        if self._difference is None:
            return
        dtypes = {p.dtype for p in parameters if p.dtype.is_floating_point}
        dtypes |= {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        if torch.get_float32_matmul_precision() != "highest":
            dtypes.add(torch.bfloat16)
        bound = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps) ** 0.5
        value = self._difference.item()
        if value > bound:
            warn(
                f"{name} must give the same embeddings in both passes, got a relative difference of {value:.1e}, so its "
                "gradients are wrong. Does the tower change a state between calls, or use a random generator of its own?",
                RuntimeWarning,
                stacklevel=4,
            )
