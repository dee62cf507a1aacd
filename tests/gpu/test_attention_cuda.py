"""Self-attention of compiled towers on a GPU, against float64."""

import pytest
import torch
import torch.nn.functional as F

from megabatch_train.towers.layers import fast_layers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 15, 24, 50, 64, 65, 99, 128, 129])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "causal"),
    [
        (torch.bfloat16, 12, 64, False),
        (torch.bfloat16, 8, 64, True),
        (torch.float16, 3, 32, False),
        (torch.float16, 2, 128, True),
    ],
)
def test_values_and_gradients(dtype, tokens, heads, dim, causal):
    """At most twice the error of PyTorch's attention in the same dtype."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    projected = torch.randn(5, tokens, 3 * heads * dim, device="cuda", generator=generator).to(dtype)
    weights = torch.randn(5, tokens, heads * dim, device="cuda", generator=generator).to(dtype)

    def run(attend, dtype):
        x = projected.to(dtype).requires_grad_()
        output = attend(x)
        return output.detach(), torch.autograd.grad(output, x, weights.to(dtype))[0]

    def plain(x):
        q, k, v = (part.unflatten(2, (heads, dim)).transpose(1, 2) for part in x.chunk(3, 2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    found = run(lambda x: fast_layers.attend(x, heads, causal=causal, has_kernel=True), dtype)
    again = run(lambda x: fast_layers.attend(x, heads, causal=causal, has_kernel=True), dtype)
    for actual, repeated, theirs, exact in zip(found, again, run(plain, dtype), run(plain, torch.float64), strict=True):
        assert torch.equal(actual, repeated)
        error, bound = ((one.double() - exact).norm() for one in (actual, theirs))
        assert error <= 2 * bound + torch.finfo(dtype).eps * exact.norm()
