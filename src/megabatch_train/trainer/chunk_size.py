"""Memory: the chunk size of each tower, activation checkpointing, and the budget for graphs.

The chunk size doubles while the next size surely fits into its fraction of the free memory. If memory runs out in training,
both are halved and the step is repeated. A chunk only needs to keep the device busy; the rest of the memory is better spent on
kept graphs, which save second passes, so the fraction is small. Checkpoints store the result, because another chunk size rounds
differently, and a resumed run should give the same bits.

Activation checkpointing needs one more forward pass, and makes room for larger chunks and for more kept graphs. Whether that
is faster is measured: it is if chunks without it are too small to keep the device busy.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from megabatch.cached import randomness
from megabatch.cached.memory import COPIES_OF_EMBEDDINGS, available_memory, free_memory, local
from megabatch.cached.streaming import count_rows, map_rows
from megabatch.cached.tower import as_encoded, call
from megabatch.world import World
from megabatch_train.evaluation.embedding import use_evaluation_mode
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.towers.tower import forward_backward, set_checkpointing

ON_CPU = 256  # samples: enough for two cores (docs/log.md, "Emoji"), and little memory
FIRST_TRIED = 32  # samples, on CUDA
OPTIMIZER_COPIES = 3  # of the parameters, allocated in the first step: gradients and two moments


@dataclass(frozen=True)
class MemoryConfig:
    """How the free memory is used."""

    chunk: float = 0.25  # fraction for the activations of a chunk, if chunk_size is "auto"
    graphs: float = 0.6  # fraction for graphs kept from the first pass; 0 keeps none
    inputs: float = 0.3  # fraction of the host's memory for samples read ahead or waiting for the second pass; 0 reads twice
    resident: float = 0.0  # fraction for the whole dataset on the device, decoded and tokenized once; 0 reads it in every epoch
    checkpointing: Literal["auto", "on", "off"] = "auto"  # of activations; "auto" if small chunks are faster with it
    offload: bool = False  # weights, gradients and optimizer in host memory between their uses, with parallel = "fsdp"

    def __post_init__(self) -> None:
        """Checks the fractions."""
        for name in ("chunk", "graphs", "inputs", "resident"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"memory.{name} must be a fraction from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Fit:
    """Chunk sizes, memory for graphs, and whether activations are computed again."""

    chunk_sizes: tuple[int, ...]  # of each side
    graph_bytes: int
    checkpointing: bool = False

    def halve(self) -> "Fit":
        """Half of both, after a step ran out of memory."""
        return replace(
            self, chunk_sizes=tuple(max(1, size // 2) for size in self.chunk_sizes), graph_bytes=self.graph_bytes // 2
        )


def what_fits(
    config: MemoryConfig,
    chunk_size: int | str,
    modules: Sequence[nn.Module],
    samples: Callable[[int, int], Any],
    pairs: int,
    world: World,
) -> Fit:
    """Chunk sizes for towers, memory for graphs and activation checkpointing, the same on all ranks.

    Checkpointing of the modules is left on or off accordingly.

    Args:
        config: fractions of the free memory.
        chunk_size: a number, or "auto".
        modules: of the two sides.
        samples: (side, count) → inputs of that many samples.
        pairs: of a batch on this rank.
        world: the ranks.
    """
    free = free_memory(world.device) // (1 if world.device.type == "cuda" else world.local_size)
    free -= _bytes_to_come(modules, samples, pairs, world.device)
    graphs = max(0.0, config.graphs * free)
    checkpointing = config.checkpointing == "on"
    set_checkpointing(modules, checkpointing)
    if isinstance(chunk_size, int):
        sizes = [chunk_size] * len(modules)
    elif world.device.type == "cuda":
        with randomness.preserve_generators([world.device]):
            trials = [_Trial(module, samples(side, min(pairs, FIRST_TRIED)), world) for side, module in enumerate(modules)]
            budget = int(config.chunk * free)
            if config.checkpointing == "auto":
                sizes, checkpointing = _faster(trials, modules, pairs, budget, graphs)
                set_checkpointing(modules, checkpointing)
            else:
                sizes = [largest_chunk(pairs, trial, budget) for trial in trials]
    else:
        sizes = [ON_CPU] * len(modules)
    sizes = [max(1, min(size, pairs)) for size in sizes]
    least = world.min([*sizes, graphs])
    return Fit(tuple(int(size) for size in least[:-1]), int(least[-1]), checkpointing)


def _bytes_to_come(modules: Sequence[nn.Module], samples: Callable[[int, int], Any], pairs: int, device: torch.device) -> int:
    """Bytes that training still allocates beside graphs and activations: gradients, moments, embeddings."""
    parameters = {id(p): local(p) for module in modules for p in module.parameters() if p.requires_grad}
    learned = sum(p.numel() * p.element_size() for p in parameters.values())
    with torch.no_grad(), use_evaluation_mode(modules[0]):
        output = call(modules[0], map_rows(lambda tensor: tensor.to(device), samples(0, 1)))
    width = as_encoded(output, type(modules[0]).__name__).embeddings.shape[1]
    return OPTIMIZER_COPIES * learned + COPIES_OF_EMBEDDINGS * len(modules) * pairs * width * 4


def _faster(
    trials: "Sequence[_Trial]", modules: Sequence[nn.Module], pairs: int, budget: int, graphs: float
) -> tuple[list[int], bool]:
    """Chunk sizes, and whether activation checkpointing is faster, measured with the sizes that fit with and without it.

    Chunks of `FIRST_TRIED` samples keep the device busy. Where they fit without checkpointing, nothing is measured.
    """
    found: dict[bool, tuple[float, list[int]]] = {}
    for checkpointing in (False, True):
        set_checkpointing(modules, checkpointing)
        try:
            sizes = [largest_chunk(pairs, trial, budget) for trial in trials]
        except MemoryError:  # not even one sample fits
            if checkpointing and not found:
                raise
            continue
        if not checkpointing and min(sizes) >= min(FIRST_TRIED, pairs):
            return sizes, False
        paces = [trial.pace(size) for trial, size in zip(trials, sizes, strict=True)]
        found[checkpointing] = pair_seconds(paces, pairs, graphs), sizes
    checkpointing = min(found, key=lambda way: found[way][0])
    return found[checkpointing][1], checkpointing


def largest_chunk(most: int, peak: Callable[[int], int | None], budget: int) -> int:
    """The largest chunk size that fits: doubles while the next size would fit, halves if the first does not.

    Args:
        most: upper bound.
        peak: size → peak bytes of a chunk; None if memory runs out. The same on all ranks.
        budget: bytes.
    """
    size = min(FIRST_TRIED, most)
    while True:
        used = peak(size)
        if used is None:
            if size == 1:
                raise MemoryError("a chunk of one sample must fit into memory, and does not")
            size //= 2
            most = size  # larger sizes have failed
        elif size >= most or 2 * used > budget:  # bytes grow no faster than samples
            return size
        else:
            size = min(2 * size, most)


@dataclass(frozen=True)
class Pace:
    """Seconds and bytes of one sample, of one tower in chunks of one size."""

    forward: float  # without a graph
    both: float  # a forward and a backward pass, and what is computed again
    graph_bytes: float  # kept between them


def pair_seconds(paces: Sequence[Pace], pairs: int, graph_bytes: float) -> float:
    """Seconds of one pair in a cached step: chunks whose graph is kept have one forward pass less."""
    needed = pairs * sum(pace.graph_bytes for pace in paces)
    again = 1 - min(1.0, graph_bytes / needed) if needed else 0.0
    return sum(pace.both + again * pace.forward for pace in paces)


class _Trial:
    """Peak memory of a forward and backward pass of n samples, and their pace, on CUDA."""

    def __init__(self, module: nn.Module, inputs: Any, world: World) -> None:
        self._module, self._world = module, world
        self._inputs = map_rows(lambda tensor: tensor.to(world.device), inputs)

    def __call__(self, size: int) -> int | None:
        device, used = self._world.device, math.inf
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            forward_backward(self._module, repeat_inputs(self._inputs, size))
            used = torch.cuda.max_memory_allocated(device) - before
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
        self._module.zero_grad(set_to_none=True)
        used = self._world.max([used])[0]
        return None if math.isinf(used) else int(used)

    def pace(self, size: int) -> Pace:
        """Seconds and bytes of one sample in chunks of a size that fits; the slowest rank's."""
        device, inputs = self._world.device, repeat_inputs(self._inputs, size)
        for _ in range(2):  # the first time allocates memory and chooses kernels
            with torch.no_grad():
                forward = _seconds(lambda: forward_backward(self._module, inputs), device)
            torch.clear_autocast_cache()  # of casts without a graph
            before = torch.cuda.memory_allocated(device)
            output = as_encoded(call(self._module, inputs), type(self._module).__name__).embeddings
            graph = float(torch.cuda.memory_allocated(device) - before)
            del output
            both = _seconds(lambda: forward_backward(self._module, inputs), device)
            torch.clear_autocast_cache()
            self._module.zero_grad(set_to_none=True)
        return Pace(*self._world.max([forward / size, both / size, graph / size]))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def repeat_inputs(inputs: Any, size: int) -> Any:
    """Inputs of `size` samples: the given ones, again and again."""
    times = -(-size // count_rows(inputs, "inputs"))
    return map_rows(lambda tensor: torch.cat([tensor] * times)[:size], inputs)


def input_bytes(config: MemoryConfig, world: World) -> int:
    """Host memory for the samples of one batch on this rank, while the next batch has as much."""
    return int(config.inputs * (available_memory() or 0) / world.local_size / 2)
