"""pairwise_topk against a stable sort of the dense products: ties, filters, few columns, kernels, ranks."""

import pytest
import torch

import megabatch as mb
from helpers import tile_size, unit
from megabatch import ring
from megabatch.kernels import plan as kernel_plan
from megabatch.tiles import plan
from megabatch.tiles.sums import best_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dense(x, y, k, left_out=None):
    """As the docstring of pairwise_topk says; `left_out` is an (N, M) mask of pairs."""
    s = x @ y.T
    left_out = s.isnan() if left_out is None else left_out | s.isnan()
    s = torch.cat((s.masked_fill(left_out, -torch.inf), s.new_full((len(s), k), -torch.inf)), 1)
    values, indices = s.sort(dim=1, descending=True, stable=True)
    return values[:, :k], indices[:, :k].masked_fill(values[:, :k] == -torch.inf, -1)


def whole_numbers(N, M, D, seed):
    """Embeddings whose products are small whole numbers: exact in every type, with many ties."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-2, 3, (rows, D), generator=generator).double().to(DEVICE) for rows in (N, M)]


def same(found, wanted):
    assert found.indices.dtype == torch.int64
    torch.testing.assert_close(found.values.double(), wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(found.indices, wanted[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("N", "M", "D", "k"), [(1, 1, 1, 1), (7, 50, 3, 5), (33, 20, 4, 30), (0, 5, 2, 3), (4, 0, 2, 3)])
def test_the_best_are_found_with_ties_to_the_smaller_index(dtype, N, M, D, k):
    x, y = whole_numbers(N, M, D, seed=N)
    with tile_size(5, 8):
        same(mb.pairwise_topk(x.to(dtype), y.to(dtype), k), dense(x, y, k))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pairs_are_left_out_by_place_by_id_and_by_value(dtype):
    x, y = whole_numbers(24, 40, 4, seed=3)
    i, j = torch.arange(24, device=DEVICE) % 5, torch.arange(40, device=DEVICE) % 7
    most = torch.arange(24, dtype=torch.float64, device=DEVICE) / 4
    cases = [
        ({"exclude": "diagonal"}, torch.eye(24, 40, dtype=torch.bool, device=DEVICE)),
        ({"exclude": (i, j)}, i[:, None] == j),
        ({"below": most.to(dtype)}, x @ y.T >= most[:, None]),
        ({"above": 2, "below": 5.0}, (x @ y.T <= 2) | (x @ y.T >= 5)),
    ]
    for options, left_out in cases:
        with tile_size(7, 9):
            same(mb.pairwise_topk(x.to(dtype), y.to(dtype), 6, **options), dense(x, y, 6, left_out))


def test_nan_is_never_chosen_and_minus_zero_is_zero():
    x = torch.tensor([[1.0, 0.0], [torch.nan, 1.0]], dtype=torch.float32)
    y = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [torch.inf, 0.5], [torch.nan, 1.0]])
    found = mb.pairwise_topk(x, y, 4)
    assert found.indices.tolist() == [[2, 0, 1, -1], [-1, -1, -1, -1]]
    negative = mb.pairwise_topk(torch.tensor([[1.0]]), torch.tensor([[-0.0], [0.0]]), 2)
    assert negative.indices.tolist() == [[0, 1]]


def test_errors_name_the_argument():
    x, y = unit(3, 4, seed=0), unit(5, 4, seed=1)
    for k in (0, 1025, True, 2.0):
        with pytest.raises(ValueError, match="k must be an integer from 1 to 1024"):
            mb.pairwise_topk(x, y, k)
    with pytest.raises(ValueError, match=r"below must have shape \(3,\)"):
        mb.pairwise_topk(x, y, 1, below=torch.zeros(4))
    with pytest.raises(ValueError, match="above must not require a gradient"):
        mb.pairwise_topk(x, y, 1, above=torch.zeros(3, requires_grad=True))


def test_bounds_of_one_element_and_nan():
    x, y = unit(3, 4, seed=0), unit(5, 4, seed=1)
    wanted = mb.pairwise_topk(x, y, 2, below=0.1)
    same(mb.pairwise_topk(x, y, 2, below=torch.full((1, 1), 0.1, dtype=torch.float64)), wanted)
    for name in ("above", "below"):
        with pytest.raises(ValueError, match=f"{name} must not be nan"):
            mb.pairwise_topk(x, y, 1, **{name: float("nan")})
        found = mb.pairwise_topk(x, y, 2, **{name: torch.tensor([torch.nan, 0.1, 0.1], dtype=torch.float64)})
        assert found.indices[0].tolist() == [-1, -1]
        rest = mb.pairwise_topk(x[1:], y, 2, **{name: 0.1})
        same(type(found)(*(part[1:] for part in found)), rest)


def test_compiled_and_under_vmap():
    x, y = unit(2, 6, 4, seed=0), unit(9, 4, seed=1)
    found = torch.func.vmap(lambda rows: mb.pairwise_topk(rows, y, 3))(x)
    for i in range(2):
        same(mb.pairwise_topk(x[i], y, 3), (found[0][i], found[1][i]))
    compiled = torch.compile(lambda rows: mb.pairwise_topk(rows, y, 3), backend="aot_eager", fullgraph=True)
    same(mb.pairwise_topk(x[0], y, 3), compiled(x[0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_groups_of_columns_hold_the_best(dtype):
    """Ties, NaN, infinities, groups that do not fit evenly, more columns asked for than there are, and columns in two parts."""
    generator = torch.Generator().manual_seed(0)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    for m, k in ((1, 1), (9, 1), (50, 3), (64, 4), (103, 2), (20, 30), (257, 16), (1100, 2)):
        values = torch.randint(-3, 4, (17, m), generator=generator).to(dtype)
        replaced = torch.rand(17, m, generator=generator) < 0.2
        values[replaced] = odd[torch.randint(4, (int(replaced.sum()),), generator=generator)].to(dtype)
        order = torch.cat((values.nan_to_num(-torch.inf, torch.inf, -torch.inf), values.new_full((17, k), -torch.inf)), 1)
        wanted = order.sort(dim=1, descending=True, stable=True)
        indices = (wanted.indices[:, :k] + 5).masked_fill(wanted.values[:, :k] == -torch.inf, -1)
        same(best_columns(values.clone(), 5, k), (wanted.values[:, :k].double(), indices))
        for cut in (m // 9, m // 2, m - 1):
            if cut > 0:
                before = best_columns(values[:, :cut].clone(), 5, k)
                after = best_columns(values[:, cut:].clone(), 5 + cut, k, before)
                same(after, (wanted.values[:, :k].double(), indices))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's numpy, on intended inf and NaN
@pytest.mark.quick(
    {"dtype": torch.float32, "case": "ids", "group": 4},
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", ["plain", "diagonal", "ids", "below"])
@pytest.mark.parametrize("group", [4, None])
def test_kernels_find_the_same(monkeypatch, dtype, case, group):
    """Products formed twice, or stored; panels, groups and strips of columns; a row with fewer columns than are asked for."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_plan, "topk_group", lambda M, D, k: group)
    monkeypatch.setattr(kernel_plan, "topk_strip", lambda N, M, group: plan.TileSize(8, 128))
    monkeypatch.setattr(kernel_plan, "TOPK_STORED_GROUP", 4)
    monkeypatch.setattr(kernel_plan, "TOPK_STORED_PANEL", 16)
    monkeypatch.setattr(kernel_plan, "TOPK_FEW", 16)
    x, y = whole_numbers(11, 200, 5, seed=1)
    y[100:104] = torch.nan  # a whole group
    i, j = torch.arange(11, device=DEVICE) % 5, torch.arange(200, device=DEVICE) % 7
    options, left_out = {
        "plain": ({}, None),
        "diagonal": ({"exclude": "diagonal"}, torch.eye(11, 200, dtype=torch.bool, device=DEVICE)),
        "ids": ({"exclude": (i, j)}, i[:, None] == j),
        "below": ({"below": -9.0}, x @ y.T >= -9),
    }[case]
    same(mb.pairwise_topk(x.to(dtype), y.to(dtype), 6, backend="triton", **options), dense(x, y, 6, left_out))


