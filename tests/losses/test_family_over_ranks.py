"""Every loss of the family over groups of 1, 2 and 3 ranks, even, uneven and empty, equals one process on the whole batch."""

import pytest
import torch

import megabatch as mb
from helpers import aligned_pairs, leaves, tile_size, unit
from megabatch import ring

ALL = ("query-key", "query-query", "key-query", "key-key")
COUNTS = {1: [[7]], 2: [[3, 4], [0, 5]], 3: [[2, 5, 3], [4, 0, 1]]}
LIMIT = 1e-10


def info_nce_loss(given, **options):
    return mb.info_nce_loss(given["x"], given["y"], scale=given["scale"], **options)


def further(given, **known):
    return mb.Negatives(given["negatives"], **known)


def with_guide(given, **options):
    hard = further(given, guide=given["seen_negatives"])
    return info_nce_loss(
        given, contrast=ALL, symmetric=True, negatives=hard, guide=(given["seen_x"], given["seen_y"]), margin=0.05, **options
    )


def with_owners(given, **options):
    """Every second pair has a hard negative, which is not given a place by its shape."""
    (rows,) = (given["place"] % 2 == 0).nonzero(as_tuple=True)
    return info_nce_loss(given, contrast=ALL, negatives=mb.Negatives(given["negatives"][rows, 0], owner=rows), **options)


def with_bank(given, **options):
    bank = mb.Negatives(given["bank"], ids=given["bank_ids"])
    return info_nce_loss(given, negatives=[further(given, private=True), bank], ids=given["ids"], **options)


LOSSES = {
    "one direction": info_nce_loss,
    "both directions, logQ": lambda g, **o: info_nce_loss(g, symmetric=True, log_q=g["log_q"], **o),
    "GTE with hard negatives": lambda g, **o: info_nce_loss(g, contrast=ALL, symmetric=True, negatives=further(g), **o),
    "ids": lambda g, **o: info_nce_loss(g, contrast=ALL, ids=g["ids"], **o),
    "margin": lambda g, **o: info_nce_loss(g, contrast=ALL, symmetric=True, margin=0.1, negatives=further(g), **o),
    "guide": with_guide,
    "owners": with_owners,
    "bank alone": lambda g, **o: info_nce_loss(g, contrast=(), negatives=g["bank"], **o),
    "bank and private negatives": with_bank,
    "smoothing": lambda g, **o: info_nce_loss(g, symmetric=True, negatives=g["bank"], label_smoothing=0.1, **o),
    "clip smoothing": lambda g, **o: mb.clip_loss(g["x"], g["y"], g["scale"], label_smoothing=0.1, **o),
    "dcl_loss": lambda g, **o: mb.dcl_loss(g["x"], g["y"], scale=g["scale"], contrast=ALL, symmetric=True, **o),
    "hcl_loss": lambda g, **o: mb.hcl_loss(g["x"], g["y"], scale=g["scale"], **o),
    "hcl_loss, hard negatives and a bank": lambda g, **o: mb.hcl_loss(
        g["x"], g["y"], scale=g["scale"], negatives=[further(g, private=True), g["negatives"], g["bank"]], symmetric=True, **o
    ),
    "hcl_loss, margin, GTE": lambda g, **o: mb.hcl_loss(
        g["x"], g["y"], scale=g["scale"], negatives=further(g), contrast=ALL, margin=0.1, **o
    ),
    "hcl_loss, two views, ids": lambda g, **o: mb.hcl_loss(
        g["x"], g["y"], scale=g["scale"], contrast=("query-key", "query-query"), symmetric=True, ids=g["ids"], **o
    ),
    "soft clip": lambda g, **o: mb.soft_clip_loss(g["x"], g["y"], g["scale"], g["seen_x"], g["seen_y"], 12.0, **o),
    "several positives": lambda g, **o: mb.siglip_loss(
        g["x"], g["y"], g["scale"], g["bias"], ids=g["ids"], ids_are_positives=True, **o
    ),
}
PARAMETERS = ("scale", "bias")
LEARNED = ("x", "y", "negatives", *PARAMETERS)


def batch(total):
    x, y = aligned_pairs(total, 5, noise=1.0, seed=0)
    seen_x, seen_y = aligned_pairs(total, 3, noise=0.7, seed=4)
    return {
        "x": x,
        "y": y,
        "negatives": unit(total, 2, 5, seed=2),
        "scale": torch.tensor(8.0, dtype=torch.float64),
        "bias": torch.tensor(-2.0, dtype=torch.float64),
        "ids": torch.arange(total) % 4,
        "place": torch.arange(total),
        "log_q": torch.linspace(-3, 0, total, dtype=torch.float64),
        "seen_x": seen_x,
        "seen_y": seen_y,
        "seen_negatives": unit(total, 2, 3, seed=5),
        "bank": unit(total, 5, seed=6),
        "bank_ids": torch.arange(total) % 5,
    }


def run(name, given, **options):
    given = {key: leaves(value)[0] if key in LEARNED else value for key, value in given.items()}
    value = LOSSES[name](given, **options)
    assert value.requires_grad
    value.backward()
    return value.detach(), {key: given[key].grad for key in LEARNED}


