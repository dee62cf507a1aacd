"""A plan: memory and time of a training step on each GPU, for any batch size, by part; and the plan as text, data and plots.

A cached step is `cached_backward` (GradCache): chunks are encoded without a graph, the loss is computed once, and chunks are
encoded again with a graph. Its peak memory is in a tower's backward pass over a chunk, or in the loss. A plain step has its
peak in the loss, while all activations are alive.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable
from megabatch_train.planning import costs, gpus, models
from megabatch_train.planning.costs import FLOAT, HALF, INF_CL, LOCAL, MEGABATCH, VANILLA, Cluster, Link, Shape
from megabatch_train.planning.gpus import GIB, HOST_MEMORY, OPTIMIZERS, PRECISIONS, SHARDINGS, Gpu
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


# ----------------------------------------------------------------------------------------------------------------------
# A plan as text with tables, and as data.

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "casts": "half-precision weights",
    "activations": "activations of a chunk",
    "embeddings": "embeddings or their gradients",
    "loss": "loss",
    "inputs": "inputs",
}
TIMES = {
    "encode": "encoder",
    "recompute": "encoder again",
    "backward": "encoder, backward",
    "loss": "loss",
    "waiting": "waiting for messages",
}


def verdict(plan: Plan, batch: int) -> str:
    """Returns a sentence about the part of a plain step that does not fit: the loss, the encoder, both or neither."""
    usable, memory = plan.setup.gpu.usable, plan.plain(batch, LOCAL)
    encoder_fits, loss_fits = memory.total - memory.loss <= usable, memory.total - memory.activations <= usable
    if memory.total <= usable:
        sentence = f"A plain step with {batch:,} pairs fits: neither loss nor encoder is the limit"
    elif encoder_fits and loss_fits:
        sentence = f"With {batch:,} pairs the loss and the encoder each fit separately, but not together"
    elif encoder_fits:
        sentence = f"With {batch:,} pairs the loss does not fit; the encoder does"
    elif loss_fits:
        sentence = f"With {batch:,} pairs the encoder does not fit; the loss does"
    else:
        sentence = f"With {batch:,} pairs neither the loss nor the encoder fits"
    return (
        f"{sentence}.\nOn each GPU, a plain step holds {gib(memory.activations)} GiB of activations, and a dense loss holds "
        f"{gib(memory.loss)} GiB. {gib(usable)} GiB are usable."
    )


def advice(plan: Plan) -> str:
    """Returns sentences about the limits of a cached step."""
    activations = max(tower.backward.at(plan.chunk) for tower in plan.encoders)
    dense, ours = plan.largest(LOCAL, REPLAY), plan.largest(MEGABATCH, REPLAY)
    if ours == 0:
        return f"Not even one pair per GPU fits in chunks of {plan.chunk}: try fsdp, a smaller chunk, or more memory."
    sentences = (
        f"A cached step with chunks of {plan.chunk} holds {gib(activations)} GiB of activations at any batch size.\n"
        f"Its limit is {dense:,} pairs with a dense loss and {ours:,} with megabatch, which does not store the logit matrix."
    )
    if plan.checkpointed_chunk > plan.chunk:
        sentences += (
            f"\nChunks this small may leave the GPU idle. With activation checkpointing {plan.checkpointed_chunk} samples fit, "
            'but it adds a forward pass. Training measures which is faster (memory.checkpointing = "auto").'
        )
    return sentences


def format_plan(plan: Plan, batch: int) -> str:
    """Returns the whole plan as text."""
    setup = plan.setup
    pair = sum(tower.forward_operations for tower in plan.encoders)
    shared = f"{setup.nodes} × {setup.per_node}" if setup.nodes > 1 else f"{setup.per_node}"
    trained, parameters = plan.model.trained_parameters, plan.model.parameters
    learns = "" if 2 * trained > parameters else f", {trained / 1e6:.1f} M of them trained"
    size = f"{parameters / 1e6:.0f} M parameters{learns}, {pair / 1e9:.1f} GFLOP per pair (forward)"
    about = [
        f"Model     {plan.model.name}: {size}, embedding dim {plan.encoders[0].width}",
        f"GPUs      {shared} × {setup.gpu.name}: {gib(setup.gpu.usable)} GiB usable per GPU",
        f"Training  {setup.precision}, {setup.optimizer}, sharding {setup.sharding}, chunks of {plan.chunk}"
        + (", activation checkpointing" if plan.checkpointing else ""),
    ]
    tables = [_largest_batches(plan), _memory_table(plan, batch), _seconds_table(plan, batch)]
    parts = [verdict(plan, batch) + "\n" + advice(plan), "\n".join(about), *(table.text() for table in tables), _notes(plan)]
    return "\n\n".join(parts) + "\n"


def plan_values(plan: Plan, batch: int) -> dict[str, Any]:
    """Returns the plan as numbers: bytes, seconds and pairs."""
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "trained_parameters": plan.model.trained_parameters,
        "setup": asdict(plan.setup),
        "usable_bytes": plan.setup.gpu.usable,
        "chunk": plan.chunk,
        "checkpointing": plan.checkpointing,
        "checkpointed_chunk": plan.checkpointed_chunk,
        "batch": batch,
        "verdict": verdict(plan, batch),
        "towers": [asdict(tower) for tower in plan.encoders],
        "largest": {
            system: {str(source or "plain"): plan.largest(system, source) for source in (None, *SOURCES)} for system in SYSTEMS
        },
        "memory": {
            "plain": asdict(plan.plain(batch, LOCAL)),
            "encoding": asdict(plan.while_encoding(batch, REPLAY)),
            "loss": asdict(plan.while_comparing(batch, MEGABATCH, REPLAY)),
        },
        "loss_bytes": {system: costs.loss_bytes(system, plan.shape(batch)) for system in SYSTEMS},
        "seconds": {system: asdict(plan.seconds(batch, system)) for system in SYSTEMS},
    }


def gib(size: float) -> str:
    """Formats bytes as GiB with one decimal below 100 and two decimals below 1."""
    value = size / GIB
    return f"{value:,.2f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _largest_batches(plan: Plan) -> TextTable:
    rows = []
    for system in SYSTEMS:
        sizes = [f"{plan.largest(system, source):,}" for source in (None, DEVICE, HOST)]
        rows.append([system, *sizes, f"{plan.largest(system, REPLAY):,}" if system == MEGABATCH else ""])
    title = "Largest batch, pairs; a cached step keeps its inputs on the GPU or on the host, or reads them again (replayed)"
    return TextTable(["", "plain step", "cached, GPU", "cached, host", "replayed"], rows, title)


def _memory_table(plan: Plan, batch: int) -> TextTable:
    moments: list[Memory] = [plan.while_encoding(batch, REPLAY), plan.while_comparing(batch, MEGABATCH, REPLAY)]
    parts = PARTS | {"total": "total"}
    rows = [[name, *(gib(getattr(moment, part)) for moment in moments)] for part, name in parts.items()]
    title = f"Memory of each GPU at {batch:,} pairs with megabatch, inputs replayed, GiB"
    return TextTable(["", "in the towers", "in the loss"], rows, title)


def _seconds_table(plan: Plan, batch: int) -> TextTable:
    systems = (LOCAL, INF_CL, MEGABATCH)
    times = [plan.seconds(batch, system) for system in systems]
    parts = TIMES | {"total": "total"}
    rows = [[name, *(_short(getattr(seconds, part)) for seconds in times)] for part, name in parts.items()]
    fits = [plan.largest(system, HOST if system != MEGABATCH else REPLAY) >= batch for system in systems]
    pace = [f"{batch / seconds.total:,.0f}" if fit else "does not fit" for seconds, fit in zip(times, fits, strict=True)]
    return TextTable(["", *systems], [*rows, ["pairs per second", *pace]], f"Seconds of a cached step at {batch:,} pairs")


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:,.3f}"


def _notes(plan: Plan) -> str:
    setup = plan.setup
    between = f"{setup.gpu.between:g} GB/s for each {'GPU' if setup.gpu.rail_each else 'node'}"
    fractions = f"{setup.encoder_efficiency:.0%} of the rate in encoders, {setup.loss_efficiency:.0%} in the loss"
    host = f"{setup.host_memory / 2**40:g} TiB"
    memory = f"{gpus.USABLE:.0%} of the memory" + (" that error correction leaves" if setup.gpu.correction_gb else "")
    inside = f"{setup.gpu.inside:g} GB/s inside a node" + (f", {setup.gpu.to_one:g} to one GPU" if setup.gpu.to_one else "")
    lines = [
        f"{VANILLA} computes all logits on every GPU. {LOCAL} computes only the logits of a GPU's own rows.",
        "Activations and operations are counted by running the towers on tensors without data.",
        f"Rates and memory are from the vendor ({setup.gpu.source}). A node has {host} of host memory.",
        f"Assumed: {memory} usable; {fractions};",
        f"{gpus.LINK_EFFICIENCY:.0%} of {inside}, and of {between} between nodes.",
        "Ids are not counted. On an H200, the loss takes about 1.5 times as long with ids at dim 512, and 2 times at dim 256.",
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# A plan as one figure with four plots: memory and time by batch size, largest batch and time by number of GPUs.


COLORS = {VANILLA: plots.ORANGE, LOCAL: plots.OCHRE, INF_CL: plots.BLUE, MEGABATCH: plots.GREEN}
PART_COLORS = (plots.GREEN, plots.MINT, plots.BLUE, plots.OCHRE, plots.ORANGE)
MOST_GPUS = 4096


def draw_plan(plan: Plan, batch: int, *paths: Path) -> None:
    """Draws the figure, and writes it to every path."""
    setup = plan.setup
    gpus = f"{setup.nodes} × {setup.per_node}" if setup.nodes > 1 else str(setup.per_node)
    title = f"{plan.model.name} on {gpus} × {setup.gpu.name}; {setup.precision}, cached, chunks of {plan.chunk}"
    figure, ((memory, seconds), (largest, scaling)) = plots.figure(title, rows=2, columns=2, size=(12, 8.6))
    _draw_memory(memory, plan)
    _draw_seconds(seconds, plan)
    _draw_largest(largest, plan)
    _draw_scaling(scaling, plan, batch)
    plots.save(figure, *paths)


def _batches(plan: Plan) -> list[int]:
    first = max(10, plan.setup.ranks.bit_length() + 6)
    return [2**i for i in range(first, first + 15)]


def _draw_memory(axes: Any, plan: Plan) -> None:
    batches = _batches(plan)
    for system in SYSTEMS:
        source = REPLAY if system == MEGABATCH else HOST
        points = [(B, plan.peak_with_caching(B, system, source).total / GIB) for B in batches]
        width = 2.4 if system == MEGABATCH else 1.6
        plots.line(axes, points, f"{system}, cached", COLORS[system], marker=None, linewidth=width)
    plain = [(B, plan.plain(B, LOCAL).total / GIB) for B in batches]
    plots.line(axes, plain, "plain step (not cached)", plots.GREY, marker=None, linestyle="--")
    limit = plan.setup.gpu.usable / GIB
    axes.axhline(limit, color=plots.INK, linewidth=1)
    axes.annotate("usable", (batches[-1], limit), (0, 3), textcoords="offset points", ha="right", color=plots.INK)
    axes.set(yscale="log", ylabel="memory of a GPU, GiB", title="Memory against the batch")
    axes.set_ylim(top=40 * limit, bottom=0.8 * plan.peak_with_caching(batches[0], MEGABATCH, REPLAY).total / GIB)
    plots.batch_axis(axes, batches)
    plots.legend(axes, loc="upper left")


def _draw_seconds(axes: Any, plan: Plan) -> None:
    """Draws the share of each part in the time of a step."""
    batches = _batches(plan)
    times = [plan.seconds(B) for B in batches]
    _draw_stack(axes, batches, [[100 * getattr(s, part) / s.total for s in times] for part in TIMES])
    axes.set(ylabel="share of a step, %", title="Time of a step with megabatch, by part", ylim=(0, 100))
    plots.batch_axis(axes, batches)
    plots.legend(axes, loc="lower left", frameon=True, framealpha=0.9)


def _counts(plan: Plan) -> list[tuple[int, int]]:
    """Returns (nodes, GPUs per node). Up to one node, the number of GPUs doubles, and then the number of full nodes doubles."""
    per_node = plan.setup.per_node
    inside = [(1, 2**i) for i in range(per_node.bit_length()) if 2**i < per_node]
    return inside + [(2**i, per_node) for i in range(13) if 2**i * per_node <= MOST_GPUS]


def _draw_largest(axes: Any, plan: Plan) -> None:
    counts = _counts(plan)
    for system in SYSTEMS:
        source = REPLAY if system == MEGABATCH else HOST
        kept = "replayed" if source == REPLAY else "on the host"
        points = [(nodes * each, on(plan, nodes, each).largest(system, source)) for nodes, each in counts]
        plots.line(axes, [(x, y) for x, y in points if y], f"{system}, inputs {kept}", COLORS[system], markersize=3)
    axes.set(yscale="log", ylabel="largest batch, pairs", title="Largest batch against the GPUs")
    plots.batch_axis(axes, [nodes * each for nodes, each in counts], "GPUs")
    plots.legend(axes)


def _draw_scaling(axes: Any, plan: Plan, batch: int) -> None:
    """Draws weak scaling: each GPU has as many pairs as in the plan."""
    counts, rows = _counts(plan), plan.rows(batch)
    times = [on(plan, nodes, each).seconds(rows * nodes * each) for nodes, each in counts]
    ranks = [nodes * each for nodes, each in counts]
    _draw_stack(axes, ranks, [[getattr(s, part) for s in times] for part in TIMES])
    axes.set(ylabel="seconds of a step", title=f"Time of a step, {rows:,} pairs on each GPU")
    plots.batch_axis(axes, ranks, "GPUs")


def _draw_stack(axes: Any, x: list[int], parts: list[list[float]]) -> None:
    axes.stackplot(x, parts, labels=list(TIMES.values()), colors=PART_COLORS, alpha=0.9)
    axes.set_xlim(x[0], x[-1])
