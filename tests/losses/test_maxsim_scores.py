"""MaxSim scores, the scores of candidates and the best documents, against the dense oracle in float64."""

import pytest
import torch
from test_late_interaction import LAYOUTS, Case

import megabatch as mb
from helpers import tile_size
from megabatch import reference
from megabatch.late import scores
from megabatch.tiles import plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's numpy, on intended inf and NaN

ENGINES = {"eager": torch.float64, "triton": torch.float32}
N, M, LQ, LD = 5, 11, 4, 7


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("tests/gpu has these tests on a GPU")
    return request.param


@pytest.fixture
def small_parts(monkeypatch):
    """Several strips of queries and of documents, and several gathers of candidates."""
    monkeypatch.setattr(scores, "SCORE_STRIP", plan.TileSize(2, 3))
    monkeypatch.setattr(scores, "SCORE_ELEMENTS", 6 * 20)
    with tile_size(6, 9):
        yield


def inputs(layout, engine, seed=3):
    """Returns the tokens in the dtype of the engine, and their float64 scores."""
    case = Case(layout, N, M, LQ, LD, seed=seed)
    case.sides = [side.detach().to(ENGINES[engine]) for side in case.sides]
    return case.tokens(), reference.maxsim(*case.lists([side.double() for side in case.sides]))


def assert_close(actual, expected):
    finite = expected.isfinite()
    assert torch.equal(actual.double()[~finite], expected[~finite])
    eps = torch.finfo(actual.dtype).eps
    assert (actual - expected)[finite].abs().max() <= 8 * LQ * eps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("normalize", [False, True])
def test_scores_match_the_oracle(engine, layout, normalize, small_parts):
    tokens, wanted = inputs(layout, engine)
    if normalize:
        counts = mb.late._items(tokens[0], None, "query").counts()
        wanted = wanted / counts[:, None]
    assert_close(mb.maxsim_scores(*tokens, normalize=normalize, backend=engine), wanted)
    candidates = torch.randint(0, M, (N, 6), generator=torch.Generator().manual_seed(0))
    expected = wanted.gather(1, candidates)
    candidates[1, 2:4], expected[1, 2:4] = -1, -torch.inf
    assert_close(mb.maxsim_scores(*tokens, candidates=candidates.int(), normalize=normalize, backend=engine), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_documents_match_the_oracle(engine, layout, small_parts):
    tokens, wanted = inputs(layout, engine)
    ids = torch.arange(N) % 3, torch.arange(M) % 4
    bound = wanted.median(1).values
    for k, options, excluded in (
        (3, {}, torch.zeros(N, M, dtype=torch.bool)),
        (M + 2, {"exclude": "diagonal"}, torch.eye(N, M, dtype=torch.bool)),
        (4, {"exclude": ids}, ids[0][:, None] == ids[1]),
        (4, {"below": bound + 1e-3}, wanted >= bound[:, None] + 1e-3),
        (M, {"above": bound + 1e-3}, wanted <= bound[:, None] + 1e-3),
    ):
        values, indices = mb.maxsim_topk(*tokens, k, backend=engine, **options)
        order = wanted.masked_fill(excluded, -torch.inf).sort(dim=1, descending=True, stable=True)
        count = min(k, M)
        missing = order.values[:, :count] == -torch.inf
        assert torch.equal(indices[:, :count], order.indices[:, :count].masked_fill(missing, -1))
        assert_close(values[:, :count], order.values[:, :count])
        assert indices[:, count:].eq(-1).all()
        assert values[:, count:].eq(-torch.inf).all()


def test_documents_may_come_in_groups(small_parts):
    (query, document), _ = inputs("packed and masked", "eager")
    values, indices = mb.maxsim_topk(query, document, 4, exclude="diagonal")
    cut = int(document.lengths[:5].sum())
    first = mb.Tokens(document.values[:cut], document.mask[:cut], document.lengths[:5])
    last = mb.Tokens(document.values[cut:], document.mask[cut:], document.lengths[5:])
    nothing = mb.Tokens(document.values[:0], lengths=document.lengths[:0])
    for groups in ([first, last], iter((first, nothing, last))):
        found = mb.maxsim_topk(query, groups, 4, exclude="diagonal")
        assert torch.equal(found.values, values)
        assert torch.equal(found.indices, indices)


def test_documents_may_be_in_a_memory_mapped_file(tmp_path):
    (query, document), wanted = inputs("packed", "eager")
    path = tmp_path / "vectors.f64"
    path.write_bytes(document.values.numpy().tobytes())
    vectors = torch.from_file(str(path), size=document.values.numel(), dtype=torch.float64).view(-1, 6)
    mapped = mb.Tokens(vectors, lengths=document.lengths)
    assert torch.equal(mb.maxsim_topk(query, mapped, 3).indices, wanted.topk(3).indices)


def test_ties_go_to_the_smaller_number(engine, small_parts):
    dtype = ENGINES[engine]
    document = torch.eye(6, dtype=dtype)[torch.arange(M) % 2][:, None].expand(M, LD, 6)
    query = torch.eye(6, dtype=dtype)[:1].expand(N, LQ, 6)
    values, indices = mb.maxsim_topk(query, document, 8, backend=engine)
    assert indices.eq(torch.tensor([0, 2, 4, 6, 8, 10, 1, 3])).all()
    assert values.eq(torch.tensor([LQ] * 6 + [0] * 2)).all()


def test_empty_items_and_nan(engine, small_parts):
    dtype = ENGINES[engine]
    query, document = torch.ones(N, LQ, 6, dtype=dtype), torch.ones(M, LD, 6, dtype=dtype)
    masks = torch.ones(N, LQ, dtype=torch.bool), torch.ones(M, LD, dtype=torch.bool)
    masks[0][1], masks[1][2], masks[1][4, 1:] = False, False, False
    query[1], document[2], document[4, 1:] = torch.nan, torch.nan, torch.nan
    document[3, 2], query[2, 0] = torch.nan, torch.nan
    expected = torch.full((N, M), 6.0 * LQ, dtype=torch.float64)
    expected[1] = 0.0
    expected[:, 3], expected[2], expected[:, 2] = torch.nan, torch.nan, -torch.inf
    options = {"query_mask": masks[0], "document_mask": masks[1], "backend": engine}
    rows = [0, 1, 2, 4]
    columns = [0, 1, 2, 4, 5]  # whether a query without vectors is compared with NaN is not defined
    found = mb.maxsim_scores(query, document, **options).double()
    assert torch.allclose(found[rows][:, columns], expected[rows][:, columns], rtol=0, atol=0, equal_nan=True)
    assert found[0, 3].isnan()
    candidates = torch.arange(M).expand(N, M)
    assert torch.equal(mb.maxsim_scores(query, document, candidates=candidates, **options)[0].isnan(), found[0].isnan())
    values, indices = mb.maxsim_topk(query, document, M, **options)
    assert indices[0].tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10, -1, -1]
    assert indices[2].eq(-1).all()
    assert values[2].eq(-torch.inf).all()


