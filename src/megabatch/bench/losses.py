"""Memory and time of losses and of the bare products against the batch. Each loss is checked against float64 first."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megabatch.bench.accuracy import ClipTruth, is_right, pairs, sampled_rows, truth_of
from megabatch.bench.loss_systems import DENSE, NAMES, Loss, loss_of
from megabatch.bench.measure import FAILED, LATE, MEMORY, MISSING, OK, WRONG, now, peak_memory, seconds_of
from megabatch.machine import ran_out_of_memory
from megabatch.tiles.plan import TileSize, eager_tile, strip_size

Inputs = tuple[Tensor, Tensor, Tensor]  # of `pairs`
T = TypeVar("T")
DENSE_BYTES = 16  # bytes that a dense loss holds for each entry of the matrix; see planning/losses.py


@dataclass
class LossResult:
    """One system at one batch. Missing numbers are None; a wrong result is never timed."""

    system: str
    batch: int
    status: str
    forward: float | None = None  # seconds
    backward: float | None = None
    peak: int | None = None  # bytes beyond the inputs, gradients included
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None

    @property
    def seconds(self) -> float | None:
        """Forward and backward."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


@dataclass(frozen=True)
class Products:
    """Seconds of the matrix products that every exact loss needs, at one batch: S, S again, dX and dY."""

    batch: int
    seconds: float


def measure(
    batches: list[int], width: int, device: str, seconds: float, memory: int | None, until: float = math.inf
) -> Iterator[LossResult | Products]:
    """All systems at all batches, smallest first. A system that ran out of memory or time is not tried at larger batches.

    Args:
        batches: pairs.
        width: of the embeddings.
        device: "cpu" or "cuda".
        seconds: time limit for one system at one batch; one step is always timed.
        memory: bytes that may be allocated; a dense loss that would need more is not tried. None for no limit.
        until: value of `time.perf_counter()` after which nothing is started.
    """
    stopped: dict[str, str] = {}
    pace: dict[str, float] = {}  # seconds that the next batch will take
    ordered = sorted(batches)
    following = dict(zip(ordered, [*ordered[1:], 0], strict=True))
    for batch in ordered:
        inputs = pairs(batch, width, device)
        right = truth_of(*inputs)
        yield Products(batch, _product_seconds(inputs[0].detach(), inputs[1].detach(), seconds))
        for name in NAMES:
            if name not in stopped and time.perf_counter() + pace.get(name, 0.0) > until:
                stopped[name] = LATE
            if name in stopped:
                yield LossResult(name, batch, stopped[name])
                continue
            result = measure_one(name, inputs, right, device, seconds, memory)
            if result.status in (MEMORY, MISSING) or result.status.startswith(FAILED):
                stopped[name] = result.status
            pace[name] = 2 * (result.seconds or 0.0) * (following[batch] / batch) ** 2
            yield result
        del inputs


def measure_one(
    name: str, inputs: Inputs, right: ClipTruth, device: str, seconds: float, memory: int | None = None
) -> LossResult:
    """One system on embeddings of `pairs`: memory, errors, then the fastest of as many steps as fit the time limit."""
    batch = len(inputs[0])
    result = LossResult(name, batch, OK)
    try:
        loss = loss_of(name, device)
    except ImportError:
        result.status = MISSING
        return result
    if memory is not None and name == DENSE and DENSE_BYTES * batch**2 > memory:
        result.status = MEMORY
        return result
    try:
        _step(loss, *pairs(64, inputs[0].shape[1], device))  # warm-up: starts threads and compiles, not to be measured
        _forget_gradients(*inputs)  # of the system before, whose freed memory would be reused uncounted
        (value, *_), result.peak = peak_memory(lambda: _step(loss, *inputs), device)
    except Exception as error:  # a peer may fail in any way; the others are still measured
        reason = f"{FAILED}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        result.status = MEMORY if ran_out_of_memory(error) else reason
        return result
    rows = sampled_rows(batch)
    gradients = [t.grad[rows] for t in inputs[:2] if t.grad is not None]
    result.loss = value
    result.loss_error, result.gradient_error = right.errors(value, *gradients)
    if not is_right(value, result.loss_error, result.gradient_error, device):
        result.status, result.peak = WRONG, None
        return result
    result.forward, result.backward = min(_repeated(lambda: _step(loss, *inputs)[1:], seconds), key=sum)
    return result


def _step(loss: Loss, image: Tensor, text: Tensor, log_scale: Tensor) -> tuple[float, float, float]:
    """(loss, seconds forward, seconds backward); gradients are left in the inputs."""
    _forget_gradients(image, text, log_scale)
    begun = now(image.device)
    value = loss(image, text, log_scale.exp())
    middle = now(image.device)
    value.backward()  # type: ignore[no-untyped-call]
    end = now(image.device)
    return value.item(), middle - begun, end - middle


def _forget_gradients(*inputs: Tensor) -> None:
    for tensor in inputs:
        tensor.grad = None


def _repeated(work: Callable[[], T], seconds: float) -> list[T]:
    """The results of as many calls as fit the time limit, and at least one."""
    begun = time.perf_counter()
    found = [work()]
    while time.perf_counter() - begun < seconds:
        found.append(work())
    return found


def bare_products(image: Tensor, text: Tensor, size: TileSize | None = None) -> dict[str, Callable[[], None]]:
    """S, dX and dY of the whole batch with PyTorch's matrix product, in strips of `size` (default: those of large batches)."""
    B, D = image.shape
    if size is None:
        size = strip_size(B, B, D, 2) if image.is_cuda else eager_tile(image.device, image.dtype)
    rows, columns = min(size.rows, B), min(size.columns, B)
    strip = torch.randn(rows, columns, device=image.device, dtype=image.dtype)
    dx, dy = image.new_empty(rows, D), image.new_empty(columns, D)
    strips = [(image[i : i + rows], text[j : j + columns]) for i in range(0, B, rows) for j in range(0, B, columns)]

    def similarities() -> None:
        for a, b in strips:
            torch.mm(a, b.T, out=strip[: len(a), : len(b)])

    def row_gradients() -> None:
        for a, b in strips:
            torch.mm(strip[: len(a), : len(b)], b, out=dx[: len(a)])

    def column_gradients() -> None:
        for a, b in strips:
            torch.mm(strip[: len(a), : len(b)].T, a, out=dy[: len(b)])

    return {"S": similarities, "dX": row_gradients, "dY": column_gradients}


def _product_seconds(image: Tensor, text: Tensor, seconds: float) -> float:
    total = 0.0
    for name, work in bare_products(image, text).items():
        work()
        best = min(_repeated(lambda work=work: seconds_of(work, image.device), seconds / 4))  # type: ignore[misc]
        total += best * (2 if name == "S" else 1)
    return total
