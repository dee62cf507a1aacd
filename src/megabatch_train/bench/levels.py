"""The loss over ranks with fewer and fewer levels of tiling, as in Inf-CL's table 4. Ranks are processes on this CPU.

A system takes the rows of a rank and returns a context manager, which yields the loss and restores the settings it changed.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import megabatch
from megabatch import ring
from megabatch.tiles import plan
from megabatch_train.bench.losses import ClipTruth, Loss, is_right, pairs, sample_rows
from megabatch_train.bench.measure import FAILED, OK, WRONG, ProcessError, on_ranks, peak_memory

System = Callable[[int], AbstractContextManager[Loss]]
VANILLA, LOCAL, BLOCKS, TILES = "vanilla", "open_clip local", "ring, dense blocks", "ring, tiles"
ABOUT = {
    VANILLA: "all logits on every rank",
    LOCAL: "local_loss and gather_with_grad: all columns of the local rows",
    BLOCKS: "one ring for both directions, each block of similarities held whole",
    TILES: "megabatch",
}


@dataclass
class LevelResult:
    """One system. Missing numbers are None; a wrong result is never timed."""

    system: str
    status: str = OK
    peak: int | None = None  # bytes beyond the inputs, gradients included, of the rank that needs most
    seconds: float | None = None  # of the slowest rank
    sent: int | None = None  # bytes sent by a rank through the ring, forward and backward
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None


def measure(
    systems: Mapping[str, System], world: int, batch: int, width: int, repeats: int, right: ClipTruth
) -> list[LevelResult]:
    """The systems one after another on the same ranks.

    Args:
        systems: by name, smallest memory first, because freed memory would hide the peak of the next.
        world: number of ranks.
        batch: pairs of all ranks together.
        width: of the embeddings.
        repeats: timed steps; the fastest counts.
        right: loss and gradients in float64.
    """
    try:
        answers = on_ranks(_on_rank, world, list(systems.values()), batch, width, repeats)
    except ProcessError as error:
        return [LevelResult(name, f"{FAILED}: {error}") for name in systems]
    return [_conclude(name, [mine[i] for mine in answers], right) for i, name in enumerate(systems)]


class _Measured(NamedTuple):
    """One system on one rank."""

    seconds: list[float]
    peak: int
    sent: int
    loss: float
    dimage: Tensor  # (S_r, D)
    dtext: Tensor  # (S_r, D)


def _conclude(name: str, answers: list[_Measured], right: ClipTruth) -> LevelResult:
    """Loss and sampled gradients are averaged over ranks as DDP would, and compared with float64."""
    world = len(answers)
    dimage, dtext = (torch.cat([getattr(a, key) for a in answers]) / world for key in ("dimage", "dtext"))
    loss = sum(a.loss for a in answers) / world
    errors = right.errors(loss, dimage, dtext)
    result = LevelResult(name, loss=loss, loss_error=errors[0], gradient_error=errors[1])
    if is_right(loss, *errors):
        result.peak, result.sent = max(a.peak for a in answers), max(a.sent for a in answers)
        result.seconds = min(map(max, zip(*(a.seconds for a in answers), strict=True)))
    else:
        result.status = WRONG
    return result


def _on_rank(rank: int, world: int, systems: list[System], batch: int, width: int, repeats: int) -> list[_Measured]:
    rows = slice(batch * rank // world, batch * (rank + 1) // world)
    chosen = sample_rows(batch)
    chosen = chosen[(chosen >= rows.start) & (chosen < rows.stop)] - rows.start

    def local(whole: tuple[Tensor, Tensor, Tensor], rows: slice) -> list[Tensor]:
        image, text, log_scale = (tensor.detach() for tensor in whole)
        return [t.requires_grad_() for t in (image[rows].clone(), text[rows].clone(), log_scale)]

    def step(loss: Loss, inputs: list[Tensor]) -> float:
        image, text, log_scale = inputs
        value = loss(image, text, log_scale.exp())
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    found = []
    for system in systems:
        with system(rows.stop - rows.start) as loss:
            step(loss, local(pairs(64 * world, width), slice(64 * rank, 64 * (rank + 1))))  # warm-up: connections, threads
            inputs = local(pairs(batch, width), rows)
            dist.barrier()
            with ring.count_traffic() as traffic:
                value, peak = peak_memory(partial(step, loss, inputs))
            gradients = [t.grad[chosen].clone() for t in inputs[:2] if t.grad is not None]
            seconds = []
            for _ in range(repeats):
                dist.barrier()
                start = time.perf_counter()
                step(loss, inputs)
                dist.barrier()
                seconds.append(time.perf_counter() - start)
        found.append(_Measured(seconds, peak, traffic.bytes, value, *gradients))
    return found


def ring_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:  # ()
    """megabatch over the default group, with the schedule of the ring."""
    with ring.use_route("ring"):
        return megabatch.clip_loss(image, text, scale, group=dist.group.WORLD)


def _open_clip_loss(image: Tensor, text: Tensor, scale: Tensor, *, local: bool) -> Tensor:  # ()
    """Dense, over the gathered batch: the rows of this rank (`local`), or all rows on every rank."""
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
    """A system that needs no settings."""
    return nullcontext(loss)


SYSTEMS: dict[str, System] = {
    TILES: partial(leave_unchanged, ring_loss),
    BLOCKS: _blocks,
    LOCAL: partial(leave_unchanged, partial(_open_clip_loss, local=True)),
    VANILLA: partial(leave_unchanged, partial(_open_clip_loss, local=False)),
}
