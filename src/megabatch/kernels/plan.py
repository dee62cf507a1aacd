"""The tiles of the kernels and the choice of a kernel, each with the measurement that decided it.

`tiles.plan` contains the sizes of strips and of the tiles of PyTorch operations.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from megabatch.tiles.block import BFLOAT16, FLOAT16, FLOAT32, TF32, Block
from megabatch.tiles.plan import TileSize


@dataclass(frozen=True)
class KernelTile:
    """One tile of a Triton kernel. Each step of its matmul loads `dims` dims of the embeddings."""

    rows: int
    columns: int
    dims: int
    warps: int
    stages: int
    group: int = 8  # tiles of rows that programs finish in some columns before they start the next columns
    per_multiprocessor: int = 1  # programs that run on one multiprocessor at the same time

    @property
    def options(self) -> dict[str, int]:
        """The tile as arguments of a launch."""
        blocks = {"BLOCK_N": self.rows, "BLOCK_M": self.columns, "BLOCK_D": self.dims}
        return blocks | {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Generation:
    """NVIDIA GPUs of one compute capability. Tests compile the kernels for each of them and compare their shared memory."""

    gpus: str
    shared_memory: int  # bytes that one program may use; a multiprocessor has `_RESERVED_MEMORY` more
    status: str


MEASURED, EXPECTED = "measured", "expected"  # by benchmarks on this GPU, or chosen from the tiles that were measured
GENERATIONS = {  # by compute capability × 10
    80: Generation("A100, A800, A30", 166912, EXPECTED),
    86: Generation("A10, A40, RTX A6000, RTX 3090", 101376, EXPECTED),
    89: Generation("L4, L40S, RTX 4090", 101376, EXPECTED),
    90: Generation("H100, H200, GH200", 232448, MEASURED),  # on the H200
    100: Generation("B200, GB200", 232448, EXPECTED),
    120: Generation("RTX 5090, RTX PRO 6000", 101376, EXPECTED),
}


# H200, bf16, 32k×32k, diagonal excluded, TFLOP/s at D = 512 / 768 / 1024. 256×128, 8 warps, 3 stages: 655 / 712 / 735.
# 128×128, 4 warps: 598 / 537 / 511. 128×256, 8 warps: 257 / 288 / 326. The cuBLAS matmul in the same run: 648 / 681 / 729.
_LOGSUMEXP = KernelTile(rows=256, columns=128, dims=64, warps=8, stages=3)
_LOGSUMEXP_TF32 = KernelTile(rows=128, columns=128, dims=32, warps=8, stages=3)
_LOGSUMEXP_FLOAT32 = KernelTile(rows=64, columns=64, dims=32, warps=4, stages=2)
_LOGSUMEXP_SMALL = KernelTile(rows=128, columns=128, dims=64, warps=8, stages=2)  # compiled for sm_89, but not measured

# H200, bf16, strips of 8448×33792, TFLOP/s at D = 512 / 768 / 1024. 128×128, 4 warps, 3 stages, groups of 8, two programs per
# multiprocessor: 519 / 622 / 653. Groups of 16: 511 / 601 / 633. 128×256, 8 warps, 4 stages: 508 / 571 / –. 256×128, 8 warps,
# 4 stages: 499 / – / 642. The cuBLAS matmul in the same run: 633 / 638 / 721. In all cases, a tile is stored in two halves.
# Kernels that store the full tile at once are slower.
_GRADIENT = KernelTile(rows=128, columns=128, dims=64, warps=4, stages=3, per_multiprocessor=2)
_GRADIENT_TF32 = KernelTile(rows=128, columns=128, dims=32, warps=8, stages=3)
# With half as many columns, the code that Triton 3.6 generates reads from wrong addresses (`tests/tiles/compile_kernels.py`).
_GRADIENT_FLOAT32 = KernelTile(rows=64, columns=128, dims=32, warps=4, stages=2, per_multiprocessor=2)
_GRADIENT_SMALL = KernelTile(rows=128, columns=128, dims=64, warps=8, stages=2)  # compiled for sm_89, but not measured

# Shared memory that one program needs for the measured tiles. GPUs with less shared memory use the small tiles.
_LARGE_SHARED_MEMORY = 152 * 2**10
_RESERVED_MEMORY = 2**10  # bytes of shared memory that CUDA reserves for each program

# The tile of the kernel that recomputes the sums of a few rows by online softmax.
ONLINE = KernelTile(rows=64, columns=64, dims=32, warps=4, stages=2)

# The tile of the last kernel of small batches if this kernel computes the matmuls of the gradients. The tile has `rows` and
# `dims` of a gradient. Each step reads `columns` weights of each row. `tiles.plan.kernels_compute_matmuls` decides whether the
# kernel computes the matmuls.
SMALL_MATMUL = KernelTile(rows=64, columns=64, dims=128, warps=4, stages=3)

# Rows and panels of columns in one launch of the logsumexp kernel. Its partial row sums take at most 128 MiB.
LAUNCH_ROWS, LAUNCH_PANELS = 131072, 256

# Top-k. The best of up to `TOPK_FEW` candidates are chosen in one step. With more candidates, the best runs of
# consecutive candidates are chosen first.
TOPK_FEW = 2**10
# Columns of a group and of a panel if all dot products are stored. With panels of 16 / 32 / 64, a search takes 57 / 54 / 56 ms.
TOPK_STORED_GROUP, TOPK_STORED_PANEL = 8, 32
_TOPK_BYTES = 384 * 2**20  # bytes of the maxima, or of the stored dot products
_TOPK_COLUMNS, _TOPK_STORED_COLUMNS = 2**20, 2**17  # columns of a strip; the best columns of the strips are merged


def topk_group(M: int, D: int, k: int) -> int | None:
    """Returns the number of columns in a group, or None if the kernel stores all dot products.

    The kernel stores one maximum for each group. Small groups need more stores. With large groups, more dot products
    (k·group for each row) are computed again.

    H200, 65,536 rows, bf16, 512 MiB of maxima, ms for groups of 8 / 16 / 32 / with all dot products stored:

    - 1M columns, D = 512: 134 / 124 / 124 / 823 for k = 16, 149 / 151 / 176 / 796 for k = 128, and 117 for the matmul only.
    - 131,072 columns, D = 512: 17.7 / 22.1 / 22.1 / 28.3 for k = 16, and 15 for the matmul only.
    - 131,072 columns, D = 1024, k = 1024: 54 with all dot products stored.
    """
    loads = k * max(D, 64)  # values of y that a row loads again for each column of a group
    if 4 * loads > M if M <= _TOPK_STORED_COLUMNS else 1.5 * loads > M:
        return None
    return 8 if 21 * loads > M else 16 if 133 * loads > M else 32


def topk_strip(N: int, M: int, group: int | None) -> TileSize:
    """Returns the rows and columns of one launch of the top-k kernel.

    The maxima of a launch, or its stored dot products, take at most 384 MiB.
    """
    columns = min(-(-M // 128) * 128, _TOPK_STORED_COLUMNS if group is None else _TOPK_COLUMNS)
    rows = _TOPK_BYTES // 4 * (group or 1) // columns // 256 * 256
    return TileSize(max(256, min(rows, N)), columns)


# Late interaction. Rows are query vectors, and columns are document vectors. There are three stages, because with two stages,
# Triton does not load a tile before the previous tile is finished. H200, 1,024 pairs of 32 × 512 vectors, bf16, forward +
# backward in ms: 256×128 with 8 warps 30.3, 128×128 with 4 warps 31.7 and with 8 warps 31.3, 256×64 31.9, 128×64 with 4 warps
# 31.0, 128×256 33.2.
_MAXSIM = KernelTile(rows=256, columns=128, dims=128, warps=8, stages=3)
_MAXSIM_WIDE = KernelTile(rows=128, columns=128, dims=64, warps=8, stages=3)  # the vectors of both sides are loaded in steps
_MAXSIM_TF32 = KernelTile(rows=128, columns=64, dims=64, warps=8, stages=2)
_MAXSIM_FLOAT32 = KernelTile(rows=64, columns=64, dims=64, warps=4, stages=2)
_MAXSIM_SMALL = KernelTile(rows=64, columns=64, dims=64, warps=4, stages=2)
# The gradient of documents. Rows are vectors of one part of a document. Columns are the query vectors that one step reads from
# the list of this part. H200, bf16, forward + backward in ms, first with 1,024 queries of 128 vectors and documents of 1,024
# vectors, then with queries of 32 and documents of 128: 64×128 105.5 and 7.3, 64×64 111.6 and 8.5, 128×64 110.2 and 8.9.
_MAXSIM_LISTED = KernelTile(rows=64, columns=128, dims=128, warps=4, stages=3)
_MAXSIM_LISTED_FLOAT32 = KernelTile(rows=64, columns=32, dims=64, warps=4, stages=2)
MAXSIM_LIST_ENTRIES = 2**25  # largest number of entries in the lists of one launch: 128 MiB
# The gradient of queries. Rows are the query vectors of a program. Times with 16 to 128 vectors differ by 3 %.
MAXSIM_GATHER = KernelTile(rows=32, columns=1, dims=128, warps=4, stages=3)
# The dense path. Tiles of the losses are lines × other items, and `columns` of a scan are argmax indices.
MAXSIM_LOSS = KernelTile(rows=16, columns=64, dims=1, warps=4, stages=2)
MAXSIM_SCAN = KernelTile(rows=1, columns=1024, dims=1, warps=4, stages=2)
MAXSIM_SMALL_GATHER = KernelTile(rows=16, columns=1, dims=128, warps=4, stages=3)
_MAXSIM_SMALL_LISTED = KernelTile(rows=64, columns=64, dims=128, warps=4, stages=3)
MAXSIM_SCORES = TileSize(rows=4096, columns=4096)  # queries and documents of one launch: 64 MiB of scores
_MAXSIM_INDICES = 2**27  # largest number of argmax indices in a strip: 256 MiB in int16
MAXSIM_DOCUMENTS = 2**15  # largest number of documents in one launch; a grid may have 65,535


def maxsim_tile(precision: str, device: torch.device, D: int) -> KernelTile:
    """Returns the tile of the late-interaction kernel."""
    half = _MAXSIM if _MAXSIM.dims >= D else _MAXSIM_WIDE
    return _tile(half, _MAXSIM_TF32, _MAXSIM_FLOAT32, _MAXSIM_SMALL, precision, device)


def maxsim_listed_tile(precision: str, device: torch.device) -> KernelTile:
    """Returns the tile of the gradient of documents. Rows are vectors of a part. Columns are the query vectors of a step."""
    small = _MAXSIM_LISTED_FLOAT32
    return _tile(_MAXSIM_LISTED, small, small, small, precision, device)


def maxsim_small_listed_tile(precision: str, device: torch.device) -> KernelTile:
    """Returns the tile of the gradient of documents on the dense path, like `maxsim_listed_tile`."""
    small = _MAXSIM_LISTED_FLOAT32
    return _tile(_MAXSIM_SMALL_LISTED, small, small, small, precision, device)


def documents_at_once(max_length: int, D: int) -> int:
    """Returns how many documents of up to `max_length` vectors are processed at once.

    Their gradients are summed in float32, in at most 256 MiB, before they are rounded.
    """
    return max(1, 2**26 // (max_length * D))


def maxsim_is_kept(rows: int, documents: int, element_bytes: int) -> bool:
    """Returns whether forward keeps the argmax indices of `rows` query vectors for backward, in at most 256 MiB."""
    return rows * documents * element_bytes <= 2 * _MAXSIM_INDICES


def maxsim_strip(rows_of_a_query: int) -> TileSize:
    """Returns the queries and documents of one strip of backward.

    A strip has up to 32k query vectors, and as many documents as the limit of their argmax indices allows.
    """
    queries = max(1, 32768 // rows_of_a_query)
    return TileSize(queries, min(MAXSIM_DOCUMENTS, max(1, _MAXSIM_INDICES // (queries * rows_of_a_query))))


# `kernels.hopper` is tested with Triton versions from the first number on, and below the second. Gluon is experimental.
_GLUON_VERSIONS = ((3, 6), (3, 9))
HOPPER_BLOCK = 128  # a tile with this many rows and columns takes half of the registers of a warpgroup


@dataclass(frozen=True)
class HopperTile:
    """The panel of the warp-specialized kernel, and how the kernel uses its 192 KiB of slots in shared memory.

    The matmul of a tile has several steps, of `dims` dims each. The columns of the resident steps stay in shared memory. The
    columns of the other steps are streamed: they are copied again for every tile.
    """

    resident: int  # slots of the resident columns
    ring: int  # slots of the ring, for rows and streamed columns
    dims: int = 64  # dims of a step, and of a slot
    columns: int = HOPPER_BLOCK


def hopper_tile(block: Block, task: str) -> HopperTile | None:
    """Returns the tile of the warp-specialized kernel if the kernel supports `block` and was measured to be faster, else None.

    `task` is "sums", "softmax" or "sigmoid".

    Speed. H200, bf16, 64k×64k in strips of 8192×16384, TFLOP/s at D = 512 / 768 / 1024:

    - Sums: 753 / 747 / 757, and 679 / 730 / 756 by the Triton kernel (`kernels.logsumexp`).
    - Softmax weights: 676 / 701 / 693, and 519 / 622 / 653 by the Triton kernel (`kernels.gradient`).
    - Sigmoid weights: 528 / 625 / 680.
    - cuBLAS matmul: 656 / 701 / 710.

    Resident steps. The same setup, TFLOP/s of softmax weights / sigmoid weights / sums:

    - D = 768: 701 / 625 / 747 with 6 steps, 633 / 578 / 685 with 7, and 563 / 522 / 617 with 8.
    - D = 1024: 684 / 661 / 722 with 6 steps, 693 / 639 / 743 with 5, and 675 / 680 / 757 with 4.
    - Twice as many slots with half the dims: 631 / 531 / 684 at D = 512. At D = 768, 0.85 of the values above.

    Large D. Milliseconds of forward + backward with 64k pairs. The first number is for the Triton kernels. The others are for
    the warp-specialized kernel with 3, 4 and 5 resident steps for all tasks, or with 4 steps for D = 1536:

    - D = 1152, `clip_loss`: 65.1, 63.8 / 64.0 / 63.8. Only the sums: 15.2, 15.6 / 15.6 / 15.4.
    - D = 1152, `siglip_loss`: 52.5, 47.8 / 47.8 / 48.3.
    - D = 1536, `clip_loss`: 87.9, 86.6. Only the sums: 22.9, 21.2.
    - D = 1536, `siglip_loss`: 65.0, 65.3.
    """
    half = block.precision in (BFLOAT16, FLOAT16)
    biased = block.col_bias is not None or (block.row_bias is not None and task != "sigmoid")
    excludes = block.row_ids is not None or block.limit is not None
    if block.D > 1536 or not half or biased or excludes or not has_gluon(block.x.device):
        return None
    steps = -(-block.D // 64)
    if steps <= 8:
        return HopperTile(steps, min(8, 12 - steps))
    if steps <= 12:
        return HopperTile(6, 6)
    return HopperTile(5, 7) if task == "softmax" else HopperTile(4, 8)


@cache
def panel_programs(panels: int, multiprocessors: int) -> int:
    """Returns the number of programs that share the tiles of `panels`.

    Programs that work on the same rows at the same time share these rows in the L2 cache. With 128 panels on 132
    multiprocessors, 132 programs all work on different rows and reach 551 TFLOP/s, but 128 programs reach 684 (softmax weights,
    D = 1024). So a few multiprocessors may stay idle.
    """

    def cost(programs: int) -> float:
        starting_rows = programs // math.gcd(programs, panels)
        return (1 + min(starting_rows, 32) / 200) / programs

    return min(range(multiprocessors, multiprocessors - multiprocessors // 16 - 1, -1), key=cost)


@cache
def has_gluon(device: torch.device) -> bool:
    """Returns whether the warp-specialized kernel runs on `device`. It needs a Hopper GPU and a tested version of Triton."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and compiles_gluon()


