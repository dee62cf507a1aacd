"""Estimates of the loss's memory and time on one rank, and of the communication of a step over many ranks."""

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
# Memory and time of only the loss on one rank, for megabatch and the baselines.
#
# A rank has n pairs, all R ranks together have B pairs, and D is the embedding dimension. Bytes are counted at the peak of
# forward and backward. They include gradients, but not the embeddings. Tests compare the formulas of megabatch and the dense
# losses with the sum of all live tensors. `benchmarks/plan_validation.py` compares the formulas of megabatch with a GPU.


VANILLA, LOCAL, INF_CL, MEGABATCH = "vanilla CLIP", "OpenCLIP, local loss", "Inf-CL", "megabatch"

FLOAT, HALF = 4, 2
STATISTICS = 64  # bytes per row, measured: sums of exponentials in float64 and their logarithms
DENSE_BYTES = 16  # bytes per matrix entry at the peak, measured: four float32 matrices, in float32 and under autocast

# Number of float32 blocks of n×D that inf_cl holds. On one GPU there are ten (measured, benchmarks/results/loss_gpu.md). Its
# ring adds five: the current and the arriving block, and the traveling gradient, the arriving gradient and the new gradient.
INF_CL_BLOCKS, INF_CL_RING_BLOCKS = 10, 5

# Minimum seconds of a loss in a step. At 4k pairs on an H200, 0.8 to 1.2 ms were measured
# (benchmarks/results/plan_validation.md). In a step, the CPU launches the kernels of the loss while the GPU still encodes. A
# small loss without a step is launch-bound (benchmarks/results/small_gpu.md). Computation hides part of this minimum, so
# minimum and computing time are combined as the cube root of the sum of their cubes.
LAUNCHING = 0.9e-3


