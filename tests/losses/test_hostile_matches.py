"""A matching pair whose similarity is beyond the type's range: no loss may take it for a certain one.

Entries that only one pair shares are huge, so that its own similarity overflows and nothing else does.
"""

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, leaves
from megabatch import reference

N = 7
OWN = torch.eye(N, dtype=torch.bool)
LABELS = torch.arange(N).repeat(2)
SHARED = torch.tensor([0, 1, 1, 1, 2, 2, 3]).repeat(2)  # pairs 0 and 6 have a sole positive, others several
BANK = aligned_pairs(5, 9, noise=1.0, seed=5)[0]


def one_pair_overflows(sign=1, dtype=torch.float32, by_scale=False):
    """The first pair is at ±inf: by its product, or by the scale that multiplies it."""
    x, y = aligned_pairs(N, 8, noise=0.5, seed=3)
    largest = torch.finfo(dtype).max
    size = largest**0.5 * (0.9 if by_scale else 1.1)
    x, y = (torch.cat((side, torch.zeros(N, 1)), dim=1).to(dtype) for side in (x, y))
    x[0, 8], y[0, 8] = size, sign * size
    return leaves(x, y, torch.tensor(10.0, dtype=dtype))


def dense_info_nce(x, y, scale):
    return F.cross_entropy(scale * (x @ y.T), torch.arange(N))


def dense_bank(x, y, scale):
    logits = torch.cat(((x * y).sum(1, keepdim=True), x @ BANK.to(x.dtype).T), dim=1) * scale
    return F.cross_entropy(logits, torch.zeros(N, dtype=torch.int64))


def dense_smoothed(x, y, scale):
    logits = scale * (x @ y.T)
    ways = [F.cross_entropy(way, torch.arange(N), label_smoothing=0.1) for way in (logits, logits.T)]
    return sum(ways) / 2


def dense_hcl(x, y, scale, beta=1.0, tau_plus=0.1):
    s, n = scale * (x @ y.T), N - 1
    p = s.diagonal().exp()
    above, below = (((power * s).masked_fill(OWN, -math.inf)).exp().sum(1) for power in (1 + beta, beta))
    negatives = ((n * above / below - tau_plus * n * p) / (1 - tau_plus)).clamp_min(n * math.exp(-scale.item()))
    return -(p / (p + negatives)).log().mean()


def of_both_views(loss, labels, **options):
    return lambda x, y, scale: loss(torch.cat((x, y)), labels, scale, **options)


