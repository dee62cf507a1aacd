"""Tile sizes, as data, each with the measurement that chose it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileSize:
    """One tile of similarities: rows × columns."""

    rows: int
    columns: int


# Two cores of an AVX-512 server, fp32, D = 512, 4096 rows and columns; forward + backward against the bare product of the
# same shape: 256×1024 2.69, 512×2048 2.60, 1024×1024 2.42, 1024×4096 2.40, 2048×4096 2.41. The tile and its spare copy
# (4 MiB each) stay in the last-level cache, and the products are long enough in every direction.
CPU = TileSize(rows=1024, columns=1024)

# One H200, 32k rows and columns, D = 512, bf16 / fp32, clip_loss forward + backward in ms: 1024×1024 693 / 590,
# 2048×2048 187 / 189, 4096×4096 72 / 143, 8192×8192 52 / 132. Launching is what small tiles cost. With every buffer a walk
# can ask for (13 bytes an element in the worst case) this size stays below the 512 MiB that a workspace may take; 8192×8192
# would not.
ACCELERATOR = TileSize(rows=4096, columns=8192)
ACCELERATOR_FLOAT64 = TileSize(rows=4096, columns=4096)


def eager_tile(device: torch.device, dtype: torch.dtype) -> TileSize:
    """The tile that PyTorch operations walk on `device`, for similarities of `dtype`."""
    if device.type == "cpu":
        return CPU
    return ACCELERATOR_FLOAT64 if dtype == torch.float64 else ACCELERATOR