@pytest.mark.quick({"exclude": "diagonal"})
@pytest.mark.parametrize("exclude", [None, "diagonal", "ids"])
@pytest.mark.thorough
def test_columns_at_the_limit_cost_no_place_in_the_kernels(exclude):
    """The limit is a product, which another order of sums rounds to either side of it."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    y = torch.randn(1024, 200)
    x = y[:32] + 0.1 * torch.randn(32, 200)
    y[32:64] = y[:32]  # the same product, which neither ids nor the diagonal exclude
    x, y, limit = x.to(DEVICE), y.to(DEVICE), (x * y[:32]).sum(1).to(DEVICE)
    ids = torch.arange(32, device=DEVICE), torch.arange(1024, device=DEVICE)
    found = mb.pairwise_topk(x, y, 1, exclude=ids if exclude == "ids" else exclude, below=limit, backend="triton")
    s = x.double() @ y.double().T
    s[ids[0], ids[0]] = s[ids[0], ids[0] + 32] = -torch.inf  # both are the limit to rounding, and may be below it or not
    at_limit = (found.values[:, 0] - limit).abs() < 1e-3
    assert (found.values[:, 0] < limit).all()
    torch.testing.assert_close(found.values[~at_limit, 0].double(), s[~at_limit].amax(1), rtol=1e-5, atol=0)
    assert at_limit.sum() < 32


def topk_on_a_rank(group, rank, route, rows, columns, exclude):
    x, y = whole_numbers(sum(rows), sum(columns), 3, seed=2)
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1])), slice(sum(columns[:rank]), sum(columns[: rank + 1]))
    i, j = torch.arange(len(x), device=DEVICE) % 3, torch.arange(len(y), device=DEVICE) % 4
    x, y, i, j = x[own[0]], y[own[1]], i[own[0]], j[own[1]]
    with ring.use_route(route), tile_size(3, 4):
        return tuple(mb.pairwise_topk(x, y, 5, exclude=(i, j) if exclude == "ids" else exclude, group=group))


@pytest.mark.quick(
    {"world": 2, "route": "gather", "exclude": "diagonal"},
    {"world": 3, "route": "ring", "exclude": "ids"},
    {"world": 4, "route": "two_level:2", "exclude": None},
)
@pytest.mark.parametrize("exclude", [None, "diagonal", "ids"])
@pytest.mark.parametrize(("world", "route"), [(1, "ring"), (2, "gather"), (3, "ring"), (3, "gather"), (4, "two_level:2")])
def test_ranks_find_what_one_process_finds(pool, world, route, exclude):
    rows, columns = [(2 * r) % 5 for r in range(1, world + 1)], [(3 * r) % 7 for r in range(world)]
    answers = pool.run(topk_on_a_rank, world, route, rows, columns, exclude)
    x, y = whole_numbers(sum(rows), sum(columns), 3, seed=2)
    i, j = torch.arange(len(x), device=DEVICE), torch.arange(len(y), device=DEVICE)
    left_out = {"diagonal": i[:, None] == j, "ids": i[:, None] % 3 == j % 4, None: None}[exclude]
    wanted = dense(x, y, 5, left_out)
    for part in range(2):
        torch.testing.assert_close(torch.cat([answer[part] for answer in answers]), wanted[part], rtol=0, atol=0)
