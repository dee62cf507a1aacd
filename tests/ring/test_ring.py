"""Many ranks against one process, in float64: every route, losses and operations, even, uneven and empty ranks.

What each rank returns is put together as DDP would: losses and gradients of shared parameters are averaged over ranks, and so
is what reaches a tower through the embeddings, each of which belongs to one rank.
"""

import os
from unittest import mock

import pytest
import torch

import megabatch as mb
from helpers import aligned_pairs, gradients, leaves, tile_size, unit
from megabatch import reference, ring
from megabatch.ring import ranks

WORLDS = (1, 2, 3, 4, 8)
SHARES = {
    "even": lambda world: [4] * world,
    "uneven": lambda world: [(3 * r) % 7 + 1 for r in range(world)],
    "one empty": lambda world: [0 if r == world // 2 else 5 for r in range(world)],
    "all on one": lambda world: [9 if r == world - 1 else 0 for r in range(world)],
}
LIMIT = 1e-10


def routes(world):
    return ["ring", "gather", "auto", *(f"two_level:{n}" for n in range(1, world + 1) if world % n == 0)]


def shared(total, counts, rank):
    start = sum(counts[:rank])
    return total[start : start + counts[rank]]


def close(found, wanted):
    finite = wanted[wanted.isfinite()]
    size = finite.abs().max().item() if finite.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=LIMIT, atol=LIMIT * (1 + size))


def losses(loss, x, y, scale, bias, ids, group=None):
    if loss == "clip":
        return mb.clip_loss(x, y, scale, ids=ids, group=group)
    return mb.siglip_loss(x, y, scale, bias, ids=ids, group=group)


def data(counts, D=5, seed=0):
    x, y = aligned_pairs(sum(counts), D, noise=1.0, seed=seed)
    return x, y, torch.tensor(8.0, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64), torch.arange(len(x)) % 6


def loss_on_a_rank(group, rank, loss, route, counts, with_ids, tile):
    x, y, scale, bias, ids = data(counts)
    x, y, scale, bias = leaves(shared(x, counts, rank), shared(y, counts, rank), scale, bias)
    ids = shared(ids, counts, rank) if with_ids else None
    with ring.use_route(route), tile_size(*tile):
        value = losses(loss, x, y, scale, bias, ids, group)
        assert value.requires_grad
        value.backward()
    return value.detach(), x.grad, y.grad, scale.grad, bias.grad


def put_together(answers):
    """As DDP averages: losses and parameters' gradients over ranks, and embeddings' gradients, each on one rank, likewise."""
    values, dx, dy, dscale, dbias = zip(*answers, strict=True)
    world = len(answers)
    parameters = [None if d[0] is None else sum(d) / world for d in (dscale, dbias)]
    return [sum(values) / world, torch.cat(dx) / world, torch.cat(dy) / world, *parameters]


@pytest.mark.quick(
    {"world": 2, "route": "ring", "share": "even"},
    {"world": 3, "route": "ring", "share": "uneven"},
    {"world": 3, "route": "auto", "share": "all on one"},
    {"world": 4, "route": "gather", "share": "uneven"},
    {"world": 4, "route": "two_level:2", "share": "one empty"},
)
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("world", "route"), [(w, s) for w in WORLDS for s in routes(w)])
def test_losses_and_their_gradients_equal_those_of_one_process(pool, loss, share, world, route):
    counts = SHARES[share](world)
    if sum(counts) == 0:
        counts = [1]
    with_ids = share == "uneven"
    found = put_together(pool.run(loss_on_a_rank, world, loss, route, counts, with_ids, (3, 2)))
    x, y, scale, bias, ids = data(counts)
    inputs = leaves(x, y, scale, bias)
    wanted = getattr(reference, f"{loss}_loss")(*inputs[: 3 if loss == "clip" else 4], ids=ids if with_ids else None)
    wanted.backward()
    for actual, expected in zip(found, [wanted.detach(), *(i.grad for i in inputs)], strict=True):
        if expected is None:
            assert actual is None
        else:
            close(actual, expected)


