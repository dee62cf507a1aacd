"""A row of zeros, from a dead encoder or a padded sample: in every loss what plain products make of it, finite and alike.

Its similarity to everything is 0. It gets the gradient of the products, and gives none to its partners.
"""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, assert_same_outcomes, leaves, tile_size, unit
from megabatch import reference

N = 12
LABELS = (torch.arange(N) % 5).repeat(2)
BANK = torch.cat((unit(4, 8, seed=5), torch.zeros(1, 8, dtype=torch.float64)))
TEACHER = [side.clone() for side in aligned_pairs(N, 5, noise=0.7, seed=9)]
TEACHER[0][3] = 0
WHERE = {"query": [2], "key": [5], "pair": [7], "all": range(N)}


def of_both_views(loss, **options):
    return lambda x, y, scale, **more: loss(torch.cat((x, y)), LABELS, scale, **options, **more)


def dense_margin(x, y, scale):
    products = x @ y.T
    above = products > products.diagonal()[:, None] + 0.1 + 1e-12
    return F.cross_entropy((scale * products).masked_fill(above, -torch.inf), torch.arange(N))


def teacher(like):
    return [side.to(like.dtype) for side in TEACHER]


# Ours, and the dense loss.
LOSSES = {
    "clip_loss": (mb.clip_loss, reference.clip_loss),
    "siglip_loss": (
        lambda x, y, s, **o: mb.siglip_loss(x, y, s, -2.0, **o),
        lambda x, y, s: reference.siglip_loss(x, y, s, -2.0),
    ),
    "info_nce_loss": (
        lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, negatives=BANK.to(x.dtype), **o),
        lambda x, y, s: reference.info_nce_loss(x, y, s, BANK),
    ),
    "info_nce_loss, margin": (lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, margin=0.1, **o), dense_margin),
    "info_nce_loss, guide": (
        lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, margin=0.1, guide=(x.detach(), y.detach()), **o),
        dense_margin,
    ),
    "dcl_loss": (
        lambda x, y, s, **o: mb.dcl_loss(x, y, scale=s, negatives=BANK.to(x.dtype), **o),
        lambda x, y, s: reference.dcl_loss(x, y, s, BANK),
    ),
    "hcl_loss": (
        lambda x, y, s, **o: mb.hcl_loss(x, y, scale=s, negatives=BANK.to(x.dtype), **o),
        lambda x, y, s: reference.hcl_loss(x, y, s, 1.0, 0.1, BANK),
    ),
    "soft_clip_loss": (
        lambda x, y, s, **o: mb.soft_clip_loss(x, y, s, *teacher(x), 9.0, **o),
        lambda x, y, s: reference.soft_clip_loss(x, y, s, *teacher(x), 9.0),
    ),
    "nt_xent_loss": (mb.nt_xent_loss, reference.nt_xent_loss),
    "sup_con_loss": (of_both_views(mb.sup_con_loss), of_both_views(reference.sup_con_loss)),
    "sup_con_loss, in": (of_both_views(mb.sup_con_loss, form="in"), of_both_views(reference.sup_con_loss, form="in")),
    "matryoshka_clip_loss": (
        lambda x, y, s, **o: mb.matryoshka_clip_loss(x, y, s, widths=[3, 8], **o),
        lambda x, y, s: reference.matryoshka_clip_loss(x, y, s, [3, 8], [1, 1]),
    ),
}


def data(where, dtype=torch.float64):
    x, y = aligned_pairs(N, 8, noise=1.0, seed=0)
    if where != "key":
        x[WHERE[where]] = 0
    if where != "query":
        y[WHERE[where]] = 0
    return leaves(*(t.to(dtype) for t in (x, y, torch.tensor(6.0, dtype=torch.float64))))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", LOSSES)
def test_as_in_dense_pytorch(name, where):
    """F.normalize leaves zeros as they are, and divides the gradient by its eps, 1e-12; so does a loss that normalises."""
    with tile_size(4, 5):
        assert_same_outcomes(*LOSSES[name], data(where), 12.0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.quick(
    *({"where": "pair", "name": name} for name in ("clip_loss", "siglip_loss", "info_nce_loss, guide", "dcl_loss"))
)
@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sup_con_loss, in"])
def test_kernels_do_the_same(name, where):
    mine, dense = LOSSES[name]
    given = data(where, torch.float32)
    wide = leaves(*(tensor.detach().double() for tensor in given))
    found, wanted = mine(*given, backend="triton"), dense(*wide)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=0)
    pairs = zip(torch.autograd.grad(found, given), torch.autograd.grad(wanted, wide), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["clip_loss", "siglip_loss", "nt_xent_loss", "info_nce_loss"])
def test_over_ranks(pool, name):
    value, dx, dy, _ = outcome(name, *data("pair"))
    answers = pool.run(on_a_rank, 2, name)
    torch.testing.assert_close((answers[0][0] + answers[1][0]) / 2, value, rtol=1e-12, atol=0)
    for i, expected in ((1, dx), (2, dy)):
        torch.testing.assert_close(torch.cat([answer[i] for answer in answers]) / 2, expected, rtol=0, atol=1e-12)


def on_a_rank(group, rank, name):
    x, y, scale = data("pair")
    own = slice(6 * rank, 6 * rank + 6)
    options = {"negatives": BANK[[[0, 1], [2, 3, 4]][rank]], "scale": scale} if name == "info_nce_loss" else None
    x, y = leaves(x[own], y[own])
    if options is None:
        return outcome(name, x, y, scale, group=group)
    loss = mb.info_nce_loss(x, y, group=group, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (x, y, scale))]


def outcome(name, x, y, scale, **options):
    loss = LOSSES[name][0](x, y, scale, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (x, y, scale))]
