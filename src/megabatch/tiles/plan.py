"""Tile sizes, as data, each with the measurement that chose it."""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from megabatch.tiles.block import Block
from megabatch.tiles.precision import BFLOAT16, FLOAT16, FLOAT32, TF32


@dataclass(frozen=True)
class TileSize:
    """One tile of similarities: rows × columns."""

    rows: int
    columns: int

    def fitted(self, N: int, M: int) -> "TileSize":
        """No larger than N×M, and where one side is short, longer on the other."""
        elements = self.rows * self.columns
        rows = max(1, min(N, self.rows))
        columns = max(1, min(M, elements // rows))
        return TileSize(max(1, min(N, elements // columns)), columns)


# Two cores of an AVX-512 server, fp32, D = 512, 4096 rows and columns; forward + backward against the bare product of the
# same shape: 256×1024 2.69, 512×2048 2.60, 1024×1024 2.42, 1024×4096 2.40, 2048×4096 2.41. The tile and its spare copy
# (4 MiB each) stay in the last-level cache, and the products are long enough in every direction.
CPU = TileSize(rows=1024, columns=1024)

# One H200, 32k rows and columns, D = 512, bf16 / fp32, clip_loss forward + backward in ms: 1024×1024 693 / 590,
# 2048×2048 187 / 189, 4096×4096 72 / 143, 8192×8192 52 / 132. Launching is what small tiles cost. With every buffer a walk
# can ask for (15 bytes an element in the worst case) this size stays below the 512 MiB that a workspace may take; 8192×8192
# would not.
ACCELERATOR = TileSize(rows=4096, columns=8192)
ACCELERATOR_FLOAT64 = TileSize(rows=4096, columns=4096)


def eager_tile(device: torch.device, dtype: torch.dtype) -> TileSize:
    """The tile that PyTorch operations walk on `device`, for similarities of `dtype`."""
    if device.type == "cpu":
        return CPU
    return ACCELERATOR_FLOAT64 if dtype == torch.float64 else ACCELERATOR


# Squares on the diagonal of a symmetric block, which are walked whole: T/N more products than the upper half needs, 12 % at 64k
# rows. A multiple of 256, which every kernel's tile divides. Smaller ones need more launches, of which the host makes few in a
# millisecond: H200, 64k × 768, squares of 4096, each with all the work around a launch: 159 ms, where the whole square takes
# 40. Squares of 8192 with that work done once (`triton_symmetric`): 23 ms.
SYMMETRIC_SQUARE = 8192


def symmetric_square(device: torch.device, dtype: torch.dtype, eager: bool) -> int:
    """Rows of a square on the diagonal: a tile of PyTorch operations, or enough for a kernel to be worth its launch."""
    return eager_tile(device, dtype).rows if eager else SYMMETRIC_SQUARE


def rows_at_once(device: torch.device, D: int) -> int:
    """Rows of embeddings for elementwise work: few launches on an accelerator, the cache on a CPU; 32 MiB in float32."""
    return CPU.rows if device.type == "cpu" else max(1024, 2**23 // D)


@dataclass(frozen=True)
class KernelTile:
    """One tile of a Triton kernel: rows × columns, `width` of the embeddings at a time."""

    rows: int
    columns: int
    width: int
    warps: int
    stages: int
    group: int = 8  # tiles of rows that programs share before they go on to the next columns
    per_multiprocessor: int = 1

    @property
    def options(self) -> dict[str, int]:
        """What every launch passes on."""
        blocks = {"BLOCK_N": self.rows, "BLOCK_M": self.columns, "BLOCK_D": self.width}
        return blocks | {"num_warps": self.warps, "num_stages": self.stages}


# H200, bf16, 32k×32k, TFLOP/s at D = 512 / 768 / 1024, diagonal left out; cuBLAS's bare product in that run: 648 / 681 / 729.
# 256×128, 8 warps, 3 stages: 655 / 712 / 735. 128×128, 4 warps: 598 / 537 / 511. 128×256, 8 warps: 257 / 288 / 326.
_MARCH = KernelTile(rows=256, columns=128, width=64, warps=8, stages=3)
_MARCH_TF32 = KernelTile(rows=128, columns=128, width=32, warps=8, stages=3)
_MARCH_FLOAT32 = KernelTile(rows=64, columns=64, width=32, warps=4, stages=2)
_MARCH_SMALL = KernelTile(rows=128, columns=128, width=64, warps=8, stages=2)  # compiled for sm_89, not measured

# H200, bf16, strips of 8448×33792, TFLOP/s at D = 512 / 768 / 1024; cuBLAS's bare product in that run: 633 / 638 / 721.
# 128×128, 4 warps, 3 stages, groups of 8, two programs an SM: 519 / 622 / 653. Groups of 16: 511 / 601 / 633.
# 128×256, 8 warps, 4 stages: 508 / 571 / –. 256×128, 8 warps, 4 stages: 499 / – / 642. All in two halves; in one piece less.
_STRIP = KernelTile(rows=128, columns=128, width=64, warps=4, stages=3, per_multiprocessor=2)
_STRIP_TF32 = KernelTile(rows=128, columns=128, width=32, warps=8, stages=3)
# Of half the columns, Triton 3.6 makes a program that reads from wrong addresses (`tests/tiles/compile_kernels.py`).
_STRIP_FLOAT32 = KernelTile(rows=64, columns=128, width=32, warps=4, stages=2, per_multiprocessor=2)
_STRIP_SMALL = KernelTile(rows=128, columns=128, width=64, warps=8, stages=2)  # compiled for sm_89, not measured

# Shared memory of one program that the measured tiles need; smaller chips get the small ones.
_LARGE_SHARED_MEMORY = 152 * 2**10

# For the few rows that need a shift of their own.
ONLINE = KernelTile(rows=64, columns=64, width=32, warps=4, stages=2)

# Rows and panels of columns of one launch of the forward walk: its row partials take 128 MiB at most.
MARCH_ROWS, MARCH_PANELS = 131072, 256

# A strip of gradients; half of the 512 MiB that a workspace may take, because others are alive beside it. Its sides decide how
# well tiles of dx and dy fill the multiprocessors. H200, bf16, 64k×64k, both products with fp32 sums, ms at D = 512 / 768 /
# 1024: 8192×16384 11.2 / 17.4 / 22.5, 16384×8192 11.3 / 16.7 / 23.1, 11008×16384 11.9 / 17.8 / 25.6, 13312×13312 12.5 / 18.7 /
# 25.6.
_STRIP_BYTES = 256 * 2**20


def _strip_rows(D: int) -> int:
    return 16384 if 512 < D < 1024 else 8448


# Versions of Triton whose Gluon, which is experimental, the kernels of `gluon_panels` were compiled and run with.
_GLUON_VERSIONS = ((3, 6), (3, 9))


@dataclass(frozen=True)
class Panel:
    """Columns that a program of `gluon_panels` owns, and how 192 KiB of slots are divided between what stays and a ring."""

    resident: int  # steps of the width whose columns stay in shared memory
    ring: int  # slots for what passes by
    width: int = 64  # of a step, and of a slot
    columns: int = 128


def panel(block: Block, task: str) -> Panel | None:
    """Where the warp-specialised kernels serve and measured faster; `task` is "sums", "softmax" or "sigmoid".

    H200, bf16, 64k×64k in strips of 8192×16384, TFLOP/s at D = 512 / 768 / 1024; cuBLAS's bare product: 656 / 701 / 710.
    Sums 753 / 747 / 757, softmax weights 676 / 701 / 693, sigmoid weights 528 / 625 / 680; `_march` sums 679 / 730 / 756,
    `_strip` softmax weights 519 / 622 / 653. How many steps stay, softmax / sigmoid / sums: at 768 6 701 / 625 / 747,
    7 633 / 578 / 685, 8 563 / 522 / 617; at 1024 6 684 / 661 / 722, 5 693 / 639 / 743, 4 675 / 680 / 757. Slots of half the
    width, twice as many: 631 / 531 / 684 at 512, and 0.85 of the others at 768.
    """
    half = block.precision in (BFLOAT16, FLOAT16)
    biased = block.col_bias is not None or (block.row_bias is not None and task != "sigmoid")
    chosen = block.row_ids is not None or block.limit is not None
    if block.D > 1024 or not half or biased or chosen or not has_gluon(block.x.device):
        return None
    steps = -(-block.D // 64)
    if steps <= 8:
        return Panel(steps, min(8, 12 - steps))
    if steps <= 12:
        return Panel(6, 6)
    return Panel(5, 7) if task == "softmax" else Panel(4, 8)


def panel_programs(panels: int, multiprocessors: int) -> int:
    """How many programs share the tiles of `panels`, each the same number of them, one after the other.

    Programs that are at the same row at the same time share its copy in the L2 cache: 128 panels on 132 multiprocessors run at
    551 TFLOP/s with 132 programs, all at different rows, and at 684 with 128 (softmax weights, D = 1024). So a few may be idle.
    """

    def cost(programs: int) -> float:
        starting_rows = programs // math.gcd(programs, panels)
        return (1 + min(starting_rows, 32) / 200) / programs

    return min(range(multiprocessors, multiprocessors - multiprocessors // 16 - 1, -1), key=cost)


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether the warp-specialised kernels run on `device`: Hopper, and a Triton they were tried with."""
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    first, after_last = _GLUON_VERSIONS
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and first <= version < after_last


def march_tile(precision: str, device: torch.device) -> KernelTile:
    """The tile of the forward kernel."""
    return _tile(_MARCH, _MARCH_TF32, _MARCH_FLOAT32, _MARCH_SMALL, precision, device)


def strip_tile(precision: str, device: torch.device) -> KernelTile:
    """The tile of the gradient kernel."""
    return _tile(_STRIP, _STRIP_TF32, _STRIP_FLOAT32, _STRIP_SMALL, precision, device)


def _tile(
    half: KernelTile, tf32: KernelTile, float32: KernelTile, small: KernelTile, precision: str, device: torch.device
) -> KernelTile:
    if precision == FLOAT32:
        return float32
    if shared_memory(device) < _LARGE_SHARED_MEMORY:
        return replace(small, width=32) if precision == TF32 else small
    return tf32 if precision == TF32 else half


def march_strips(panels: int, rows: int, tile_rows: int, multiprocessors: int) -> tuple[int, int]:
    """(how many programs share a panel, rows of each): the fewest that leave the fewest multiprocessors idle at the end."""
    tiles = -(-rows // tile_rows)

    def idle(strips: int) -> float:
        waves = panels * strips / multiprocessors
        return -(-panels * strips // multiprocessors) / waves

    strips = min(range(1, min(tiles, 8 + multiprocessors // panels) + 1), key=lambda count: (round(idle(count), 2), count))
    strip_rows = -(-tiles // strips) * tile_rows
    return -(-rows // strip_rows), strip_rows


def strip_size(N: int, M: int, D: int, element_size: int) -> TileSize:
    """Rows and columns of one strip of gradients: all of equal size, as few as the workspace allows.

    A strip of dx is alive beside it, in fp32, and so is a temporary of its size: 64 MiB each at most.
    """
    rows = _even(N, min(_strip_rows(D), max(256, 2**24 // D)))
    return TileSize(rows, _even(M, _STRIP_BYTES // element_size // rows))


def _even(length: int, most: int) -> int:
    """The size of equal pieces of `length`, each a multiple of 256 and at most `most`."""
    pieces = max(1, -(-length // (most // 256 * 256)))
    return -(-length // pieces // 256) * 256


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; a CPU interpreting kernels has enough."""
    if device.type != "cuda":
        return 2**20
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; a CPU interpreting kernels counts as a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