def operations(operands, exclude, group=None):
    """Values and gradients of both operations, every output with a weight of its own; −inf has weight 0."""
    x, y, scale, row_bias, col_bias, bias, row_ids, col_ids, drow, dcol, dtotal = operands
    inputs = leaves(x, y, scale, row_bias, col_bias, bias)
    x, y, scale, row_bias, col_bias, bias = inputs
    left_out = (row_ids.int(), col_ids) if exclude == "ids" else exclude
    row, col = mb.pairwise_logsumexp(x, y, scale, row_bias, col_bias, exclude=left_out, group=group)
    total = mb.pairwise_softplus(x, y, scale, bias, group=group)
    return [t.detach() for t in (row, col, total)], gradients((row, col, total), (drow, dcol, dtotal), inputs)


def operations_on_a_rank(group, rank, route, rows, columns, exclude):
    counts = [{"row": rows, "column": columns, "": None}[side] for side in SIDES]
    mine = [t if c is None else shared(t, c, rank) for t, c in zip(operands(rows, columns), counts, strict=True)]
    with ring.use_route(route), tile_size(2, 3):
        return operations(mine, exclude, group)


SIDES = ["row", "column", "", "row", "column", "", "row", "column", "row", "column", "row"]


def operands(rows, columns):
    N, M = sum(rows), sum(columns)
    g = torch.Generator().manual_seed(7)
    row_bias, col_bias, drow, dcol, dtotal = (torch.randn(n, generator=g, dtype=torch.float64) for n in (N, M, N, M, N))
    row_ids, col_ids = torch.randint(4, (N,), generator=g), torch.randint(4, (M,), generator=g)
    scale, bias = torch.tensor(4.0, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    x, y = unit(N, 6, seed=7), unit(M, 6, seed=8)
    return [x, y, scale, row_bias, col_bias, bias, row_ids, col_ids, drow, dcol, dtotal]


SHAPES = {
    "pairs": ([3, 1, 4, 2], [3, 1, 4, 2]),
    "rows and columns apart": ([5, 0, 2, 3], [1, 4, 0, 6]),
    "no columns": ([2, 3, 1, 1], [0, 0, 0, 0]),
}


@pytest.mark.quick(
    {"route": "ring", "shape": "rows and columns apart"},
    {"route": "two_level:2", "exclude": "ids"},
    {"route": "gather", "shape": "no columns"},
)
@pytest.mark.parametrize("exclude", [None, "diagonal", "ids"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ["ring", "two_level:2", "gather"])
def test_operations_with_offsets_and_exclusions(pool, route, shape, exclude):
    rows, columns = SHAPES[shape]
    answers = pool.run(operations_on_a_rank, 4, route, rows, columns, exclude)
    wanted = operations(operands(rows, columns), exclude)
    for kind, sides in ((0, ["row", "column", "row"]), (1, SIDES[:6])):
        for i, side in enumerate(sides):
            found = [answer[kind][i] for answer in answers]
            close(torch.cat(found) if side else sum(found), wanted[kind][i])


def ranks_on_a_rank(group, rank, route, counts):
    x, y, *_ = data(counts)
    y[3] = y[2]  # equal similarities: the smaller index of the whole batch comes first
    x[1] = float("nan")
    with ring.use_route(route), tile_size(3, 2):
        return mb.pairwise_rank(shared(x, counts, rank), shared(y, counts, rank), group=group)


@pytest.mark.parametrize("route", ["ring", "two_level:2", "gather"])
@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [1, 6, 0, 3]])
def test_ranks_of_pairs_are_those_in_the_whole_batch(pool, route, counts):
    found = pool.run(ranks_on_a_rank, 4, route, counts)
    x, y, *_ = data(counts)
    y[3] = y[2]
    x[1] = float("nan")
    for i, wanted in enumerate(mb.pairwise_rank(x, y)):
        assert torch.equal(torch.cat([answer[i] for answer in found]), wanted)


def twice_on_a_rank(group, rank, route):
    return [loss_on_a_rank(group, rank, "clip", route, [5, 3, 7, 2], False, (3, 2)) for _ in range(2)]


