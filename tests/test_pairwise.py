"""The three operations against the dense reference, in float64, on shapes and ranges meant to hurt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from helpers import assert_equal_to_rounding, examples, gradients, leaves, tile_size, unit
from megabatch import reference

WIDTHS = (1, 3, 384, 1152)
sizes = st.integers(0, 40)
tiles = st.tuples(st.integers(1, 24), st.integers(1, 24))
log_scales = st.floats(-3, 4)
signs = st.sampled_from([1.0, 1.0, 1.0, -1.0])


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def left_out_mask(exclude, N, M):
    if exclude is None:
        return None
    if exclude == "diagonal":
        return torch.eye(N, M, dtype=torch.bool)
    return exclude[0][:, None] == exclude[1][None, :]


@examples(300)
@given(
    N=sizes,
    M=sizes,
    D=st.sampled_from(WIDTHS),
    tile=tiles,
    log_scale=log_scales,
    sign=signs,
    spread=st.sampled_from([0.0, 1.0, 300.0]),
    exclude_by=st.sampled_from([None, "diagonal", "ids"]),
    with_bias=st.booleans(),
    repeated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_logsumexp_matches_reference(N, M, D, tile, log_scale, sign, spread, exclude_by, with_bias, repeated, seed):
    x, y = unit(N, D, seed=seed), unit(M, D, seed=seed + 1)
    x = x * torch.linspace(1, 1 + spread / 10, N, dtype=torch.float64)[:, None]
    if repeated and N > 1:
        x[N // 2 :] = x[0]
    scale = torch.tensor(sign * 10**log_scale, dtype=torch.float64)
    u, v = (random(N, seed=seed + 2) * spread, random(M, seed=seed + 3) * spread) if with_bias else (None, None)
    exclude = exclude_by
    if exclude_by == "ids":
        exclude = (torch.arange(N) % 5, torch.arange(M) % 3)
    inputs = leaves(x, y, scale, *([u, v] if with_bias else []))

    with tile_size(*tile):
        found = mb.pairwise_logsumexp(*inputs, exclude=exclude)
        weights = [random(N, seed=seed + 4), random(M, seed=seed + 5)]
        found_gradients = gradients(found, weights, inputs)
    wanted = reference.pairwise_logsumexp(*inputs, left_out=left_out_mask(exclude, N, M))
    wanted_gradients = gradients(wanted, weights, inputs)

    exponent = reference.similarities(*inputs).abs().max().item() if N and M else 0.0
    for actual, expected in zip([*found, *found_gradients], [*wanted, *wanted_gradients], strict=True):
        assert_equal_to_rounding(actual.detach(), expected.detach(), exponent)


@examples(100)
@given(
    N=sizes,
    M=sizes,
    D=st.sampled_from(WIDTHS),
    tile=tiles,
    log_scale=log_scales,
    bias=st.floats(-300, 300),
    seed=st.integers(0, 1000),
)
def test_softplus_matches_reference(N, M, D, tile, log_scale, bias, seed):
    inputs = leaves(
        unit(N, D, seed=seed),
        unit(M, D, seed=seed + 1),
        torch.tensor(10**log_scale, dtype=torch.float64),
        torch.tensor([bias], dtype=torch.float64),
    )
    weights = [random(N, seed=seed + 4)]
    with tile_size(*tile):
        found = mb.pairwise_softplus(*inputs)
        found_gradients = gradients([found], weights, inputs)
    wanted = reference.pairwise_softplus(*inputs)
    wanted_gradients = gradients([wanted], weights, inputs)
    exponent = 10**log_scale + abs(bias)
    for actual, expected in zip([found, *found_gradients], [wanted, *wanted_gradients], strict=True):
        assert_equal_to_rounding(actual.detach(), expected.detach(), exponent)


@examples(100)
@given(N=sizes, D=st.sampled_from((1, 2, 16)), tile=tiles, levels=st.integers(1, 4), seed=st.integers(0, 1000))
def test_rank_matches_a_stable_sort(N, D, tile, levels, seed):
    # Small integers make products exact and ties frequent.
    x, y = (torch.randint(-levels, levels + 1, (N, D), generator=torch.Generator().manual_seed(s)) for s in (seed, seed + 1))
    with tile_size(*tile):
        found = mb.pairwise_rank(x.float(), y.float())
    wanted = reference.pairwise_rank(x.double(), y.double())
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.dtype == torch.int64
        assert torch.equal(actual, expected)


def test_rank_of_real_valued_embeddings():
    x, y = unit(700, 24, seed=0), unit(700, 24, seed=1)
    with tile_size(128, 96):
        found = mb.pairwise_rank(x, x + 0.3 * y)
    for actual, expected in zip(found, reference.pairwise_rank(x, x + 0.3 * y), strict=True):
        assert torch.equal(actual, expected)


def test_collapsed_embeddings_do_not_rank_perfectly():
    x = unit(1, 64, seed=0, dtype=torch.float32).expand(500, 64)
    with tile_size(128, 64):
        row_rank, col_rank = mb.pairwise_rank(x, x)
    assert torch.equal(row_rank, torch.arange(500))
    assert torch.equal(col_rank, torch.arange(500))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "D"), [(1025, 64), (1026, 384), (33, 7), (1029, 513)])
def test_copies_tie_wherever_they_are_formed(N, D, dtype):
    # The last column of 1025 is a tile of its own, formed by another routine with other roundings.
    x = unit(1, D, seed=N, dtype=dtype).expand(N, D)
    for rank in mb.pairwise_rank(x, x):
        assert torch.equal(rank, torch.arange(N))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_ranks_of_large_norms(backend):
    """A norm of 1e25 is within float32; its square is not."""
    x, y = unit(40, 8, seed=0, dtype=torch.float32), unit(40, 8, seed=1, dtype=torch.float32)
    found = mb.pairwise_rank(x * 1e25, y, backend=backend)
    for actual, expected in zip(found, reference.pairwise_rank(x.double(), y.double()), strict=True):
        assert torch.equal(actual, expected)


def test_nan_ranks_worst():
    x = unit(20, 8, seed=0, dtype=torch.float32)
    x[3] = torch.nan
    row_rank, _ = mb.pairwise_rank(x, unit(20, 8, seed=1, dtype=torch.float32))
    assert row_rank[3] == 19


@pytest.mark.parametrize("exclude", [None, "diagonal", "ids"])
def test_gradcheck_logsumexp(exclude):
    x, y, scale, u, v = leaves(
        random(6, 4, seed=0), random(5, 4, seed=1), torch.tensor(1.7, dtype=torch.float64), random(6, seed=2), random(5, seed=3)
    )
    if exclude == "ids":
        exclude = (torch.tensor([0, 1, 2, 0, 4, 5]), torch.tensor([0, 9, 2, 2, 9]))
    with tile_size(4, 2):
        assert torch.autograd.gradcheck(lambda *a: mb.pairwise_logsumexp(*a, exclude=exclude), (x, y, scale, u, v))


def test_gradcheck_softplus():
    inputs = leaves(random(6, 4, seed=0), random(5, 4, seed=1), *torch.tensor([1.7, -0.4], dtype=torch.float64))
    with tile_size(4, 2):
        assert torch.autograd.gradcheck(mb.pairwise_softplus, inputs)


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_of_one_direction_alone(used):
    x, y, scale = leaves(random(30, 8, seed=0), random(20, 8, seed=1), torch.tensor(2.0, dtype=torch.float64))
    with tile_size(7, 5):
        found = torch.autograd.grad(mb.pairwise_logsumexp(x, y, scale)[used].square().sum(), (x, y, scale))
    wanted = torch.autograd.grad(reference.pairwise_logsumexp(x, y, scale)[used].square().sum(), (x, y, scale))
    for actual, expected in zip(found, wanted, strict=True):
        assert_equal_to_rounding(actual, expected, 20.0)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)])
def test_only_the_gradients_that_are_asked_for(needs):
    tensors = [random(30, 8, seed=0), random(20, 8, seed=1), torch.tensor(2.0, dtype=torch.float64)]
    for tensor, need in zip(tensors, needs, strict=True):
        tensor.requires_grad_(need)
    wanted_inputs = [tensor for tensor in tensors if tensor.requires_grad]
    with tile_size(7, 5):
        for mine, dense in (
            (sum(o.square().sum() for o in mb.pairwise_logsumexp(*tensors)), reference.pairwise_logsumexp(*tensors)),
            (mb.pairwise_softplus(*tensors).square().sum(), [reference.pairwise_softplus(*tensors)]),
        ):
            found = torch.autograd.grad(mine, wanted_inputs)
            wanted = torch.autograd.grad(sum(o.square().sum() for o in dense), wanted_inputs)
            for actual, expected in zip(found, wanted, strict=True):
                assert_equal_to_rounding(actual, expected, 20.0)


def test_everything_left_out_of_a_row_and_a_column():
    x, y = leaves(random(4, 3, seed=0), random(5, 3, seed=1))
    row_ids, col_ids = torch.tensor([7, 1, 2, 3]), torch.full((5,), 7)
    row, col = mb.pairwise_logsumexp(x, y, exclude=(row_ids, col_ids))
    assert row[0] == -torch.inf
    assert row[1:].isfinite().all()
    weights = torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    dx, dy = torch.autograd.grad([row, col], [x, y], [weights, torch.ones_like(col)])
    assert torch.equal(dx[0], torch.zeros_like(dx[0]))
    assert dx.isfinite().all()
    assert dy.isfinite().all()


def test_minus_infinity_as_an_offset_leaves_a_column_out():
    x, y = leaves(random(6, 3, seed=0), random(5, 3, seed=1))
    mask = torch.zeros(5, dtype=torch.float64)
    mask[2] = -torch.inf
    row, col = mb.pairwise_logsumexp(x, y, col_bias=mask)
    kept = [0, 1, 3, 4]
    wanted = mb.pairwise_logsumexp(x, y[kept])
    torch.testing.assert_close(row, wanted[0])
    torch.testing.assert_close(col[kept], wanted[1])
    assert col[2] == -torch.inf
    dy = torch.autograd.grad([row, col], y, [torch.ones_like(row), torch.ones_like(col)])[0]
    assert torch.equal(dy[2], torch.zeros(3, dtype=torch.float64))
    assert dy.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nan_in_gives_nan_out(dtype):
    x, y = unit(9, 4, seed=0, dtype=dtype), unit(9, 4, seed=1, dtype=dtype)
    x[2, 1] = torch.nan
    with tile_size(4, 4):
        row, col = mb.pairwise_logsumexp(x, y)
        total = mb.pairwise_softplus(x, y)
        loss = mb.clip_loss(x, y, 10.0)
    assert row.isnan().tolist() == [i == 2 for i in range(9)]
    assert col.isnan().all()
    assert total.isnan().tolist() == [i == 2 for i in range(9)]
    assert loss.isnan()


def test_nan_with_every_bit_set_survives_tf32_rounding():
    from megabatch.tiles.block import round_to_tf32

    values = torch.tensor([0x7FFFFFFF, 0x7F800000, 0x3F801000, 0x3F800FFF, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    rounded = round_to_tf32(values)
    assert rounded[0].isnan()
    assert rounded[1] == torch.inf
    assert rounded[2] == 1 + 2**-10
    assert rounded[3] == 1
    assert rounded[4] == torch.inf


def test_tf32_rounding_in_place_gives_a_nearest_value():
    from megabatch.tiles.block import round_to_tf32, round_to_tf32_

    significands = torch.randint(0, 2**23, (9000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ties = torch.arange(1000, dtype=torch.int32) * 2**13 + 2**12  # halfway: either neighbour will do
    exponents = torch.arange(10000, dtype=torch.int32) % 128 + 64
    values = (torch.cat([significands, ties]) | exponents << 23).view(torch.float32)
    values[::2].neg_()
    values[7] = torch.nan
    nearest = round_to_tf32(values)
    found = round_to_tf32_(values.clone(), torch.empty_like(values))
    torch.testing.assert_close(round_to_tf32(found), found, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close((found - values).abs(), (nearest - values).abs(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_any_memory_layout(dtype, layout):
    x = unit(12, 6, seed=0, dtype=dtype)
    other = {
        "transposed": lambda: x.t().contiguous().t(),
        "strided": lambda: torch.stack([x, -x], dim=-1).flatten(1)[:, ::2],
        "expanded": lambda: x[:1].expand(12, 6),
        "offset": lambda: torch.cat([x.new_zeros(12, 1), x], dim=1)[:, 1:],
    }[layout]()
    plain = other.contiguous().clone()
    y = unit(12, 6, seed=1, dtype=dtype)
    with tile_size(5, 4):
        for operation in (
            lambda a, b: sum(s.sum() for s in mb.pairwise_logsumexp(a, b, 7.0)),
            lambda a, b: mb.pairwise_softplus(a, b, 7.0).sum(),
            lambda a, b: mb.clip_loss(a, b, 7.0),
            lambda a, b: mb.siglip_loss(a, b, 7.0, -3.0),
        ):
            results = []
            for tensor in (other, plain):
                a, b = tensor.detach().requires_grad_(), y.detach().requires_grad_()
                loss = operation(a, b)
                results.append((loss, *torch.autograd.grad(loss, (a, b))))
            for actual, expected in zip(*results, strict=True):
                torch.testing.assert_close(actual, expected)


def test_bitwise_the_same_over_repeated_runs():
    x, y = leaves(unit(333, 65, seed=0, dtype=torch.float32), unit(333, 65, seed=1, dtype=torch.float32))
    scale = torch.tensor(20.0, requires_grad=True)

    def run():
        row, col = mb.pairwise_logsumexp(x, y, scale)
        loss = mb.clip_loss(x, y, scale) + mb.siglip_loss(x, y, scale, -10.0)
        return [row, col, loss, *torch.autograd.grad(loss + row.sum(), (x, y, scale))]

    with tile_size(64, 48):
        first = run()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.quick({"size": (64, 7)}, {"size": (1000, 1000)})
@pytest.mark.parametrize("size", [(1, 1), (1000, 1000), (64, 7), (7, 64)])
def test_results_do_not_depend_on_the_tile_beyond_rounding(size):
    x, y = leaves(unit(150, 32, seed=0), unit(150, 32, seed=1))
    scale = torch.tensor(50.0, dtype=torch.float64, requires_grad=True)

    def run():
        loss = mb.clip_loss(x, y, scale) + mb.siglip_loss(x, y, scale, -10.0)
        return [loss.detach(), *torch.autograd.grad(loss, (x, y, scale))]

    with tile_size(*size):
        found = run()
    with tile_size(16, 16):
        wanted = run()
    for actual, expected in zip(found, wanted, strict=True):
        assert_equal_to_rounding(actual, expected, 50.0)


@pytest.mark.parametrize(("N", "M"), [(2, 700), (700, 2), (1, 1), (3, 0)])
def test_thin_shapes(N, M):
    x, y = leaves(unit(N, 8, seed=0), unit(M, 8, seed=1))
    with tile_size(16, 16):
        found = mb.pairwise_logsumexp(x, y, 5.0)
    for actual, expected in zip(found, reference.pairwise_logsumexp(x, y, 5.0), strict=True):
        assert_equal_to_rounding(actual.detach(), expected.detach(), 5.0)


def test_fresh_memory_is_never_read():
    # With NaN in every uninitialised buffer, a value that is read before it is written shows.
    x, y = leaves(unit(50, 8, seed=0), unit(50, 8, seed=1))
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        with tile_size(16, 12):
            row, col = mb.pairwise_logsumexp(x, y, 3.0)
            loss = mb.clip_loss(x, y, 3.0) + mb.siglip_loss(x, y, 3.0, -1.0) + mb.pairwise_softplus(x, y).sum()
            dx, dy = torch.autograd.grad(loss + row.sum() + col.sum(), (x, y))
    finally:
        torch.use_deterministic_algorithms(False)
    for tensor in (row, col, loss, dx, dy):
        assert tensor.isfinite().all()
