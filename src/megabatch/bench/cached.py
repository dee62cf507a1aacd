"""Memory and speed of a training step against the batch, after its gradients have been compared with the plain step's.

`benchmarks/cached_step.py` is the long version of this, for a GPU.
"""

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megabatch.bench.losses import LATE, MEMORY, OK, WRONG
from megabatch.bench.measure import peak_memory
from megabatch.bench.steps import SYSTEMS, Setting
from megabatch.bench.towers import SIZES, SyntheticImages, tokens, towers
from megabatch.primitives import Backend

CHECK, CHECK_CHUNK = 64, 16
TOLERANCE = 1e-3  # relative error of a gradient, by norm, float32 against float32
PLAIN, ALONE = "plain step", "towers alone"
CACHED = ("cached, budget 0", "cached, auto")
INITIAL = 2.66  # logarithm of CLIP's scale
LATER_STEPS = {"cpu": 1, "cuda": 2}  # timed steps after a first one that allocates; the fastest counts


@dataclass
class StepResult:
    """One system at one batch; a wrong one is not timed."""

    system: str
    batch: int
    status: str
    error: float | None = None  # relative error of all towers' gradients, on a small batch
    scale_ratio: float | None = None  # the scale's gradient ÷ the right one
    seconds: float | None = None
    peak: int | None = None  # bytes beyond weights and gradients


def measure(
    model: str, batches: list[int], chunk: int, device: str, systems: list[str], until: float = math.inf
) -> Iterator[StepResult]:
    """The systems at all batches, smallest first, until the time limit."""
    image, text, _ = towers(SIZES[model], device)
    backend: Backend = "triton" if device == "cuda" else "eager"

    def setting(rows: int, chunk: int, autocast: bool) -> Setting:
        log_scale = nn.Parameter(torch.tensor(INITIAL, device=device))
        images = SyntheticImages(rows, SIZES[model], device)
        return Setting(image, text, log_scale, images, tokens(rows, device), chunk, device, autocast=autocast, backend=backend)

    checks = compare(setting(CHECK, CHECK_CHUNK, False), systems)
    failed: set[str] = set()
    for batch in sorted(batches):
        for name in systems:
            error, ratio = checks.get(name, (None, None))
            result = StepResult(name, batch, OK, error, ratio)
            # Written so that NaN is wrong.
            if error is not None and ratio is not None and not (error <= TOLERANCE and abs(ratio - 1) <= TOLERANCE):
                result.status = WRONG
            elif name in failed:
                result.status = MEMORY
            elif time.perf_counter() > until:
                result.status = LATE
            else:
                _time(result, setting(batch, chunk, autocast=device == "cuda"), failed)
            yield result


def compare(s: Setting, systems: list[str]) -> dict[str, tuple[float, float]]:
    """(error of the towers' gradients, the scale's gradient ÷ the right one) of each system, against the plain step."""
    wanted = _gradients(s, PLAIN)
    found: dict[str, tuple[float, float]] = {}
    for name in systems:
        if name != ALONE:
            gradients = _gradients(s, name)
            difference = torch.cat([(a - b).flatten() for a, b in zip(gradients[:-1], wanted[:-1], strict=True)]).norm()
            length = torch.cat([b.flatten() for b in wanted[:-1]]).norm()
            found[name] = (difference / length).item(), (gradients[-1] / wanted[-1]).item()
    return found


def _gradients(s: Setting, name: str) -> list[Tensor]:
    """Gradients of all parameters, the scale's last."""
    for p in s.parameters():
        p.grad = None
    SYSTEMS[name](s)
    return [p.grad.double().cpu() for p in s.parameters() if p.grad is not None]


def _time(result: StepResult, s: Setting, failed: set[str]) -> None:
    for p in s.parameters():
        p.grad = torch.zeros_like(p)  # as in every step but the first
    gc.collect()
    if s.device == "cuda":
        torch.cuda.empty_cache()  # cached blocks of the step before would slow down this one

    def step() -> float:
        begun = time.perf_counter()
        SYSTEMS[result.system](s)
        if s.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    try:
        first, result.peak = peak_memory(step, s.device)
        result.seconds = min(first, *(step() for _ in range(LATER_STEPS[s.device])))
    except (torch.OutOfMemoryError, MemoryError):
        result.status = MEMORY
        failed.add(result.system)