@pytest.mark.parametrize("route", ["ring", "two_level:2", "gather"])
def test_the_same_inputs_give_the_same_bits(pool, route):
    for first, second in pool.run(twice_on_a_rank, 4, route):
        for a, b in zip(first, second, strict=True):
            assert (a is b is None) or torch.equal(a, b)


def frozen_on_a_rank(group, rank, loss, side):
    counts = [3, 2, 4]
    x, y, scale, bias, _ = data(counts)
    inputs = {"x": shared(x, counts, rank).clone(), "y": shared(y, counts, rank).clone()}
    inputs[side].requires_grad_()
    losses(loss, inputs["x"], inputs["y"], scale, bias, None, group).backward()
    return inputs[side].grad


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("side", ["x", "y"])
def test_a_frozen_side(pool, loss, side):
    found = torch.cat(pool.run(frozen_on_a_rank, 3, loss, side)) / 3
    x, y, scale, bias, _ = data([3, 2, 4])
    inputs = leaves(x, y)
    getattr(reference, f"{loss}_loss")(*inputs, scale, *([bias] if loss == "siglip" else [])).backward()
    close(found, inputs["xy".index(side)].grad)


def without_gradients(group, rank, loss):
    counts = [3, 0]
    x, y, scale, bias, _ = data(counts)
    with torch.no_grad():
        value = losses(loss, shared(x, counts, rank), shared(y, counts, rank), scale, bias, None, group)
    assert not value.requires_grad
    return value


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_no_grad(pool, loss):
    x, y, scale, bias, _ = data([3, 0])
    wanted = losses(loss, x, y, scale, bias, None)
    close(sum(pool.run(without_gradients, 2, loss)) / 2, wanted)


def half_precision(group, rank, loss, dtype, autocast):
    counts = [6, 0, 11]
    x, y, *_ = data(counts, D=8)
    kept = torch.float32 if autocast else dtype
    x, y = leaves(*(shared(t, counts, rank).float().to(kept) for t in (x, y)))
    scale, bias = leaves(torch.tensor(8.0), torch.tensor(-2.0))
    with torch.autocast("cpu", dtype, enabled=autocast), ring.use_route("ring"):
        value = losses(loss, x, y, scale, bias, None, group)
    (value * 2.0**10).backward()
    assert (x.grad.dtype, y.grad.dtype) == (kept, kept)
    return [None if t is None else t.double() for t in (value.detach(), x.grad, y.grad, scale.grad, bias.grad)]


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_rounded_once(pool, loss, dtype, autocast):
    answers = pool.run(half_precision, 3, loss, dtype, autocast)
    assert answers[1][0] == 0  # the empty rank
    x, y, *_ = data([6, 0, 11], D=8)
    inputs = leaves(*(t.float().to(dtype).double() for t in (x, y)), torch.tensor(8.0).double(), torch.tensor(-2.0).double())
    wanted = losses(loss, *inputs, None)
    (wanted * 2.0**10).backward()
    rounding = torch.finfo(torch.float32 if autocast else dtype).eps
    for found, expected in zip(put_together(answers), [wanted.detach(), *(i.grad for i in inputs)], strict=True):
        if expected is not None:  # float32 sums, and one rounding to the type of the inputs
            size = expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=rounding + 2e-6, atol=2e-6 * size)


def through_triton(group, rank, route):
    counts = [20, 0, 37]
    x, y, scale, bias, ids = data(counts, D=16)
    x, y, scale, bias = leaves(*(t.float() for t in (shared(x, counts, rank), shared(y, counts, rank), scale, bias)))
    ids = shared(ids, counts, rank)
    with ring.use_route(route):
        value = mb.clip_loss(x, y, scale, ids=ids, group=group, backend="triton")
        value = value + mb.siglip_loss(x, y, scale, bias, group=group, backend="triton")
    value.backward()
    return value.detach(), x.grad, y.grad, scale.grad, bias.grad