def compiles_gluon() -> bool:
    """Returns whether the warp-specialized kernel is tested with the installed version of Triton."""
    import triton

    first, after_last = _GLUON_VERSIONS
    return first <= tuple(map(int, triton.__version__.split(".")[:2])) < after_last


def logsumexp_tile(precision: str, device: torch.device) -> KernelTile:
    """Returns the tile of the logsumexp kernel."""
    return _tile(_LOGSUMEXP, _LOGSUMEXP_TF32, _LOGSUMEXP_FLOAT32, _LOGSUMEXP_SMALL, precision, device)


def gradient_tile(precision: str, device: torch.device) -> KernelTile:
    """Returns the tile of the gradient-strip kernel."""
    tile = _tile(_GRADIENT, _GRADIENT_TF32, _GRADIENT_FLOAT32, _GRADIENT_SMALL, precision, device)
    element_bytes = 2 if precision in (BFLOAT16, FLOAT16) else 4
    return _fit_programs(tile, element_bytes, shared_memory(device), stores_from_memory=has_copy_engine(device))


@cache
def _fit_programs(tile: KernelTile, element_bytes: int, shared: int, *, stores_from_memory: bool) -> KernelTile:
    """Returns the tile with fewer stages if its programs need more shared memory than a multiprocessor has.

    If two stages are still too many, the tile gets its former stages and one program per multiprocessor. On the H200, all
    programs fit. On an A100, the tile of half precision gets two stages instead of three. This is not measured.

    Args:
        tile: the tile.
        element_bytes: bytes of an element of the embeddings.
        shared: bytes of shared memory that one program may use. A multiprocessor has one more `_RESERVED_MEMORY`.
        stores_from_memory: whether half of the tile is copied to shared memory before it is stored.
    """
    store = tile.rows * tile.columns // 2 * element_bytes if stores_from_memory else 0
    for stages in range(tile.stages, 1, -1):
        size = stages * (tile.rows + tile.columns) * tile.dims * element_bytes + store
        if tile.per_multiprocessor * (size + _RESERVED_MEMORY) <= shared + _RESERVED_MEMORY:
            return replace(tile, stages=stages)
    return replace(tile, per_multiprocessor=1)


