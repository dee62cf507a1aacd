"""Random numbers twice the same: generator states before a chunk is encoded, and the same states when it is encoded again.

Towers draw from PyTorch's generators, of the CPU and of each device, and some from Python's and NumPy's (masking of speech,
dropped layers). All of them are kept. A state that did not change between two chunks is kept once.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class States(NamedTuple):
    """Of all generators a tower may draw from."""

    cpu: Tensor
    cuda: tuple[tuple[int, Tensor], ...]  # (device index, state)
    python: Any
    numpy: Any  # None where NumPy has not been imported


def capture(devices: Iterable[torch.device], before: States | None = None) -> States:
    """The states now; what equals `before` is shared with it."""
    numpy = sys.modules.get("numpy.random")
    now = States(
        torch.get_rng_state(),
        tuple((index, torch.cuda.get_rng_state(index)) for index in _cuda_indices(devices)),
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),
    )
    if before is None:
        return now
    return States(
        before.cpu if torch.equal(before.cpu, now.cpu) else now.cpu,
        now.cuda,
        before.python if before.python == now.python else now.python,
        before.numpy if _same_numpy(before.numpy, now.numpy) else now.numpy,
    )


def restore(states: States) -> None:
    """Makes all generators continue from `states`."""
    torch.set_rng_state(states.cpu)
    for index, state in states.cuda:
        torch.cuda.set_rng_state(state, index)
    random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy.random"].set_state(states.numpy)


@contextmanager
def untouched(devices: Iterable[torch.device]) -> Iterator[None]:
    """Whatever is drawn or set inside, the generators continue afterwards as if nothing had been."""
    states = capture(devices)
    try:
        yield
    finally:
        restore(states)


def seed_host(seed: int) -> None:
    """The generators of the host, all three; those of devices are left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)


def _cuda_indices(devices: Iterable[torch.device]) -> list[int]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    indices = {device.index for device in devices if device.type == "cuda" and device.index is not None}
    return sorted(indices | {torch.cuda.current_device()})


def _same_numpy(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    if {first["bit_generator"], second["bit_generator"]} != {"MT19937"}:  # somebody has put in another, of unknown form
        return False
    a, b = first["state"], second["state"]
    return a["pos"] == b["pos"] and bool((a["key"] == b["key"]).all()) and first["gauss"] == second["gauss"]
