"""Training steps with a large batch: plain, cached, and re-implementations of other projects' schemes.

A step is a function of a `Setting` that leaves gradients in the parameters and returns the loss. `measure` compares its
gradients with the plain step's, then measures memory and speed. `benchmarks/cached_step.py` is the long version for a GPU.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.bench.measure import LATE, MEMORY, OK, WRONG, peak_memory, seconds_of
from megabatch.bench.towers import SIZES, SyntheticImages, tokens, towers
from megabatch.cached import Budget
from megabatch.primitives import Backend

PLAIN, ALONE = "plain step", "towers alone"
CACHED = ("cached, budget 0", "cached, auto")
CHECK, CHECK_CHUNK = 64, 16  # pairs and chunk of the comparison
TOLERANCE = 1e-3  # relative error of a gradient, by norm, float32 against float32
INITIAL = 2.66  # logarithm of CLIP's initial scale
LATER_STEPS = {"cpu": 1, "cuda": 2}  # timed steps after a first one that allocates; the fastest counts


@dataclass
class Setting:
    """The inputs of a step."""

    image: nn.Module
    text: nn.Module
    log_scale: nn.Parameter
    images: Any  # SyntheticImages, or another source
    tokens: Tensor  # (B, context)
    chunk: int
    device: str
    autocast: bool = True
    backend: Backend = "auto"
    beside: tuple[Tensor, Tensor] | None = None  # (n, D) of each side: embeddings that enter the loss and are not encoded

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters."""
        return [*self.image.parameters(), *self.text.parameters(), self.log_scale]

    def of_batch(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """All embeddings that enter the loss."""
        if self.beside is None:
            return image, text
        first, second = (torch.cat((x, rest.to(x.dtype))) for x, rest in zip((image, text), self.beside, strict=True))
        return first, second

    def cast(self) -> Any:
        """The autocast region of a step."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast)

    def halves(self) -> Iterator[tuple[nn.Module, Callable[[], Iterator[Tensor]]]]:
        """Each tower, and how to go over its chunks."""
        spans = [(i, min(i + self.chunk, len(self.tokens))) for i in range(0, len(self.tokens), self.chunk)]
        yield self.image, lambda: iter(self.images.chunks(spans, None))
        yield self.text, lambda: (self.tokens[a:b] for a, b in spans)


def dense_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """As open_clip has it on one rank."""
    logits = scale * image @ text.T
    labels = torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def plain(s: Setting) -> Tensor:
    """One graph over the whole batch."""
    assert isinstance(s.images, SyntheticImages)
    with s.cast():
        loss = mb.clip_loss(s.image(s.images.all()), s.text(s.tokens), s.log_scale.exp(), backend=s.backend)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def cached(s: Setting, budget: Budget = None) -> Tensor:
    """`cached_backward`."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mb.clip_loss(*s.of_batch(x, y), s.log_scale.exp(), backend=s.backend)

    with s.cast():
        return mb.cached_backward(loss, [(s.image, s.images), (s.text, s.tokens)], chunk_size=s.chunk, budget=budget)


def accum_freq(s: Setting) -> Tensor:
    """open_clip's `--accum-freq`: all features without a graph; then for every chunk the whole loss, that chunk's fresh."""
    (image, images), (text, texts) = s.halves()
    with torch.no_grad(), s.cast():
        features = [[tower(x) for x in chunks()] for tower, chunks in ((image, images), (text, texts))]
    loss = torch.zeros(())
    for i, (x, y) in enumerate(zip(images(), texts(), strict=True)):
        with s.cast():
            fresh = [
                [*old[:i], tower(part), *old[i + 1 :]] for old, tower, part in zip(features, (image, text), (x, y), strict=True)
            ]
            loss = dense_loss(torch.cat(fresh[0]), torch.cat(fresh[1]), s.log_scale.exp())
        del fresh
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def grad_cache(s: Setting) -> Tensor:
    """GradCache: features and generator states first, a dense loss on them, then ⟨features, gradient⟩ of every chunk."""
    halves = list(s.halves())
    kept: list[tuple[Tensor, list[Any]]] = []
    for tower, chunks in halves:
        parts, states = [], []
        with torch.no_grad(), s.cast():
            for x in chunks():
                states.append((torch.get_rng_state(), torch.cuda.get_rng_state() if s.device == "cuda" else None))
                parts.append(tower(x))
        kept.append((torch.cat(parts).requires_grad_(), states))
    with s.cast():
        loss = dense_loss(kept[0][0], kept[1][0], s.log_scale.exp())
    loss.backward()  # type: ignore[no-untyped-call]
    for (tower, chunks), (features, states) in zip(halves, kept, strict=True):
        assert features.grad is not None
        for x, (cpu, cuda), gradient in zip(chunks(), states, torch.split(features.grad, s.chunk), strict=True):
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
            with s.cast():
                surrogate = (tower(x) * gradient).sum()
            surrogate.backward()
    return loss.detach()


def towers_alone(s: Setting) -> Tensor:
    """A forward pass, then a forward and a backward pass of every chunk, without a loss: the lower bound of a budget of 0."""
    total = torch.zeros((), device=s.device)
    for tower, chunks in s.halves():
        with torch.no_grad(), s.cast():
            for x in chunks():
                total += tower(x).sum()
        for x in chunks():
            with s.cast():
                embeddings = tower(x)
            embeddings.backward(torch.full_like(embeddings, 1e-3))
    return total


SYSTEMS: dict[str, Callable[[Setting], Tensor]] = {
    PLAIN: plain,
    CACHED[0]: cached,
    CACHED[1]: lambda s: cached(s, "auto"),
    "accum-freq": accum_freq,
    "GradCache": grad_cache,
    ALONE: towers_alone,
}


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
        return seconds_of(lambda: SYSTEMS[result.system](s), s.device)

    try:
        first, result.peak = peak_memory(step, s.device)
        result.seconds = min(first, *(step() for _ in range(LATER_STEPS[s.device])))
    except (torch.OutOfMemoryError, MemoryError):
        result.status = MEMORY
        failed.add(result.system)
