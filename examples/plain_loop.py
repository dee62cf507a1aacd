"""A contrastive model in a plain PyTorch loop: one loss over a batch whose activations would not fit in memory.

    python examples/plain_loop.py

Pairs are two noisy views of the same hidden point. The towers encode `--chunk` samples at a time. The loss uses the whole
batch.
"""

import argparse

import torch
import torch.nn.functional as F
import toy
from torch import nn

import megabatch as mb


def recall(first, second, device, count=1024):
    """Recall@1: the fraction of new samples whose own partner is the nearest of `count`."""
    x, y = toy.views(count, seed=10**6).to(device)
    with torch.no_grad():
        ranks, _ = mb.pairwise_rank(F.normalize(first(x), dim=-1), F.normalize(second(y), dim=-1))
    return (ranks == 0).float().mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16384, help="pairs in a step (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="samples encoded at once (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default %(default)s)")
    args = parser.parse_args(argv)

    device = toy.device()
    torch.manual_seed(0)
    first, second = toy.tower().to(device), toy.tower().to(device)
    log_scale = nn.Parameter(torch.tensor(2.7, device=device))  # learned with the towers
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), log_scale], lr=3e-3)

    def loss_fn(a, b):
        return mb.clip_loss(F.normalize(a, dim=-1), F.normalize(b, dim=-1), log_scale.exp())

    losses = []
    for step in range(args.steps):
        x, y = toy.views(args.batch, seed=step).to(device)
        loss = mb.cached_backward(loss_fn, [(first, x), (second, y)], chunk_size=args.chunk)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, recall@1 {recall(first, second, device):.4f}")


if __name__ == "__main__":
    main()
