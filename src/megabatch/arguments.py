"""Checked arguments as the operators take them: how a call runs, decided once, and numbers as tensors."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megabatch import validation
from megabatch.ring import topology
from megabatch.tiles import backends
from megabatch.tiles.precision import accumulator_dtype, compute_precision

Backend = Literal["auto", "eager", "triton"]
Group = ProcessGroup | DeviceMesh | None


class Execution(NamedTuple):
    """How a call runs. Operators take the three strings, in this order."""

    precision: str  # of the products
    backend: str  # "eager" or "triton"
    group: str  # the route of `ring.topology`; empty for this process alone

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return int(topology.rank_on(self.group))


def execution(
    x: Tensor,
    y: Tensor,
    names: tuple[str, str] = ("x", "y"),
    *,
    same_rows: bool = False,
    group: Group = None,
    purpose: str = "",
    backend: Backend = "auto",
) -> Execution:
    """Checks the two sides of a pairwise operation, its group and its backend, and decides how the call runs.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings.
        names: of x and y, for messages.
        same_rows: whether row i of x belongs to row i of y.
        group: process group to share the batch over (default: this process only).
        purpose: what the operation is for; all ranks have to agree on it.
        backend: "auto", "eager" or "triton".
    """
    validation.embeddings(x, y, names, same_rows=same_rows)
    precision = compute_precision(x.dtype, validation.autocast_device(x))
    process_group = validation.group(group)
    validation.backend(backend, precision, x.device)
    chosen = str(backends.default(precision, x.device)) if backend == "auto" else backend
    return Execution(precision, chosen, topology.route(process_group, purpose))


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