@dataclass(frozen=True)
class Shape:
    """The loss of one rank."""

    batch: int  # B, pairs of all ranks
    ranks: int
    nodes: int
    dim: int  # D, the embedding dimension
    embedding_bytes: int  # bytes of one number in the embeddings
    half: bool  # whether matmuls are in half precision

    @property
    def rows(self) -> int:
        """The largest number of rows of a rank, n."""
        return -(-self.batch // self.ranks)


def loss_bytes(system: str, shape: Shape) -> float:
    """Returns the peak bytes of one rank's loss."""
    return {VANILLA: _vanilla, LOCAL: _local, INF_CL: _inf_cl, MEGABATCH: _megabatch}[system](shape)


def loss_seconds(system: str, shape: Shape, gpu: Gpu, precision: str, efficiency: float = gpus.LOSS_EFFICIENCY) -> float:
    """Returns the seconds of one rank's loss in a training step, without communication."""
    # Vanilla CLIP computes all logits on every rank.
    pairs = shape.batch * (shape.batch if system == VANILLA else shape.rows)
    operations, rate = 8.0 * pairs * shape.dim, gpu.rate(precision)
    if system == INF_CL:
        return operations / (gpus.INF_CL_EFFICIENCY * gpu.rate("bf16"))
    seconds = operations / (efficiency * rate)
    if system in (VANILLA, LOCAL):
        return seconds + gpus.DENSE_TRAFFIC * pairs / (1e9 * gpu.bandwidth)
    return float((seconds**3 + LAUNCHING**3) ** (1 / 3))


def _megabatch(shape: Shape) -> float:
    """Returns the bytes of megabatch. docs/kernels.md describes one rank, and docs/ring.md describes many ranks."""
    n, D, s = shape.rows, shape.dim, shape.embedding_bytes
    block, element = n * D, HALF if shape.half else FLOAT
    rounded = 2 * block * HALF if shape.half and s > HALF else 0
    statistics = STATISTICS * n
    module = dispatch.find_rule(dispatch.BOTH, n, D, TRITON).module if shape.ranks == 1 else "fused"
    if module != "fused":
        # Gradients are computed with the loss, as float32 sums. Then they are copied to the dtype of the inputs.
        one = pair_strip(n, element)
        weights = min(one.rows, n) * min(one.columns, n) * element
        if module == "dense":  # all logits are in memory; in float32 the softmax weights overwrite them
            weights = n * n * (FLOAT + HALF if shape.half else FLOAT)
        return rounded + 2 * block * FLOAT + statistics + max(weights, 2 * block * s)
    strip = strip_size(n, n, D, element)
    rows, columns = min(strip.rows, n), min(strip.columns, n)
    work = rows * columns * element + 2 * rows * D * FLOAT
    if shape.ranks == 1:
        # dx has the dtype of the inputs, and the sums of dy are float32. If dy is not float32, its sums are rounded to a copy.
        last = block * s if s < FLOAT else 0
        return rounded + block * s + block * FLOAT + statistics + max(work, last)
    # The ring holds traveling columns, sums of rows, and sums of columns (new, arriving, leaving, and on the home rank). With
    # two levels it holds twice as many traveling columns, and two more blocks of sums.
    two_levels = shape.nodes > 1 and shape.ranks > shape.nodes
    traveling = (4 if two_levels else 2) * block * element
    sums = (7 if two_levels else 5) * block * FLOAT
    return rounded + traveling + sums + 2 * block * s + 2 * statistics + work


def _vanilla(shape: Shape) -> float:
    gathered = shape.batch * shape.dim
    # Both towers need the gathered embeddings, their concatenation, the gradient, and half-precision copies for the matmul.
    several = 2 * 2 * FLOAT + 2 * FLOAT + (2 * HALF if shape.half else 0) if shape.ranks > 1 else 2 * shape.embedding_bytes
    return DENSE_BYTES * float(shape.batch) ** 2 + gathered * several


def _local(shape: Shape) -> float:
    if shape.ranks == 1:
        return _vanilla(shape)
    # Both towers need the gathered embeddings and their concatenation.
    return DENSE_BYTES * float(shape.batch) * shape.rows + shape.batch * shape.dim * 2 * 2 * FLOAT


def _inf_cl(shape: Shape) -> float:
    blocks = INF_CL_BLOCKS + (INF_CL_RING_BLOCKS if shape.ranks > 1 else 0)
    return float(blocks * shape.rows * shape.dim * FLOAT)


# ----------------------------------------------------------------------------------------------------------------------
# The communication of a training step over many ranks: bytes and seconds.
#
# Bytes are exact, because they follow from the hops of the schedule. Tests compare them with the bytes that are really sent.
# Seconds come from a simulation of the schedule. Every rank has a clock, every link carries one message after another at its
# bandwidth, and a rank that needs a message waits for it. This waiting time is the exposed part of the communication.
#
# Bandwidths, latencies and the compute rate are inputs, which should be measured on the target machine.


SCHEDULES: dict[str, Callable[[Nodes], Route]] = {
    "ring": routes.ring,
    "two_level": routes.two_level,
    "gather": routes.gather,
}


@dataclass(frozen=True)
class Link:
    """A full-duplex link. Both directions have this bandwidth at the same time."""

    bandwidth: float  # bytes per second
    latency: float = 0.0  # seconds


@dataclass(frozen=True)
class Cluster:
    """Nodes with equally many ranks. Within a node, every rank has a separate link. Between nodes, a node has `rails` links."""

    nodes: int
    ranks_per_node: int
    inside: Link
    between: Link
    rate: float  # operations per second of one rank while all ranks compute
    rails: int = 1  # number of links from a node to other nodes: one for all its ranks, or one for each rank
    overhead: float = 0.0  # minimum seconds of one piece of work

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def layout(self) -> Nodes:
        """The ranks of each node, with the numbers of torchrun."""
        return tuple(tuple(range(n * self.ranks_per_node, (n + 1) * self.ranks_per_node)) for n in range(self.nodes))


@dataclass(frozen=True)
class Pass:
    """The costs of one lap of the ring."""

    name: str
    operations: int  # operations per pair and embedding dimension
    block_bytes: int  # bytes per column, which travels to all ranks
    sums_bytes: int  # bytes of the sums per column, which travel to the home rank
    exchanges: int = 1  # number of small all-to-all messages before the lap


def clip_passes(D: int, element_bytes: int, *, sums_bytes: int = 4, statistics_bytes: int | None = None) -> list[Pass]:
    """Returns the forward and backward passes of `clip_loss` if both towers are trained.

    Args:
        D: embedding dimension.
        element_bytes: bytes of a number in traveling embeddings: 2 for half precision and under autocast.
        sums_bytes: bytes of a number in a gradient sum.
        statistics_bytes: bytes of one sum of exponentials. Its dtype depends on the backend (8 bytes for Triton).
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
    exposed: float  # seconds in which the rank waits for messages


def traffic(schedule: Route, columns: list[int], lap: Pass) -> list[int]:
    """Returns the exact number of bytes that each rank sends."""
    sent = [0] * len(columns)
    for hops, per_column in ((schedule.blocks, lap.block_bytes), (schedule.sums, lap.sums_bytes)):
        for hop in hops:
            sent[hop.source] += hop.length(columns[hop.block]) * per_column
    return sent


def predict(name: str, cluster: Cluster, batch: int, D: int, lap: Pass) -> Cost:
    """Predicts the cost of one pass over a batch that is split evenly over the ranks.

    Args:
        name: "ring", "two_level" or "gather".
        cluster: the ranks and their links.
        batch: number of pairs of all ranks.
        D: embedding dimension.
        lap: one of `clip_passes`.
    """
    if name not in SCHEDULES:
        raise ValueError(f"name must be one of {', '.join(map(repr, SCHEDULES))}, got {name!r}")
    ranks = range(cluster.ranks)
    columns = [(batch + rank) // cluster.ranks for rank in ranks]
    clocks, working = _Simulation(SCHEDULES[name](cluster.layout), cluster, columns, D, lap).run()
    slowest = max(ranks, key=lambda rank: clocks[rank])
    return Cost(clocks[slowest], clocks[slowest] - working[slowest])


# A lap is in steady state after its first steps, so every further node adds the same waiting time. To simulate thousands of
# ranks would take too long. Therefore two small clusters with equally many pairs per rank are simulated and extrapolated.
SIMULATED = 6  # largest number of nodes, or of ranks of one node, that is fully simulated


def estimate_wait(cluster: Cluster, rows: int, D: int, element_bytes: int) -> float:
    """Returns the exposed seconds of forward and backward, with the schedule that "auto" chooses for many pairs."""
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
    """Returns the seconds of a ring all-reduce of `size` bytes over all ranks. An all-gather takes half of this time.

    The slowest link determines the time.
    """
    slowest = cluster.inside.bandwidth
    if cluster.nodes > 1:
        slowest = min(slowest, cluster.between.bandwidth * cluster.rails)
    return 2 * (cluster.ranks - 1) / cluster.ranks * size / slowest


class _Simulation:
    """Simulates a lap step by step with clocks for ranks and links."""

    def __init__(self, schedule: Route, cluster: Cluster, columns: list[int], D: int, lap: Pass) -> None:
        self.schedule, self.cluster, self.columns, self.D, self.lap = schedule, cluster, columns, D, lap
        self._free: dict[tuple[str, int, int], float] = defaultdict(float)  # when a link can take the next message
        self._block_arrives: dict[tuple[int, int], float] = defaultdict(float)  # (rank, step)
        self._sums_arrive: dict[tuple[int, int], float] = defaultdict(float)

    def run(self) -> tuple[list[float], list[float]]:
        """Returns the time at which each rank ends, and the time for which it computed."""
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
        ends = [("out", *self._rail(hop.source, crosses)), ("in", *self._rail(hop.target, crosses))]
        # A message starts when both sides have reached this step.
        earliest = max(clocks[hop.source], clocks[hop.target])
        # Each end of a link serves its own messages in order. A message that waits at one end does not block the other end.
        for end in ends:
            self._free[end] = max(earliest, self._free[end]) + size / link.bandwidth
        done = max(self._free[end] for end in ends)
        arrives[hop.target, hop.needed] = max(arrives[hop.target, hop.needed], done + link.latency)

    def _rail(self, rank: int, crosses: bool) -> tuple[int, int]:
        """Returns the link that a rank uses: (−1, rank) within its node, or (node, rail) between nodes."""
        if not crosses:
            return -1, rank
        node, place = divmod(rank, self.cluster.ranks_per_node)
        return node, place * self.cluster.rails // self.cluster.ranks_per_node
