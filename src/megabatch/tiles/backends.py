"""The two engines behind one protocol: PyTorch operations (`eager`) and Triton kernels. `dispatch` chooses one of them."""

from collections.abc import Iterator
from typing import Final, Protocol

import torch
from torch import Tensor

from megabatch.tiles import eager
from megabatch.tiles.block import Block, ColumnGradients, Needs, RankTargets, RowGradients
from megabatch.tiles.sums import LogSum, SoftSum
from megabatch.tiles.topk import Best

EAGER: Final = "eager"
TRITON: Final = "triton"


class Passes(Protocol):
    """The passes over the tiles of a block. `eager` says what each of them means."""

    def logsumexp_statistics(self, block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]: ...  # noqa: D102

    def logsumexp_gradients(  # noqa: D102
        self,
        block: Block,
        row: LogSum,
        col: LogSum | None,
        drow: Tensor | None,
        dcol: Tensor | None,
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]: ...

    def soft_statistics(self, block: Block) -> tuple[SoftSum, SoftSum]: ...  # noqa: D102

    def soft_gradients(  # noqa: D102
        self,
        block: Block,
        row: SoftSum,
        col: SoftSum,
        drow: Tensor,
        dcol: Tensor,
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]: ...

    def softplus_sums(self, block: Block) -> Tensor: ...  # noqa: D102

    def softplus_gradients(  # noqa: D102
        self, block: Block, dtotal: Tensor | None, sums: ColumnGradients, needs: Needs, *, total: Tensor | None = None
    ) -> Iterator[RowGradients]: ...

    def rank_counts(self, block: Block, targets: RankTargets | None = None) -> tuple[Tensor, Tensor]: ...  # noqa: D102

    def topk(self, block: Block, k: int) -> Best: ...  # noqa: D102


class RowWork(Protocol):
    """What is done row by row, without a pass over tiles. `eager` defines each of them."""

    def matching_products(self, block: Block) -> Tensor: ...  # noqa: D102

    def finish_rows(  # noqa: D102
        self,
        sums: Tensor,
        out: Tensor | None,
        factor: Tensor,
        *,
        own: Tensor | None,
        partners: Tensor,
        dmatch: Tensor | None,
        precision: str,
    ) -> Tensor | None: ...


class Backend(Passes, RowWork, Protocol):
    """A backend: passes over tiles and work on rows."""


def sums_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """In which type a backend keeps the sums of exponentials, for statistics of `dtype`."""
    return torch.float64 if backend == TRITON else dtype


def backend_for(name: str, block: Block) -> Backend:
    """A backend by its name; a block without similarities needs no kernels."""
    if name == EAGER or block.is_empty:
        return eager
    from megabatch.kernels import backend as triton_backend

    return triton_backend
