"""`reduction` in every loss: "none" against dense float64 losses row by row, "sum" and "mean" against it; over ranks too."""

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, assert_equal_to_rounding, leaves, tile_size, unit
from megabatch import reference

N = 13
IDS = torch.tensor([0, 1, 2, 3, 0, 4, 5, 6, 7, 1, 8, 9, 10])
LABELS = torch.tensor([0, 1, 0, 2, 3, 4, 4, 0, 5, 6, 7, 7, 8])  # 1, 2, 3, 5, 6 and 8 occur once
SEEN = [side.half().double() for side in aligned_pairs(N, 5, noise=0.7, seed=4)]  # the same numbers in every type
HARD = unit(N, 2, 7, seed=6)
SCALE, BIAS = 6.0, -2.0


def both_directions(logits, smoothing=0.0):
    wanted = torch.arange(len(logits))
    ways = [F.cross_entropy(way, wanted, reduction="none", label_smoothing=smoothing) for way in (logits, logits.T)]
    return (ways[0] + ways[1]) / 2


def left_out(logits, rows, ids):
    return logits.masked_fill((ids[rows][:, None] == ids) & (rows[:, None] != torch.arange(len(ids))), -torch.inf)


def dense_clip(x, y, scale, rows):
    return both_directions(left_out(scale * x @ y.T, rows, IDS))


def dense_smoothed(x, y, scale, rows):
    return both_directions(scale * x @ y.T, 0.1)


def dense_siglip(x, y, scale, rows):
    logits = scale * x @ y.T + BIAS
    signs = torch.where(IDS[:, None] == IDS, 1.0, -1.0)
    return -F.logsigmoid(signs * logits).sum(1)


def dense_siglip_left_out(x, y, scale, rows):
    logits = scale * x @ y.T + BIAS
    own = torch.eye(N, dtype=torch.bool)
    losses = -F.logsigmoid(torch.where(own, 1.0, -1.0) * logits)
    return losses.masked_fill((IDS[:, None] == IDS) & ~own, 0.0).sum(1)


def dense_info_nce(x, y, scale, rows):
    logits = torch.cat((scale * x @ y.T, scale * x @ HARD.flatten(0, 1).T), 1)
    return F.cross_entropy(logits, rows, reduction="none", label_smoothing=0.1)


def dense_dcl(x, y, scale, rows):
    logits = scale * x @ y.T
    match, others = logits.diagonal(), logits.masked_fill(torch.eye(N, dtype=torch.bool), -torch.inf)
    return (others.logsumexp(1) + others.logsumexp(0)) / 2 - match


def dense_hcl(x, y, scale, rows):
    s = (scale * x @ y.T).masked_fill(torch.eye(N, dtype=torch.bool), -torch.inf)
    match, n = (scale * (x * y).sum(1)).exp(), N - 1
    weighted = n * (2 * s).exp().sum(1) / s.exp().sum(1)
    negatives = torch.maximum((weighted - 0.1 * n * match) / 0.9, n * (-scale).exp())
    return -(match / (match + negatives)).log()


def dense_soft(x, y, scale, rows):
    logits, targets = scale * x @ y.T, 9.0 * SEEN[0] @ SEEN[1].T
    of_rows = F.cross_entropy(logits, targets.softmax(1), reduction="none")
    return (of_rows + F.cross_entropy(logits.T, targets.T.softmax(1), reduction="none")) / 2


def dense_nt_xent(x, y, scale, rows):
    z = torch.cat((x, y))
    logits = (scale * z @ z.T).masked_fill(torch.eye(2 * N, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * N).roll(N), reduction="none").reshape(2, N).mean(0)


def dense_sup_con(x, y, scale, rows):
    own = torch.eye(N, dtype=torch.bool)
    logits = scale * x @ x.T
    positive = (LABELS[:, None] == LABELS) & ~own
    count = positive.sum(1)
    losses = logits.masked_fill(own, -torch.inf).logsumexp(1) - (logits * positive).sum(1) / count.clamp_min(1)
    return torch.where(count > 0, losses, 0.0)


