"""A plan as pictures: memory and time against the batch, largest batch and time against the number of GPUs."""

from pathlib import Path
from typing import Any

from megabatch.planning import step
from megabatch.planning.losses import INF_CL, LOCAL, MEGABATCH, VANILLA
from megabatch.planning.report import GIB, TIMES
from megabatch.planning.step import HOST, REPLAY, Plan

COLOURS = {VANILLA: "#c1440e", LOCAL: "#e0a030", INF_CL: "#5b6fb5", MEGABATCH: "#0b6e4f"}
PART_COLOURS = ("#0b6e4f", "#67b99a", "#2c4a7c", "#e0a030", "#c1440e")
MOST_GPUS = 4096


def draw(plan: Plan, batch: int, paths: list[Path]) -> None:
    """One figure, written to every path."""
    from matplotlib.figure import Figure

    setup = plan.setup
    figure = Figure(figsize=(12, 8.6), layout="constrained")
    gpus = f"{setup.nodes} × {setup.per_node}" if setup.nodes > 1 else str(setup.per_node)
    figure.suptitle(f"{plan.model.name} on {gpus} × {setup.gpu.name}; {setup.precision}, cached, chunks of {plan.chunk}")
    (memory, seconds), (largest, scaling) = figure.subplots(2, 2)
    _memory(memory, plan, batch)
    _seconds(seconds, plan)
    _largest(largest, plan)
    _scaling(scaling, plan, batch)
    for axes in (memory, seconds, largest, scaling):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for path in paths:
        figure.savefig(path, dpi=130)


def _batches(plan: Plan) -> list[int]:
    first = max(10, plan.setup.ranks.bit_length() + 6)
    return [2**i for i in range(first, first + 15)]


def _memory(axes: Any, plan: Plan, batch: int) -> None:
    """Of a GPU, against the batch; the limit as a line."""
    batches = _batches(plan)
    for system in step.SYSTEMS:
        source = REPLAY if system == MEGABATCH else HOST
        sizes = [plan.cached(B, system, source).total / GIB for B in batches]
        axes.plot(
            batches, sizes, color=COLOURS[system], label=f"{system}, cached", linewidth=2.4 if system == MEGABATCH else 1.6
        )
    plain = [plan.plain(B, LOCAL).total / GIB for B in batches]
    axes.plot(batches, plain, "--", color="#888888", label="plain step (not cached)")
    limit = plan.setup.gpu.usable / GIB
    axes.axhline(limit, color="black", linewidth=1)
    axes.annotate("usable", (batches[-1], limit), (0, 3), textcoords="offset points", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="batch, pairs", ylabel="memory of a GPU, GiB", title="Memory against the batch")
    axes.set_ylim(top=40 * limit, bottom=0.8 * plan.cached(batches[0], MEGABATCH, REPLAY).total / GIB)
    _powers(axes, batches)
    axes.legend(fontsize=9, loc="upper left", framealpha=0.95, edgecolor="none")


def _seconds(axes: Any, plan: Plan) -> None:
    """Shares of a step's time against the batch."""
    batches = _batches(plan)
    found = [plan.seconds(B) for B in batches]
    parts = [[100 * getattr(s, part) / s.total for s in found] for part in TIMES]
    axes.stackplot(batches, parts, labels=list(TIMES.values()), colors=PART_COLOURS, alpha=0.9)
    axes.set(
        xscale="log", xlabel="batch, pairs", ylabel="share of a step, %", title="Where megabatch's time goes", ylim=(0, 100)
    )
    axes.set_xlim(batches[0], batches[-1])
    _powers(axes, batches)
    axes.legend(loc="lower left", fontsize=9)


def _counts(plan: Plan) -> list[tuple[int, int]]:
    """(nodes, GPUs of each): up to a node, then nodes, each time doubled."""
    per_node = plan.setup.per_node
    inside = [(1, 2**i) for i in range(per_node.bit_length()) if 2**i < per_node]
    return inside + [(2**i, per_node) for i in range(13) if 2**i * per_node <= MOST_GPUS]


def _largest(axes: Any, plan: Plan) -> None:
    counts = _counts(plan)
    for system in step.SYSTEMS:
        source = REPLAY if system == MEGABATCH else HOST
        kept = "replayed" if source == REPLAY else "on the host"
        points = [(nodes * each, step.on(plan, nodes, each).largest(system, source)) for nodes, each in counts]
        points = [(x, y) for x, y in points if y]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[system], label=f"{system}, inputs {kept}"
            )
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="largest batch, pairs", title="Largest batch against the GPUs")
    _powers(axes, [nodes * each for nodes, each in counts])
    axes.legend(frameon=False, fontsize=9)


def _scaling(axes: Any, plan: Plan, batch: int) -> None:
    """A step with as many pairs on each GPU as there are now."""
    counts, rows = _counts(plan), plan.rows(batch)
    found = [step.on(plan, nodes, each).seconds(rows * nodes * each) for nodes, each in counts]
    ranks = [nodes * each for nodes, each in counts]
    axes.stackplot(
        ranks,
        [[getattr(s, part) for s in found] for part in TIMES],
        labels=list(TIMES.values()),
        colors=PART_COLOURS,
        alpha=0.9,
    )
    axes.set(xscale="log", xlabel="GPUs", ylabel="seconds of a step", title=f"Time of a step, {rows:,} pairs on each GPU")
    axes.set_xlim(ranks[0], ranks[-1])
    _powers(axes, ranks)


def _powers(axes: Any, values: list[int]) -> None:
    """A tick at every second value, in k and M."""
    ticks = values[:: 1 + len(values) // 9]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()


def _short(number: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if number >= unit:
            return f"{number / unit:g}{name}"
    return str(number)
