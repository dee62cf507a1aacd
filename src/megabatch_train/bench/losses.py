"""Benchmarks of the CLIP loss: the systems that are compared, their inputs, and the checks of their results.

The loss is measured on one device at several batch sizes, and over ranks with fewer and fewer levels of tiling.
"""

import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megabatch as mb
from megabatch import ring
from megabatch.dispatch import Backend
from megabatch.tiles import plan
from megabatch.tiles.plan import TileSize, eager_tile, strip_size
from megabatch_train.bench.measure import (
    FAILED,
    LATE,
    MEMORY,
    MISSING,
    OK,
    WRONG,
    ProcessError,
    now,
    on_ranks,
    peak_memory,
    seconds_of,
)
from megabatch_train.machine import ran_out_of_memory

# ----------------------------------------------------------------------------------------------------------------------
# Inputs of loss benchmarks, and the reference: the CLIP loss and its gradients in float64, in linear memory.
#
# The reference follows the definition and computes a few rows of logits at a time. It shares no code with the losses that it
# checks.

SCALE = 50.0  # logit scale; in CLIP it starts at 14 and reaches 100
NOISE = 4.0  # length of the noise between an image and its text; with SCALE, the match is likely, but not certain
SAMPLED_ROWS = 64  # gradient rows that are compared with float64
LOGITS_AT_A_TIME = 2**24  # logits that the reference computes at once (128 MiB); a few temporaries have the same size

# The inner product of two unit vectors in float32 has the error of a few roundings. The error of a logit is SCALE times larger,
# and the loss has about the same error as a logit. The relative errors of probabilities and gradients have this size, too.
TOLERANCE = 4 * SCALE * torch.finfo(torch.float32).eps

# For bfloat16 inputs. Rounding a logit near SCALE to bfloat16 changes it by 0.1. float32 logits have much smaller errors.
HALF_TOLERANCE = {"loss": 2e-2, "gradient": 3e-2}


