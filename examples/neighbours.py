"""Nearest-neighbour recall of compressed embeddings among a million points, in memory linear in the number of points.

    python examples/neighbours.py --points 1000000

The search goes chunk by chunk and holds one chunk of similarities and the best k results so far. There are two compressed
embeddings: the first quarter of the columns, and one byte per number. Their recall@k is the fraction of the k exact
neighbours among the k neighbours that they find. For pairs with one correct answer each, `pairwise_rank` counts ranks
without a search: here the ranks of points among noisy copies and of copies among points, in one pass.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb

CHUNK = 8192


def points(count: int, width: int) -> Tensor:  # (N, D)
    """Unit vectors around cluster centres, about 100 points per centre. The first columns have the largest variance."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(max(1, count // 100), width, generator=generator) / torch.arange(1, width + 1).sqrt()
    found = torch.empty(count, width)
    for start in range(0, count, CHUNK):
        part = found[start : start + CHUNK]
        part.copy_(centres[torch.randint(len(centres), (len(part),), generator=generator)])
        part.add_(torch.randn(part.shape, generator=generator), alpha=0.2)
        F.normalize(part, dim=1, out=part)
    return found


def nearest(queries: Tensor, z: Tensor, k: int, cheaper: Callable[[Tensor], Tensor] = Tensor.clone) -> Tensor:  # (Q, k)
    """Indices of the k points most similar to each query, after `cheaper` has compressed both."""
    queries = cheaper(queries)
    scores = queries.new_empty(len(queries), 0)
    indices = torch.empty(len(queries), 0, dtype=torch.int64)
    for start in range(0, len(z), CHUNK):
        found = torch.topk(queries @ cheaper(z[start : start + CHUNK]).T, min(k, len(z) - start))
        scores, indices = torch.cat((scores, found.values), 1), torch.cat((indices, found.indices + start), 1)
        scores, order = torch.topk(scores, min(k, scores.shape[1]))
        indices = indices.gather(1, order)
    return indices


def recall(found: Tensor, wanted: Tensor) -> float:  # (Q, k), (Q, k)
    """Fraction of the wanted indices that are among those found."""
    return (found[:, :, None] == wanted[:, None, :]).any(2).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=100_000, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--queries", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument("--pairs", type=int, default=10_000, help="points ranked against noisy copies (default %(default)s)")
    parser.add_argument("--k", type=int, default=10, help="neighbours (default %(default)s)")
    options = parser.parse_args(arguments)

    z = points(options.points, options.width)
    queries = F.normalize(z[: options.queries] + 0.05 * torch.randn(options.queries, options.width), dim=1)
    began = time.perf_counter()
    wanted = nearest(queries, z, options.k)
    seconds = time.perf_counter() - began
    print(f"{options.points:,} points, {options.queries:,} queries: exact neighbours in {seconds:.1f} s")
    quarter, step = options.width // 4, z.abs().max() / 127
    found = nearest(queries, z, options.k, lambda part: F.normalize(part[:, :quarter], dim=1))
    print(f"recall@{options.k} of the first {quarter} columns: {recall(found, wanted):.3f}")
    found = nearest(queries, z, options.k, lambda part: torch.round(part / step))
    print(f"recall@{options.k} of one byte a number: {recall(found, wanted):.3f}")

    chosen = z[: options.pairs]
    copy = F.normalize(chosen + 0.1 * torch.randn(chosen.shape), dim=1)
    forth, back = mb.pairwise_rank(copy, chosen)
    found = [(rank == 0).float().mean().item() for rank in (forth, back)]
    print(f"recall@1 from copies to points: {found[0]:.3f}, from points to copies: {found[1]:.3f}")


if __name__ == "__main__":
    main()
