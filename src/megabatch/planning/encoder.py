"""Bytes and operations of a tower that encodes a chunk, measured on tensors without data (`meter`)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.planning.meter import Meter, metered, nowhere
from megabatch.planning.models import Side


@dataclass(frozen=True)
class Line:
    """A number of bytes that grows with the samples: `fixed` + `each` · n."""

    fixed: float
    each: float

    def at(self, n: float) -> float:
        """Bytes for n samples."""
        return self.fixed + self.each * n


@dataclass(frozen=True)
class Encoder:
    """One tower at one precision. Bytes of one device, without weights, their gradients and inputs."""

    name: str
    width: int  # D of the embeddings
    embedding_bytes: int  # of one number
    input_bytes: int  # of one sample
    casts: int  # half-precision copies of weights that autocast keeps during a step
    saved: Line  # activations held after the forward pass, without casts
    forward: Line  # peak of a forward pass without a graph, without casts
    backward: Line  # peak of a forward and backward pass, without casts
    forward_operations: float  # of one sample
    backward_operations: float

    @property
    def embedding(self) -> int:
        """Bytes of one embedding."""
        return self.width * self.embedding_bytes


def measure(side: Side, chunk: int, half: torch.dtype | None) -> Encoder:
    """Measures a chunk of `chunk` samples and one of half the size, to separate fixed bytes from bytes a sample.

    Args:
        side: the tower, without data.
        chunk: samples encoded at once, 2 or more.
        half: autocast's type, or None for none.
    """
    if chunk < 2:
        raise ValueError(f"chunk must be 2 or more, got {chunk}")
    sizes = (chunk // 2, chunk)
    with nowhere():
        plain = [_run(side, n, half, graph=False) for n in sizes]
        graph = [_run(side, n, half, graph=True) for n in sizes]
    embeddings = graph[1].embeddings
    casts = plain[1].alive - _bytes([embeddings])

    def line(first: int, second: int) -> Line:
        each = (second - first) / (sizes[1] - sizes[0])
        return Line(second - each * chunk - casts, each)

    return Encoder(
        name=side.name,
        width=embeddings.shape[1],
        embedding_bytes=embeddings.element_size(),
        input_bytes=graph[1].input_bytes // chunk,
        casts=casts,
        saved=line(graph[0].alive, graph[1].alive),
        forward=line(plain[0].peak, plain[1].peak),
        backward=line(graph[0].peak, graph[1].peak),
        forward_operations=graph[1].forward / chunk,
        backward_operations=(graph[1].operations - graph[1].forward) / chunk,
    )


@dataclass(frozen=True)
class _Run:
    embeddings: Tensor
    input_bytes: int
    alive: int  # after the forward pass
    peak: int
    forward: int  # operations
    operations: int


def _run(side: Side, n: int, half: torch.dtype | None, *, graph: bool) -> _Run:
    inputs, parameters = side.inputs(n), list(side.module.parameters())
    for p in parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None  # as in every step but the first
    meter = Meter()
    meter.ignore([*parameters, *side.module.buffers(), *inputs.values(), *(p.grad for p in parameters if p.grad is not None)])
    with metered(meter, half), torch.set_grad_enabled(graph):
        embeddings: Tensor = side.module(**inputs)
        alive, forward = meter.alive, meter.operations
        if graph:
            with torch.autocast("cpu", enabled=False):
                embeddings.backward(torch.ones_like(embeddings))  # type: ignore[no-untyped-call]
    return _Run(embeddings.detach(), _bytes(inputs.values()), alive, meter.peak, forward, meter.operations)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
