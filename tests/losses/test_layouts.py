"""Every loss and pairwise operation with inputs that are not contiguous, and with unequal, strided upstream gradients.

A contiguous copy of the inputs is the same batch, so values and gradients must be the same up to rounding. Other tests compare
contiguous inputs with dense float64 losses.
"""

import importlib.util

import pytest
import torch

import megabatch as mb
from helpers import aligned_pairs, tile_size, unit

N, D = 7, 9
LABELS = torch.tensor([0, 1, 0, 2, 1, 1, 3])
IDS = torch.tensor([0, 1, 2, 3, 0, 4, 5])
SCALE, BIAS = 6.0, -2.0

KERNELS = importlib.util.find_spec("triton") is not None


def column_major(values):
    return values.transpose(-1, -2).contiguous().transpose(-1, -2) if values.dim() > 1 else spread(values)


def spread(values):
    """Every second entry of every dimension of a larger tensor, whose other entries are NaN."""
    room = torch.full([2 * size + 1 for size in values.shape], torch.nan).to(values.dtype)
    part = room[tuple(slice(1, None, 2) for _ in values.shape)]
    return part.copy_(values)


def cut(values):
    """The middle columns of a larger matrix: rows are contiguous, and start at no multiple of 16 bytes."""
    room = torch.full((*values.shape[:-1], values.shape[-1] + 4), torch.nan).to(values.dtype)
    return room[..., 1:-3].copy_(values)


LAYOUTS = {"column-major": column_major, "spread": spread, "cut": cut}


class Given:
    """Inputs of a loss in one layout, and those of them that get a gradient."""

    def __init__(self, lay, dtype):
        self.lay, self.dtype = lay, dtype
        x, y = aligned_pairs(N, D, noise=1.0, seed=0)
        self.x, self.y, self.scale = self.learned(x), self.learned(y), torch.tensor(SCALE, dtype=torch.float64).to(dtype)
        self.scale.requires_grad_()
        self.hard = self.learned(unit(N, 2, D, seed=3))
        self.bank = self.learned(unit(5, D, seed=4))
        self.guide = [self.lay(side.to(dtype)) for side in aligned_pairs(N, 5, noise=1.0, seed=5)]
        self.log_q, self.bias = (self.lay(-unit(N, seed=seed).abs().to(dtype)) for seed in (6, 7))
        self.query, self.document, self.further = (
            self.learned(unit(*shape, D, seed=seed)) for seed, shape in enumerate([(N, 3), (N, 4), (N, 2, 4)], start=8)
        )
        self.ids, self.labels = lay(IDS.double()).long(), lay(LABELS.double()).long()

    def learned(self, values):
        return self.lay(values.to(self.dtype)).requires_grad_()

    def learnable(self):
        return [self.x, self.y, self.scale, self.hard, self.bank, self.query, self.document, self.further]


def options_of_rows(given):
    return {"negatives": [given.hard, given.bank], "log_q": given.log_q, "symmetric": True}


# The losses, which have reductions, and the operations, which have none.
LOSSES = {
    "clip_loss": lambda g, **o: mb.clip_loss(g.x, g.y, g.scale, ids=g.ids, **o),
    "clip_loss, smoothed": lambda g, **o: mb.clip_loss(g.x, g.y, g.scale, label_smoothing=0.1, **o),
    "siglip_loss": lambda g, **o: mb.siglip_loss(g.x, g.y, g.scale, BIAS, ids=g.ids, **o),
    "info_nce_loss": lambda g, **o: mb.info_nce_loss(g.x, g.y, scale=g.scale, **o),
    "info_nce_loss, all contrasts": lambda g, **o: mb.info_nce_loss(
        *(g.x, g.y), scale=g.scale, contrast=("query-key", "key-query", "query-query", "key-key"), **options_of_rows(g), **o
    ),
    "info_nce_loss, margin": lambda g, **o: mb.info_nce_loss(g.x, g.y, scale=g.scale, margin=0.1, ids=g.ids, **o),
    "info_nce_loss, guide": lambda g, **o: mb.info_nce_loss(g.x, g.y, scale=g.scale, guide=tuple(g.guide), **o),
    "info_nce_loss, private": lambda g, **o: mb.info_nce_loss(
        g.x, g.y, scale=g.scale, negatives=mb.Negatives(g.hard, private=True), **o
    ),
    "dcl_loss": lambda g, **o: mb.dcl_loss(g.x, g.y, scale=g.scale, **options_of_rows(g), **o),
    "hcl_loss": lambda g, **o: mb.hcl_loss(g.x, g.y, scale=g.scale, negatives=g.bank, symmetric=True, **o),
    "soft_clip_loss": lambda g, **o: mb.soft_clip_loss(g.x, g.y, g.scale, *g.guide, 9.0, **o),
    "matryoshka_clip_loss": lambda g, **o: mb.matryoshka_clip_loss(g.x, g.y, g.scale, widths=[3, D], **o),
    "nt_xent_loss": lambda g, **o: mb.nt_xent_loss(g.x, g.y, g.scale, **o),
    "sup_con_loss": lambda g, **o: mb.sup_con_loss(g.x, g.labels, g.scale, **o),
    "sup_con_loss, in": lambda g, backend, **o: mb.sup_con_loss(g.x, g.labels, g.scale, form="in", **o),
    "late_interaction_loss": lambda g, **o: mb.late_interaction_loss(
        g.query, g.document, scale=g.scale, negatives=g.further, symmetric=True, **o
    ),
    "late_distillation_loss": lambda g, backend, **o: mb.late_distillation_loss(
        g.query, g.further, g.guide[0][:, :2], scale=g.scale, **o
    ),
}
OPERATIONS = {
    "pairwise_logsumexp": lambda g, **o: mb.pairwise_logsumexp(g.x, g.bank, g.scale, g.bias, g.bias[:5], **o),
    "pairwise_symmetric_logsumexp": lambda g, **o: (mb.pairwise_symmetric_logsumexp(g.x, g.scale, **o),),
    "pairwise_symmetric_logsumexp, ids": lambda g, **o: (mb.pairwise_symmetric_logsumexp(g.x, g.scale, exclude=g.labels, **o),),
    "pairwise_softplus": lambda g, **o: (mb.pairwise_softplus(g.x, g.bank, g.scale, BIAS, **o),),
    "maxsim_logsumexp": lambda g, **o: mb.maxsim_logsumexp(g.query, g.document, g.scale, **o),
}
ENGINES = [("eager", torch.float64), ("triton", torch.float32), ("triton", torch.float16)]


