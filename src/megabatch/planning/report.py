"""A plan in words and tables, and as data."""

from dataclasses import asdict
from typing import Any

from megabatch.planning import gpus, losses, step
from megabatch.planning.losses import INF_CL, LOCAL, MEGABATCH, VANILLA
from megabatch.planning.step import DEVICE, HOST, REPLAY, Memory, Plan

GIB = 2**30
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
    """Is it my loss or my encoder?"""
    usable, whole = plan.setup.gpu.usable, plan.plain(batch, LOCAL)
    encoder_fits, loss_fits = whole.total - whole.loss <= usable, whole.total - whole.activations <= usable
    took = (
        f".\nA plain step holds {gib(whole.activations)} GiB of activations on each GPU, a dense loss {gib(whole.loss)} GiB; "
        f"{gib(usable)} GiB are usable."
    )
    if whole.total <= usable:
        return f"Neither your loss nor your encoder is in the way of {batch:,} pairs{took}"
    if encoder_fits and loss_fits:
        return f"Your loss and your encoder fit {batch:,} pairs each alone, not together{took}"
    if encoder_fits:
        return f"It is your loss that is in the way of {batch:,} pairs, not your encoder{took}"
    if loss_fits:
        return f"It is your encoder that is in the way of {batch:,} pairs, not your loss{took}"
    return f"Both your loss and your encoder are in the way of {batch:,} pairs{took}"


def advice(plan: Plan) -> str:
    """What comes after the first limit."""
    activations = max(tower.backward.at(plan.chunk) for tower in plan.encoders)
    dense, ours = plan.largest(LOCAL, REPLAY), plan.largest(MEGABATCH, REPLAY)
    if ours == 0:
        return f"Not even one pair a GPU fits in chunks of {plan.chunk}: try fsdp, a smaller chunk, or more memory."
    return (
        f"In a cached step with chunks of {plan.chunk} the activations are {gib(activations)} GiB whatever the batch.\n"
        f"Then the dense loss is the limit, at {dense:,} pairs; megabatch, which holds no similarities, goes on to {ours:,}."
    )


def text(plan: Plan, batch: int) -> str:
    """All of it."""
    setup = plan.setup
    pair = sum(tower.forward_operations for tower in plan.encoders)
    shared = f"{setup.nodes} × {setup.per_node}" if setup.nodes > 1 else f"{setup.per_node}"
    size = f"{plan.model.parameters / 1e6:.0f} M parameters, {pair / 1e9:.1f} GFLOP a pair forward"
    about = [
        f"Model     {plan.model.name}: {size}, embeddings of {plan.encoders[0].width}",
        f"GPUs      {shared} × {setup.gpu.name}: {gib(setup.gpu.usable)} GiB usable of each",
        f"Training  {setup.precision}, {setup.optimizer}, sharding {setup.sharding}, chunks of {plan.chunk}",
    ]
    parts = [
        verdict(plan, batch) + "\n" + advice(plan),
        "\n".join(about),
        "Largest batch, pairs\n" + _table(_largest_batches(plan)),
        f"Memory of each GPU at {batch:,} pairs with megabatch, inputs replayed, GiB\n" + _table(_memory(plan, batch)),
        f"Seconds of a step at {batch:,} pairs, cached\n" + _table(_seconds(plan, batch)),
        _notes(plan),
    ]
    return "\n\n".join(parts) + "\n"


def data(plan: Plan, batch: int) -> dict[str, Any]:
    """The same as numbers: bytes, seconds, pairs."""
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "setup": asdict(plan.setup),
        "usable_bytes": plan.setup.gpu.usable,
        "chunk": plan.chunk,
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
    """Bytes as GiB: one digit after the point below 100, two below 1."""
    value = size / GIB
    return f"{value:,.2f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _largest_batches(plan: Plan) -> list[list[str]]:
    rows = [["", "plain step", "cached, inputs on GPU", "… on host", "… replayed"]]
    for system in step.SYSTEMS:
        sizes = [f"{plan.largest(system, source):,}" for source in (None, DEVICE, HOST)]
        replayed = f"{plan.largest(system, REPLAY):,}" if system == MEGABATCH else ""
        rows.append([system, *sizes, replayed])
    return rows


def _memory(plan: Plan, batch: int) -> list[list[str]]:
    moments: list[Memory] = [plan.while_encoding(batch, REPLAY), plan.while_comparing(batch, MEGABATCH, REPLAY)]
    rows = [["", "while towers work", "while the loss works"]]
    rows += [[name, *(gib(getattr(moment, part)) for moment in moments)] for part, name in PARTS.items()]
    return [*rows, ["total", *(gib(moment.total) for moment in moments)]]


def _seconds(plan: Plan, batch: int) -> list[list[str]]:
    systems = (LOCAL, INF_CL, MEGABATCH)
    found = [plan.seconds(batch, system) for system in systems]
    rows = [["", *systems]]
    rows += [[name, *(_short(getattr(seconds, part)) for seconds in found)] for part, name in TIMES.items()]
    rows.append(["total", *(_short(seconds.total) for seconds in found)])
    fits = [plan.largest(system, HOST if system != MEGABATCH else REPLAY) >= batch for system in systems]
    pace = [f"{batch / seconds.total:,.0f}" if fit else "does not fit" for seconds, fit in zip(found, fits, strict=True)]
    return [*rows, ["pairs a second", *pace]]


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
        f"{VANILLA}: all logits on every GPU. {LOCAL}: those of its own rows. Host memory of a node: {host}.",
        "Counted: activations and operations, by running the towers on tensors without data.",
        f"The vendor's: rates and memory ({setup.gpu.source}).",
        f"Assumed: {memory} usable; {shares};",
        f"{gpus.LINK_EFFICIENCY:.0%} of {inside}, and of {between} between nodes.",
    ]
    return "\n".join(lines)


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
