"""dcl_loss and hcl_loss against dense float64 losses, one and two views, with ids, at their edges.

No package that these are known from is among the test requirements; the dense losses follow the papers' formulas.
"""

import pytest
import torch

import megabatch as mb
from helpers import aligned_pairs, assert_same_outcomes, leaves, tile_size, unit
from megabatch import reference

TWO_VIEWS = {"contrast": ("query-key", "query-query"), "symmetric": True}


def compared(query, key, scale, ids, *, two_views):
    """Similarities to all negatives of each anchor, one row each, −inf where left out, and to the match."""
    N = len(query)
    out = torch.eye(N, dtype=torch.bool) if ids is None else ids[:, None] == ids
    match = scale * (query * key).sum(1)
    across = (scale * query @ key.T).masked_fill(out, -torch.inf)
    if not two_views:
        return across, match
    within = [(scale * side @ side.T).masked_fill(out, -torch.inf) for side in (query, key)]
    rows = torch.cat((across, within[0]), 1), torch.cat((across.T, within[1]), 1)
    return torch.cat(rows), torch.cat((match, match))


def dense_dcl(query, key, scale, ids=None, *, two_views=False):
    s, match = compared(query, key, scale, ids, two_views=two_views)
    some = s.isfinite().any(1)
    return (s[some].logsumexp(1) - match[some]).sum() / len(s)


def dense_hcl(query, key, scale, beta, tau_plus, ids=None, *, two_views=False):
    s, match = compared(query, key, scale, ids, two_views=two_views)
    n = s.isfinite().sum(1).to(s.dtype)
    weight = torch.where(s.isfinite(), (beta * s).exp(), 0.0)
    weighted = n * (weight * s.exp()).sum(1) / weight.sum(1)
    negatives = (weighted - tau_plus * n * match.exp()) / (1 - tau_plus)
    negatives = torch.maximum(negatives, n * (-scale).exp())
    return -(match.exp() / (match.exp() + negatives)).log().mean()


def data(scale=5.0, N=21, noise=1.0):
    return leaves(*aligned_pairs(N, 7, noise=noise, seed=0), torch.tensor(scale, dtype=torch.float64))


@pytest.mark.parametrize("two_views", [False, True])
@pytest.mark.parametrize("ids", [None, torch.arange(21) % 8])
def test_dcl(two_views, ids):
    options = TWO_VIEWS if two_views else {}
    with tile_size(4, 5):
        assert_same_outcomes(
            lambda q, k, s: mb.dcl_loss(q, k, scale=s, ids=ids, **options),
            lambda q, k, s: dense_dcl(q, k, s, ids, two_views=two_views),
            data(),
            5.0,
        )


@pytest.mark.parametrize("guided", [False, True])
def test_dcl_with_log_q_and_a_margin(guided):
    """Keys that are more similar than the own key by more than the margin are left out, as in info_nce_loss."""
    log_q = torch.linspace(-3, -1, 21, dtype=torch.float64)
    guide = tuple(aligned_pairs(21, 5, noise=1.0, seed=3)) if guided else None

    def dense(query, key, scale):
        logits = scale * query @ key.T - log_q
        compared = query.detach() @ key.detach().T if guide is None else guide[0] @ guide[1].T
        out = (compared > compared.diagonal()[:, None] + 0.1) | torch.eye(21, dtype=torch.bool)
        return (logits.masked_fill(out, -torch.inf).logsumexp(1) - logits.diagonal()).mean()

    with tile_size(4, 5):
        assert_same_outcomes(
            lambda q, k, s: mb.dcl_loss(q, k, scale=s, log_q=log_q, margin=0.1, guide=guide), dense, data(), 5.0
        )


@pytest.mark.parametrize("two_views", [False, True])
@pytest.mark.parametrize("ids", [None, torch.arange(21) % 8])
@pytest.mark.parametrize(("beta", "tau_plus"), [(0.0, 0.0), (0.0, 0.1), (1.0, 0.1), (0.5, 0.02), (2.0, 0.0)])
def test_hcl(two_views, ids, beta, tau_plus):
    options = TWO_VIEWS if two_views else {}
    with tile_size(4, 5):
        assert_same_outcomes(
            lambda q, k, s: mb.hcl_loss(q, k, scale=s, beta=beta, tau_plus=tau_plus, ids=ids, **options),
            lambda q, k, s: dense_hcl(q, k, s, beta, tau_plus, ids, two_views=two_views),
            data(),
            5.0 * (1 + beta),
        )


