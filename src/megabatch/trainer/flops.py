"""Model FLOPs utilisation (MFU): the share of the GPU's peak rate that a step's necessary operations reach.

Necessary are a forward pass and two products for each of its products in the backward pass: three forward passes of a trained
tower, one of a frozen tower. A tower with adapters has two, because its frozen weights need no gradients. The second forward
pass of the cached step does not count, because it only saves memory. Padding does not count either: texts have the mean length
of a few samples. The loss, a percent of a step or less, is left out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megabatch.cached.lengths import width_of
from megabatch.cached.tower_io import call, count_rows, map_rows
from megabatch.evaluation.embedding import evaluating
from megabatch.flops import FlopCounter
from megabatch.machine import peak_rates
from megabatch.towers.tower import Tower
from megabatch.world import World

TRAINED, ADAPTED, FROZEN = 3, 2, 1  # forward passes


class Utilisation:
    """The share of the peak rate that a step reaches.

    Args:
        towers: of the sides that are encoded in each step, before they are compiled, wrapped or sharded.
        samples: for each of them a function that reads the inputs of a few samples.
        precision: of the towers: "bf16", "fp16" or "fp32".
        world: the ranks.
    """

    def __init__(self, towers: Sequence[Tower], samples: Sequence[Callable[[], Any]], precision: str, world: World) -> None:
        self._peak = _peak(precision, world.device) * world.size
        self._flops = 0.0  # of a pair
        if self._peak:
            for tower, read in zip(towers, samples, strict=True):
                inputs = of_mean_length(tower, read())
                self._flops += _passes(tower.module) * forward_flops(tower.module, inputs, world.device)

    def numbers(self, pairs: int, seconds: float) -> dict[str, float]:
        """{"mfu": …} of a step; empty on a CPU, and on a GPU whose peak rate is not known."""
        return {"mfu": pairs * self._flops / seconds / self._peak} if self._peak else {}


def _passes(module: nn.Module) -> int:
    """Forward passes that cost as much as the necessary operations; adapters are few beside frozen weights."""
    sizes = {True: 0, False: 0}
    for parameter in module.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    if not sizes[True]:
        return FROZEN
    return TRAINED if sizes[True] >= sizes[False] else ADAPTED


def of_mean_length(tower: Tower, inputs: Any) -> Any:
    """The inputs, texts cut to the mean of their lengths; their number of operations is the mean, nearly."""
    lengths = None if tower.lengths is None else tower.lengths(inputs)
    if lengths is None:
        return inputs
    width, mean = width_of(inputs), max(1, round(lengths.double().mean().item()))
    return map_rows(lambda tensor: tensor[:, :mean] if tensor.dim() > 1 and tensor.shape[1] == width else tensor, inputs)


def forward_flops(module: nn.Module, inputs: Any, device: torch.device) -> float:
    """Operations of a forward pass, for one sample."""
    # As plain products: the counter does not know PyTorch's one operator for a whole layer, nor every attention kernel.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    plain, counter = sdpa_kernel(SDPBackend.MATH), FlopCounter()
    try:
        with torch.no_grad(), evaluating(module), plain, counter:
            call(module, map_rows(lambda tensor: tensor.to(device), inputs))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.total / count_rows(inputs, "inputs")


def _peak(precision: str, device: torch.device) -> float:
    """Operations a second; 0 if not known."""
    rates = peak_rates(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if rates is None:
        return 0.0
    if precision != "fp32":
        return 1e12 * rates.half
    return 1e12 * (rates.single if torch.get_float32_matmul_precision() == "highest" else rates.tf32)
