"""Memory: the chunk size of each tower, and the budget for graphs.

The chunk size doubles while the next size surely fits into its fraction of the free memory. If memory runs out in training,
both are halved and the step is repeated. A chunk only needs to keep the device busy; the rest of the memory is better spent on
kept graphs, which save second passes, so the fraction is small. Checkpoints store the result, because another chunk size rounds
differently, and a resumed run should give the same bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megabatch.cached import batchnorm, randomness
from megabatch.cached.budget import COPIES_OF_EMBEDDINGS, free_memory
from megabatch.cached.tower_io import call, count_rows, local, map_rows, opened
from megabatch.evaluation.embedding import evaluating
from megabatch.machine import available_memory, ran_out_of_memory
from megabatch.world import World

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

    def __post_init__(self) -> None:
        """Checks the fractions."""
        for name in ("chunk", "graphs", "inputs", "resident"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"memory.{name} must be a fraction from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Fit:
    """Chunk sizes and memory for graphs."""

    chunk_sizes: tuple[int, ...]  # of each side
    graph_bytes: int

    def halved(self) -> "Fit":
        """Half of both, after a step ran out of memory."""
        return Fit(tuple(max(1, size // 2) for size in self.chunk_sizes), self.graph_bytes // 2)


def what_fits(
    config: MemoryConfig,
    chunk_size: int | str,
    modules: Sequence[nn.Module],
    samples: Callable[[int, int], Any],
    pairs: int,
    world: World,
) -> Fit:
    """Chunk sizes for towers and memory for graphs, the same on all ranks.

    Args:
        config: fractions of the free memory.
        chunk_size: a number, or "auto".
        modules: of the two sides.
        samples: (side, count) → inputs of that many samples.
        pairs: of a batch on this rank.
        world: the ranks.
    """
    free = free_memory(world.device) // (1 if world.device.type == "cuda" else world.local_size)
    free -= _coming(modules, samples, pairs, world.device)
    if isinstance(chunk_size, int):
        sizes = [chunk_size] * len(modules)
    elif world.device.type == "cuda":
        with randomness.untouched([world.device]):
            sizes = [
                largest_chunk(pairs, _Peak(module, samples(side, min(pairs, FIRST_TRIED)), world), int(config.chunk * free))
                for side, module in enumerate(modules)
            ]
    else:
        sizes = [ON_CPU] * len(modules)
    sizes = [max(1, min(size, pairs)) for size in sizes]
    least = world.min([*sizes, max(0.0, config.graphs * free)])
    return Fit(tuple(int(size) for size in least[:-1]), int(least[-1]))


def input_bytes(config: MemoryConfig, world: World) -> int:
    """Host memory for the samples of one batch on this rank, while the next batch has as much."""
    return int(config.inputs * (available_memory() or 0) / world.local_size / 2)


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


def repeated(inputs: Any, size: int) -> Any:
    """Inputs of `size` samples: the given ones, again and again."""
    times = -(-size // count_rows(inputs, "inputs"))
    return map_rows(lambda tensor: torch.cat([tensor] * times)[:size], inputs)


class _Peak:
    """Peak memory of a forward and backward pass of n samples, on CUDA."""

    def __init__(self, module: nn.Module, inputs: Any, world: World) -> None:
        self._module, self._world = module, world
        self._inputs = map_rows(lambda tensor: tensor.to(world.device), inputs)

    def __call__(self, size: int) -> int | None:
        device, used = self._world.device, math.inf
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            forward_backward(self._module, repeated(self._inputs, size))
            used = torch.cuda.max_memory_allocated(device) - before
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
        self._module.zero_grad(set_to_none=True)
        used = self._world.max([used])[0]
        return None if math.isinf(used) else int(used)


def forward_backward(module: nn.Module, inputs: Any) -> None:
    """A forward and, with gradients enabled, a backward pass; running statistics stay as they were."""
    with batchnorm.running_statistics_kept(batchnorm.layers([module])):
        output: Any = opened(call(module, inputs), type(module).__name__).embeddings
        if output.requires_grad:
            output.float().sum().backward()


def _coming(modules: Sequence[nn.Module], samples: Callable[[int, int], Any], pairs: int, device: torch.device) -> int:
    """Bytes that training still allocates beside graphs and activations: gradients, moments, embeddings."""
    parameters = {id(p): local(p) for module in modules for p in module.parameters() if p.requires_grad}
    learned = sum(p.numel() * p.element_size() for p in parameters.values())
    with torch.no_grad(), evaluating(modules[0]):
        output = call(modules[0], map_rows(lambda tensor: tensor.to(device), samples(0, 1)))
    width = opened(output, type(modules[0]).__name__).embeddings.shape[1]
    return OPTIMIZER_COPIES * learned + COPIES_OF_EMBEDDINGS * len(modules) * pairs * width * 4
