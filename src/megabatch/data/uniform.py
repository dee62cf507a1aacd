"""Random numbers of many samples at once, on their device: the bits of `sample_seed`, which computes one at a time."""

import torch
from torch import Tensor


def uniform(seed: int, indices: Tensor, count: int) -> Tensor:  # (n,) int64 -> (n, count) float32
    """`count` numbers in [0, 1) for each sample: the upper bits of `sample_seed(sample_seed(seed, index), number)`."""
    seeds = _sample_seeds(torch.full_like(indices, _signed(seed)), indices)  # (n,)
    bits = _sample_seeds(seeds[:, None], torch.arange(count, device=indices.device))  # (n, count)
    return (bits >> 39).float() / 2**24  # 24 of 63 bits, all of which float32 can hold


def _sample_seeds(seed: Tensor, position: Tensor) -> Tensor:
    """`sample_seed` line by line. int64 wraps around like the 64 bits there."""
    state = seed * _signed(0xD1342543DE82EF95) + (position + 1) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(state ^ _shifted(state, 31), 1)


def _shifted(state: Tensor, count: int) -> Tensor:
    """An unsigned shift to the right: bits that the sign fills are cleared."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number
