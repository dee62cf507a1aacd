"""A contrastive model in a plain PyTorch loop: one loss over a batch whose activations would not fit in memory.

Pairs are two noisy views of the same hidden point. The towers encode `--chunk` samples at a time; the loss uses the whole
batch.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import megabatch as mb

WIDTH = 32  # of a view; the hidden points have a quarter of it


def views(count, seed=0):
    """Two views of `count` random points. The maps from points to views do not depend on the seed."""
    fixed, fresh = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + seed)
    maps = torch.randn(2, WIDTH // 4, WIDTH, generator=fixed)
    points = torch.randn(count, WIDTH // 4, generator=fresh)
    return torch.tanh(points @ maps) + 0.1 * torch.randn(2, count, WIDTH, generator=fresh)  # (2, N, WIDTH)


class Tower(nn.Module):
    """An encoder with embeddings of unit length. Any module that returns (n, D) embeddings works."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=-1)


def recall(first, second, count=1024):
    """Recall@1: the fraction of new samples whose own partner is the nearest of `count`."""
    x, y = views(count, seed=10**6)
    with torch.no_grad():
        ranks, _ = mb.pairwise_rank(first(x), second(y))
    return (ranks == 0).float().mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    first, second = Tower(), Tower()
    log_scale = nn.Parameter(torch.tensor(2.7))  # learned with the towers
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), log_scale], lr=3e-3)
    losses = []
    for step in range(args.steps):
        x, y = views(args.batch, seed=step)
        loss = mb.cached_backward(
            lambda a, b: mb.clip_loss(a, b, log_scale.exp()),
            [(first, x), (second, y)],
            chunk_size=args.chunk,
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, recall@1 {recall(first, second):.4f}")


if __name__ == "__main__":
    main()
