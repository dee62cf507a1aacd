"""Memory and time of the loss on one rank, and the communication of a step over many ranks, without running them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from megabatch import dispatch
from megabatch.ring import routes
from megabatch.ring.routes import Hop, Nodes, Route
from megabatch.tiles.block import TRITON
from megabatch.tiles.plan import pair_strip, strip_size
from megabatch_train.planning import gpus
from megabatch_train.planning.gpus import Gpu

# ----------------------------------------------------------------------------------------------------------------------
# Memory and time of the loss alone on one rank: megabatch and its peers.
#
# A rank has n pairs, all R ranks together B, and embeddings are D wide. Bytes are counted at the peak of forward and backward,
# beyond the embeddings, gradients included. Tests compare megabatch's and the dense formulas with the sum of all live tensors;
# `benchmarks/plan_validation.py` compares megabatch's with a GPU.


VANILLA, LOCAL, INF_CL, MEGABATCH = "vanilla CLIP", "OpenCLIP, local loss", "Inf-CL", "megabatch"

FLOAT, HALF = 4, 2
STATISTICS = 64  # bytes a row: sums of exponentials in float64 and their logarithms; measured
DENSE_BYTES = 16  # bytes of a matrix entry at the peak, in float32 and under autocast: four float32 matrices; measured

# Float32 blocks of n×D that inf_cl holds: ten on one GPU (measured, benchmarks/results/loss_gpu.md), and in its ring five
# more: the present block and the arriving one; the travelling gradient, the arriving one, and the gradient of this visit.
INF_CL_BLOCKS, INF_CL_RING_BLOCKS = 10, 5

# Seconds that a loss takes in a step however small it is: 0.8 to 1.2 ms measured at 4k pairs on an H200
# (benchmarks/results/plan_validation.md). Its launches are made while the device still encodes; a small loss that runs alone
# waits for them (small_gpu.md there). Work hides part of this time: the two are combined as the cube root of the sum of their
# cubes.
LAUNCHING = 0.9e-3


@dataclass(frozen=True)
class Shape:
    """The loss of one rank."""

    batch: int  # B, of all ranks
    ranks: int
    nodes: int
    width: int  # D
    embedding_bytes: int  # of one number as the towers return it
    half: bool  # whether products are in half precision

    @property
    def rows(self) -> int:
        """n, the largest number of rows of a rank."""
        return -(-self.batch // self.ranks)


def loss_bytes(system: str, shape: Shape) -> float:
    """Bytes of one rank's loss at its peak."""
    return {VANILLA: _vanilla, LOCAL: _local, INF_CL: _inf_cl, MEGABATCH: _megabatch}[system](shape)


def loss_seconds(system: str, shape: Shape, gpu: Gpu, precision: str, efficiency: float = gpus.LOSS_EFFICIENCY) -> float:
    """Seconds of one rank's work in a training step, without communication."""
    pairs = shape.batch * (shape.batch if system == VANILLA else shape.rows)  # vanilla: all logits on every rank
    operations, rate = 8.0 * pairs * shape.width, gpu.rate(precision)
    if system == INF_CL:
        return operations / (gpus.INF_CL_EFFICIENCY * gpu.rate("bf16"))
    seconds = operations / (efficiency * rate)
    if system in (VANILLA, LOCAL):
        return seconds + gpus.DENSE_TRAFFIC * pairs / (1e9 * gpu.bandwidth)
    return float((seconds**3 + LAUNCHING**3) ** (1 / 3))


def _megabatch(shape: Shape) -> float:
    """See docs/kernels.md for one rank, docs/ring.md for many."""
    n, D, s = shape.rows, shape.width, shape.embedding_bytes
    block, product = n * D, HALF if shape.half else FLOAT
    rounded = 2 * block * HALF if shape.half and s > HALF else 0
    statistics = STATISTICS * n
    path = dispatch.find_rule(dispatch.BOTH, n, D, TRITON).path if shape.ranks == 1 else dispatch.TWO_PASS
    if path != dispatch.TWO_PASS:
        # Gradients are made with the loss: float32 sums, then copies in the inputs' type.
        one = pair_strip(n, product)
        weights = min(one.rows, n) * min(one.columns, n) * product
        if path == dispatch.DENSE:  # all logits are in memory, and in float32 the weights overwrite them
            weights = n * n * (FLOAT + HALF if shape.half else FLOAT)
        return rounded + 2 * block * FLOAT + statistics + max(weights, 2 * block * s)
    strip = strip_size(n, n, D, product)
    rows, columns = min(strip.rows, n), min(strip.columns, n)
    work = rows * columns * product + 2 * rows * D * FLOAT
    if shape.ranks == 1:
        # dx in its own type, and the sums of dy in float32. At the end dy is a rounded copy of them, if it is not float32.
        last = block * s if s < FLOAT else 0
        return rounded + block * s + block * FLOAT + statistics + max(work, last)
    # Travelling columns; sums of columns (found here, arriving, leaving, at home) and of rows. Two levels hold twice as many
    # travelling columns, and two more blocks of sums.
    two_levels = shape.nodes > 1 and shape.ranks > shape.nodes
    travelling = (4 if two_levels else 2) * block * product
    sums = (7 if two_levels else 5) * block * FLOAT
    return rounded + travelling + sums + 2 * block * s + 2 * statistics + work