def dense_matryoshka(x, y, scale, rows):
    losses = [both_directions(scale * F.normalize(x[:, :w], dim=1) @ F.normalize(y[:, :w], dim=1).T) for w in (3, 7)]
    return losses[0] + 0.5 * losses[1]


def sup_con(x, y, scale, rows, form="out", **options):
    return mb.sup_con_loss(x + 0 * y, LABELS[rows], scale, form=form, **options)


def smoothed_info_nce(x, y, scale, rows, **options):
    return mb.info_nce_loss(x, y, scale=scale, negatives=HARD[rows], label_smoothing=0.1, **options)


def soft(x, y, scale, rows, **options):
    return mb.soft_clip_loss(x, y, scale, *(side[rows].to(x.dtype) for side in SEEN), 9.0, **options)


def siglip(x, y, scale, rows, **options):
    return mb.siglip_loss(x, y, scale, BIAS, ids=IDS[rows], **options)


# Ours on the rows given, and the dense losses of all rows.
LOSSES = {
    "clip_loss": (lambda x, y, s, rows, **o: mb.clip_loss(x, y, s, ids=IDS[rows], **o), dense_clip),
    "clip_loss, smoothed": (lambda x, y, s, rows, **o: mb.clip_loss(x, y, s, label_smoothing=0.1, **o), dense_smoothed),
    "siglip_loss": (lambda *a, **o: siglip(*a, ids_are_positives=True, **o), dense_siglip),
    "siglip_loss, left out": (siglip, dense_siglip_left_out),
    "info_nce_loss": (smoothed_info_nce, dense_info_nce),
    "dcl_loss": (lambda x, y, s, rows, **o: mb.dcl_loss(x, y, scale=s, symmetric=True, **o), dense_dcl),
    "hcl_loss": (lambda x, y, s, rows, **o: mb.hcl_loss(x, y, scale=s, **o), dense_hcl),
    "soft_clip_loss": (soft, dense_soft),
    "nt_xent_loss": (lambda x, y, s, rows, **o: mb.nt_xent_loss(x, y, s, **o), dense_nt_xent),
    "sup_con_loss": (sup_con, dense_sup_con),
    "matryoshka_clip_loss": (
        lambda x, y, s, rows, **o: mb.matryoshka_clip_loss(x, y, s, widths=[3, 7], weights=[1, 0.5], **o),
        dense_matryoshka,
    ),
}
ALL_ROWS = torch.arange(N)
WEIGHTS = torch.linspace(-1, 2, N, dtype=torch.float64)


def inputs(dtype=torch.float64):
    given = *aligned_pairs(N, 7, noise=1.0, seed=0), torch.tensor(SCALE, dtype=torch.float64)
    return leaves(*(tensor.to(dtype) for tensor in given))


def outcomes(losses, weights, given):
    """The losses, and the gradients of their weighted sum."""
    return [losses.detach(), *torch.autograd.grad((losses * weights).sum(), given, allow_unused=True)]


@pytest.mark.parametrize("name", LOSSES)
def test_none_gives_the_loss_of_each_row(name):
    mine, dense = LOSSES[name]
    given = inputs()
    with tile_size(4, 5):
        found = outcomes(mine(*given, ALL_ROWS, reduction="none"), WEIGHTS, given)
    wanted = outcomes(dense(*given, ALL_ROWS), WEIGHTS, given)
    assert found[0].shape == (N,)
    for actual, expected in zip(found, wanted, strict=True):
        if expected is None:
            assert actual is None or not actual.any()
        else:
            assert_equal_to_rounding(actual, expected, 2 * SCALE)


@pytest.mark.parametrize("name", LOSSES)
def test_sum_and_mean_are_of_these(name):
    mine, _ = LOSSES[name]
    given = inputs()
    rows = N if name != "sup_con_loss" else (LABELS[:, None] == LABELS).sum(1).gt(1).sum().item()
    each = outcomes(mine(*given, ALL_ROWS, reduction="none").sum(), 1.0, given)
    for reduction, size in (("sum", 1), ("mean", rows)):
        found = outcomes(mine(*given, ALL_ROWS, reduction=reduction), 1.0, given)
        for actual, expected in zip(found, each, strict=True):
            if expected is not None:
                torch.testing.assert_close(actual, expected / size, rtol=1e-12, atol=1e-13)


