"""A plan as one figure: memory and time against the batch, largest batch and time against the number of GPUs."""

from pathlib import Path
from typing import Any

from megabatch.display import plots
from megabatch.planning import step
from megabatch.planning.gpus import GIB
from megabatch.planning.losses import INF_CL, LOCAL, MEGABATCH, VANILLA
from megabatch.planning.report import TIMES
from megabatch.planning.step import HOST, REPLAY, Plan

COLOURS = {VANILLA: plots.ORANGE, LOCAL: plots.OCHRE, INF_CL: plots.BLUE, MEGABATCH: plots.GREEN}
PART_COLOURS = (plots.GREEN, plots.MINT, plots.BLUE, plots.OCHRE, plots.ORANGE)
MOST_GPUS = 4096


def draw(plan: Plan, batch: int, *paths: Path) -> None:
    """Draws the figure and writes it to every path."""
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
        points = [(B, plan.cached(B, system, source).total / GIB) for B in batches]
        width = 2.4 if system == MEGABATCH else 1.6
        plots.line(axes, points, f"{system}, cached", COLOURS[system], marker=None, linewidth=width)
    plain = [(B, plan.plain(B, LOCAL).total / GIB) for B in batches]
    plots.line(axes, plain, "plain step (not cached)", plots.GREY, marker=None, linestyle="--")
    limit = plan.setup.gpu.usable / GIB
    axes.axhline(limit, color=plots.INK, linewidth=1)
    axes.annotate("usable", (batches[-1], limit), (0, 3), textcoords="offset points", ha="right", color=plots.INK)
    axes.set(yscale="log", ylabel="memory of a GPU, GiB", title="Memory against the batch")
    axes.set_ylim(top=40 * limit, bottom=0.8 * plan.cached(batches[0], MEGABATCH, REPLAY).total / GIB)
    plots.batch_axis(axes, batches)
    plots.legend(axes, loc="upper left")


def _seconds(axes: Any, plan: Plan) -> None:
    """Shares of a step's time."""
    batches = _batches(plan)
    found = [plan.seconds(B) for B in batches]
    _stack(axes, batches, [[100 * getattr(s, part) / s.total for s in found] for part in TIMES])
    axes.set(ylabel="share of a step, %", title="Time of a step with megabatch, by part", ylim=(0, 100))
    plots.batch_axis(axes, batches)
    plots.legend(axes, loc="lower left", frameon=True, framealpha=0.9)


def _counts(plan: Plan) -> list[tuple[int, int]]:
    """(nodes, GPUs of each): powers of two up to one node, then powers of two of nodes."""
    per_node = plan.setup.per_node
    inside = [(1, 2**i) for i in range(per_node.bit_length()) if 2**i < per_node]
    return inside + [(2**i, per_node) for i in range(13) if 2**i * per_node <= MOST_GPUS]


def _largest(axes: Any, plan: Plan) -> None:
    counts = _counts(plan)
    for system in step.SYSTEMS:
        source = REPLAY if system == MEGABATCH else HOST
        kept = "replayed" if source == REPLAY else "on the host"
        points = [(nodes * each, step.on(plan, nodes, each).largest(system, source)) for nodes, each in counts]
        plots.line(axes, [(x, y) for x, y in points if y], f"{system}, inputs {kept}", COLOURS[system], markersize=3)
    axes.set(yscale="log", ylabel="largest batch, pairs", title="Largest batch against the GPUs")
    plots.batch_axis(axes, [nodes * each for nodes, each in counts], "GPUs")
    plots.legend(axes)


def _scaling(axes: Any, plan: Plan, batch: int) -> None:
    """Weak scaling: as many pairs on each GPU as the plan has."""
    counts, rows = _counts(plan), plan.rows(batch)
    found = [step.on(plan, nodes, each).seconds(rows * nodes * each) for nodes, each in counts]
    ranks = [nodes * each for nodes, each in counts]
    _stack(axes, ranks, [[getattr(s, part) for s in found] for part in TIMES])
    axes.set(ylabel="seconds of a step", title=f"Time of a step, {rows:,} pairs on each GPU")
    plots.batch_axis(axes, ranks, "GPUs")


def _stack(axes: Any, x: list[int], parts: list[list[float]]) -> None:
    axes.stackplot(x, parts, labels=list(TIMES.values()), colors=PART_COLOURS, alpha=0.9)
    axes.set_xlim(x[0], x[-1])