def _vanilla(shape: Shape) -> float:
    gathered = shape.batch * shape.width
    # For both towers: the gathered embeddings and their concatenation, the gradient, half-precision copies for the product.
    several = 2 * 2 * FLOAT + 2 * FLOAT + (2 * HALF if shape.half else 0) if shape.ranks > 1 else 2 * shape.embedding_bytes
    return DENSE_BYTES * float(shape.batch) ** 2 + gathered * several


def _local(shape: Shape) -> float:
    if shape.ranks == 1:
        return _vanilla(shape)
    # For both towers: the gathered embeddings and their concatenation.
    return DENSE_BYTES * float(shape.batch) * shape.rows + shape.batch * shape.width * 2 * 2 * FLOAT


def _inf_cl(shape: Shape) -> float:
    blocks = INF_CL_BLOCKS + (INF_CL_RING_BLOCKS if shape.ranks > 1 else 0)
    return float(blocks * shape.rows * shape.width * FLOAT)


# ----------------------------------------------------------------------------------------------------------------------
# The communication of a training step over many ranks: bytes and seconds.
#
# Bytes are exact: they follow from the schedule, hop by hop, and tests compare them with the bytes really sent. Seconds come
# from a simulation of the schedule: every rank has a clock, every link carries one message after another at its bandwidth, and
# a rank that needs a message waits for it. The waiting time is the exposed part of the communication.
#
# Bandwidths, latencies and the compute rate are inputs; measure them on your machine.


SCHEDULES: dict[str, Callable[[Nodes], Route]] = {
    "ring": routes.ring,
    "two_level": routes.two_level,
    "gather": routes.gather,
}


@dataclass(frozen=True)
class Link:
    """A full-duplex link: this bandwidth in each direction at once."""

    bandwidth: float  # bytes a second
    latency: float = 0.0  # seconds


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many ranks. Inside a node every rank has a link of its own; between nodes, a node has `rails` links."""

    nodes: int
    ranks_per_node: int
    inside: Link
    between: Link
    rate: float  # operations a second of one rank, all ranks working
    rails: int = 1  # links that a node has to the others, shared out evenly among its ranks; one, or one for each rank
    overhead: float = 0.0  # seconds that one piece of work takes, however small

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def layout(self) -> Nodes:
        """The ranks of each node, numbered as torchrun does."""
        return tuple(tuple(range(n * self.ranks_per_node, (n + 1) * self.ranks_per_node)) for n in range(self.nodes))


@dataclass(frozen=True)
class Pass:
    """One lap of the ring: operations for a pair, bytes sent for a column."""

    name: str
    operations: int  # for a pair, per unit of width
    block_bytes: int  # of a column, on its way to all ranks
    sums_bytes: int  # of the sums of a column, on their way home
    exchanges: int = 1  # small all-to-all messages before the lap


def clip_passes(D: int, element_bytes: int, *, sums_bytes: int = 4, statistics_bytes: int | None = None) -> list[Pass]:
    """Forward and backward of `clip_loss` with both towers learned.

    Args:
        D: the width of the embeddings.
        element_bytes: of one number as it travels; 2 for half precision, also under autocast.
        sums_bytes: of a number in a gradient sum.
        statistics_bytes: of a number in a sum of exponentials; `backends.sums_dtype` says which (8 for Triton).
    """
    statistics = 2 * (statistics_bytes or sums_bytes)
    return [
        Pass("forward", 2, D * element_bytes, statistics),
        Pass("backward", 6, D * element_bytes + statistics + sums_bytes, D * sums_bytes, exchanges=2),
    ]


@dataclass(frozen=True)
class Cost:
    """The cost of one pass, on the rank that finishes last."""

    seconds: float
    exposed: float  # seconds in which it waits for messages


def traffic(schedule: Route, columns: list[int], lap: Pass) -> list[int]:
    """Bytes that each rank sends, exactly."""
    sent = [0] * len(columns)
    for hops, per_column in ((schedule.blocks, lap.block_bytes), (schedule.sums, lap.sums_bytes)):
        for hop in hops:
            sent[hop.source] += hop.length(columns[hop.block]) * per_column
    return sent


def predict(name: str, cluster: Cluster, batch: int, D: int, lap: Pass) -> Cost:
    """The cost of one pass over a batch that is shared out evenly.

    Args:
        name: "ring", "two_level" or "gather".
        cluster: the ranks and their links.
        batch: pairs of all ranks together.
        D: the width of the embeddings.
        lap: one of `clip_passes`.
    """
    if name not in SCHEDULES:
        raise ValueError(f"name must be one of {', '.join(map(repr, SCHEDULES))}, got {name!r}")
    ranks = range(cluster.ranks)
    columns = [(batch + rank) // cluster.ranks for rank in ranks]
    clocks, working = _Simulation(SCHEDULES[name](cluster.layout), cluster, columns, D, lap).run()
    slowest = max(ranks, key=lambda rank: clocks[rank])
    return Cost(clocks[slowest], clocks[slowest] - working[slowest])


# A lap is in steady state after its first steps: every further node adds the same waiting time. So two small clusters are
# simulated, with as many pairs on each rank, and a line through both extends them. Thousands of ranks would take too long.
SIMULATED = 6  # nodes, or ranks of one node, up to which everything is simulated


def estimate_wait(cluster: Cluster, rows: int, D: int, element_bytes: int) -> float:
    """Exposed seconds of the loss, forward and backward, with the schedule that "auto" chooses for many pairs."""
    if cluster.ranks == 1:
        return 0.0
    name = "two_level" if cluster.nodes > 1 and cluster.ranks_per_node > 1 else "ring"
    size = cluster.nodes if cluster.nodes > 1 else cluster.ranks_per_node

    def predict_exposed(size: int) -> float:
        part = replace(cluster, nodes=size) if cluster.nodes > 1 else replace(cluster, ranks_per_node=size, rails=1)
        passes = clip_passes(D, element_bytes, statistics_bytes=8)
        return sum(predict(name, part, rows * part.ranks, D, lap).exposed for lap in passes)

    if size <= SIMULATED:
        return predict_exposed(size)
    most = predict_exposed(SIMULATED)
    return most + (most - predict_exposed(SIMULATED - 1)) * (size - SIMULATED)


def all_reduce_seconds(cluster: Cluster, size: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes over all ranks, by the slowest link. An all-gather takes half of it."""
    slowest = cluster.inside.bandwidth
    if cluster.nodes > 1:
        slowest = min(slowest, cluster.between.bandwidth * cluster.rails)
    return 2 * (cluster.ranks - 1) / cluster.ranks * size / slowest


