"""What a backward pass may get wrong if it forms its similarities anew, in another order than forward did.

Both passes round ⟨x_i, y_j⟩. Each is off by at most δ_ij = (D + 4)·u·scale·⟨|x_i|, |y_j|⟩, where u is half a unit in the last place
of float32, and 4 covers the product with the scale and the subtraction of a shift. A logsumexp of row i is then off by at most
Δ_i = max_j δ_ij, and a softmax weight w_ij = exp(s_ij − lse_i) by at most w_ij·(exp(δ_ij + Δ_i) − 1); and never by more than 1,
because the true weight and the computed one are both between 0 and 1.
"""

import torch

from megabatch import operators
from megabatch.operators.logsumexp import KEPT, logsumexp_backward

UNIT = torch.finfo(torch.float32).eps / 2


def gradients_rounded_differently(x, y, scale, precision, backend):
    """dx and dy of the sum of all row and column logsumexps; backward sees the width in reverse."""
    scale = torch.tensor(scale, dtype=torch.float32, device=x.device)
    *_, row, col = operators.logsumexp(x, y, scale, None, None, None, None, KEPT, precision, backend, "")
    drow, dcol = (torch.ones(len(side), device=x.device) for side in (x, y))
    needs = [True, True, True, False, False]
    options = (None, None, None, None, KEPT, precision, backend, "")
    dx, dy, *_ = logsumexp_backward(x.flip(1), y.flip(1), scale, *options, row, col, drow, dcol, None, needs)
    return dx.flip(1), dy.flip(1)


def truth_and_bounds(x, y, scale):
    """((dx, how far off it may be), (dy, the same)), in float64; every gradient entry has a bound of its own."""
    size = torch.finfo(x.dtype).eps / 2
    x, y = x.double(), y.double()
    s, noise = scale * x @ y.T, (x.shape[1] + 4) * UNIT * scale * x.abs() @ y.abs().T
    weights, errors = [], []
    for dim in (1, 0):
        log_w, off = s - s.logsumexp(dim, keepdim=True), noise + noise.amax(dim, keepdim=True)
        weights.append(log_w.exp())
        errors.append(torch.where(off < 1, log_w.exp() * torch.expm1(off), (log_w + off).clamp_max(0.0).exp()))
    g, error = sum(weights), sum(errors)
    results = []
    for g_side, error_side, others in ((g, error, y), (g.T, error.T, x)):
        # Sums of as many terms as there are others, in float32; weights and the result are rounded to the type of the inputs.
        summing = len(others) * UNIT + 3 * size
        bound = scale * (error_side + (g_side + error_side) * summing) @ others.abs()
        results.append((scale * g_side @ others, bound))
    return results