# Ours, and the dense loss that has to be NaN with it.
LOSSES = {
    "clip_loss": (mb.clip_loss, reference.clip_loss),
    "clip_loss, smoothed": (lambda x, y, s: mb.clip_loss(x, y, s, label_smoothing=0.1), dense_smoothed),
    "info_nce_loss": (lambda x, y, s: mb.info_nce_loss(x, y, scale=s), dense_info_nce),
    "info_nce_loss, both": (lambda x, y, s: mb.info_nce_loss(x, y, scale=s, symmetric=True), reference.clip_loss),
    "info_nce_loss, margin": (lambda x, y, s: mb.info_nce_loss(x, y, scale=s, margin=1e3), dense_info_nce),
    "info_nce_loss, bank alone": (
        lambda x, y, s: mb.info_nce_loss(x, y, scale=s, negatives=BANK.to(x.dtype), contrast=()),
        dense_bank,
    ),
    "hcl_loss": (lambda x, y, s: mb.hcl_loss(x, y, scale=s), dense_hcl),
    "nt_xent_loss": (mb.nt_xent_loss, reference.nt_xent_loss),
    "sup_con_loss, out, sole": (of_both_views(mb.sup_con_loss, LABELS), of_both_views(reference.sup_con_loss, LABELS)),
    "sup_con_loss, out": (of_both_views(mb.sup_con_loss, SHARED), of_both_views(reference.sup_con_loss, SHARED)),
    "sup_con_loss, in, sole": (
        of_both_views(mb.sup_con_loss, LABELS, form="in"),
        of_both_views(reference.sup_con_loss, LABELS, form="in"),
    ),
    "sup_con_loss, in": (
        of_both_views(mb.sup_con_loss, SHARED, form="in"),
        of_both_views(reference.sup_con_loss, SHARED, form="in"),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_scale", [False, True], ids=["product", "scale"])
def test_a_match_beyond_the_range_is_nan_and_not_certain(name, dtype, by_scale):
    mine, dense = LOSSES[name]
    inputs = one_pair_overflows(dtype=dtype, by_scale=by_scale)
    assert dense(*inputs).isnan(), "what this test compares with"
    loss = mine(*inputs)
    assert loss.isnan()
    found, wanted = torch.autograd.grad(loss, inputs), torch.autograd.grad(dense(*inputs), inputs)
    for actual, expected in zip(found, wanted, strict=True):
        assert expected.isnan().any()
        assert actual[expected.isnan()].isnan().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_match_below_the_range_is_no_finite_loss(name):
    mine, dense = LOSSES[name]
    inputs = one_pair_overflows(sign=-1)
    assert not dense(*inputs).isfinite()
    assert not mine(*inputs).isfinite()


@pytest.mark.parametrize("sign", [1, -1])
def test_losses_without_a_softmax_over_the_match_are_as_dense_ones(sign):
    x, y, scale = one_pair_overflows(sign)
    s = scale * (x @ y.T)
    dense_dcl = (s.masked_fill(OWN, -math.inf).logsumexp(1) - s.diagonal()).mean()
    assert torch.equal(mb.dcl_loss(x, y, scale=scale), dense_dcl)  # ∓inf
    torch.testing.assert_close(
        mb.siglip_loss(x, y, scale, -1.0), reference.siglip_loss(x, y, scale, -1.0)
    )  # a certain yes or no


def test_a_single_pair_beyond_the_range():
    x = torch.full((1, 2), 1e30, requires_grad=True)
    loss = mb.clip_loss(x, x, 1.0)
    assert loss.isnan()
    assert torch.autograd.grad(loss, x)[0].isnan().all()


def test_a_scale_beyond_the_range_at_several_widths():
    x, y = leaves(torch.eye(4, 6) - 0.1, torch.eye(4, 6) - 0.1)  # every pair is alike, every two others are not
    loss = mb.matryoshka_clip_loss(x, y, math.inf, widths=(4, 6))
    assert loss.isnan()
    assert all(gradient.isnan().all() for gradient in torch.autograd.grad(loss, (x, y)))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="kernels need Triton")
@pytest.mark.usefixtures("both_ways")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on inf and NaN, which are meant
@pytest.mark.parametrize(
    "loss",
    [
        lambda *inputs: mb.clip_loss(*inputs, backend="triton"),
        lambda x, y, s: mb.info_nce_loss(x, y, scale=s, backend="triton"),
        lambda *inputs: mb.nt_xent_loss(*inputs, backend="triton"),
    ],
    ids=["clip_loss", "info_nce_loss", "nt_xent_loss"],
)
def test_kernels_agree(loss):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = [tensor.detach().to(device).requires_grad_() for tensor in one_pair_overflows()]
    found = loss(*inputs)
    assert found.isnan()
    dx, dy, dscale = torch.autograd.grad(found, inputs)
    assert dx[0].isnan().all()
    assert dy.isnan().all()
    assert dscale.isnan()


# Losses that give the same embeddings to several operators. The gradients of some are beyond the range of float16.
SHARING = {
    "clip_loss, smoothed": lambda x, y, **o: mb.clip_loss(x, y, 3e5, label_smoothing=0.1, **o),
    "info_nce_loss, bank": lambda x, y, **o: mb.info_nce_loss(x, y, scale=3e5, negatives=y.detach().flip(0), **o),
    "info_nce_loss, GTE": lambda x, y, **o: mb.info_nce_loss(
        x, y, scale=3e5, contrast=("query-key", "key-query", "query-query", "key-key"), symmetric=True, **o
    ),
    "hcl_loss": lambda x, y, **o: mb.hcl_loss(x, y, scale=3e5, **o),
    "nt_xent_loss": lambda x, y, **o: mb.nt_xent_loss(x, y, 3e5, **o),
    "sup_con_loss": lambda x, y, **o: mb.sup_con_loss(torch.cat((x, y)), SHARED, 3e5, **o),
    "late_interaction_loss, negatives": lambda x, y, **o: mb.late_interaction_loss(
        x.view(N, 2, 4), y.view(N, 2, 4), scale=3e5, negatives=[y.detach().flip(0).view(N, 2, 4)], **o
    ),
}


@pytest.mark.parametrize("name", SHARING)
def test_gradients_of_several_operators_are_added_before_they_are_rounded(name):
    """float16 has infinities where the sum is beyond its range, and nowhere NaN, which is inf − inf."""
    sides = [side.half() for side in aligned_pairs(N, 8, noise=1.0, seed=3)]
    results = []
    for dtype in (torch.float16, torch.float32):
        inputs = leaves(*(side.to(dtype) for side in sides))
        results.append(torch.autograd.grad(SHARING[name](*inputs, reduction="none").sum(), inputs))
    assert any(part.isinf().any() for part in results[0]), "what this test is about"
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted.half(), rtol=2e-3, atol=1.0)
