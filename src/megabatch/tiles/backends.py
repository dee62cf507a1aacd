"""Which walks serve a call: PyTorch operations everywhere, Triton kernels where they run."""

import importlib.util
import os
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megabatch.tiles import eager
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import FLOAT64

EAGER, TRITON = "eager", "triton"


class Walks(Protocol):
    """What a backend is: the walks over the tiles of a block. `eager` says what each of them means."""

    def logsumexp_statistics(self, block: Block) -> tuple[LogSum, LogSum]: ...  # noqa: D102

    def logsumexp_gradients(  # noqa: D102
        self,
        block: Block,
        row: LogSum,
        col: LogSum,
        drow: Tensor | None,
        dcol: Tensor | None,
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]: ...

    def softplus_sums(self, block: Block) -> Tensor: ...  # noqa: D102

    def softplus_gradients(  # noqa: D102
        self, block: Block, dtotal: Tensor, sums: ColumnGradients, needs: Needs, *, total: Tensor | None = None
    ) -> Iterator[RowGradients]: ...

    def rank_counts(self, block: Block) -> tuple[Tensor, Tensor]: ...  # noqa: D102


def _find_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:
        return False


# Looked up once, because the compiler cannot trace the looking.
HAS_TRITON = _find_triton()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly, for tests


def why_not_triton(precision: str, device: torch.device) -> str | None:
    """What keeps the kernels from serving inputs of this precision on this device; None if nothing does."""
    if not HAS_TRITON:
        return "the package triton is not installed; pip install triton"
    if precision == FLOAT64:
        return "its kernels compute in float32 at most, and the inputs are float64"
    if device.type != "cuda" and not INTERPRETED:
        return f"its kernels run on CUDA devices, and the inputs are on {device}"
    return None


# What "auto" means. The kernels are asked for by name until their safe path for outliers has been run on a device.
DEFAULT = EAGER


def sums_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """In which type a backend keeps the sums of exponentials, for statistics of `dtype`."""
    return torch.float64 if backend == TRITON else dtype


def walks(backend: str, block: Block) -> Walks:
    """The walks of a backend, by its name; a block without similarities needs no kernels."""
    if backend == EAGER or block.is_empty:
        return eager
    from megabatch.tiles import triton_walks

    return triton_walks
