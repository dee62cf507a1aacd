"""Recall of compressed embeddings among a million points, in memory that grows linearly with the number of points.

    python examples/neighbors.py --points 1000000

`pairwise_topk` finds the exact neighbors tile by tile, so the matrix of similarities is never stored. There are two
compressed embeddings: the first quarter of the columns, and one byte per number. Their recall@k is the fraction of the k
exact neighbors among the k neighbors that they find. If each point has one correct match, `pairwise_rank` counts retrieval
ranks without a search: here from noisy copies to points and from points to copies, in one pass.
"""

import argparse
import time

import torch
import torch.nn.functional as F
import toy
from torch import Tensor

import megabatch as mb


def points(count: int, width: int, device: torch.device) -> Tensor:  # (N, D)
    """Unit vectors around cluster centers, about 100 points per center. The first columns have the largest variance."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    centers = torch.randn(max(1, count // 100), width, **options) / torch.arange(1, width + 1, device=device).sqrt()
    z = torch.randn(count, width, **options).mul_(0.2)
    z.add_(centers[torch.randint(len(centers), (count,), **options)])
    return F.normalize(z, dim=1)


def recall(found: Tensor, exact: Tensor) -> float:  # (Q, k), (Q, k)
    """The fraction of the exact neighbors that were found."""
    return (found[:, :, None] == exact[:, None, :]).any(2).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=100_000, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="dimension of the points (default %(default)s)")
    parser.add_argument("--queries", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument("--pairs", type=int, default=10_000, help="points ranked against noisy copies (default %(default)s)")
    parser.add_argument("--k", type=int, default=10, help="neighbors (default %(default)s)")
    args = parser.parse_args(arguments)

    z = points(args.points, args.width, toy.device())
    queries = F.normalize(z[: args.queries] + 0.05 * torch.randn_like(z[: args.queries]), dim=1)
    mb.pairwise_topk(queries[:1], z[:1], 1)  # the first call imports modules
    began = time.perf_counter()
    exact = mb.pairwise_topk(queries, z, args.k).indices
    first = exact[0].tolist()  # waits for the GPU
    seconds = time.perf_counter() - began
    print(f"{len(z):,} points, {len(queries):,} queries: exact neighbors in {seconds:.1f} s, of the first query {first[:3]}, …")

    quarter, step = args.width // 4, z.abs().max() / 127
    found = mb.pairwise_topk(F.normalize(queries[:, :quarter], dim=1), F.normalize(z[:, :quarter], dim=1), args.k).indices
    print(f"recall@{args.k} of the first {quarter} columns: {recall(found, exact):.3f}")
    found = mb.pairwise_topk((queries / step).round(), (z / step).round(), args.k).indices
    print(f"recall@{args.k} of one byte per number: {recall(found, exact):.3f}")

    chosen = z[: args.pairs]
    copies = F.normalize(chosen + 0.1 * torch.randn_like(chosen), dim=1)
    forth, back = ((rank == 0).float().mean().item() for rank in mb.pairwise_rank(copies, chosen))
    print(f"recall@1 from copies to points: {forth:.3f}, from points to copies: {back:.3f}")


if __name__ == "__main__":
    main()