def _tile(
    half: KernelTile, tf32: KernelTile, float32: KernelTile, small: KernelTile, precision: str, device: torch.device
) -> KernelTile:
    if precision == FLOAT32:
        return float32
    if shared_memory(device) < _LARGE_SHARED_MEMORY:
        return replace(small, dims=32) if precision == TF32 else small
    return tf32 if precision == TF32 else half


@cache
def row_splits(panels: int, rows: int, tile_rows: int, multiprocessors: int) -> tuple[int, int]:
    """Returns the number of programs that share the rows of a panel, and the rows of each program.

    The number of programs is chosen so that the fewest multiprocessors are idle. The smallest of several such numbers is used.
    """
    tiles = -(-rows // tile_rows)

    def cost(splits: int) -> float:
        waves = panels * splits / multiprocessors
        return -(-panels * splits // multiprocessors) / waves

    splits = min(range(1, min(tiles, 8 + multiprocessors // panels) + 1), key=lambda count: (round(cost(count), 2), count))
    split_rows = -(-tiles // splits) * tile_rows
    return -(-rows // split_rows), split_rows


@cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program may use. For a CPU, which interprets kernels, it returns 1 MiB."""
    if device.type != "cuda":
        return 2**20
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Returns whether kernels store tiles by the copy engine, which reads them from shared memory. Hopper and newer GPUs do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a CUDA device, and 4 for a CPU, which interprets kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
