"""Rounding errors in float32, bfloat16 and float16: at most twice those of dense PyTorch in the same type.

The truth is float64 on the same rounded inputs. Errors are root mean squares over seeds: a single dense error can be small by
luck, its size over many draws cannot.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import PATIENCE, aligned_pairs, dense_clip, dense_siglip, outcomes, tile_size, unit
from megabatch import reference

SEEDS = 24
REGIMES = {  # noise between matching pairs, scale
    "untrained": (10.0, 14.0),
    "training": (0.7, 50.0),
    "trained": (0.3, 100.0),
    "cold": (3.0, 1000.0),
}


def root_mean_square_errors(function, truth, draws):
    """Of the value and of each gradient, relative to the size of the true one."""
    squares = []
    for inputs in draws:
        wanted = outcomes(truth, [t.detach().double().requires_grad_() for t in inputs])
        found = outcomes(function, [t.detach().clone().requires_grad_() for t in inputs])
        squares.append(torch.stack([(a - b).square().sum() for a, b in zip(found, wanted, strict=True)]))
    return torch.stack(squares).mean(0).sqrt()


@pytest.mark.quick(
    {"regime": "training", "dtype": torch.float32},
    {"regime": "training", "dtype": torch.bfloat16, "loss": "clip"},
    {"regime": "cold", "dtype": torch.float32, "loss": "clip"},
)
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_the_dense_one(loss, regime, dtype):
    noise, scale = REGIMES[regime]
    numbers = [scale] if loss == "clip" else [scale, -10.0]
    draws = [
        [t.to(dtype) for t in aligned_pairs(192, 48, noise=noise, seed=seed)] + [torch.tensor(n, dtype=dtype) for n in numbers]
        for seed in range(0, 2 * SEEDS, 2)
    ]
    mine, dense, truth = {
        "clip": (mb.clip_loss, dense_clip, reference.clip_loss),
        "siglip": (mb.siglip_loss, dense_siglip, reference.siglip_loss),
    }[loss]
    with tile_size(64, 40):
        found = root_mean_square_errors(mine, truth, draws)
    bar = root_mean_square_errors(dense, truth, draws)
    names = ["value", "d image", "d text", "d scale", "d bias"]
    report = {name: (a.item(), b.item()) for name, a, b in zip(names, found, bar, strict=False)}
    assert (found <= 2 * bar).all(), report
    if dtype == torch.float32:
        assert (bar < 1e-2).all(), "the bar itself must mean something"


@pytest.mark.parametrize("N", [3, 7, 100, 1000, 1023])
def test_the_mean_of_equal_losses_is_that_loss(N):
    """Every row of zeros has the same loss: added up in float32 and multiplied by a rounded 1/N, they came out as another."""
    x = torch.zeros(N, 4)
    row = mb.pairwise_logsumexp(x, x, exclude="diagonal")[0][0]
    one_of_many = F.softplus(row)
    correct = torch.tensor(N, dtype=torch.float64).log().float()  # a small batch adds its softmax in float64
    assert mb.dcl_loss(x, x, scale=1.0) == row
    assert mb.clip_loss(x, x, 1.0) == correct
    assert mb.clip_loss(x, x, 1.0, label_smoothing=0.1) == one_of_many
    assert mb.info_nce_loss(x, x, scale=1.0, symmetric=True) == correct
    assert mb.matryoshka_clip_loss(x + 1, x + 1, 1e-30, widths=(2, 4)) == 2 * correct
    assert mb.hcl_loss(x, x, scale=1.0, beta=0.0, tau_plus=0.0) == one_of_many
    assert mb.sup_con_loss(x, torch.zeros(N, dtype=torch.int64)) == row
    assert mb.soft_clip_loss(x, x, 1.0, x, x, 1.0) == mb.pairwise_logsumexp(x, x)[0][0]


def hard_negatives(query, several):
    return (
        unit(len(query), 3, query.shape[1], seed=99).to(query.dtype)
        if several
        else unit(50, query.shape[1], seed=99).to(query.dtype)
    )


def dense_bank(query, key, scale):
    logits = torch.cat(((query * key).sum(1, keepdim=True), query @ hard_negatives(query, False).T), dim=1) * scale
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64))


def dense_hard(query, key, scale):
    keys = torch.cat((key, hard_negatives(query, True).flatten(0, 1)))
    return F.cross_entropy(scale * (query @ keys.T), torch.arange(len(query)))


def by_label(loss, rows_each, **options):
    """Of two views: labels of two rows, or of more."""

    def of_labels(x, y, scale):
        labels = torch.arange(len(x)) % (2 * len(x) // rows_each)
        return loss(torch.cat((x, y)), labels.repeat(2), scale, **options)

    return of_labels


# Mine, dense, rows, width, scale, noise: where parts of the scale's gradient, or of the loss, nearly cancel.
IN_PARTS = {
    "nt_xent": (mb.nt_xent_loss, reference.nt_xent_loss, 400, 32, 12.0, 3.0),
    "info_nce_loss, a bank alone": (
        lambda x, y, s: mb.info_nce_loss(x, y, scale=s, negatives=hard_negatives(x, False), contrast=()),
        *(dense_bank, 800, 48, 5.0, 10.0),
    ),
    "info_nce_loss, hard negatives": (
        lambda x, y, s: mb.info_nce_loss(x, y, scale=s, negatives=hard_negatives(x, True)),
        *(dense_hard, 200, 48, 9.0, 5.0),
    ),
    "sup_con_loss, pairs": (by_label(mb.sup_con_loss, 2), by_label(reference.sup_con_loss, 2), 150, 32, 10.0, 3.0),
    "sup_con_loss, in": (
        by_label(mb.sup_con_loss, 30, form="in"),
        by_label(reference.sup_con_loss, 30, form="in"),
        150,
        32,
        10.0,
        10.0,
    ),
}


@pytest.mark.quick({"name": "nt_xent"}, {"name": "info_nce_loss, hard negatives"})
@pytest.mark.parametrize("name", IN_PARTS)
def test_a_loss_of_several_parts_is_rounded_once(name):
    """Its parts come from operators of their own, whose gradients of the scale are of opposite signs.

    Rounded before they are added, they left the scale with three to eight times the dense error here.
    """
    mine, dense, N, D, scale, noise = IN_PARTS[name]
    draws = [
        [*(t.float() for t in aligned_pairs(N, D, noise=noise, seed=seed)), torch.tensor(scale)]
        for seed in range(0, 2 * SEEDS, 2)
    ]
    found, bar = (root_mean_square_errors(function, dense, draws) for function in (mine, dense))
    assert (found <= 2 * bar).all(), list(zip(["value", "dx", "dy", "d scale"], found.tolist(), bar.tolist(), strict=True))


@pytest.mark.parametrize(
    "loss",
    [
        mb.clip_loss,
        mb.nt_xent_loss,
        lambda x, y, s: mb.siglip_loss(x, y, s, -1.0),
        lambda x, y, s: mb.soft_clip_loss(x, y, s, x, y, 3.0),
        lambda x, y, s: mb.matryoshka_clip_loss(x, y, s, widths=(4, 16)),
        lambda x, y, s: mb.pairwise_softplus(x, y, s).mean(),
    ],
)
def test_a_float64_scale_beside_float32_embeddings_gets_a_float64_gradient(loss):
    x, y = (t.float() for t in aligned_pairs(64, 16, noise=1.0, seed=0))
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    value = loss(x, y, scale)
    (dscale,) = torch.autograd.grad(value, scale)
    assert (value.dtype, dscale.dtype) == (torch.float32, torch.float64)
    assert dscale != dscale.float(), "rounded on the way"


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_precision_of_forward_is_that_of_backward(when):
    x, y = (t.float().requires_grad_() for t in aligned_pairs(64, 16, noise=1.0, seed=0))
    settings = ("high", "highest") if when == "forward" else ("highest", "high")
    try:
        torch.set_float32_matmul_precision(settings[0])
        total = mb.pairwise_logsumexp(x, y, 1e4)[0].sum()
        wanted = torch.autograd.grad(mb.pairwise_logsumexp(x, y, 1e4)[0].sum(), x)
        torch.set_float32_matmul_precision(settings[1])
        found = torch.autograd.grad(total, x)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found[0], wanted[0])


SETTINGS = {  # whether they round the products of a CPU
    "torch.set_float32_matmul_precision('high')": True,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": False,  # of another device
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": True,
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'ieee'": False,
}
IN_A_CHILD_EACH = """
import os, sys
import torch
import megabatch as mb
torch.set_num_threads(1)  # threads do not survive a fork
x, y = torch.randn(2, 50, 20, generator=torch.Generator().manual_seed(0))
exact = mb.pairwise_logsumexp(x, y)[0]
for setting in sys.argv[1:]:
    if os.fork() == 0:
        exec(setting)
        print(not torch.equal(mb.pairwise_logsumexp(x, y)[0], exact), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, setting
"""


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_way_to_set_the_precision():
    newer = hasattr(torch.backends, "fp32_precision")
    chosen = {text: rounds for text, rounds in SETTINGS.items() if newer or "fp32_precision" not in text}
    call = [sys.executable, "-c", IN_A_CHILD_EACH, *chosen]
    done = subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(rounds) for rounds in chosen.values()]


@pytest.mark.parametrize("which", ["high", "medium"])
def test_tf32_is_a_rounding_of_the_inputs_and_nothing_else(which):
    from megabatch.tiles.block import round_to_tf32

    x, y = (t.float() for t in aligned_pairs(100, 32, noise=1.0, seed=0))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(which)
    try:
        found = mb.pairwise_logsumexp(x, y, 30.0)
    finally:
        torch.set_float32_matmul_precision(before)
    wanted = reference.pairwise_logsumexp(round_to_tf32(x).double(), round_to_tf32(y).double(), 30.0)
    exact = reference.pairwise_logsumexp(x.double(), y.double(), 30.0)
    for actual, rounded, unrounded in zip(found, wanted, exact, strict=True):
        assert (actual - rounded).abs().max() < 1e-5
        assert (actual - unrounded).abs().max() > 1e-4


@pytest.mark.parametrize("form", ["out", "in"])
@pytest.mark.parametrize("classes", [2, 5, 13])
def test_sup_con_has_the_digits_of_float64(form, classes):
    """1e-12 is some thousand roundings of a loss near 1; a logarithm of counts in float32 would cost 1e-8."""
    z, labels = aligned_pairs(120, 16, noise=1.0, seed=classes)[0], torch.arange(120) % classes
    found, wanted = (loss(z, labels, 10.0, form=form) for loss in (mb.sup_con_loss, reference.sup_con_loss))
    assert abs(found - wanted) < 1e-12
