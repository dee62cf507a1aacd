"""Ids in two columns, of a query and of its document: pairs that agree in one column are not each other's negatives."""

import contextlib

import pytest
import torch

import megabatch as mb
from helpers import aligned_pairs, assert_equal_to_rounding, leaves, outcomes, tile_size
from megabatch import dispatch, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, D, SCALE = 40, 8, 12.0
# A chain of shared queries and documents: as one id for each pair, all pairs would be one group.
IDS = torch.stack([torch.arange(N) // 2, (torch.arange(N) + 1) // 2], dim=1)
IDS[-1] = 0  # the last pair has the query and the document of the first


def dense(x, y, scale, *, left_out):
    """InfoNCE in one direction."""
    logits = (scale * x @ y.T).masked_fill(left_out & ~torch.eye(N, dtype=torch.bool, device=x.device), -torch.inf)
    return torch.nn.functional.cross_entropy(logits, torch.arange(N, device=x.device))


LOSSES = {
    "clip": (lambda x, y, s, **o: mb.clip_loss(x, y, s, **o), reference.clip_loss),
    "siglip": (
        lambda x, y, s, **o: mb.siglip_loss(x, y, s, -5.0, **o),
        lambda x, y, s, ids: reference.siglip_loss(x, y, s, -5.0, ids),
    ),
    "info_nce": (
        lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, **o),
        lambda x, y, s, ids: dense(x, y, s, left_out=(ids[:, None] == ids).any(2)),
    ),
}


def inputs(dtype=torch.float64):
    x, y = aligned_pairs(N, D, noise=1.0, seed=5)
    return [tensor.to(DEVICE, dtype) for tensor in (x, y, torch.tensor(SCALE))]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tile", [(N, N), (7, 12)])
@pytest.mark.parametrize("name", LOSSES)
def test_in_pytorch_operations(name, tile, reduction):
    mine, wanted = LOSSES[name]
    ids = IDS.to(DEVICE)
    with tile_size(*tile):
        found = outcomes(lambda *a: mine(*a, ids=ids, reduction=reduction, backend="eager").mean(), leaves(*inputs()))
    for actual, expected in zip(found, outcomes(lambda *a: wanted(*a, ids=ids), leaves(*inputs())), strict=True):
        assert_equal_to_rounding(actual, expected, SCALE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on inf, which is meant
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_in_kernels(name, small):
    pytest.importorskip("triton")
    mine, wanted = LOSSES[name]
    ids, given = IDS.to(DEVICE), inputs(torch.float32)
    with contextlib.nullcontext() if small else dispatch.override(dense_triton=0):
        found = outcomes(lambda *a: mine(*a, ids=ids, backend="triton"), leaves(*given))
    exact = outcomes(lambda *a: wanted(*a, ids=ids), leaves(*(tensor.double() for tensor in given)))
    for actual, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_with_a_guide_and_one_loss_per_pair(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    x, y, scale = inputs(torch.float32)
    ids, guide = IDS.to(DEVICE), tuple(tensor.to(DEVICE) for tensor in aligned_pairs(N, 4, noise=1.0, seed=6))
    guide = tuple(tensor.float() for tensor in guide)
    found = mb.info_nce_loss(x, y, scale=scale, ids=ids, guide=guide, reduction="none", backend=backend)
    seen = guide[0].double() @ guide[1].double().T
    above = seen > seen.diagonal()[:, None] + 1e-6
    left_out = ((ids[:, None] == ids).any(2) | above) & ~torch.eye(N, dtype=torch.bool, device=DEVICE)
    logits = (scale * x @ y.T).double().masked_fill(left_out, -torch.inf)
    wanted = torch.nn.functional.cross_entropy(logits, torch.arange(N, device=DEVICE), reduction="none")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("private", [False, True])
def test_hard_negatives(private):
    x, y, scale = inputs()
    ids = IDS.to(DEVICE)
    hard = aligned_pairs(N, D, noise=3.0, seed=7)[0].to(DEVICE)
    # The first is a document of the batch, the second belongs to a query of the batch, the others to nothing.
    own = torch.stack([torch.arange(N) * -1 - 1] * 2, dim=1).to(DEVICE)
    own[0, 1], own[1, 0] = ids[5, 1], ids[8, 0]
    negatives = mb.Negatives(hard, ids=own, owner=torch.arange(N, device=DEVICE).roll(3), private=private)
    found = mb.info_nce_loss(x, y, scale=scale, ids=ids, negatives=negatives, reduction="none")
    logits = scale * torch.cat([x @ y.T, x @ hard.T], dim=1)
    left_out = torch.cat([(ids[:, None] == ids).any(2).fill_diagonal_(False), (ids[:, None] == own).any(2)], dim=1)
    if private:
        left_out[:, N:] |= torch.arange(N, device=DEVICE).roll(3) != torch.arange(N, device=DEVICE)[:, None]
    wanted = torch.nn.functional.cross_entropy(
        logits.masked_fill(left_out, -torch.inf), torch.arange(N, device=DEVICE), reduction="none"
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_columns_of_ids_have_to_agree():
    x, y, scale = inputs()
    with pytest.raises(
        ValueError, match=r"negatives.ids must have as many columns as ids, .* got shapes \(40,\) and \(40, 2\)"
    ):
        mb.info_nce_loss(x, y, scale=scale, ids=IDS.to(DEVICE), negatives=mb.Negatives(x, ids=IDS[:, 0].to(DEVICE)))
    with pytest.raises(ValueError, match=r"ids must have shape \(40,\)"):
        mb.clip_loss(x, y, scale, ids=torch.zeros(N, 3, dtype=torch.int64, device=DEVICE))


def _on_a_rank(group, rank):
    mine = slice(rank * N // 2, (rank + 1) * N // 2)
    x, y, scale = inputs()
    ids = IDS.to(DEVICE)[mine]
    return {name: loss(x[mine], y[mine], scale, ids=ids, group=group) for name, (loss, _) in LOSSES.items()}


def test_over_ranks(pool):
    x, y, scale = inputs()
    ranks = pool.run(_on_a_rank, 2)
    for name, (_, wanted) in LOSSES.items():
        expected = wanted(x, y, scale, ids=IDS.to(DEVICE)).cpu()
        torch.testing.assert_close(sum(found[name].cpu() for found in ranks) / 2, expected, rtol=1e-12, atol=1e-12)