def part(given, rank, counts):
    start = sum(counts[:rank])
    return {key: value if key in PARAMETERS else value[start : start + counts[rank]] for key, value in given.items()}


def on_a_rank(group, rank, name, counts, route):
    with ring.use_route(route), tile_size(3, 2):
        return run(name, part(batch(sum(counts)), rank, counts), group=group)


def together(answers, key):
    """A gradient as DDP averages it, and those of rows one after another; None if there is none."""
    found = [gradients[key] for _, gradients in answers]
    if found[0] is None:
        assert all(gradient is None for gradient in found)
        return None
    return (sum(found) if key in PARAMETERS else torch.cat(found)) / len(answers)


@pytest.mark.quick({"counts": [2, 5, 3], "route": "ring"}, {"counts": [0, 5], "route": "gather"})
@pytest.mark.parametrize("route", ["ring", "gather"])
@pytest.mark.parametrize(("world", "counts"), [(w, c) for w in COUNTS for c in COUNTS[w]])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_together_are_one_process(pool, name, world, counts, route):
    value, gradients = run(name, batch(sum(counts)))
    answers = pool.run(on_a_rank, world, name, counts, route)
    close(sum(a[0] for a in answers) / world, value)
    for key, expected in gradients.items():
        found = together(answers, key)
        assert (found is None) == (expected is None)
        if expected is not None:
            close(found, expected)


def single(given):
    return {key: value.float() if value.is_floating_point() else value for key, value in given.items()}


def on_a_rank_by_kernels(group, rank, name, counts):
    with ring.use_route("ring"), tile_size(8, 6):
        return run(name, single(part(batch(sum(counts)), rank, counts)), group=group, backend="triton")


@pytest.mark.quick({"name": "soft clip"})
@pytest.mark.parametrize("name", ["guide", "soft clip", "margin"])
def test_kernels_of_ranks_together_are_one_process(pool, name):
    """Sums of a guide's and a teacher's tiles are float32, those of other kernels float64: all of them go around."""
    pytest.importorskip("triton")
    counts = [9, 12]
    value, gradients = run(name, {key: t.double() if t.is_floating_point() else t for key, t in single(batch(21)).items()})
    answers = pool.run(on_a_rank_by_kernels, 2, name, counts)
    torch.testing.assert_close((sum(a[0] for a in answers) / 2).double(), value, rtol=1e-6, atol=0)
    for key, expected in gradients.items():
        found = together(answers, key)
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def margins_on_a_rank(group, rank):
    given = {key: value for key, value in batch(3).items() if key in ("x", "y", "scale")}
    return info_nce_loss(given, margin=0.1 if rank == 0 else None, group=group)


def test_ranks_that_disagree_all_say_so(pool):
    for worked, answer in pool.attempt(margins_on_a_rank, 2):
        assert not worked
        assert "the loss is info_nce_loss(margin=0.1) on rank 0, info_nce_loss on rank 1" in answer


def sent_forward(group, rank):
    x, y = aligned_pairs(8, 5, noise=1.0, seed=rank)
    with ring.use_route("ring"), ring.count_traffic() as sent, torch.no_grad():
        mb.info_nce_loss(x, y, scale=3.0, group=group)
    return sent.bytes


def test_nothing_goes_home_where_rows_are_all_that_is_asked_for(pool):
    assert pool.run(sent_forward, 3) == [2 * 8 * 5 * 8] * 3


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=LIMIT, atol=LIMIT * (1 + wanted.abs().max().item()))


FACTORS = {
    "clip": lambda x, y, **o: mb.clip_loss(x, y, 3.0, **o),
    "info_nce": lambda x, y, **o: mb.info_nce_loss(x, y, 3.0, **o),
    "nt_xent": lambda x, y, **o: mb.nt_xent_loss(x, y, 3.0, **o),
    "sup_con": lambda x, y, **o: mb.sup_con_loss(x, torch.arange(len(x)) // 2, 3.0, **o),
    "siglip": lambda x, y, **o: mb.siglip_loss(x, y, 3.0, -2.0, **o),
}


def with_a_factor(group, rank, name, reduction):
    x, y = (side[:6] if rank else side[6:] for side in aligned_pairs(10, 5, noise=1.0, seed=7))
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    loss = FACTORS[name](x, y, reduction=reduction, group=group)
    try:
        (loss.sum() / len(x)).backward()
    except ValueError as error:
        return str(error)
    return [side.grad for side in (x, y) if side.grad is not None]


@pytest.mark.parametrize("name", FACTORS)
def test_each_rank_may_multiply_its_sum_by_another_factor(pool, name):
    """Ranks have 4 and 6 pairs, and each divides its sum by the number of its own pairs."""
    found, wanted = (pool.run(with_a_factor, 2, name, reduction) for reduction in ("sum", "none"))
    for mine, expected in zip(found, wanted, strict=True):
        for gradient, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", FACTORS)
def test_a_mean_has_the_same_factor_on_all_ranks(pool, name):
    for message in pool.run(with_a_factor, 2, name, "mean"):
        assert "all ranks must multiply the mean of a loss by the same factor, got [0.25, 0.16" in message
