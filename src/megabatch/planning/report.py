"""A plan as text with tables, and as data."""

from dataclasses import asdict
from typing import Any

from megabatch.display.tables import Table
from megabatch.planning import gpus, losses, step
from megabatch.planning.gpus import GIB
from megabatch.planning.losses import INF_CL, LOCAL, MEGABATCH, VANILLA
from megabatch.planning.step import DEVICE, HOST, REPLAY, Memory, Plan

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
    """The part of a plain step that does not fit: the loss, the encoder, both or neither."""
    usable, whole = plan.setup.gpu.usable, plan.plain(batch, LOCAL)
    encoder_fits, loss_fits = whole.total - whole.loss <= usable, whole.total - whole.activations <= usable
    if whole.total <= usable:
        said = f"A plain step with {batch:,} pairs fits: neither loss nor encoder is the limit"
    elif encoder_fits and loss_fits:
        said = f"With {batch:,} pairs the loss and the encoder each fit alone, but not together"
    elif encoder_fits:
        said = f"With {batch:,} pairs the loss does not fit; the encoder does"
    elif loss_fits:
        said = f"With {batch:,} pairs the encoder does not fit; the loss does"
    else:
        said = f"With {batch:,} pairs neither the loss nor the encoder fits"
    return (
        f"{said}.\nA plain step holds {gib(whole.activations)} GiB of activations on each GPU, a dense loss "
        f"{gib(whole.loss)} GiB; {gib(usable)} GiB are usable."
    )


def advice(plan: Plan) -> str:
    """The limits of a cached step."""
    activations = max(tower.backward.at(plan.chunk) for tower in plan.encoders)
    dense, ours = plan.largest(LOCAL, REPLAY), plan.largest(MEGABATCH, REPLAY)
    if ours == 0:
        return f"Not even one pair a GPU fits in chunks of {plan.chunk}: try fsdp, a smaller chunk, or more memory."
    said = (
        f"A cached step with chunks of {plan.chunk} holds {gib(activations)} GiB of activations at any batch size.\n"
        f"Its limit is {dense:,} pairs with a dense loss and {ours:,} with megabatch, which holds no similarity matrix."
    )
    if plan.checkpointed_chunk > plan.chunk:
        said += (
            f"\nChunks this small may leave the GPU idle. With activation checkpointing {plan.checkpointed_chunk} samples fit, "
            'for one more forward pass; training measures which is faster (memory.checkpointing = "auto").'
        )
    return said


def text(plan: Plan, batch: int) -> str:
    """The whole plan."""
    setup = plan.setup
    pair = sum(tower.forward_operations for tower in plan.encoders)
    shared = f"{setup.nodes} × {setup.per_node}" if setup.nodes > 1 else f"{setup.per_node}"
    trained, parameters = plan.model.trained, plan.model.parameters
    learns = "" if 2 * trained > parameters else f", {trained / 1e6:.1f} M of them trained"
    size = f"{parameters / 1e6:.0f} M parameters{learns}, {pair / 1e9:.1f} GFLOP a pair forward"
    about = [
        f"Model     {plan.model.name}: {size}, embeddings of {plan.encoders[0].width}",
        f"GPUs      {shared} × {setup.gpu.name}: {gib(setup.gpu.usable)} GiB usable of each",
        f"Training  {setup.precision}, {setup.optimizer}, sharding {setup.sharding}, chunks of {plan.chunk}"
        + (", activation checkpointing" if plan.checkpointing else ""),
    ]
    tables = [_largest_batches(plan), _memory(plan, batch), _seconds(plan, batch)]
    parts = [verdict(plan, batch) + "\n" + advice(plan), "\n".join(about), *(table.text() for table in tables), _notes(plan)]
    return "\n\n".join(parts) + "\n"


def data(plan: Plan, batch: int) -> dict[str, Any]:
    """The plan as numbers: bytes, seconds, pairs."""
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "trained_parameters": plan.model.trained,
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
        "loss_bytes": {system: losses.loss_bytes(system, plan.shape(batch)) for system in step.SYSTEMS},
        "seconds": {system: asdict(plan.seconds(batch, system)) for system in step.SYSTEMS},
    }


def gib(size: float) -> str:
    """Bytes as GiB: one decimal below 100, two below 1."""
    value = size / GIB
    return f"{value:,.2f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _largest_batches(plan: Plan) -> Table:
    rows = []
    for system in step.SYSTEMS:
        sizes = [f"{plan.largest(system, source):,}" for source in (None, DEVICE, HOST)]
        rows.append([system, *sizes, f"{plan.largest(system, REPLAY):,}" if system == MEGABATCH else ""])
    title = "Largest batch, pairs; a cached step with its inputs on the GPU, on the host, or replayed"
    return Table(["", "plain step", "cached, GPU", "cached, host", "replayed"], rows, title)


def _memory(plan: Plan, batch: int) -> Table:
    moments: list[Memory] = [plan.while_encoding(batch, REPLAY), plan.while_comparing(batch, MEGABATCH, REPLAY)]
    parts = PARTS | {"total": "total"}
    rows = [[name, *(gib(getattr(moment, part)) for moment in moments)] for part, name in parts.items()]
    title = f"Memory of each GPU at {batch:,} pairs with megabatch, inputs replayed, GiB"
    return Table(["", "in the towers", "in the loss"], rows, title)


def _seconds(plan: Plan, batch: int) -> Table:
    systems = (LOCAL, INF_CL, MEGABATCH)
    found = [plan.seconds(batch, system) for system in systems]
    parts = TIMES | {"total": "total"}
    rows = [[name, *(_short(getattr(seconds, part)) for seconds in found)] for part, name in parts.items()]
    fits = [plan.largest(system, HOST if system != MEGABATCH else REPLAY) >= batch for system in systems]
    pace = [f"{batch / seconds.total:,.0f}" if fit else "does not fit" for seconds, fit in zip(found, fits, strict=True)]
    return Table(["", *systems], [*rows, ["pairs a second", *pace]], f"Seconds of a cached step at {batch:,} pairs")


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:,.3f}"


def _notes(plan: Plan) -> str:
    setup = plan.setup
    between = f"{setup.gpu.between:g} GB/s for each {'GPU' if setup.gpu.rail_each else 'node'}"
    shares = f"{setup.encoder_efficiency:.0%} of the rate in encoders, {setup.loss_efficiency:.0%} in the loss"
    host = f"{setup.host_memory / 2**40:g} TiB"
    memory = f"{gpus.USABLE:.0%} of the memory" + (" that error correction leaves" if setup.gpu.correction_gb else "")
    inside = f"{setup.gpu.inside:g} GB/s inside a node" + (f", {setup.gpu.to_one:g} to one GPU" if setup.gpu.to_one else "")
    lines = [
        f"{VANILLA}: all logits on every GPU. {LOCAL}: the logits of a GPU's own rows. Host memory of a node: {host}.",
        "Counted: activations and operations, by running the towers on tensors without data.",
        f"From the vendor: rates and memory ({setup.gpu.source}).",
        f"Assumed: {memory} usable; {shares};",
        f"{gpus.LINK_EFFICIENCY:.0%} of {inside}, and of {between} between nodes.",
        "Left out: ids. On an H200, megabatch's loss takes about 1.5 times as long with them at width 512, and twice at 256.",
    ]
    return "\n".join(lines)
