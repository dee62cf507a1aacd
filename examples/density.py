"""Uniformity and alignment of embeddings (Wang and Isola, 2020), and a kernel density estimate, in linear memory.

    python examples/density.py --points 20000

Uniformity is log mean exp(−2‖z_i − z_j‖²) over all pairs i ≠ j. For vectors of unit length the exponent is 4⟨z_i, z_j⟩ − 4,
so `pairwise_symmetric_logsumexp` gives the sums over j and computes each logit once. A Gaussian kernel density is a sum over
points of exp(−‖q − z‖²/2h²). Its exponent is ⟨q, z⟩/h² plus a row offset and a column offset, so `pairwise_logsumexp` gives
the density. Both are differentiable: a model can be trained for uniformity with the same function.
"""

import argparse
import math

import torch
import torch.nn.functional as F
import toy
from torch import Tensor

import megabatch as mb


def uniformity(z: Tensor, t: float = 2.0) -> Tensor:  # (N, D) of unit length → ()
    """log mean exp(−t‖z_i − z_j‖²) over all pairs i ≠ j. Lower is more uniform."""
    row = mb.pairwise_symmetric_logsumexp(z, 2 * t) - 2 * t
    return row.logsumexp(0) - math.log(len(z) * (len(z) - 1))


def alignment(z1: Tensor, z2: Tensor) -> Tensor:  # (N, D), (N, D) → ()
    """Mean squared distance between the two views of a sample."""
    return (z1 - z2).square().sum(1).mean()


def log_density(query: Tensor, points: Tensor, bandwidth: float) -> Tensor:  # (Q, D), (N, D) → (Q,)
    """Log density of a Gaussian kernel density estimate from the points, at the queries."""
    N, D = points.shape
    row, _ = mb.pairwise_logsumexp(
        query,
        points,
        1 / bandwidth**2,
        row_bias=-query.square().sum(1) / (2 * bandwidth**2),
        col_bias=-points.square().sum(1) / (2 * bandwidth**2),
    )
    return row - math.log(N) - D / 2 * math.log(2 * math.pi * bandwidth**2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=5000, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=16, help="dimension of the embeddings (default %(default)s)")
    args = parser.parse_args(arguments)
    device, generator = toy.device(), torch.Generator().manual_seed(0)

    # Points spread over the sphere have low uniformity values, points near one direction have high ones.
    spread = F.normalize(torch.randn(args.points, args.width, generator=generator), dim=1).to(device)
    concentrated = F.normalize(spread + 2 * spread[0], dim=1)
    for name, z in (("uniform on the sphere", spread), ("concentrated near one direction", concentrated)):
        view = F.normalize(z + 0.1 * torch.randn(z.shape, generator=generator).to(device), dim=1)
        print(f"{name}: uniformity {uniformity(z):.3f}, alignment with a noisy view {alignment(z, view):.3f}")

    points, query = (torch.randn(n, 2, generator=generator, dtype=torch.float64).to(device) for n in (args.points, 5))
    found = log_density(query, points, bandwidth=0.2)
    limits = -query.square().sum(1) / (2 * 1.04) - math.log(2 * math.pi * 1.04)  # the limit: a normal of variance 1 + h²
    for (a, b), estimate, limit in zip(query.tolist(), found.tolist(), limits.tolist(), strict=True):
        print(f"log density at ({a:5.2f}, {b:5.2f}): {estimate:.2f}, exact limit {limit:.2f}")


if __name__ == "__main__":
    main()