def outcomes(results, inputs):
    """The results, and the gradients of their sum with random weights, which are strided."""
    generator = torch.Generator().manual_seed(1)
    weights = [spread(torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype)) for part in results]
    found = torch.autograd.grad(list(results), inputs, weights, allow_unused=True)
    return [*(part.detach() for part in results), *(part for part in found if part is not None)]


def assert_layout_does_not_matter(function, layout, dtype):
    with tile_size(3, 4):  # several tiles in PyTorch operations
        found, wanted = (
            outcomes(function(given), given.learnable()) for given in (Given(LAYOUTS[layout], dtype), Given(torch.clone, dtype))
        )
    assert len(found) == len(wanted)
    for actual, expected in zip(found, wanted, strict=True):
        assert expected.any(), "nothing to compare"
        # Sums over D and over rows may be in another order, and a gradient is rounded to the type of its input.
        rounding = 2 * D * torch.finfo(torch.promote_types(torch.float32, dtype)).eps + torch.finfo(expected.dtype).eps
        bound = (1 + SCALE) * rounding * expected.abs().max().item()
        torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)


ROW_BY_ROW = {"layout": "column-major", "reduction": "none"}
BY_KERNELS = {"layout": "column-major", "backend": "triton", "dtype": torch.float32}


@pytest.mark.quick(
    {**ROW_BY_ROW, "backend": "eager"},
    *({**ROW_BY_ROW, **BY_KERNELS, "name": name} for name in ("clip_loss", "nt_xent_loss", "sup_con_loss")),
    {"layout": "spread", "reduction": "mean", "backend": "triton", "dtype": torch.float16, "name": "info_nce_loss"},
)
@pytest.mark.parametrize(("backend", "dtype"), ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, reduction, layout, backend, dtype):
    if backend == "triton" and not KERNELS:
        pytest.skip("kernels need Triton")
    assert_layout_does_not_matter(lambda given: (LOSSES[name](given, reduction=reduction, backend=backend),), layout, dtype)


@pytest.mark.quick({"layout": "column-major", "backend": "eager"}, {**BY_KERNELS, "name": "pairwise_symmetric_logsumexp"})
@pytest.mark.parametrize(("backend", "dtype"), ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, layout, backend, dtype):
    if backend == "triton" and not KERNELS:
        pytest.skip("kernels need Triton")
    assert_layout_does_not_matter(lambda given: OPERATIONS[name](given, backend=backend), layout, dtype)


@pytest.mark.quick({"layout": "column-major", "backend": "eager"})
@pytest.mark.parametrize(("backend", "dtype"), ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_best_columns(layout, backend, dtype):
    if backend == "triton" and not KERNELS:
        pytest.skip("kernels need Triton")
    given = Given(LAYOUTS[layout], dtype)
    x, y = (side.detach().contiguous() for side in (given.x, given.y))
    for actual, expected in (
        (mb.pairwise_rank(given.x, given.y, backend=backend), mb.pairwise_rank(x, y, backend=backend)),
        (mb.pairwise_topk(given.x, given.y, 3, backend=backend), mb.pairwise_topk(x, y, 3, backend=backend)),
    ):
        assert torch.equal(actual[1], expected[1])
        torch.testing.assert_close(actual[0], expected[0])
