"""Memory and time of a training step on each GPU, for any batch size, by part.

A cached step is `cached_backward` (GradCache): chunks are encoded without a graph, the loss is computed once, and chunks are
encoded again with a graph. Its peak memory is in a tower's backward pass over a chunk, or in the loss. A plain step has its
peak in the loss, while all activations are alive.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megabatch_train.planning import costs, gpus, models
from megabatch_train.planning.costs import FLOAT, HALF, INF_CL, LOCAL, MEGABATCH, VANILLA, Cluster, Link, Shape
from megabatch_train.planning.gpus import HOST_MEMORY, OPTIMIZERS, PRECISIONS, SHARDINGS, Gpu
from megabatch_train.planning.models import Encoder, Model
from megabatch_train.towers.tower import set_checkpointing

DEVICE, HOST, REPLAY = "device", "host", "replay"
SOURCES = (DEVICE, HOST, REPLAY)
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # autocast dtype by precision
SYSTEMS = (VANILLA, LOCAL, INF_CL, MEGABATCH)

# A plan chooses the largest of these chunk sizes whose activations take at most this fraction of a GPU. Larger chunks are not
# faster, because the matmuls already keep the device busy.
CHUNKS, CHUNK_SHARE = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2), 0.2

# Smaller chunks may leave the device idle. For them, training measures whether activation checkpointing is faster.
BUSY_CHUNK = 32


@dataclass(frozen=True)
class Setup:
    """GPUs, links and training options of a plan."""

    gpu: Gpu
    per_node: int
    nodes: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    sharding: str = "none"
    host_memory: float = HOST_MEMORY
    encoder_efficiency: float = gpus.ENCODER_EFFICIENCY
    loss_efficiency: float = gpus.LOSS_EFFICIENCY

    def __post_init__(self) -> None:
        """Checks the options."""
        for name, options in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("sharding", SHARDINGS)):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {getattr(self, name)!r}")

    @property
    def ranks(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.per_node

    @property
    def half(self) -> bool:
        """Whether matmuls are in half precision."""
        return self.precision in AUTOCAST

    @property
    def cluster(self) -> Cluster:
        """The cluster with the bandwidth to one other GPU, which the ring uses."""
        usable = 1e9 * gpus.LINK_EFFICIENCY
        return Cluster(
            nodes=self.nodes,
            ranks_per_node=self.per_node,
            inside=Link((self.gpu.to_one or self.gpu.inside) * usable, gpus.LATENCY_INSIDE),
            between=Link(self.gpu.between * usable, gpus.LATENCY_BETWEEN),
            rate=self.gpu.rate(self.precision) * self.loss_efficiency,
            rails=self.per_node if self.gpu.rail_each else 1,
        )

    @property
    def all_links(self) -> Cluster:
        """The cluster with the bandwidth to all other GPUs at once, which all-reduce and all-gather use."""
        one, others = self.cluster, max(1, self.per_node - 1)
        bandwidth = min(self.gpu.inside * 1e9 * gpus.LINK_EFFICIENCY, others * one.inside.bandwidth)
        return replace(one, inside=replace(one.inside, bandwidth=bandwidth))


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU by part. A plain step needs `loss` and `activations` together. A cached step needs only one of them."""

    weights: float
    gradients: float
    optimizer: float
    casts: float = 0  # half-precision copies of weights
    activations: float = 0
    embeddings: float = 0
    loss: float = 0
    inputs: float = 0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step by part."""

    encode: float  # forward passes
    recompute: float  # second forward passes of a cached step
    backward: float
    loss: float
    waiting: float  # exposed communication of the loss's columns, the towers' gradients and sharded weights

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Plan:
    """The plan for a model on a setup, with a chunk size."""

    model: Model
    setup: Setup
    encoders: tuple[Encoder, ...]
    chunk: int
    checkpointing: bool = False  # whether activations are computed again in the backward pass
    checkpointed_chunk: int = 0  # samples that fit with checkpointing; 0 if `chunk` is large or checkpointed

    # Memory

    def rows(self, batch: int) -> int:
        """Returns the number of pairs on each GPU."""
        return -(-batch // self.setup.ranks)

    def shape(self, batch: int) -> Shape:
        """Returns the shape of the loss."""
        first = self.encoders[0]
        return Shape(batch, self.setup.ranks, self.setup.nodes, first.width, first.embedding_bytes, self.setup.half)

    @cached_property
    def states(self) -> Memory:
        """The memory that persists between steps, and the gradients."""
        weights, trained = self.model.weight_bytes, self.model.trained_parameters * FLOAT
        ranks, sharding = self.setup.ranks, self.setup.sharding
        optimizer = trained * OPTIMIZERS[self.setup.optimizer] / (ranks if sharding != "none" else 1)
        if sharding == "fsdp":
            # FSDP gathers one layer and prefetches the next layer. Gradients stay unsharded until the last chunk.
            return Memory(weights / ranks + 2 * self.largest_layer_bytes, trained, optimizer)
        buckets = trained if ranks > 1 else 0  # gradient buckets of DDP
        return Memory(weights, trained + buckets, optimizer)

    @cached_property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest repeated block, or of the largest module that has parameters, without its submodules."""
        blocks = [
            sum(p.numel() * p.element_size() for p in child.parameters())
            for side in self.model.sides
            for stack in side.module.modules()
            if isinstance(stack, torch.nn.ModuleList | torch.nn.Sequential)
            for child in stack
        ]
        own = [
            sum(p.numel() * p.element_size() for p in part.parameters(recurse=False))
            for side in self.model.sides
            for part in side.module.modules()
        ]
        return max(blocks + own, default=0)

    @property
    def casts(self) -> float:
        """Bytes of autocast's half-precision copies of all weights. Shared weights count once."""
        return self.encoders[0].casts if self.model.is_one_tower else sum(tower.casts for tower in self.encoders)

    def embeddings(self, batch: int) -> float:
        """Returns the bytes of the embeddings of all towers, which are also the bytes of their gradients."""
        return self.rows(batch) * sum(tower.embedding for tower in self.encoders)

    def inputs(self, batch: int, source: str) -> float:
        """Returns the bytes of inputs on the device: the whole batch, or two chunks of the tower that is encoding."""
        if source == DEVICE:
            return self.rows(batch) * sum(tower.input_bytes for tower in self.encoders)
        return 2 * min(self.chunk, self.rows(batch)) * max(tower.input_bytes for tower in self.encoders)

    def host_bytes(self, batch: int) -> float:
        """Returns the host memory of a node for the inputs."""
        return self.rows(batch) * self.setup.per_node * sum(tower.input_bytes for tower in self.encoders)

    def while_encoding(self, batch: int, source: str) -> Memory:
        """Returns the memory of a cached step at its peak in the backward pass over a chunk, for the tower that needs most."""
        chunk = min(self.chunk, self.rows(batch))
        return replace(
            self.states,
            casts=self.casts,
            activations=max(tower.backward.at(chunk) for tower in self.encoders),
            embeddings=self.embeddings(batch),
            inputs=self.inputs(batch, source),
        )

    def while_comparing(self, batch: int, system: str, source: str) -> Memory:
        """Returns the memory of a cached step at the peak of its loss."""
        return replace(
            self.states,
            embeddings=self.embeddings(batch),
            loss=costs.loss_bytes(system, self.shape(batch)),
            inputs=self.inputs(batch, source) if source == DEVICE else 0,
        )

    def plain(self, batch: int, system: str) -> Memory:
        """Returns the memory of a plain step, which keeps all activations until the loss and the last tower's backward pass."""
        rows = self.rows(batch)
        saved = sum(tower.saved.at(rows) for tower in self.encoders)
        work = max(tower.backward.at(rows) - tower.saved.at(rows) for tower in self.encoders)
        loss = costs.loss_bytes(system, self.shape(batch))
        return replace(
            self.states,
            casts=self.casts,
            activations=saved + max(0, work - loss),
            embeddings=self.embeddings(batch),
            loss=loss,
            inputs=self.inputs(batch, DEVICE),
        )

    def peak_with_caching(self, batch: int, system: str, source: str) -> Memory:
        """Returns the larger of the two peaks of a cached step."""
        return max(self.while_encoding(batch, source), self.while_comparing(batch, system, source), key=lambda m: m.total)

    # The largest batch

    def largest(self, system: str, source: str | None) -> int:
        """Returns the largest multiple of the number of GPUs that fits, or 0. `source` is None for a plain step."""

        def fits(rows: int) -> bool:
            batch = rows * self.setup.ranks
            if source is None:
                return self.plain(batch, system).total <= self.setup.gpu.usable
            on_host = source != HOST or self.host_bytes(batch) <= self.setup.host_memory
            return on_host and self.peak_with_caching(batch, system, source).total <= self.setup.gpu.usable

        return _largest(fits) * self.setup.ranks

    # Time

    def seconds(self, batch: int, system: str = MEGABATCH, *, cached: bool = True) -> Seconds:
        """Returns the seconds of one step. megabatch communicates in a ring, and the dense losses use an all-gather."""
        setup, rows, shape = self.setup, self.rows(batch), self.shape(batch)
        rate = setup.gpu.rate(setup.precision) * setup.encoder_efficiency
        forward = rows * sum(tower.forward_operations for tower in self.encoders) / rate
        backward = rows * sum(tower.backward_operations for tower in self.encoders) / rate
        loss = costs.loss_seconds(system, shape, setup.gpu, setup.precision, setup.loss_efficiency)
        return Seconds(
            encode=forward,
            recompute=forward if cached else 0.0,
            backward=backward,
            loss=loss,
            waiting=self._columns(system, shape) + self._gradients(rows, forward, backward, cached),
        )

    def _columns(self, system: str, shape: Shape) -> float:
        if system == MEGABATCH:
            element = HALF if self.setup.half else FLOAT
            return costs.estimate_wait(self.setup.cluster, shape.rows, shape.dim, element)
        if system == INF_CL:
            return 0.0  # Inf-CL hides its two float32 rings behind a much longer computation
        # The dense losses all-gather the embeddings of both towers, and reduce-scatter their gradients.
        return costs.all_reduce_seconds(self.setup.all_links, 2 * shape.batch * shape.dim * FLOAT)

    def _gradients(self, rows: int, forward: float, backward: float, cached: bool) -> float:
        chunk = min(self.chunk, rows) if cached else rows
        chunks = -(-rows // chunk)
        averaging = costs.all_reduce_seconds(self.setup.all_links, self.model.trained_parameters * FLOAT)
        hidden_by = backward / chunks  # the backward pass of the last chunk
        exposed = max(0.0, averaging - hidden_by)
        if self.setup.sharding == "fsdp":
            # FSDP gathers the weights for each chunk in both forward passes and in backward. Each costs half an all-reduce.
            gathering = costs.all_reduce_seconds(self.setup.all_links, self.model.weight_bytes) / 2
            passes, work = (3, 2 * forward + backward) if cached else (2, forward + backward)
            exposed += max(0.0, passes * chunks * gathering - work)
        return exposed


def make(model: Model, setup: Setup, chunk: int | None = None, *, checkpointing: bool = False) -> Plan:
    """Measures the towers, and chooses a chunk size if none is given.

    Args:
        model: the towers.
        setup: GPUs and training options.
        chunk: number of samples that are encoded at once.
        checkpointing: whether the towers' blocks compute their activations again in the backward pass.
    """
    half, modules = AUTOCAST.get(setup.precision), [side.module for side in model.sides]
    set_checkpointing(modules, checkpointing)
    if chunk is None:
        chunk = _chunk(model, setup)
    first = models.measure(model.sides[0], chunk, half)
    second = replace(first, name=model.sides[1].name) if model.is_one_tower else models.measure(model.sides[1], chunk, half)
    larger = 0
    if chunk < BUSY_CHUNK and not checkpointing:
        set_checkpointing(modules, True)
        larger = _chunk(model, setup)
        set_checkpointing(modules, False)
    return Plan(model, setup, (first, second), chunk, checkpointing, larger)


def _chunk(model: Model, setup: Setup) -> int:
    half = AUTOCAST.get(setup.precision)
    encoders = [models.measure(side, 32, half) for side in model.sides[: 1 if model.is_one_tower else 2]]
    limit = CHUNK_SHARE * setup.gpu.usable
    return next((c for c in CHUNKS if max(tower.backward.at(c) for tower in encoders) <= limit), CHUNKS[-1])


def on(plan: Plan, nodes: int, per_node: int) -> Plan:
    """Returns the plan on another number of GPUs."""
    return replace(plan, setup=replace(plan.setup, nodes=nodes, per_node=per_node))


def _largest(fits: Callable[[int], bool]) -> int:
    """Finds the largest number that fits, by bisection. Every smaller number must fit, too."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