def pairs(batch: int, width: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:  # (N, D), (N, D), ()
    """Returns embeddings of unit length, in float32 on a CPU and in bfloat16 on CUDA, and the logarithm of a learned scale."""
    generator = torch.Generator(device).manual_seed(0)
    image, noise = (F.normalize(torch.randn(batch, width, generator=generator, device=device), dim=1) for _ in range(2))
    text = F.normalize(image + NOISE * noise, dim=1)
    log_scale = torch.tensor(math.log(SCALE), device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return image.to(dtype).requires_grad_(), text.to(dtype).requires_grad_(), log_scale.requires_grad_()


def sample_rows(batch: int) -> Tensor:  # (S,)
    """Returns the indices of the gradient rows that are compared."""
    return torch.linspace(0, batch - 1, min(batch, SAMPLED_ROWS)).long()


def is_right(loss: float, loss_error: float, gradient_error: float, device: str = "cpu") -> bool:
    """Whether the relative errors are within the precision of the inputs. NaN and a negative loss are wrong."""
    if device == "cuda":
        return loss >= 0 and loss_error <= HALF_TOLERANCE["loss"] and gradient_error <= HALF_TOLERANCE["gradient"]
    return loss >= 0 and loss_error * loss <= TOLERANCE and gradient_error <= TOLERANCE


class ClipTruth(NamedTuple):
    """The loss and sampled rows of its gradients in float64."""

    loss: float
    dimage: Tensor  # (S, D)
    dtext: Tensor  # (S, D)

    def errors(self, loss: float, dimage: Tensor, dtext: Tensor) -> tuple[float, float]:
        """Returns the relative error of a loss, and the larger relative error of its two gradients, measured by norms."""
        pairs = ((dimage, self.dimage), (dtext, self.dtext))
        gradients = torch.stack([(d.double() - right).norm() / right.norm() for d, right in pairs])
        return abs(loss - self.loss) / abs(self.loss), float(gradients.max())  # torch's max keeps a NaN, Python's may not


@torch.no_grad()
def clip_truth(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    scale: float | Tensor,
    sample: Tensor,  # (S,) int64
) -> ClipTruth:
    """Returns the CLIP loss, and the rows `sample` of its gradients, in float64.

    Args:
        image: (N, D) embeddings of any dtype on any device.
        text: (N, D) embeddings. Row i matches row i of `image`.
        scale: logit scale, already exponentiated, as a float or a tensor with one element.
        sample: (S,) indices of the gradient rows.
    """
    x, y, scale, sample = image.double(), text.double(), float(scale), sample.to(image.device)
    row, col = _logsumexps(x, y, scale)
    match = scale * (x * y).sum(1)  # (N,)
    loss = ((row - match) + (col - match)).mean() / 2
    dimage = _gradient_rows(x, y, scale, row, col, sample)
    return ClipTruth(float(loss), dimage, _gradient_rows(y, x, scale, col, row, sample))


def truth_of(image: Tensor, text: Tensor, log_scale: Tensor) -> ClipTruth:
    """Returns the reference for embeddings of `pairs`."""
    return clip_truth(image, text, log_scale.detach().exp(), sample_rows(len(image)))


def _logsumexps(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:  # (N,), (N,)
    """Returns the logsumexp of the rows and of the columns of scale·x·yᵀ."""
    row, col = torch.empty_like(x[:, 0]), torch.full_like(y[:, 0], -torch.inf)
    for rows in _chunks(len(x), len(y)):
        s = scale * x[rows] @ y.T  # (n, N)
        row[rows] = s.logsumexp(1)
        col = torch.logaddexp(col, s.logsumexp(0))
    return row, col


def _gradient_rows(x: Tensor, y: Tensor, scale: float, row: Tensor, col: Tensor, sample: Tensor) -> Tensor:  # (S, D)
    """dx_i = scale / 2N · [Σ_j (p_ij + q_ij)·y_j − 2·y_i], where p sums to one over j and q over i."""
    out = torch.empty_like(x[sample])
    for part in _chunks(len(sample), len(y)):
        i = sample[part]
        s = scale * x[i] @ y.T  # (s, N)
        out[part] = ((s - row[i, None]).exp_() + (s - col).exp_()) @ y - 2 * y[i]
    return out * (scale / (2 * len(x)))


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, LOGITS_AT_A_TIME // columns)
    return (slice(start, start + size) for start in range(0, rows, size))


# ----------------------------------------------------------------------------------------------------------------------
# The CLIP losses that benchmarks compare: megabatch, a loss in plain PyTorch, and the losses of other projects.
#
# A loss is a function of image embeddings, text embeddings and scale that returns the symmetric loss of CLIP. If a loss is not
# installed or does not run on the device, building it raises an `ImportError`.


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
MEGABATCH, DENSE, CHUNKS = "megabatch", "open_clip", "checkpoint"
INF_CL, CUT, LIGER = "inf_cl", "cut-cross-entropy", "Liger"
CHUNK_ROWS = 1024


def open_clip_losses() -> Any:
    """Imports only the losses of open_clip, because the whole package imports many other packages."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        raise ImportError("open_clip", name="open_clip")
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(package.origin).parent / "loss.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _megabatch(device: str) -> Loss:
    backend: Backend = "triton" if device == "cuda" else "auto"
    return lambda x, y, k: mb.clip_loss(x, y, k, backend=backend)


def _dense(device: str) -> Loss:
    module = open_clip_losses().ClipLoss()

    def loss(*inputs: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=inputs[0].dtype == torch.bfloat16):
            value: Tensor = module(*inputs)
        return value

    return loss


def dense_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The dense CLIP loss in plain PyTorch, as in open_clip on one rank."""
    logits, labels = scale * image @ text.T, torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def loss_by_chunks(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The CLIP loss in chunks of rows, which activation checkpointing computes again in the backward pass."""

    def part(rows: Tensor, others: Tensor, scale: Tensor, start: int) -> Tensor:
        logits = scale * rows @ others.T  # (n, N)
        labels = torch.arange(start, start + len(rows), device=rows.device)
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    total = image.new_zeros((), dtype=torch.float32)
    for x, y in ((image, text), (text, image)):
        for i, rows in enumerate(torch.split(x, CHUNK_ROWS)):
            total = total + checkpoint(part, rows, y, scale, i * CHUNK_ROWS, use_reentrant=False)
    return total / (2 * len(image))


def _both_ways(one_way: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Loss:
    """Returns a loss that is the mean of `one_way(queries, keys, scale, labels)` over both directions."""

    def loss(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        return (one_way(x, y, k, labels) + one_way(y, x, k, labels)) / 2

    return loss


def _inf_cl(device: str) -> Loss:
    from inf_cl import cal_flash_loss

    return _both_ways(lambda x, y, k, labels: cal_flash_loss(x, y, labels, k).mean())


def _cut_cross_entropy(device: str) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    exact = partial(linear_cross_entropy, filter_eps=None, impl="cce")
    return _both_ways(lambda x, y, k, labels: exact((k * x).to(x.dtype), y, labels))


def _liger(device: str) -> Loss:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    return _both_ways(lambda x, y, k, labels: fused(y, (k * x).to(x.dtype), labels))


_BUILDERS: dict[str, Callable[[str], Loss]] = {
    MEGABATCH: _megabatch,
    CHUNKS: lambda device: loss_by_chunks,
    DENSE: _dense,
    INF_CL: _inf_cl,
    CUT: _cut_cross_entropy,
    LIGER: _liger,
}
NAMES = tuple(_BUILDERS)
CUDA_ONLY = (INF_CL, CUT, LIGER)
ABOUT = {
    MEGABATCH: "tiles",
    CHUNKS: "chunks of rows with activation checkpointing",
    DENSE: "dense loss",
    INF_CL: "code of the paper",
    CUT: "exact, both directions",
    LIGER: "fused linear cross-entropy, both directions",
}


def loss_of(name: str, device: str) -> Loss:
    """Returns the loss with this name. Raises an `ImportError` if it is not installed or does not run on `device`."""
    if name in CUDA_ONLY and device != "cuda":
        raise ImportError(f"{name} runs only on CUDA", name=name)
    return _BUILDERS[name](device)


# ----------------------------------------------------------------------------------------------------------------------
# Memory and time of losses, and of only their matmuls, against the batch size. Each loss is first compared with float64.


Inputs = tuple[Tensor, Tensor, Tensor]  # the result of `pairs`
T = TypeVar("T")
DENSE_BYTES = 16  # bytes of a dense loss for each logit; see planning/costs.py


@dataclass
class LossResult:
    """The result of one system at one batch size. Missing numbers are None. A wrong result is never timed."""

    system: str
    batch: int
    status: str
    forward: float | None = None  # seconds
    backward: float | None = None
    peak: int | None = None  # bytes in addition to the inputs, with gradients
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds of the forward and the backward pass."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


@dataclass(frozen=True)
class Products:
    """Seconds of the matmuls that every exact loss needs at one batch size: S, S again, dX and dY."""

    batch: int
    seconds: float


def measure(
    batches: list[int], width: int, device: str, seconds: float, memory: int | None, until: float = math.inf
) -> Iterator[LossResult | Products]:
    """Measures all systems at all batch sizes, smallest first.

    If a system runs out of memory or time, larger batches are skipped.

    Args:
        batches: batch sizes, in pairs.
        width: embedding dimension.
        device: "cpu" or "cuda".
        seconds: time limit for one system at one batch size. At least one step is timed.
        memory: bytes that can be allocated, or None for no limit. A dense loss that would need more is skipped.
        until: value of `time.perf_counter()` after which no measurement starts.
    """
    stopped: dict[str, str] = {}
    pace: dict[str, float] = {}  # expected seconds of the next batch, by system
    ordered = sorted(batches)
    next_batch = dict(zip(ordered, [*ordered[1:], 0], strict=True))
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
            pace[name] = 2 * (result.seconds or 0.0) * (next_batch[batch] / batch) ** 2
            yield result
        del inputs


def measure_one(
    name: str, inputs: Inputs, right: ClipTruth, device: str, seconds: float, memory: int | None = None
) -> LossResult:
    """Measures memory and errors of one system on embeddings of `pairs`, and the fastest step within the time limit."""
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
        _step(loss, *pairs(64, inputs[0].shape[1], device))  # warm-up, which starts threads and compiles
        _clear_gradients(*inputs)  # frees gradients before the measurement, because reused memory would not count
        (value, *_), result.peak = peak_memory(lambda: _step(loss, *inputs), device)
    except Exception as error:  # a baseline can fail in any way; the others are still measured
        reason = f"{FAILED}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        result.status = MEMORY if ran_out_of_memory(error) else reason
        return result
    rows = sample_rows(batch)
    gradients = [t.grad[rows] for t in inputs[:2] if t.grad is not None]
    result.loss = value
    result.loss_error, result.gradient_error = right.errors(value, *gradients)
    if not is_right(value, result.loss_error, result.gradient_error, device):
        result.status, result.peak = WRONG, None
        return result
    result.forward, result.backward = min(_repeat(lambda: _step(loss, *inputs)[1:], seconds), key=sum)
    return result


def _step(loss: Loss, image: Tensor, text: Tensor, log_scale: Tensor) -> tuple[float, float, float]:
    """Returns the loss, and the seconds of the forward and the backward pass. The inputs keep their gradients."""
    _clear_gradients(image, text, log_scale)
    start = now(image.device)
    value = loss(image, text, log_scale.exp())
    middle = now(image.device)
    value.backward()  # type: ignore[no-untyped-call]
    end = now(image.device)
    return value.item(), middle - start, end - middle


def _clear_gradients(*inputs: Tensor) -> None:
    for tensor in inputs:
        tensor.grad = None


def _repeat(work: Callable[[], T], seconds: float) -> list[T]:
    """Returns the results of as many calls as fit into the time limit, but at least one."""
    start = time.perf_counter()
    results = [work()]
    while time.perf_counter() - start < seconds:
        results.append(work())
    return results


def bare_products(image: Tensor, text: Tensor, size: TileSize | None = None) -> dict[str, Callable[[], None]]:
    """Returns the matmuls S, dX and dY of the whole batch in PyTorch, in strips of `size` (default: for large batches)."""
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
        best = min(_repeat(lambda work=work: seconds_of(work, image.device), seconds / 4))  # type: ignore[misc]
        total += best * (2 if name == "S" else 1)
    return total


# ----------------------------------------------------------------------------------------------------------------------
# The loss over ranks with fewer and fewer levels of tiling, as in table 4 of Inf-CL. Ranks are processes on this CPU.
#
# A system is a function that gets the number of rows per rank. It returns a context manager that yields the loss and restores
# the settings that it changed.


System = Callable[[int], AbstractContextManager[Loss]]
VANILLA, LOCAL, BLOCKS, TILES = "vanilla", "open_clip local", "ring, dense blocks", "ring, tiles"
ABOUT_LEVELS = {
    VANILLA: "all logits on every rank",
    LOCAL: "local_loss and gather_with_grad, all columns of the local rows",
    BLOCKS: "one ring for both directions, each block of logits stored",
    TILES: "megabatch",
}


@dataclass
class LevelResult:
    """The result of one system. Missing numbers are None. A wrong result is never timed."""

    system: str
    status: str = OK
    peak: int | None = None  # bytes in addition to the inputs, with gradients, on the rank that needs most
    seconds: float | None = None  # of the slowest rank
    cpu_seconds: float | None = None  # of all ranks together; other programs have little effect on it
    sent: int | None = None  # bytes sent by a rank through the ring, forward and backward
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None


def measure_levels(
    systems: Mapping[str, System], world: int, batch: int, width: int, repeats: int, right: ClipTruth
) -> list[LevelResult]:
    """Measures the systems one after another on the same ranks.

    Args:
        systems: systems by name. The system with the smallest peak is first, because freed memory would hide a smaller peak.
        world: number of ranks.
        batch: number of pairs of all ranks together.
        width: embedding dimension.
        repeats: number of timed steps. The fastest step counts.
        right: loss and gradients in float64.
    """
    try:
        answers = on_ranks(_on_rank, world, list(systems.values()), batch, width, repeats)
    except ProcessError as error:
        return [LevelResult(name, f"{FAILED}: {error}") for name in systems]
    return [_conclude(name, [mine[i] for mine in answers], right) for i, name in enumerate(systems)]


class _Measured(NamedTuple):
    """The measurement of one system on one rank."""

    seconds: list[float]
    cpu_seconds: list[float]
    peak: int
    sent: int
    loss: float
    dimage: Tensor  # (S_r, D)
    dtext: Tensor  # (S_r, D)


def _conclude(name: str, answers: list[_Measured], right: ClipTruth) -> LevelResult:
    """Averages the loss and the sampled gradients over ranks, as DDP does, and compares them with float64."""
    world = len(answers)
    dimage, dtext = (torch.cat([getattr(a, key) for a in answers]) / world for key in ("dimage", "dtext"))
    loss = sum(a.loss for a in answers) / world
    errors = right.errors(loss, dimage, dtext)
    result = LevelResult(name, loss=loss, loss_error=errors[0], gradient_error=errors[1])
    if is_right(loss, *errors):
        result.peak, result.sent = max(a.peak for a in answers), max(a.sent for a in answers)
        result.seconds = min(map(max, zip(*(a.seconds for a in answers), strict=True)))
        result.cpu_seconds = min(map(sum, zip(*(a.cpu_seconds for a in answers), strict=True)))
    else:
        result.status = WRONG
    return result


def _on_rank(rank: int, world: int, systems: list[System], batch: int, width: int, repeats: int) -> list[_Measured]:
    rows = slice(batch * rank // world, batch * (rank + 1) // world)
    sampled = sample_rows(batch)
    sampled = sampled[(sampled >= rows.start) & (sampled < rows.stop)] - rows.start

    def local(inputs_of_all: tuple[Tensor, Tensor, Tensor], rows: slice) -> list[Tensor]:
        image, text, log_scale = (tensor.detach() for tensor in inputs_of_all)
        return [t.requires_grad_() for t in (image[rows].clone(), text[rows].clone(), log_scale)]

    def step(loss: Loss, inputs: list[Tensor]) -> float:
        image, text, log_scale = inputs
        value = loss(image, text, log_scale.exp())
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    measured = []
    for system in systems:
        with system(rows.stop - rows.start) as loss:
            step(loss, local(pairs(64 * world, width), slice(64 * rank, 64 * (rank + 1))))  # warm-up
            inputs = local(pairs(batch, width), rows)
            dist.barrier()
            with ring.count_traffic() as traffic:
                value, peak = peak_memory(partial(step, loss, inputs))
            gradients = [t.grad[sampled].clone() for t in inputs[:2] if t.grad is not None]
            seconds, cpu_seconds = [], []
            for _ in range(repeats):
                dist.barrier()
                start, cpu_start = time.perf_counter(), time.process_time()
                step(loss, inputs)
                cpu_seconds.append(time.process_time() - cpu_start)
                dist.barrier()
                seconds.append(time.perf_counter() - start)
        measured.append(_Measured(seconds, cpu_seconds, peak, traffic.bytes, value, *gradients))
    return measured


def ring_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:  # ()
    """The CLIP loss of megabatch over the default process group, with the ring route."""
    with ring.use_route("ring"):
        return mb.clip_loss(image, text, scale, group=dist.group.WORLD)


def _open_clip_loss(image: Tensor, text: Tensor, scale: Tensor, *, local: bool) -> Tensor:  # ()
    """The dense loss of open_clip over the gathered batch, for the rows of this rank (`local`) or for all rows."""
    from open_clip.loss import ClipLoss

    loss = ClipLoss(local_loss=local, gather_with_grad=True, rank=dist.get_rank(), world_size=dist.get_world_size())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # open_clip gathers with a deprecated function of PyTorch
        value: Tensor = loss(image, text, scale)
    return value


@contextmanager
def _blocks(rows: int) -> Iterator[Loss]:
    tile = plan.eager_tile
    plan.eager_tile = lambda device, dtype: plan.TileSize(rows, rows)
    try:
        yield ring_loss
    finally:
        plan.eager_tile = tile


def leave_unchanged(loss: Loss, rows: int) -> AbstractContextManager[Loss]:
    """Returns the context manager of a system that changes no settings."""
    return nullcontext(loss)


LEVELS: dict[str, System] = {
    TILES: partial(leave_unchanged, ring_loss),
    BLOCKS: _blocks,
    LOCAL: partial(leave_unchanged, partial(_open_clip_loss, local=True)),
    VANILLA: partial(leave_unchanged, partial(_open_clip_loss, local=False)),
}