BANK = unit(9, 7, seed=8)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_hcl_counts_further_negatives(beta):
    """Hard negatives and a bank, given one by one or together, as in the other losses."""
    hard = leaves(unit(21, 2, 7, seed=5))[0]
    forms = {
        "one tensor": lambda n: torch.cat((n.flatten(0, 1), BANK)),
        "several": lambda n: [n, BANK],
        "with owners": lambda n: [
            mb.Negatives(n.flatten(0, 1), owner=torch.arange(21).repeat_interleave(2)),
            mb.Negatives(BANK),
        ],
    }
    for given in forms.values():
        with tile_size(4, 5):
            assert_same_outcomes(
                lambda q, k, s, n, given=given: mb.hcl_loss(q, k, scale=s, beta=beta, negatives=given(n)),
                lambda q, k, s, n: reference.hcl_loss(q, k, s, beta, 0.1, torch.cat((n.flatten(0, 1), BANK))),
                [*data(), hard],
                5.0 * (1 + beta),
            )


@pytest.mark.parametrize("form", ["private", "ids", "margin", "guide", "GTE"])
def test_hcl_counts_what_is_not_left_out(form):
    """A dense loss over one row of similarities for each query, −inf for what is left out of it."""
    hard = leaves(unit(21, 2, 7, seed=5))[0]
    ids, bank_ids, guide = torch.arange(21) % 8, torch.arange(42).reshape(21, 2) % 11, aligned_pairs(21, 5, noise=1.0, seed=3)
    seen = unit(21, 2, 5, seed=4)
    options = {
        "private": ({"negatives": lambda n: mb.Negatives(n, private=True)}, {}),
        "ids": ({"negatives": lambda n: mb.Negatives(n, ids=bank_ids)}, {"ids": ids}),
        "margin": ({"negatives": mb.Negatives}, {"margin": 0.1}),
        "guide": ({"negatives": lambda n: mb.Negatives(n, guide=seen)}, {"guide": guide, "margin": 0.05}),
        "GTE": ({"negatives": mb.Negatives}, {"contrast": ("query-key", "key-key")}),
    }
    further, given = options[form]

    def dense(query, key, scale, negatives):
        own, owners = torch.eye(21, dtype=torch.bool), torch.arange(21).repeat_interleave(2)
        flat, match = negatives.flatten(0, 1), (query * key).sum(1)
        others = torch.arange(21)[:, None] != owners
        columns = [(query @ key.T, own), (query @ flat.T, torch.zeros_like(others))]
        if form == "private":
            columns[1] = (query @ flat.T, others)
        elif form == "ids":
            columns = [(query @ key.T, ids[:, None] == ids), (query @ flat.T, ids[:, None] == bank_ids.flatten())]
        elif form == "margin":
            columns = [(p, out | (p > match[:, None] + 0.1)) for p, out in columns]
        elif form == "guide":
            limit = (guide[0] * guide[1]).sum(1, keepdim=True) + 0.05
            by = guide[0] @ guide[1].T, guide[0] @ seen.flatten(0, 1).T
            columns = [(p, out | (g > limit)) for (p, out), g in zip(columns, by, strict=True)]
        elif form == "GTE":
            columns += [(key @ key.T, own), (key @ flat.T, ~others)]
        s = torch.cat([(scale * p).masked_fill(out, -torch.inf) for p, out in columns], 1)
        n = s.isfinite().sum(1).to(s.dtype)
        weighted = n * (2 * s).exp().sum(1) / s.exp().sum(1)
        p = (scale * match).exp()
        freed = torch.maximum((weighted - 0.1 * n * p) / 0.9, n * (-scale).exp())
        return -(p / (p + freed)).log().mean()

    with tile_size(4, 5):
        assert_same_outcomes(
            lambda q, k, s, n: mb.hcl_loss(q, k, scale=s, negatives=further["negatives"](n), **given),
            dense,
            [*data(), hard],
            10.0,
        )


