"""Seconds that a step waits for communication: the ring of the loss, and the all-reduce of the towers' gradients.

`planning.ring` simulates a lap hop by hop, which thousands of ranks would make too long. A lap is in steady state after its
first steps, so what a further node adds is what it added before: two small clusters are simulated, with as many pairs on each
rank as there will be, and the rest is that line. Tests compare it with the whole simulation.
"""

from dataclasses import dataclass, replace

from megabatch.planning.ring import Cluster, Cost, Pass, clip_passes, predict

SIMULATED = 6  # nodes, or ranks of one node, up to which everything is simulated


@dataclass(frozen=True)
class Waiting:
    """Communication of a loss over all ranks."""

    seconds: float  # exposed
    sent: float  # bytes of a rank


def waiting_for_columns(cluster: Cluster, rows: int, D: int, element_bytes: int) -> Waiting:
    """Exposed communication of the loss, forward and backward, with the schedule that "auto" chooses for many pairs."""
    if cluster.ranks == 1:
        return Waiting(0.0, 0.0)
    name = "two_level" if cluster.nodes > 1 and cluster.ranks_per_node > 1 else "ring"
    passes = clip_passes(D, element_bytes, statistics_bytes=8)
    costs = [_cost(name, cluster, rows, D, lap) for lap in passes]
    return Waiting(sum(seconds for seconds, _ in costs), sum(sent for _, sent in costs))


def averaging_seconds(cluster: Cluster, gradient_bytes: float) -> float:
    """Seconds of a ring all-reduce of the gradients over all ranks, by the slowest link."""
    if cluster.ranks == 1:
        return 0.0
    slowest = cluster.inside.bandwidth
    if cluster.nodes > 1:
        slowest = min(slowest, cluster.between.bandwidth * cluster.rails)
    return 2 * (cluster.ranks - 1) / cluster.ranks * gradient_bytes / slowest


def _cost(name: str, cluster: Cluster, rows: int, D: int, lap: Pass) -> tuple[float, float]:
    """(exposed seconds, bytes sent by a rank)."""

    def at(size: int) -> tuple[float, float]:
        several = replace(cluster, nodes=size) if cluster.nodes > 1 else replace(cluster, ranks_per_node=size, rails=1)
        cost: Cost = predict(name, several, rows * several.ranks, D, lap)
        return cost.exposed, float(max(cost.sent))

    size = cluster.nodes if cluster.nodes > 1 else cluster.ranks_per_node
    if size <= SIMULATED:
        return at(size)
    (few, few_sent), (more, more_sent) = at(SIMULATED - 1), at(SIMULATED)
    steps = size - SIMULATED
    return more + (more - few) * steps, more_sent + (more_sent - few_sent) * steps
