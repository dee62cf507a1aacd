"""Exact ties at large scales: a loss over n equal logits is log n, and its gradient is 0, at every scale up to 10⁸.

Logits of 10⁸ have steps of 8 in float32, so a loss must not round a logsumexp before it subtracts the logit of the match.
"""

import contextlib
import importlib.util
import math

import pytest
import torch

import megabatch as mb
from helpers import tile_size
from megabatch import dispatch

N = 8
SCALES = [1e3, 1e6, 1e7, 12345678.9, 1e8 / 3, 1e8]
SCALES_OF_KERNELS = [1e6, 1e8 / 3, 1e8]  # interpreted kernels are slow
EVERY_CONTRAST = ("query-key", "key-query", "query-query", "key-key")
PAIRS, FOURS = torch.arange(N) // 2, torch.arange(N) // 4


def tokens(x):
    return x[:, None].repeat(1, 3, 1)


# Losses of equal rows, and the number of logits that are equal.
LOSSES = {
    "clip_loss": (lambda x, s, **o: mb.clip_loss(x, x, s, **o), N),
    "clip_loss, smoothed": (lambda x, s, **o: mb.clip_loss(x, x, s, label_smoothing=0.1, **o), N),
    "info_nce_loss": (lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, **o), N),
    "info_nce_loss, negatives": (
        lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, negatives=[x, x], label_smoothing=0.1, **o),
        3 * N,
    ),
    "info_nce_loss, private": (
        lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, negatives=mb.Negatives(x[:, None], private=True), **o),
        N + 1,
    ),
    "info_nce_loss, all contrasts": (
        lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, contrast=EVERY_CONTRAST, symmetric=True, **o),
        4 * (N - 1) + 1,
    ),
    "info_nce_loss, negatives alone": (lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, negatives=x, contrast=(), **o), N + 1),
    "info_nce_loss, margin": (lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, margin=0.1, **o), N),
    "info_nce_loss, guide": (lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, guide=(x.detach(), x.detach()), **o), N),
    "info_nce_loss, log_q": (lambda x, s, **o: mb.info_nce_loss(x, x, scale=s, log_q=torch.zeros(N), **o), N),
    "dcl_loss": (lambda x, s, **o: mb.dcl_loss(x, x, scale=s, symmetric=True, **o), N - 1),
    "hcl_loss": (lambda x, s, **o: mb.hcl_loss(x, x, scale=s, beta=0.3, **o), N),
    "soft_clip_loss": (lambda x, s, **o: mb.soft_clip_loss(x, x, s, x.detach(), x.detach(), 3.0, **o), N),
    "matryoshka_clip_loss": (lambda x, s, **o: mb.matryoshka_clip_loss(x, x, s, widths=[2, 4], weights=[0.5, 0.5], **o), N),
    "nt_xent_loss": (lambda x, s, **o: mb.nt_xent_loss(x, x, s, **o), 2 * N - 1),
    "sup_con_loss, sole positive": (lambda x, s, **o: mb.sup_con_loss(x, PAIRS, s, **o), N - 1),
    "sup_con_loss": (lambda x, s, **o: mb.sup_con_loss(x, FOURS, s, **o), N - 1),
    "sup_con_loss, in": (lambda x, s, backend, **o: mb.sup_con_loss(x, FOURS, s, form="in", **o), N - 1),
    "late_interaction_loss": (
        lambda x, s, **o: mb.late_interaction_loss(tokens(x), tokens(x), scale=s / 3, symmetric=True, **o),
        N,
    ),
    "late_interaction_loss, negatives": (
        lambda x, s, **o: mb.late_interaction_loss(tokens(x), tokens(x), scale=s, negatives=tokens(x), normalize=True, **o),
        2 * N,
    ),
}


def equal_rows(dtype):
    x = torch.zeros(N, 4, dtype=dtype)
    x[:, 0] = 1.0
    return x.requires_grad_()


def assert_log_of(loss, count, x, scale):
    rounding = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(loss.detach(), torch.full_like(loss, math.log(count)), rtol=0, atol=rounding)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    rounding = 64 * torch.finfo(x.dtype).eps  # of the terms that cancel
    assert gradient.abs().max() <= rounding * N * scale


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_ties(name, reduction):
    loss, count = LOSSES[name]
    x = equal_rows(torch.float32)
    for scale in SCALES:
        assert_log_of(loss(x, scale, reduction=reduction, backend="eager"), count, x, scale)
    with tile_size(3, 5):
        assert_log_of(loss(x, scale, reduction=reduction, backend="eager"), count, x, scale)


@pytest.mark.quick(
    {"scale": 1e8, "name": "clip_loss", "dtype": torch.float32},
    {"scale": 1e8 / 3, "name": "sup_con_loss", "dtype": torch.float16},
    {"scale": 1e8 / 3, "name": "info_nce_loss", "dtype": torch.float16, "reduction": "mean"},
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="kernels need Triton")
@pytest.mark.parametrize("way", ["in memory", "over tiles"])
@pytest.mark.parametrize("scale", SCALES_OF_KERNELS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_ties_by_kernels(name, dtype, reduction, scale, way):
    loss, count = LOSSES[name]
    x = equal_rows(dtype)
    with dispatch.override(dense_triton=0) if way == "over tiles" else contextlib.nullcontext():
        value = loss(x, scale, reduction=reduction, backend="triton")
    gradient_scale = min(scale, 1e3) if dtype == torch.float16 else scale  # gradients of 10⁸ are beyond float16
    if gradient_scale == scale:
        assert_log_of(value, count, x, scale)
    else:
        torch.testing.assert_close(value.detach(), torch.full_like(value, math.log(count)), rtol=0, atol=1e-5)


def on_a_rank(group, rank, name, scale):
    x = equal_rows(torch.float32)
    loss = LOSSES[name][0](x, scale, reduction="none", group=group, backend="eager")
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), gradient


@pytest.mark.quick(
    {"name": "info_nce_loss, negatives"}, {"name": "sup_con_loss"}, {"name": "nt_xent_loss"}, {"name": "hcl_loss"}
)
@pytest.mark.parametrize("name", [name for name in LOSSES if "private" not in name])
def test_ties_over_ranks(pool, name):
    """All logits of the batch of both ranks, 16 rows, are equal as well."""
    whole = {"dcl_loss": 15, "nt_xent_loss": 31, "info_nce_loss, all contrasts": 61, "info_nce_loss, negatives alone": 17}
    count = whole.get(name, 15 if name.startswith("sup_con_loss") else 2 * LOSSES[name][1])
    for scale in (1e6, 1e8):
        for loss, gradient in pool.run(on_a_rank, 2, name, scale):
            torch.testing.assert_close(loss, torch.full_like(loss, math.log(count)), rtol=0, atol=1e-5)
            assert gradient.abs().max() <= 1e-5 * N * scale
