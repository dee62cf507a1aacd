"""Saves generator states before a chunk is encoded and restores them later, so that both passes draw equal random numbers.

Towers use PyTorch's generators of the CPU and of each device. Some also use Python's and NumPy's generators, for masking of
speech or layer drop. All states are saved. A state that did not change between two chunks is stored once.
"""

import importlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class States(NamedTuple):
    """The states of all random generators that a tower may use."""

    cpu: Tensor
    cuda: tuple[tuple[int | torch.device, Tensor], ...]  # (device, state)
    python: Any
    numpy: Any  # None if NumPy was never imported


def capture(devices: Iterable[torch.device], before: States | None = None) -> States:
    """Returns the current states. A state that did not change since `before` is shared with it."""
    numpy = _numpy()
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
    """Sets all generators to `states`."""
    torch.set_rng_state(states.cpu)
    for index, state in states.cuda:
        torch.cuda.set_rng_state(state, index)
    random.setstate(states.python)
    if states.numpy is not None:
        importlib.import_module("numpy.random").set_state(states.numpy)


@contextmanager
def preserve_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restores all generators at the end of the context."""
    states = capture(devices)
    try:
        yield
    finally:
        restore(states)


def seed_host(seed: int) -> None:
    """Seeds the CPU generators of PyTorch, Python and NumPy. Generators of other devices are not seeded."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.seed(seed % 2**32)


def _cuda_indices(devices: Iterable[torch.device]) -> list[int]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    indices = {device.index for device in devices if device.type == "cuda" and device.index is not None}
    return sorted(indices | {torch.cuda.current_device()})


def _numpy() -> Any:
    """Returns `numpy.random`, or None if NumPy was never imported.

    NumPy imports `numpy.random` at its first use, which may be in a tower, so this function imports it.
    """
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def _same_numpy(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    if {first["bit_generator"], second["bit_generator"]} != {
        "MT19937"
    }:  # the state of another bit generator has another structure
        return False
    a, b = first["state"], second["state"]
    return a["pos"] == b["pos"] and bool((a["key"] == b["key"]).all()) and first["gauss"] == second["gauss"]
