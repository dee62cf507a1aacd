"""Images that replay reads from the host, for benchmarks of a step."""

import torch
from torch import Tensor, nn

import megabatch as mb
from megabatch.bench.towers import Size

POOL = 256  # raw images on the host that replay reads from


def replay(rows: int, size: Size, workers: int, seed: int) -> mb.ReplaySource:
    """Raw images on the host, cropped and flipped at random by worker threads, identically in both passes."""
    raw = size.pixels + 32
    pool = torch.randint(0, 256, (POOL, 3, raw, raw), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def read(i: int, generator: torch.Generator) -> Tensor:
        top, left, flip = torch.randint(0, 32, (3,), generator=generator).tolist()
        image = pool[i % POOL, :, top : top + size.pixels, left : left + size.pixels]
        return (image.flip(-1) if flip < 16 else image).contiguous()

    return mb.ReplaySource(range(rows), read, seed=seed, workers=workers)


class Normalised(nn.Module):
    """A tower that takes uint8 images: a quarter of the bytes of float32 to copy."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor) -> Tensor:
        """(n, D)."""
        return self.tower(x.float().div_(127.5).sub_(1.0))  # type: ignore[no-any-return]
