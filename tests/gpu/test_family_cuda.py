"""The family of losses on a CUDA device: errors in every dtype, and no synchronisation with the host."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, leaves, outcomes
from megabatch import reference
from rounding import half_units

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("both_ways")]

WIDTHS, LABELS = [33, 64, 200], torch.arange(1000) % 300
MARGIN = 1 / 128 - 5 / 8  # of a guide, whose limit is then among the products of other pairs


def teacher(like):
    """Another model's embeddings of the same samples, the same numbers in every type."""
    return on_device(like.device, like.dtype)


@cache  # copied once, because copying waits
def on_device(device, dtype):
    return [t.bfloat16().to(device, dtype) for t in aligned_pairs(1000, 48, noise=1.0, seed=99)]


def soft(x, y, scale):
    logits, targets = scale * x @ y.T, 30.0 * teacher(x)[0] @ teacher(x)[1].T
    if x.dtype != torch.float64:
        logits, targets = logits.float(), targets.float()
    return (F.cross_entropy(logits, targets.softmax(1)) + F.cross_entropy(logits.T, targets.T.softmax(1))) / 2


def guide(like):
    """A guide whose products are multiples of 1/64, so that every type and order of summation leaves out the same pairs."""
    return tuple((t * 8).round() / 8 for t in teacher(like))


def guided(x, y, scale):
    seen = guide(x)[0].double() @ guide(x)[1].double().T
    left_out = (seen > seen.diagonal()[:, None] + MARGIN).fill_diagonal_(False)
    logits = (scale * x @ y.T).masked_fill(left_out, -torch.inf)
    return F.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), torch.arange(len(x), device=x.device))


LOSSES = {
    "guide": (
        lambda x, y, scale, **o: mb.info_nce_loss(x, y, scale=scale, guide=guide(x), margin=MARGIN, **o),
        guided,
    ),
    "nt_xent_loss": (mb.nt_xent_loss, reference.nt_xent_loss),
    "sup_con_loss out": (
        lambda x, y, scale, **o: mb.sup_con_loss(torch.cat((x, y)), LABELS.repeat(2).to(x.device), scale, **o),
        lambda x, y, scale: reference.sup_con_loss(torch.cat((x, y)), LABELS.repeat(2).to(x.device), scale),
    ),
    "sup_con_loss in": (
        lambda x, y, scale, **o: mb.sup_con_loss(torch.cat((x, y)), LABELS.repeat(2).to(x.device), scale, form="in", **o),
        lambda x, y, scale: reference.sup_con_loss(torch.cat((x, y)), LABELS.repeat(2).to(x.device), scale, form="in"),
    ),
    "soft_clip_loss": (
        lambda x, y, scale, **o: mb.soft_clip_loss(x, y, scale, *teacher(x), 30.0, **o),
        soft,
    ),
    "matryoshka": (
        partial(mb.matryoshka_clip_loss, widths=WIDTHS),
        lambda x, y, scale: reference.matryoshka_clip_loss(x, y, scale, WIDTHS, [1.0] * 3),
    ),
}


def inputs(noise, scale, dtype, seed):
    pairs = [t.to("cuda", dtype) for t in aligned_pairs(1000, 200, noise=noise, seed=seed)]
    return leaves(*pairs, torch.tensor(scale, device="cuda", dtype=dtype))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("noise", "scale"), [(10.0, 14.0), (2.0, 50.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_error_is_at_most_twice_the_dense_one(loss, noise, scale, dtype, backend):
    mine, dense = LOSSES[loss]
    errors = []
    for seed in range(0, 32, 2):
        given = inputs(noise, scale, dtype, seed)
        exact = outcomes(dense, leaves(*(t.double() for t in given)))
        results = outcomes(partial(mine, backend=backend), given), outcomes(dense, given)
        norms = [[(a - b).norm() for a, b in zip(result, exact, strict=True)] for result in results]
        errors.append([*norms, half_units(exact)])
    found, bar, least = torch.tensor(errors).square().mean(0).sqrt()
    assert (found <= torch.maximum(2 * bar, least)).all(), (found, bar, least)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("loss", ["nt_xent_loss", "sup_con_loss out", "guide", "matryoshka"])
def test_the_host_never_waits(loss):
    given = inputs(1.0, 20.0, torch.bfloat16, 0)
    labels = LABELS.repeat(2).cuda()

    def step():
        value = (
            mb.sup_con_loss(torch.cat(given[:2]), labels, given[2]) if loss == "sup_con_loss out" else LOSSES[loss][0](*given)
        )
        value.backward()

    step()  # compiles
    before = given[0].grad.clone()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(given[0].grad, 2 * before)  # the same gradient, added once more