@pytest.mark.quick({"dtype": torch.float16}, {"dtype": torch.float32, "name": "clip_loss"})
@pytest.mark.parametrize("name", ["clip_loss", "siglip_loss", "siglip_loss, left out", "dcl_loss", "soft_clip_loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_none_by_kernels(name, dtype):
    pytest.importorskip("triton")
    mine, dense = LOSSES[name]
    given = inputs(dtype)
    wide = leaves(*(tensor.detach().double() for tensor in given))
    found = outcomes(mine(*given, ALL_ROWS, reduction="none", backend="triton"), WEIGHTS.float(), given)
    wanted = outcomes(dense(*wide, ALL_ROWS), WEIGHTS, wide)
    assert found[0].dtype == torch.float32
    for i, (actual, expected) in enumerate(zip(found, wanted, strict=True)):
        rounding = torch.finfo(torch.float32 if i == 0 else dtype).eps  # gradients are rounded to the type of the inputs
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=16 * rounding * expected.abs().max().item())


def part_of(tensor, rank, counts):
    start = sum(counts[:rank])
    return tensor[start : start + counts[rank]]


def on_a_rank(group, rank, name, counts, reduction):
    x, y, scale = inputs()
    x, y = leaves(part_of(x, rank, counts), part_of(y, rank, counts))
    with tile_size(3, 2):
        losses = LOSSES[name][0](x, y, scale, part_of(ALL_ROWS, rank, counts), reduction=reduction, group=group)
    weights = part_of(WEIGHTS, rank, counts) if reduction == "none" else torch.ones(())
    found = outcomes(losses, weights, (x, y, scale))
    return [0 if part is None else part for part in found]


@pytest.mark.quick({"counts": [6, 7]})
@pytest.mark.parametrize("counts", [[6, 7], [5, 0, 8]])
@pytest.mark.parametrize("name", LOSSES)
def test_over_ranks_none_and_sum_are_of_the_ranks_own_rows(pool, name, counts):
    """Each rank has the losses of its rows among all rows. Gradients are those of the sum over all ranks."""
    mine, _ = LOSSES[name]
    given = inputs()
    for reduction, weights in (("none", WEIGHTS), ("sum", 1.0)):
        losses = mine(*given, ALL_ROWS, reduction="none")
        _, dx, dy, dscale = outcomes(losses, weights, given)
        answers = pool.run(on_a_rank, len(counts), name, counts, reduction)
        for rank, (found, found_dx, found_dy, _) in enumerate(answers):
            own = part_of(losses.detach(), rank, counts)
            close(found, own if reduction == "none" else own.sum())
            close(found_dx, part_of(dx, rank, counts))
            if dy is not None:
                close(found_dy, part_of(dy, rank, counts))
        close(sum(answer[3] for answer in answers), dscale)


def reductions_that_differ(group, rank):
    x, y, _ = inputs()
    return mb.siglip_loss(x, y, SCALE, BIAS, reduction=("mean", "sum")[rank], group=group)


def test_ranks_with_different_reductions_all_say_so(pool):
    for worked, answer in pool.attempt(reductions_that_differ, 2):
        assert not worked
        assert "the loss is siglip_loss on rank 0, siglip_loss(reduction=sum) on rank 1" in answer


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("wrong", ["max", None, 1])
def test_other_reductions_are_refused(name, wrong):
    with pytest.raises(ValueError, match=f"reduction must be .*got {wrong!r}"):
        LOSSES[name][0](*inputs(), ALL_ROWS, reduction=wrong)


def test_the_form_in_of_sup_con():
    given = inputs()
    losses = mb.sup_con_loss(given[0], LABELS, given[2], form="in", reduction="none")
    single = (LABELS[:, None] == LABELS).sum(1) == 1
    assert not losses[single].any()
    wanted = reference.sup_con_loss(given[0], LABELS, given[2], form="in")
    torch.testing.assert_close(losses.sum() / (~single).sum(), wanted, rtol=1e-12, atol=0)


def close(found, wanted):
    found, wanted = (torch.as_tensor(value, dtype=torch.float64) for value in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
