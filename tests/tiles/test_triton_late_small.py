"""The dense path of late interaction against the dense oracle in float64, and against the path over strips."""

import pytest
import torch
import torch.nn.functional as F
from test_triton_late import DEVICE, items

import megabatch as mb
from helpers import unit
from megabatch import dispatch, reference
from megabatch.kernels import plan as kernel_plan

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's numpy, on intended inf and NaN

LAYOUTS = ("padded", "masked", "packed", "packed and masked")
# Pairs, vectors of each item, width: slots that a query fills and not, queries of several tiles, documents of several parts,
# and vectors wider than a step.
SHAPES = {"small": (5, 4, 7, 12), "long": (3, 80, 150, 8), "wide": (2, 3, 4, 70)}


def oracle(sides, scale, ids, *, symmetric, normalize, mean):
    """Returns the float64 loss of (values, mask, lengths) on both sides."""
    lists = []
    for values, mask, lengths in sides:
        parts = list(values) if lengths is None else list(values.split(lengths.tolist()))
        kept = [None] * len(parts) if mask is None else list(mask) if lengths is None else mask.split(lengths.tolist())
        lists.append([part if keep is None else part[keep] for part, keep in zip(parts, kept, strict=True)])
    s = reference.maxsim(*lists, scale, normalize)
    if ids is not None:
        s = s.masked_fill(reference.same_id(ids, len(s)), -torch.inf)
    labels, reduction = torch.arange(len(s), device=s.device), "mean" if mean else "sum"
    loss = F.cross_entropy(s, labels, reduction=reduction)
    return (loss + F.cross_entropy(s.T, labels, reduction=reduction)) / 2 if symmetric else loss


