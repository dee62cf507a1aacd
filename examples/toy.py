"""What several examples share: pairs to learn from without a download, a small tower, and the device."""

import torch
from torch import Tensor, nn

WIDTH = 32  # of a view; a hidden point has a quarter of it


def views(count: int, seed: int = 0) -> Tensor:  # (2, N, WIDTH)
    """Two noisy views of `count` random points. The maps from points to views do not depend on the seed."""
    fixed, fresh = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + seed)
    maps = torch.randn(2, WIDTH // 4, WIDTH, generator=fixed)
    points = torch.randn(count, WIDTH // 4, generator=fresh)
    return torch.tanh(points @ maps) + 0.1 * torch.randn(2, count, WIDTH, generator=fresh)


class Views(torch.utils.data.Dataset):
    """The same pairs as a dataset."""

    def __init__(self, count: int) -> None:
        self.sides = views(count)

    def __len__(self) -> int:
        return self.sides.shape[1]

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.sides[0, i], self.sides[1, i]


def tower() -> nn.Sequential:  # (N, WIDTH) → (N, 64)
    """A small encoder. Its embeddings do not have unit length."""
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 64))


def device(local_rank: int = 0) -> torch.device:
    """The GPU of this process if there is one, else the CPU. The GPU becomes the current device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