def test_queries_may_be_longer_than_a_tile(engine):
    dtype, generator = ENGINES[engine], torch.Generator().manual_seed(0)
    query, document = (torch.randn(count, 80, 6, generator=generator).to(dtype) for count in (2, 3))
    wanted = reference.maxsim(list(query.double()), list(document.double()))
    candidates = torch.tensor([[2, 0], [1, -1]])
    expected = wanted.gather(1, candidates.clamp_min(0)).masked_fill(candidates < 0, -torch.inf)
    for actual, exact in (
        (mb.maxsim_scores(query, document, backend=engine), wanted),
        (mb.maxsim_scores(query, document, candidates=candidates, backend=engine), expected),
    ):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)


def test_sides_may_be_empty(engine):
    query, nothing = torch.ones(2, 3, 4, dtype=ENGINES[engine]), torch.ones(0, 3, 4, dtype=ENGINES[engine])
    assert mb.maxsim_scores(query, nothing, backend=engine).shape == (2, 0)
    assert mb.maxsim_scores(nothing, query, backend=engine).shape == (0, 2)
    no_candidates = torch.full((2, 3), -1)
    assert mb.maxsim_scores(query, nothing, candidates=no_candidates, backend=engine).eq(-torch.inf).all()
    assert mb.maxsim_scores(query, query, candidates=no_candidates[:, :0], backend=engine).shape == (2, 0)
    assert mb.maxsim_topk(query, nothing, 2, backend=engine).indices.tolist() == [[-1, -1], [-1, -1]]
    assert mb.maxsim_topk(query, [], 2, backend=engine).indices.tolist() == [[-1, -1], [-1, -1]]
    assert mb.maxsim_topk(nothing, query, 2, backend=engine).values.shape == (0, 2)


def test_errors_name_the_argument():
    x = torch.ones(2, 3, 4)
    for error, message, arguments, options in (
        (ValueError, "candidates must be from -1 to 1", (x, x), {"candidates": torch.tensor([[0], [2]])}),
        (ValueError, "candidates must be from -1 to 1", (x, x), {"candidates": torch.tensor([[0], [-2]])}),
        (ValueError, "candidates must have 2 rows", (x, x), {"candidates": torch.tensor([[0]])}),
        (TypeError, "candidates must be an int64 or int32", (x, x), {"candidates": torch.zeros(2, 1)}),
        (ValueError, "candidates must be on cpu", (x, x), {"candidates": torch.zeros(2, 1, dtype=torch.int64, device="meta")}),
        (ValueError, "same embedding dimension", (x, torch.ones(2, 3, 5)), {}),
        (TypeError, "same dtype", (x, x.half()), {}),
        (ValueError, "document must not require", (x, x.clone().requires_grad_()), {}),
    ):
        with pytest.raises(error, match=message):
            mb.maxsim_scores(*arguments, **options)
    with torch.no_grad():
        assert mb.maxsim_scores(x, x.clone().requires_grad_()).eq(12.0).all()
    for error, message, arguments, options in (
        (ValueError, "k must be an integer", (x, x, 0), {}),
        (TypeError, "document must be a tensor, Tokens or an iterable", (x, 3, 1), {}),
        (TypeError, r"document\[0\] must be a tensor or Tokens", (x, ["text"], 1), {}),
        (ValueError, "must be None if document is an iterable", (x, [x], 1), {"document_mask": torch.ones(2, 3).bool()}),
        (
            ValueError,
            r"exclude\[1\] must have shape \(2,\)",
            (x, x, 1),
            {"exclude": (torch.zeros(2).int(), torch.zeros(3).int())},
        ),
        (ValueError, "below must have shape .* row of query", (x, x, 1), {"below": torch.zeros(3)}),
    ):
        with pytest.raises(error, match=message):
            mb.maxsim_topk(*arguments, **options)