def test_hcl_with_further_negatives_by_kernels():
    pytest.importorskip("triton")
    given = leaves(*(tensor.detach().float() for tensor in data()))
    wide = leaves(*(tensor.detach().double() for tensor in given))
    found = mb.hcl_loss(given[0], given[1], scale=given[2], negatives=BANK.float(), backend="triton")
    wanted = reference.hcl_loss(*wide, 1.0, 0.1, BANK.float().double())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=0)
    pairs = zip(torch.autograd.grad(found, given), torch.autograd.grad(wanted, wide), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=4e-6 * expected.abs().max().item())


def freed(query, key, scale, tau_plus):
    """What the clamp is applied to, and its bound."""
    s, match = compared(query, key, scale, None, two_views=False)
    n = s.isfinite().sum(1).to(s.dtype)
    return (s.exp().sum(1) - tau_plus * n * match.exp()) / (1 - tau_plus), n * (-scale).exp()


def test_all_sides_of_the_clamp_are_met():
    values, bound = freed(*data(), 0.1)
    assert (values > bound).any()
    assert (values < 0).any()
    inputs = data(scale=0.5, noise=0.3)
    values, bound = freed(*inputs, 0.45)
    assert ((values > 0) & (values < bound)).any()
    assert_same_outcomes(
        lambda q, k, s: mb.hcl_loss(q, k, scale=s, beta=0.0, tau_plus=0.45),
        lambda q, k, s: dense_hcl(q, k, s, 0.0, 0.45),
        inputs,
        0.5,
    )


def test_hcl_without_reweighting_is_info_nce():
    query, key, scale = data()
    found = mb.hcl_loss(query, key, scale=scale, beta=0.0, tau_plus=0.0)
    torch.testing.assert_close(found, mb.info_nce_loss(query, key, scale=scale), rtol=1e-13, atol=0)


@pytest.mark.parametrize("loss", [mb.dcl_loss, mb.hcl_loss])
def test_no_negatives_no_loss(loss):
    """One pair alone, and a batch of one id: finite values and gradients."""
    for N, ids in ((1, None), (6, torch.zeros(6, dtype=torch.int64))):
        query, key = leaves(unit(N, 4, seed=0), unit(N, 4, seed=1))
        value = loss(query, key, scale=5.0, ids=ids, **TWO_VIEWS)
        assert value == 0
        for gradient in torch.autograd.grad(value, (query, key)):
            assert not gradient.any()


@pytest.mark.parametrize("scale", [0.5, 30.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_always_finite(scale, dtype):
    query, key = (t.to(dtype).requires_grad_() for t in aligned_pairs(50, 8, noise=0.3, seed=0))
    for value in (mb.dcl_loss(query, key, scale=scale), mb.hcl_loss(query, key, scale=scale)):
        assert value.isfinite()
        assert all(g.isfinite().all() for g in torch.autograd.grad(value, (query, key)))
    assert mb.hcl_loss(query, key, scale=scale) >= 0


def test_messages():
    query, key = unit(3, 2, seed=0), unit(3, 2, seed=1)
    with pytest.raises(ValueError, match="beta must be a number of at least 0, got -1"):
        mb.hcl_loss(query, key, scale=1.0, beta=-1)
    with pytest.raises(ValueError, match=r"tau_plus must be a number from 0 to below 1, got 1.0"):
        mb.hcl_loss(query, key, scale=1.0, tau_plus=1.0)
    for wrong in (float("inf"), float("nan"), "1"):
        with pytest.raises(ValueError, match=f"beta must be a number of at least 0, got {wrong!r}"):
            mb.hcl_loss(query, key, scale=1.0, beta=wrong)
    with pytest.raises(ValueError, match=r"negatives\.log_q must be None"):
        mb.hcl_loss(query, key, scale=1.0, negatives=[mb.Negatives(query), mb.Negatives(key, log_q=query[:, 0])])
