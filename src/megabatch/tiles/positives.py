"""Several positives: sums over all rows of the same id, by sorting, in O(N·D). No similarity is formed.

Σ_{j∈P(i)} ⟨z_i, z_j⟩ = ⟨z_i, Σ_{j∈P(i)} z_j⟩. Sums over a label are float64 and leave out the row itself before they are
rounded: of a label with two rows, what is left is the other one to the last bit. Rows are added in their order, never by
atomics, so results are the same every time; and no length is read back to the host.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.tiles.block import windows

# Float64 numbers of a tensor of sums, of which five are held at once: the cache on a CPU, few launches elsewhere.
_ON_CPU, _ON_ACCELERATOR, _LEAST_WIDTH = 2**18, 2**23, 16


class SameId:
    """Which of some columns have the id of each row."""

    def __init__(self, row_ids: Tensor, col_ids: Tensor) -> None:
        self._order = torch.argsort(col_ids, stable=True)
        ids = col_ids[self._order]
        self._first = torch.searchsorted(ids, row_ids)  # (N,) into the sorted columns
        self.count = torch.searchsorted(ids, row_ids, right=True) - self._first  # (N,) how many columns
        # Every column begins a segment: those that are the first of their id begin one of all its columns, others an empty one.
        place = torch.arange(len(ids), device=ids.device)
        begins, ends = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
        end = torch.full((1,), len(ids), device=ids.device)
        self._segments = torch.cat((torch.where(begins == place, place, ends), end))

    def sums(
        self,
        values: Tensor,  # (M, K)
        weights: Tensor | None = None,  # (M, 1) float64
    ) -> Iterator[tuple[slice, Tensor]]:  # (N, k) float64
        """Sums of `values`, or of them times `weights`, over the columns of a row's id, some of their width at a time."""
        M, K = values.shape
        N = len(self._first)
        if N == 0 or M == 0:
            return
        first, found = self._first.clamp_max(M - 1), (self.count > 0)[:, None]
        at_once = _ON_CPU if values.device.type == "cpu" else _ON_ACCELERATOR
        for part in windows(K, max(_LEAST_WIDTH, at_once // max(N, M))):
            ordered = values[self._order, part].double()
            if weights is not None:
                ordered *= weights[self._order]
            sums = torch.segment_reduce(ordered, "sum", offsets=self._segments, axis=0, initial=0, unsafe=True)
            yield part, torch.where(found, sums[first], 0.0)

    def whole_numbers(self, values: Tensor) -> Tensor:  # (M,) int64 → (N,)
        """The same for integers, exact."""
        before = torch.nn.functional.pad(values[self._order].cumsum(0), (1, 0))
        return before[self._first + self.count] - before[self._first]
