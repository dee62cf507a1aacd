"""Memory and time of the loss alone on one rank: megabatch and its peers.

A rank has n pairs, all R ranks together B, and embeddings are D wide. Bytes are counted at the peak of forward and backward,
beyond the embeddings, gradients included. Tests compare megabatch's and the dense formulas with the sum of all live tensors;
`benchmarks/plan_validation.py` compares megabatch's with a GPU.
"""

from dataclasses import dataclass

from megabatch.planning import gpus
from megabatch.planning.gpus import Gpu
from megabatch.tiles.plan import SMALL_PAIRS, pair_strip, pairs_with_gradients, strip_size

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
    if shape.ranks == 1 and (n * n <= SMALL_PAIRS or pairs_with_gradients(n, D)):
        # Gradients are made with the loss: float32 sums, then copies in the inputs' type.
        one = pair_strip(n, product)
        weights = min(one.rows, n) * min(one.columns, n) * product
        if n * n <= SMALL_PAIRS:  # all similarities are in memory, and in float32 the weights overwrite them
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