class _Simulation:
    """Clocks of ranks and links, moved forward step by step."""

    def __init__(self, schedule: Route, cluster: Cluster, columns: list[int], D: int, lap: Pass) -> None:
        self.schedule, self.cluster, self.columns, self.D, self.lap = schedule, cluster, columns, D, lap
        self._free: dict[tuple[str, int, int], float] = defaultdict(float)  # when a link can take the next message
        self._block_arrives: dict[tuple[int, int], float] = defaultdict(float)  # (rank, step)
        self._sums_arrive: dict[tuple[int, int], float] = defaultdict(float)

    def run(self) -> tuple[list[float], list[float]]:
        """When each rank ends, and how long it worked."""
        ranks, cluster = range(self.cluster.ranks), self.cluster
        slow = max(cluster.inside.latency, cluster.between.latency if cluster.nodes > 1 else 0.0)
        clocks = [self.lap.exchanges * (len(ranks) - 1) * slow for _ in ranks]
        working = [0.0 for _ in ranks]
        by_step: list[list[list[Hop]]] = [[[], []] for _ in range(self.schedule.steps)]
        for kind, hops in enumerate((self.schedule.blocks, self.schedule.sums)):
            for hop in hops:
                by_step[hop.leaves][kind].append(hop)
        for step, (blocks, sums) in enumerate(by_step):
            clocks = [max(clocks[rank], self._block_arrives[rank, step]) for rank in ranks]
            for hop in blocks:
                self._send(hop, self.lap.block_bytes, clocks, self._block_arrives)
            for rank in ranks:
                pairs = self.columns[rank] * sum(self.columns[block] for block in self.schedule.work(step, rank))
                seconds = self.lap.operations * self.D * pairs / cluster.rate + cluster.overhead
                working[rank] += seconds
                clocks[rank] = max(clocks[rank] + seconds, self._sums_arrive.pop((rank, step), 0.0))
            for hop in sums:
                self._send(hop, self.lap.sums_bytes, clocks, self._sums_arrive)
            clocks = [max(clocks[rank], self._sums_arrive.pop((rank, step), 0.0)) for rank in ranks]
        return clocks, working

    def _send(self, hop: Hop, per_column: int, clocks: list[float], arrives: dict[tuple[int, int], float]) -> None:
        size = hop.length(self.columns[hop.block]) * per_column
        crosses = self.schedule.crosses(hop)
        link = self.cluster.between if crosses else self.cluster.inside
        ways = [("out", *self._rail(hop.source, crosses)), ("in", *self._rail(hop.target, crosses))]
        # A message starts when both sides have reached this step.
        asked = max(clocks[hop.source], clocks[hop.target])
        # Each end serves its own messages in order: a message that waits at one end does not block the other end.
        for way in ways:
            self._free[way] = max(asked, self._free[way]) + size / link.bandwidth
        end = max(self._free[way] for way in ways)
        arrives[hop.target, hop.needed] = max(arrives[hop.target, hop.needed], end + link.latency)

    def _rail(self, rank: int, crosses: bool) -> tuple[int, int]:
        """Which link a rank uses: (−1, rank) inside its node, (node, rail) between nodes."""
        if not crosses:
            return -1, rank
        node, place = divmod(rank, self.cluster.ranks_per_node)
        return node, place * self.cluster.rails // self.cluster.ranks_per_node
