"""A plan as text with tables, as data, and as plots."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable
from megabatch_train.planning import costs, gpus, step
from megabatch_train.planning.costs import INF_CL, LOCAL, MEGABATCH, VANILLA
from megabatch_train.planning.gpus import GIB
from megabatch_train.planning.step import DEVICE, HOST, REPLAY, Memory, Plan

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


def text(plan: Plan, batch: int) -> str:
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


def data(plan: Plan, batch: int) -> dict[str, Any]:
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
            system: {str(source or "plain"): plan.largest(system, source) for source in (None, *step.SOURCES)}
            for system in step.SYSTEMS
        },
        "memory": {
            "plain": asdict(plan.plain(batch, LOCAL)),
            "encoding": asdict(plan.while_encoding(batch, REPLAY)),
            "loss": asdict(plan.while_comparing(batch, MEGABATCH, REPLAY)),
        },
        "loss_bytes": {system: costs.loss_bytes(system, plan.shape(batch)) for system in step.SYSTEMS},
        "seconds": {system: asdict(plan.seconds(batch, system)) for system in step.SYSTEMS},
    }


def gib(size: float) -> str:
    """Formats bytes as GiB with one decimal below 100 and two decimals below 1."""
    value = size / GIB
    return f"{value:,.2f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _largest_batches(plan: Plan) -> TextTable:
    rows = []
    for system in step.SYSTEMS:
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


def draw(plan: Plan, batch: int, *paths: Path) -> None:
    """Draws the figure, and writes it to every path."""
    setup = plan.setup
    gpus = f"{setup.nodes} × {setup.per_node}" if setup.nodes > 1 else str(setup.per_node)
    title = f"{plan.model.name} on {gpus} × {setup.gpu.name}; {setup.precision}, cached, chunks of {plan.chunk}"
    figure, ((memory, seconds), (largest, scaling)) = plots.figure(title, rows=2, columns=2, size=(12, 8.6))
    _memory(memory, plan)
    _seconds(seconds, plan)
    _largest(largest, plan)
    _scaling(scaling, plan, batch)
    plots.save(figure, *paths)


def _batches(plan: Plan) -> list[int]:
    first = max(10, plan.setup.ranks.bit_length() + 6)
    return [2**i for i in range(first, first + 15)]


def _memory(axes: Any, plan: Plan) -> None:
    batches = _batches(plan)
    for system in step.SYSTEMS:
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


def _seconds(axes: Any, plan: Plan) -> None:
    """Draws the share of each part in the time of a step."""
    batches = _batches(plan)
    times = [plan.seconds(B) for B in batches]
    _stack(axes, batches, [[100 * getattr(s, part) / s.total for s in times] for part in TIMES])
    axes.set(ylabel="share of a step, %", title="Time of a step with megabatch, by part", ylim=(0, 100))
    plots.batch_axis(axes, batches)
    plots.legend(axes, loc="lower left", frameon=True, framealpha=0.9)


def _counts(plan: Plan) -> list[tuple[int, int]]:
    """Returns (nodes, GPUs per node). Up to one node, the number of GPUs doubles, and then the number of full nodes doubles."""
    per_node = plan.setup.per_node
    inside = [(1, 2**i) for i in range(per_node.bit_length()) if 2**i < per_node]
    return inside + [(2**i, per_node) for i in range(13) if 2**i * per_node <= MOST_GPUS]


def _largest(axes: Any, plan: Plan) -> None:
    counts = _counts(plan)
    for system in step.SYSTEMS:
        source = REPLAY if system == MEGABATCH else HOST
        kept = "replayed" if source == REPLAY else "on the host"
        points = [(nodes * each, step.on(plan, nodes, each).largest(system, source)) for nodes, each in counts]
        plots.line(axes, [(x, y) for x, y in points if y], f"{system}, inputs {kept}", COLORS[system], markersize=3)
    axes.set(yscale="log", ylabel="largest batch, pairs", title="Largest batch against the GPUs")
    plots.batch_axis(axes, [nodes * each for nodes, each in counts], "GPUs")
    plots.legend(axes)


def _scaling(axes: Any, plan: Plan, batch: int) -> None:
    """Draws weak scaling: each GPU has as many pairs as in the plan."""
    counts, rows = _counts(plan), plan.rows(batch)
    times = [step.on(plan, nodes, each).seconds(rows * nodes * each) for nodes, each in counts]
    ranks = [nodes * each for nodes, each in counts]
    _stack(axes, ranks, [[getattr(s, part) for s in times] for part in TIMES])
    axes.set(ylabel="seconds of a step", title=f"Time of a step, {rows:,} pairs on each GPU")
    plots.batch_axis(axes, ranks, "GPUs")


def _stack(axes: Any, x: list[int], parts: list[list[float]]) -> None:
    axes.stackplot(x, parts, labels=list(TIMES.values()), colors=PART_COLORS, alpha=0.9)
    axes.set_xlim(x[0], x[-1])
