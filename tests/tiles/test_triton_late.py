"""The late-interaction kernels against PyTorch operations in float64: on a GPU if there is one, otherwise interpreted."""

import pytest
import torch

import megabatch as mb
from helpers import gradients, leaves, unit
from megabatch.kernels import plan as kernel_plan
from megabatch.tiles import plan

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's numpy, on intended inf and NaN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Queries, documents, vectors of each, width: slots that a query fills and not, queries of several tiles, documents of several,
# and vectors wider than a step.
SHAPES = {"small": (3, 4, 5, 7, 12), "long": (2, 3, 80, 70, 8), "wide": (2, 2, 3, 4, 70)}


def items(count, width, D, layout, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = unit(count, width, D, seed=seed, dtype=dtype)
    mask = torch.rand(count, width, generator=generator) > 0.3 if "masked" in layout else None
    lengths = torch.randint(1, width + 1, (count,), generator=generator) if "packed" in layout else None
    if lengths is not None:
        present = torch.arange(width) < lengths[:, None]
        values, mask = values[present], None if mask is None else mask[present]
    return [None if part is None else part.to(DEVICE) for part in (values, mask, lengths)]


@pytest.mark.quick(
    {"shape": "small", "layout": "masked", "dtype": torch.float32, "strips": "many"},
    {"shape": "small", "layout": "packed", "dtype": torch.float16, "strips": "many"},
    {"shape": "long", "layout": "padded", "dtype": torch.float32, "strips": "many"},
    {"shape": "long", "layout": "masked", "dtype": torch.float16, "strips": "one"},
    {"shape": "wide", "layout": "packed and masked", "dtype": torch.float32, "strips": "one"},
    {"shape": "long", "layout": "packed and masked", "dtype": torch.float32, "strips": "short lists"},
    {"shape": "long", "layout": "padded", "dtype": torch.float16, "strips": "short lists"},
)
@pytest.mark.parametrize("strips", ["many", "one", "short lists"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["padded", "masked", "packed", "packed and masked"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_match_float64(monkeypatch, shape, layout, dtype, strips):
    """In several strips; in one, whose scores and winners forward keeps; and with several lists of winners for a document."""
    if strips == "short lists":
        monkeypatch.setattr(kernel_plan, "MAXSIM_LIST_ENTRIES", 600)  # of two long documents at a time
        monkeypatch.setattr(kernel_plan, "documents_at_once", lambda width, D: 3)  # backward takes what forward kept in parts
        monkeypatch.setattr(
            kernel_plan, "_MAXSIM_LISTED", kernel_plan.KernelTile(rows=16, columns=16, dims=128, warps=4, stages=3)
        )
        monkeypatch.setattr(kernel_plan, "_MAXSIM_LISTED_FLOAT32", kernel_plan._MAXSIM_LISTED)
        monkeypatch.setattr("megabatch.late.kernels._CHUNK", 32)
    if strips == "many":
        monkeypatch.setattr(kernel_plan, "maxsim_is_kept", lambda *sizes: False)
        monkeypatch.setattr(kernel_plan, "MAXSIM_SCORES", plan.TileSize(2, 3))
        monkeypatch.setattr(kernel_plan, "maxsim_strip", lambda rows: plan.TileSize(2, 2))
    N, M, Lq, Ld, D = SHAPES[shape]
    sides = [items(N, Lq, D, layout, 1, dtype), items(M, Ld, D, layout, 2, dtype)]
    weights = [torch.randn(size, dtype=torch.float64).to(DEVICE) for size in (N, M)]
    exclude = torch.arange(N, device=DEVICE) % 2, torch.arange(M, device=DEVICE) % 3

    def outcomes(width, **options):
        values = [side[0].to(width).requires_grad_() for side in sides]
        scale = torch.tensor(2.0, device=DEVICE, requires_grad=True)
        tokens = [mb.Tokens(part, *side[1:]) for part, side in zip(values, sides, strict=True)]
        found = mb.maxsim_logsumexp(*tokens, scale, exclude=exclude, normalize=True, **options)
        total = [part.double() for part in found]
        return [*total, *(part.double() for part in gradients(total, weights, [*values, scale]))]

    wanted = outcomes(torch.float64, backend="eager")
    found = outcomes(dtype, backend="triton")
    for what, actual, expected in zip(("row", "col", "dquery", "ddocument", "dscale"), found, wanted, strict=True):
        finite = expected.isfinite()
        assert torch.equal(actual[~finite], expected[~finite]), what
        rough = torch.finfo(dtype).eps if what in ("dquery", "ddocument") else torch.finfo(torch.float32).eps * 8
        size = expected[finite].abs().max().item() if finite.any() else 0.0
        assert (actual - expected)[finite].abs().max() <= 4 * rough * (1 + size), what


def test_ties_go_to_the_first_and_nan_is_kept():
    query, document = leaves(torch.ones(2, 3, 4, device=DEVICE), torch.ones(2, 70, 4, device=DEVICE))
    row, _ = mb.maxsim_logsumexp(query, document, backend="triton")
    (gradient,) = torch.autograd.grad(row.sum(), document)
    assert gradient[:, 0].eq(3.0).all()
    assert not gradient[:, 1:].any()
    with torch.no_grad():
        document[1, 5] = torch.nan
    row, col = mb.maxsim_logsumexp(query, document, backend="triton")
    assert row.isnan().all()
    assert col.isnan().tolist() == [False, True]


def test_sums_of_vectors_may_overflow():
    query, document = torch.full((2, 3, 4), 1e-38, device=DEVICE), torch.full((2, 5, 4), 3e38, device=DEVICE)
    for backend in ("eager", "triton"):
        assert mb.maxsim_logsumexp(query, document, backend=backend).row.isfinite().all()


def test_the_same_bits_every_time():
    query, document = leaves(unit(4, 5, 8, seed=0, dtype=torch.float32), unit(4, 9, 8, seed=1, dtype=torch.float32))
    runs = []
    for _ in range(2):
        loss = mb.late_interaction_loss(query.to(DEVICE), document.to(DEVICE), scale=5.0, backend="triton")
        runs.append([loss.detach(), *torch.autograd.grad(loss, (query, document))])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("scale", [0.01, 20.0, 1000.0])
def test_half_precision_gradients_at_any_scale(scale):
    """The weights of a tile are rounded to fp16 before the scale, which could take them out of its range."""
    sides = [unit(4, 3, 8, seed=0, dtype=torch.float16).to(DEVICE), unit(4, 5, 8, seed=1, dtype=torch.float16).to(DEVICE)]

    def outcomes(dtype, **options):
        values = leaves(*(side.to(dtype) for side in sides))
        return torch.autograd.grad(mb.late_interaction_loss(*values, scale=scale, normalize=True, **options), values)

    backends = ("triton", "eager") if DEVICE == "cuda" else ("triton",)
    for backend in backends:
        for found, wanted in zip(outcomes(torch.float16, backend=backend), outcomes(torch.float64), strict=True):
            assert (found - wanted).abs().max() <= 4 * torch.finfo(torch.float16).eps * wanted.abs().max()


def test_losses_of_kept_scores():
    """The scores of pairs are those that forward kept; a document without vectors makes its pair's loss infinite."""
    sides = [unit(5, length, 8, seed=length).to(DEVICE) for length in (3, 6)]
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE) > 0.3
    mask[2] = False
    found, wanted = (
        mb.late_interaction_loss(
            *leaves(*(side.to(dtype) for side in sides)),
            scale=9.0,
            document_mask=mask,
            normalize=True,
            reduction="none",
            backend=backend,
        ).detach()
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "eager"))
    )
    assert wanted.isinf().tolist() == [False, False, True, False, False]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
