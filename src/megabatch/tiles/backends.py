"""Which backend serves a call: PyTorch operations everywhere, Triton kernels where they run."""

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from typing import Final, Protocol

import torch
from torch import Tensor

from megabatch import tracing
from megabatch.tiles import eager
from megabatch.tiles.block import Block, ColumnGradients, Needs, Pairs, RowGradients
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import FLOAT64
from megabatch.tiles.softsum import SoftSum
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

    def rank_counts(self, block: Block, pairs: Pairs | None = None) -> tuple[Tensor, Tensor]: ...  # noqa: D102

    def topk(self, block: Block, k: int) -> Best: ...  # noqa: D102


class RowWork(Protocol):
    """What is done row by row, without a pass over tiles. `matching` says what each of them means."""

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
    if INTERPRETED:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels run on NVIDIA GPUs, and the inputs are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return "its kernels need compute capability {}.{} or newer, and {} has {}.{}".format(*_OLDEST, device, *capability)
    return None


_OLDEST = (8, 0)  # Ampere: the first with bfloat16 and TF32


@tracing.constant
def default(precision: str, device: torch.device) -> str:
    """What "auto" means: the kernels on GPUs they run on, PyTorch operations elsewhere."""
    return TRITON if device.type == "cuda" and _kernels_serve(precision, device) else EAGER


@cache  # asking for the capability of a device takes the host as long as an allocation
def _kernels_serve(precision: str, device: torch.device) -> bool:
    return why_not_triton(precision, device) is None


def sums_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """In which type a backend keeps the sums of exponentials, for statistics of `dtype`."""
    return torch.float64 if backend == TRITON else dtype


def backend_for(name: str, block: Block) -> Backend:
    """A backend by its name; a block without similarities needs no kernels."""
    if name == EAGER or block.is_empty:
        return eager
    from megabatch.tiles import triton_backend

    return triton_backend