@pytest.mark.quick({"route": "ring"})
@pytest.mark.parametrize("route", ["ring", "gather"])
@pytest.mark.thorough
def test_kernels_go_round_too(pool, route):
    pytest.importorskip("triton")
    found = put_together(pool.run(through_triton, 3, route))
    x, y, scale, bias, ids = data([20, 0, 37], D=16)
    inputs = leaves(*(t.float().double() for t in (x, y, scale, bias)))
    wanted = reference.clip_loss(*inputs[:3], ids=ids) + reference.siglip_loss(*inputs)
    wanted.backward()
    for actual, expected in zip(found, [wanted.detach(), *(i.grad for i in inputs)], strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())


def nodes_by_environment(group, rank, variable, route):
    """Two nodes of two ranks, as torchrun would say it."""
    counts = [2, 3, 1, 4]
    x, y, scale, *_ = data(counts)
    value = {"GROUP_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"}[variable]
    named, large = mock.patch.dict(os.environ, {variable: value}), mock.patch.object(ranks, "GATHER_BYTES", 0)
    with named, large, ring.use_route(route), ring.count_traffic() as sent:
        loss = mb.clip_loss(shared(x, counts, rank), shared(y, counts, rank), scale, group=group)
    return loss, sent.crossing


@pytest.mark.parametrize("variable", ["GROUP_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("route", ["two_level", "auto", "ring"])
def test_nodes_are_those_that_the_environment_names(pool, variable, route):
    answers = pool.run(nodes_by_environment, 4, variable, route)
    x, y, scale, *_ = data([2, 3, 1, 4])
    close(sum(loss for loss, _ in answers) / 4, mb.clip_loss(x, y, scale))
    crossing = [size for _, size in answers]
    if route == "ring":
        assert [size > 0 for size in crossing] == [False, True, False, True]  # the last rank of each node
    else:
        assert all(size > 0 for size in crossing)


def ranks_through_triton(group, rank):
    counts = [20, 0, 37]
    x, y, *_ = data(counts, D=16)
    return mb.pairwise_rank(shared(x, counts, rank).float(), shared(y, counts, rank).float(), group=group, backend="triton")


def test_kernels_rank_the_pairs_of_all_ranks(pool):
    pytest.importorskip("triton")
    answers = pool.run(ranks_through_triton, 3)
    x, y, *_ = data([20, 0, 37], D=16)
    wanted = reference.pairwise_rank(x.float().double(), y.float().double())
    for parts, expected in zip(zip(*answers, strict=True), wanted, strict=True):
        assert torch.equal(torch.cat(parts), expected)


def unequal_norms(group, rank, backend):
    """Every block has a common shift of its own: one column of the second is longer than all others, and points away."""
    g = torch.Generator().manual_seed(3)
    axis = torch.eye(8)[:1]
    near, far = (
        torch.cat(
            (torch.full((n, 1), c), torch.nn.functional.normalize(torch.randn(n, 7, generator=g)) * (1 - c * c) ** 0.5), 1
        )
        for n, c in ((15, 0.3), (15, 0.04))
    )
    x, y = torch.cat((axis, near)), torch.cat((far, -1.55 * axis))
    if group is None:
        x, y, scale = leaves(x.double(), y.double(), torch.tensor(100.0).double())
        loss = reference.clip_loss(x, y, scale)
    else:
        x, y, scale = leaves(x[8 * rank : 8 * rank + 8], y[8 * rank : 8 * rank + 8], torch.tensor(100.0))
        loss = mb.clip_loss(x, y, scale, group=group, backend=backend)
    loss.backward()
    return loss.detach(), x.grad, y.grad, scale.grad


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_blocks_whose_norms_differ(pool, backend):
    answers = pool.run(unequal_norms, 2, backend)
    loss, dx, dy, dscale = unequal_norms(None, 0, backend)
    found = [sum(a[0] for a in answers) / 2, *(torch.cat([a[i] for a in answers]) / 2 for i in (1, 2))]
    found.append(sum(a[3] for a in answers) / 2)
    for actual, expected in zip(found, (loss, dx, dy, dscale), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5 * expected.abs().max().item())


def test_counters_within_counters():
    with ranks.count_traffic() as outer:
        with ranks.count_traffic():
            pass
        ranks._count(100, crosses=False)
    assert outer.bytes == 100
