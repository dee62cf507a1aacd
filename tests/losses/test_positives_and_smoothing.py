"""SigLIP with several positives by ids, and label smoothing of the softmax losses, against dense float64 losses."""

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, assert_same_outcomes, leaves, tile_size, unit


def dense_siglip(image, text, scale, bias, ids):
    signs = torch.where(ids[:, None] == ids, 1.0, -1.0).to(image.dtype)
    return -F.logsigmoid(signs * (scale * image @ text.T + bias)).sum() / len(image)


def numbers(*values):
    return leaves(*(torch.tensor(value, dtype=torch.float64) for value in values))


@pytest.mark.parametrize("id_count", [1, 4, 1000])
@pytest.mark.parametrize("tile", [(5, 4), (1024, 1024)])
def test_several_positives(id_count, tile):
    inputs = [*leaves(*aligned_pairs(23, 6, noise=1.0, seed=0)), *numbers(20.0, -5.0)]
    ids = torch.arange(23) % id_count
    with tile_size(*tile):
        assert_same_outcomes(
            lambda *a: mb.siglip_loss(*a, ids=ids, ids_are_positives=True),
            lambda *a: dense_siglip(*a, ids),
            inputs,
        )


def test_several_positives_are_open_clips_loss_where_all_ids_differ():
    theirs = pytest.importorskip("open_clip.loss").SigLipLoss()
    inputs = [*leaves(*aligned_pairs(23, 6, noise=1.0, seed=0)), *numbers(20.0, -5.0)]
    assert_same_outcomes(lambda *a: mb.siglip_loss(*a, ids=torch.arange(23), ids_are_positives=True), theirs, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_several_positives_in_other_types(dtype, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    image, text = (t.to(dtype).requires_grad_() for t in aligned_pairs(90, 24, noise=0.3, seed=0))
    ids = torch.arange(90) % 7
    found = mb.siglip_loss(image, text, 20.0, -5.0, ids=ids, ids_are_positives=True, backend=backend)
    wide = leaves(image.double(), text.double())
    wanted = dense_siglip(*wide, 20.0, -5.0, ids)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    rounding = 2 * torch.finfo(dtype).eps
    for actual, expected in zip(torch.autograd.grad(found, (image, text)), torch.autograd.grad(wanted, wide), strict=True):
        size = expected.abs().max().item()
        torch.testing.assert_close(actual.double(), expected, rtol=rounding, atol=rounding * size + 1e-6 * size)


def test_certain_positives_keep_their_digits():
    """Positives at s = 40: the sum over all pairs of softplus(s), minus s, would see nothing of exp(−40)."""
    x = unit(1, 8, seed=0, dtype=torch.float32).expand(16, 8).contiguous().requires_grad_()
    loss = mb.siglip_loss(x, x.detach(), 40.0, 0.0, ids=torch.zeros(16, dtype=torch.int64), ids_are_positives=True)
    wanted = dense_siglip(x.detach().double(), x.detach().double(), 40.0, 0.0, torch.zeros(16))
    assert 0 < wanted < 1e-14
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=1e-4, atol=0)


def test_positives_need_ids():
    with pytest.raises(ValueError, match="ids must be given if ids_are_positives"):
        mb.siglip_loss(unit(3, 2, seed=0), unit(3, 2, seed=1), 1.0, 0.0, ids_are_positives=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_smoothing_of_clip(smoothing):
    def dense(image, text, scale):
        logits, labels = scale * image @ text.T, torch.arange(len(image))
        rows = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        return (rows + F.cross_entropy(logits.T, labels, label_smoothing=smoothing)) / 2

    inputs = [*leaves(*aligned_pairs(23, 6, noise=1.0, seed=0)), *numbers(20.0)]
    with tile_size(5, 4):
        assert_same_outcomes(lambda *a: mb.clip_loss(*a, label_smoothing=smoothing), dense, inputs)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("with_log_q", [False, True])
def test_smoothing_of_info_nce(symmetric, with_log_q):
    """Over keys and further negatives alike; keys look for queries, of which there are no further ones."""
    log_q = torch.linspace(-4, 0, 23, dtype=torch.float64) if with_log_q else None

    def dense(query, key, scale, negatives):
        corrected = scale * query @ key.T - (0.0 if log_q is None else log_q)
        logits, labels = torch.cat((corrected, scale * query @ negatives.T), 1), torch.arange(len(query))
        forward = F.cross_entropy(logits, labels, label_smoothing=0.1)
        if not symmetric:
            return forward
        return (forward + F.cross_entropy(scale * key @ query.T, labels, label_smoothing=0.1)) / 2

    inputs = [*leaves(*aligned_pairs(23, 6, noise=1.0, seed=0)), *numbers(20.0), unit(31, 6, seed=3).requires_grad_()]
    assert_same_outcomes(
        lambda q, k, s, n: mb.info_nce_loss(q, k, scale=s, negatives=n, label_smoothing=0.1, symmetric=symmetric, log_q=log_q),
        dense,
        inputs,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smoothing_under_autocast_sees_what_products_see(dtype):
    image, text = leaves(*(t.float() for t in aligned_pairs(23, 6, noise=1.0, seed=0)))
    with torch.autocast("cpu", dtype):
        found = mb.clip_loss(image, text, 20.0, label_smoothing=0.5)
    rounded = [t.detach().to(dtype).double() for t in (image, text)]
    torch.testing.assert_close(found.double(), mb.clip_loss(*rounded, 20.0, label_smoothing=0.5), rtol=1e-6, atol=0)


def test_smoothing_needs_all_pairs():
    x, y = unit(3, 2, seed=0), unit(3, 2, seed=1)
    with pytest.raises(ValueError, match="ids must be None with label smoothing"):
        mb.clip_loss(x, y, 1.0, ids=torch.arange(3), label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing must be a number from 0 to 1, got -0.1"):
        mb.clip_loss(x, y, 1.0, label_smoothing=-0.1)
