"""The loss over ranks with fewer and fewer levels of tiling, as in Inf-CL's table 4. Ranks are processes on this CPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import megabatch
from megabatch import ring
from megabatch.bench import ring_peers
from megabatch.bench.inputs import pairs, sampled_rows
from megabatch.bench.measure import peak_memory
from megabatch.ring import lap
from megabatch.tiles import plan

VANILLA, LOCAL, BLOCKS, TILES = "vanilla", "open_clip local", "ring, dense blocks", "ring, tiles"
SYNCHRONOUS, GATHER, TWO_RINGS = "ring, synchronous", "gather, tiles", "two rings"
SYSTEMS = {
    VANILLA: "all logits on every rank",
    LOCAL: "local_loss and gather_with_grad: all columns of the local rows",
    TWO_RINGS: "Inf-CL's exchange, one ring for each direction, in our tiles",
    BLOCKS: "one ring for both directions, each block of similarities held whole",
    SYNCHRONOUS: "tiles, and every message waited for before the work goes on",
    GATHER: "tiles, everything sent to everybody first",
    TILES: "megabatch as it is",
}


class Measured(NamedTuple):
    """The result of a rank."""

    seconds: list[float]
    peak: int
    sent: int
    loss: float
    dimage: Tensor  # (S_r, D)
    dtext: Tensor  # (S_r, D)


def measure(rank: int, world: int, systems: list[str], batch: int, width: int, repeats: int) -> list[Measured]:
    """Runs on every rank: the systems one after another."""
    return [_measure(rank, world, system, batch, width, repeats) for system in systems]


def _measure(rank: int, world: int, system: str, batch: int, width: int, repeats: int) -> Measured:
    rows = slice(batch * rank // world, batch * (rank + 1) // world)

    def local(whole: tuple[Tensor, Tensor, Tensor], rows: slice) -> list[Tensor]:
        image, text, log_scale = (tensor.detach() for tensor in whole)
        return [t.requires_grad_() for t in (image[rows].clone(), text[rows].clone(), log_scale)]

    with _loss(system, rows.stop - rows.start) as function:

        def step(image: Tensor, text: Tensor, log_scale: Tensor) -> float:
            loss = function(image, text, log_scale.exp())
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        step(*local(pairs(64 * world, width), slice(64 * rank, 64 * (rank + 1))))  # warm-up: connections, threads, libraries
        inputs = local(pairs(batch, width), rows)
        dist.barrier()
        with ring.counted() as traffic:
            loss, peak = peak_memory(lambda: step(*inputs))
        gradients = [t.grad.clone() for t in inputs[:2] if t.grad is not None]
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            step(*inputs)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
    chosen = sampled_rows(batch)
    mine = chosen[(chosen >= rows.start) & (chosen < rows.stop)] - rows.start
    return Measured(seconds, peak, traffic.bytes, loss, *(g[mine] for g in gradients))


@contextmanager
def _loss(system: str, rows: int) -> Iterator[Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The loss of a system; settings changed for it are restored afterwards."""
    if system in (VANILLA, LOCAL):
        yield lambda *inputs: ring_peers.open_clip_loss(*inputs, local=system == LOCAL)
        return
    if system == TWO_RINGS:
        yield ring_peers.two_rings
        return

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        with ring.using("gather" if system == GATHER else "ring"):
            return megabatch.clip_loss(image, text, scale, group=dist.group.WORLD)

    tile, overlap = plan.eager_tile, lap.OVERLAP
    try:
        lap.OVERLAP = system != SYNCHRONOUS
        if system == BLOCKS:
            plan.eager_tile = lambda device, dtype: plan.TileSize(rows, rows)
        yield loss
    finally:
        plan.eager_tile, lap.OVERLAP = tile, overlap


def mean_over_ranks(answers: list[Measured]) -> tuple[float, Tensor, Tensor]:
    """Loss and sampled gradients as DDP would average them."""
    dimage, dtext = (torch.cat([getattr(a, name) for a in answers]) / len(answers) for name in ("dimage", "dtext"))
    return sum(a.loss for a in answers) / len(answers), dimage, dtext