@pytest.mark.quick(
    {"shape": "small", "layout": "masked", "dtype": torch.float32, "options": "symmetric"},
    {"shape": "small", "layout": "packed", "dtype": torch.float16, "options": "normalize"},
    {"shape": "long", "layout": "padded", "dtype": torch.float32, "options": "plain"},
    {"shape": "long", "layout": "packed and masked", "dtype": torch.float16, "options": "symmetric"},
    {"shape": "wide", "layout": "packed and masked", "dtype": torch.float32, "options": "normalize"},
)
@pytest.mark.parametrize("options", ["plain", "symmetric", "normalize"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_matches_float64(monkeypatch, shape, layout, dtype, options):
    small = kernel_plan.KernelTile(rows=16, columns=16, dims=128, warps=4, stages=3)  # several parts, steps and programs
    for name in ("_MAXSIM_SMALL_LISTED", "_MAXSIM_LISTED_FLOAT32", "MAXSIM_SCAN"):
        monkeypatch.setattr(kernel_plan, name, small)
    monkeypatch.setattr(kernel_plan, "MAXSIM_LOSS", kernel_plan.KernelTile(rows=2, columns=4, dims=1, warps=4, stages=1))
    N, Lq, Ld, D = SHAPES[shape]
    sides = [items(N, Lq, D, layout, 1, dtype), items(N, Ld, D, layout, 2, dtype)]
    for _, mask, lengths in sides:
        if mask is not None:  # no item without vectors, which has its own test
            first = 0 if lengths is None else lengths.cumsum(0) - lengths
            mask[(slice(None), 0) if lengths is None else first] = True
    ids = torch.tensor([0, 1, 2, 0, 1], device=DEVICE)[:N]
    symmetric, normalize, mean = options == "symmetric", options == "normalize", options != "plain"
    wide = [[values.double().requires_grad_(), *rest] for values, *rest in sides]
    value = min(2.0, 8 / Lq)  # a rounding error of a score is relative to its size
    scale = torch.tensor(value, dtype=torch.float64, device=DEVICE, requires_grad=True)
    wanted = oracle(wide, scale, ids, symmetric=symmetric, normalize=normalize, mean=mean)
    wanted = [wanted, *torch.autograd.grad(3.0 * wanted, [side[0] for side in wide] + [scale])]
    values = [side[0].clone().requires_grad_() for side in sides]
    learned = torch.tensor(value, device=DEVICE, requires_grad=True)
    tokens = [mb.Tokens(part, *side[1:]) for part, side in zip(values, sides, strict=True)]
    settings = {"ids": ids, "symmetric": symmetric, "normalize": normalize, "reduction": "mean" if mean else "sum"}
    found = mb.late_interaction_loss(*tokens, learned, backend="triton", **settings)
    assert type(found.grad_fn).__name__ == "_LateLossBackward"
    with torch.no_grad():
        assert torch.equal(mb.late_interaction_loss(*tokens, learned, backend="triton", **settings), found)
    found = [found, *torch.autograd.grad(3.0 * found, [*values, learned])]
    for what, actual, expected in zip(("loss", "dquery", "ddocument", "dscale"), found, wanted, strict=True):
        rough = torch.finfo(dtype).eps if what in ("dquery", "ddocument") else torch.finfo(torch.float32).eps * 8
        size = Lq if what == "dscale" else expected.abs().max()  # dscale is a sum of weights · scores, and scores are up to Lq
        assert (actual.double() - expected).abs().max() <= 4 * rough * (1 + size), what


def test_both_paths_agree_about_empty_items_and_ties_and_keep_nan():
    query, document = unit(4, 3, 8, seed=0, dtype=torch.float32), unit(4, 5, 8, seed=1, dtype=torch.float32)
    masks = torch.ones(4, 3, dtype=torch.bool), torch.ones(4, 5, dtype=torch.bool)
    masks[0][0], masks[1][2], masks[1][1, 3] = False, False, False
    query[0], document[2], document[1, 3] = torch.nan, torch.nan, torch.inf
    document[3] = document[3, :1]  # ties
    options = {"query_mask": masks[0].to(DEVICE), "document_mask": masks[1].to(DEVICE), "backend": "triton"}

    def outcomes(query, document, **options):
        values = [side.to(DEVICE).requires_grad_() for side in (query.clone(), document.clone())]
        scale = torch.tensor(3.0, device=DEVICE, requires_grad=True)
        loss = mb.late_interaction_loss(*values, scale, **options)
        return [loss.detach(), *torch.autograd.grad(loss, [*values, scale])]

    for pairs, symmetric in ((slice(0, 4), True), (slice(2, 3), False)):  # item 2 has an empty document
        given = {name: part[pairs] if isinstance(part, torch.Tensor) else part for name, part in options.items()}
        found = outcomes(query[pairs], document[pairs], symmetric=symmetric, **given)
        with dispatch.override(late_triton=0):
            wanted = outcomes(query[pairs], document[pairs], symmetric=symmetric, **given)
        for actual, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    query[1, 2] = torch.nan
    loss, dquery, *_ = outcomes(query, document, **options)
    assert loss.isnan()
    assert dquery[1].isnan().all()


def test_equal_scores_give_the_logarithm_of_their_number():
    query = torch.ones(5, 2, 4, device=DEVICE, requires_grad=True)
    document = torch.ones(5, 3, 4, device=DEVICE, requires_grad=True)
    loss = mb.late_interaction_loss(query, document, 20.0, backend="triton")
    assert loss.item() == torch.tensor(5.0).log().item()
    (gradient,) = torch.autograd.grad(loss, document)
    assert not gradient[:, 1:].any()  # ties go to the first vector


def test_backward_of_some_inputs_and_of_batches():
    query, document = (unit(3, 4, 6, seed=i, dtype=torch.float32).to(DEVICE) for i in range(2))
    scale = torch.tensor(2.0, device=DEVICE, requires_grad=True)
    query.requires_grad_()
    loss = mb.late_interaction_loss(query, document, scale, backend="triton")
    once = torch.autograd.grad(loss, (query, scale), retain_graph=True)
    batch = torch.autograd.grad(loss, (query, scale), torch.tensor([1.0, 2.0], device=DEVICE), True, is_grads_batched=True)
    for single, several in zip(once, batch, strict=True):
        torch.testing.assert_close(several, torch.stack((single, 2 * single)))
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(torch.autograd.grad(loss, query, create_graph=True)[0].sum(), query)


def test_limits_decide():
    x = torch.ones(2, 3, 4, device=DEVICE, requires_grad=True)

    def is_dense(**options):
        loss = mb.late_interaction_loss(x, x.detach(), 1.0, **{"backend": "triton", **options})
        return type(loss.grad_fn).__name__ == "_LateLossBackward"

    assert is_dense()
    for options in ({"reduction": "none"}, {"negatives": x.detach()}, {"backend": "eager"}):
        assert not is_dense(**options)
    for limits in ({"late_triton": 1}, {"late_indices": 11}):
        with dispatch.override(**limits):
            assert not is_dense()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_loss_without_gradients_is_the_same(symmetric):
    """Such a call stores no gradients of the scores."""
    query, document = (F.normalize(torch.randn(5, tokens, 12, device=DEVICE), dim=2) for tokens in (4, 7))
    options = {"symmetric": symmetric, "backend": "triton"}
    learned = mb.late_interaction_loss(query.requires_grad_(), document, 5.0, **options)
    with torch.no_grad():
        assert torch.equal(mb.late_interaction_loss(query, document, 5.0, **options), learned)
