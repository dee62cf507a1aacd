"""Entropic optimal transport between two point clouds, in memory that grows linearly with the number of points.

    pip install POT  # optional, for the comparison
    python examples/optimal_transport.py --points 20000

Sinkhorn's algorithm finds potentials f and g such that the plan a_i·b_j·exp((f_i + g_j − C_ij)/ε) has the marginals a and
b. With C_ij = ‖x_i − y_j‖²/2 the exponent is ⟨x_i, y_j⟩/ε plus a row offset and a column offset, the form of
`pairwise_logsumexp`. One pass gives both directions. Each step averages the old and the new potentials, and this converges.
The cost of the plan comes from a gradient: the gradient of the row sums with respect to 1/ε is the mean of ⟨x_i, y_j⟩ under
the plan.

With at most 4,000 points and the package POT installed, the result is compared with POT's dense result.
"""

import argparse
import math

import torch
import toy
from torch import Tensor

import megabatch as mb


class Plan:
    """A transport plan between uniform weights, given by its potentials."""

    def __init__(self, x: Tensor, y: Tensor, epsilon: float) -> None:  # (N, D), (M, D)
        self.x, self.y, self.epsilon = x, y, epsilon
        self.f, self.g = x.new_zeros(len(x)), y.new_zeros(len(y))

    def sums(self, scale: float | Tensor) -> tuple[Tensor, Tensor]:  # (N,), (M,)
        """Logarithms of the plan's marginals."""
        row_bias = (self.f - self.x.square().sum(1) / 2) / self.epsilon - math.log(len(self.x))
        col_bias = (self.g - self.y.square().sum(1) / 2) / self.epsilon - math.log(len(self.y))
        return mb.pairwise_logsumexp(self.x, self.y, scale, row_bias, col_bias)

    def improve(self) -> float:
        """One step of both potentials. Returns the total deviation of the row marginal from uniform before the step."""
        row, col = self.sums(1 / self.epsilon)
        self.f -= self.epsilon * (row + math.log(len(self.x))) / 2
        self.g -= self.epsilon * (col + math.log(len(self.y))) / 2
        return (row.exp() - 1 / len(self.x)).abs().sum().item()

    def cost(self) -> float:
        """Σ C_ij · plan_ij."""
        scale = torch.tensor(1 / self.epsilon, dtype=self.x.dtype, requires_grad=True)
        row, _ = self.sums(scale)
        (products,) = torch.autograd.grad(row.mean(), scale)
        return (self.x.square().sum(1).mean() / 2 + self.y.square().sum(1).mean() / 2 - products).item()


def dense_cost(x: Tensor, y: Tensor, epsilon: float) -> float | None:
    """The cost by POT, if it is installed."""
    try:
        import ot
    except ImportError:
        return None
    cost = (torch.cdist(x, y).square() / 2).cpu().numpy()
    plan = ot.sinkhorn([], [], cost, epsilon, method="sinkhorn_log", numItermax=10000, stopThr=1e-9)
    return float((plan * cost).sum())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=4000, help="in each cloud (default %(default)s)")
    parser.add_argument("--width", type=int, default=8, help="dimensions (default %(default)s)")
    parser.add_argument("--epsilon", type=float, default=0.5, help="entropic regularization (default %(default)s)")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="of the marginals (default %(default)s)")
    args = parser.parse_args(arguments)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, args.points, args.width, generator=generator, dtype=torch.float64).to(toy.device())
    y = 0.5 * y + 1.0
    plan = Plan(x, y, args.epsilon)
    error, passes = math.inf, 0
    while error > args.tolerance and passes < 2000:
        error, passes = plan.improve(), passes + 1
    print(f"{passes} passes, marginals within {error:.1e}, cost {plan.cost():.6f}")
    dense = dense_cost(x, y, args.epsilon) if args.points <= 4000 else None
    if dense is not None:
        print(f"POT, with all {args.points**2:,} pairs in memory: {dense:.6f}")


if __name__ == "__main__":
    main()
