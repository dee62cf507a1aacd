"""info_nce_loss in all its forms: against a dense float64 loss, written out column by column."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from helpers import aligned_pairs, assert_same_outcomes, examples, leaves, tile_size, unit

ALL = ("query-key", "query-query", "key-query", "key-key")
SCALE = 20.0


def dense(
    query,
    key,
    scale,
    negatives=None,
    *,
    contrast=("query-key",),
    symmetric=False,
    ids=None,
    log_q=None,
    margin=None,
    guide=None,
    private=False,
    negative_ids=None,
    negative_log_q=None,
    negative_guide=None,
):
    """One row of logits for each query, its own key first, −inf for what is left out. Negatives are (N, K, D)."""
    N = len(query)
    own = torch.eye(N, dtype=torch.bool)
    same = own if ids is None else own | (ids[:, None] == ids)
    side = {"query": query, "key": key}
    seen = dict(zip(("query", "key"), guide or (query, key), strict=True))
    limit = None if margin is None else (seen["query"] * seen["key"]).sum(1, keepdim=True) + margin
    correction = torch.zeros(N, dtype=query.dtype) if log_q is None else log_q

    def left_out(mask, compared):
        return mask if limit is None else mask | (compared > limit + 1e-12)  # a key that occurs twice is not above itself

    def one_direction(names):
        columns = []
        for name in names:
            rows, cols = name.split("-")
            s = scale * side[rows] @ side[cols].T - (correction if cols == "key" else 0.0)
            columns.append(s.masked_fill(left_out(same, seen[rows] @ seen[cols].T), -torch.inf))
        return columns

    match = scale * (query * key).sum(1, keepdim=True)
    logits = [match - correction[:, None], *one_direction(contrast)]
    if negatives is not None:
        flat, K = negatives.flatten(0, 1), negatives.shape[1]
        flat_guide = flat if negative_guide is None else negative_guide.flatten(0, 1)
        others = torch.arange(N)[:, None] != torch.arange(N).repeat_interleave(K)
        mask = others if private else torch.zeros_like(others)
        if negative_ids is not None:
            mask = mask | (ids[:, None] == negative_ids.flatten())
        s = scale * query @ flat.T - (0.0 if negative_log_q is None else negative_log_q.flatten())
        logits.append(s.masked_fill(left_out(mask, seen["query"] @ flat_guide.T), -torch.inf))
        if "key-key" in contrast and not private:
            s = scale * key @ flat.T - (0.0 if negative_log_q is None else negative_log_q.flatten())
            logits.append(s.masked_fill(left_out(~others, seen["key"] @ flat_guide.T), -torch.inf))
    loss = F.cross_entropy(torch.cat(logits, 1), torch.zeros(N, dtype=torch.int64))
    if not symmetric:
        return loss
    exchanged = ["-".join({"query": "key", "key": "query"}[word] for word in name.split("-")) for name in contrast]
    backward = torch.cat([match, *one_direction(exchanged)], 1)
    return (loss + F.cross_entropy(backward, torch.zeros(N, dtype=torch.int64))) / 2


def data(N=23, D=8, K=3, noise=1.0, seed=0):
    query, key = aligned_pairs(N, D, noise=noise, seed=seed)
    negatives = F.normalize(key[:, None] + 0.7 * unit(N, K, D, seed=seed + 7), dim=-1)
    return leaves(query, key, torch.tensor(SCALE, dtype=torch.float64), negatives)


FORMS = {
    "one direction": {},
    "both directions": {"symmetric": True},
    "GTE": {"contrast": ALL},
    "GTE, both directions": {"contrast": ALL, "symmetric": True},
    "two views": {"contrast": ("query-key", "query-query"), "symmetric": True},
    "keys of queries alone": {"contrast": ("key-query",)},
    "queries alone": {"contrast": ("query-query",)},
    "nothing but the pair": {"contrast": ()},
    "margin": {"margin": 0.1},
    "Qwen3": {"margin": 0.1, "contrast": ("query-key", "query-query", "key-key")},
    "negative margin, both": {"margin": -0.2, "contrast": ALL, "symmetric": True},
    "ids": {"ids": torch.arange(23) % 9},
    "ids and GTE": {"ids": torch.arange(23) % 9, "contrast": ALL, "symmetric": True},
    "ids and a margin": {"ids": torch.arange(23) % 9, "margin": 0.05, "contrast": ALL},
    "logQ": {"log_q": torch.linspace(-6, -1, 23, dtype=torch.float64)},
    "logQ, both": {"log_q": torch.linspace(-6, -1, 23, dtype=torch.float64), "symmetric": True},
    "logQ and a margin": {"log_q": torch.linspace(-6, -1, 23, dtype=torch.float64), "margin": 0.0},
    "logQ and GTE": {"log_q": torch.linspace(-6, -1, 23, dtype=torch.float64), "contrast": ALL},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", [(5, 4), (1024, 1024)])
def test_forms_in_the_batch(form, tile):
    query, key, scale, _ = data()
    options = FORMS[form]
    with tile_size(*tile):
        assert_same_outcomes(
            lambda q, k, s: mb.info_nce_loss(q, k, scale=s, **options),
            lambda q, k, s: dense(q, k, s, **options),
            [query, key, scale],
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("private", [False, True])
def test_forms_with_hard_negatives(form, private):
    inputs, options = data(), FORMS[form]
    negative_ids, log_q = torch.arange(69).reshape(23, 3) % 11, torch.linspace(-3, 0, 69, dtype=torch.float64).reshape(23, 3)
    ids = None if "ids" not in options or ("key-key" in options.get("contrast", ()) and not private) else negative_ids
    with tile_size(5, 4):
        assert_same_outcomes(
            lambda q, k, s, n: mb.info_nce_loss(
                q, k, scale=s, negatives=mb.Negatives(n, ids, log_q, private=private), **options
            ),
            lambda q, k, s, n: dense(q, k, s, n, private=private, negative_ids=ids, negative_log_q=log_q, **options),
            inputs,
        )


@pytest.mark.parametrize("contrast", [("query-key",), ALL])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_guide_decides(contrast, private, dtype):
    inputs = data()
    guide = aligned_pairs(23, 5, noise=1.0, seed=3)
    of_negatives = unit(23, 3, 5, seed=4)
    seen = [part.to(dtype) for part in (*guide, of_negatives)]
    options = {"contrast": contrast, "margin": 0.05, "symmetric": True}
    with tile_size(5, 4):
        assert_same_outcomes(
            lambda q, k, s, n: mb.info_nce_loss(
                q, k, scale=s, negatives=mb.Negatives(n, guide=seen[2], private=private), guide=tuple(seen[:2]), **options
            ),
            lambda q, k, s, n: dense(q, k, s, n, private=private, guide=guide, negative_guide=of_negatives, **options),
            inputs,
        )


@pytest.mark.quick({"contrast": ALL, "private": False, "dtype": torch.float32})
@pytest.mark.parametrize("contrast", [("query-key",), ALL])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.thorough
def test_a_guide_decides_in_kernels(contrast, private, dtype):
    pytest.importorskip("triton")
    inputs = leaves(*(t.detach().float() for t in data()))
    guide = [part.float() for part in aligned_pairs(23, 5, noise=1.0, seed=3)]
    of_negatives = unit(23, 3, 5, seed=4).float()
    seen = [part.to(dtype) for part in (*guide, of_negatives)]
    options = {"contrast": contrast, "margin": 0.05, "symmetric": True, "ids": torch.arange(23) % 11}
    query, key, scale, negatives = inputs
    further = mb.Negatives(negatives, guide=seen[2], private=private)
    with tile_size(8, 10):
        found = mb.info_nce_loss(query, key, scale=scale, negatives=further, guide=tuple(seen[:2]), backend="triton", **options)
        gradients = torch.autograd.grad(found, inputs)
    wide = leaves(*(t.double() for t in inputs))
    wanted = dense(
        *wide,
        private=private,
        guide=[part.double() for part in guide],
        negative_guide=of_negatives.double(),
        **options,
    )
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    exact = torch.autograd.grad(wanted, wide)
    sizes = [expected.abs().max().item() for expected in exact]
    # The gradient of the scale is a difference: the mean cosine under the softmax minus the mean cosine of the pairs.
    sizes[2] = max(sizes[2], (wide[0] * wide[1]).sum(1).abs().mean().item())
    for actual, expected, size in zip(gradients, exact, sizes, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("contrast", [("query-key",), ALL])
def test_different_numbers_of_hard_negatives(private, contrast):
    """Four of them, given as rows with owners, are what is left of (N, K) when the others are far away."""
    query, key, scale, _ = data(N=5, K=2)
    owner = torch.tensor([3, 0, 3, 1])
    negatives = unit(4, 8, seed=9).requires_grad_()

    def padded(q, k, s, n):
        rows = torch.zeros(5, 2, 8, dtype=torch.float64)
        place = torch.tensor([0, 0, 1, 0])
        rows = rows.index_put((owner, place), n)
        nothing = torch.full((5, 2), 1e6, dtype=torch.float64).index_put((owner, place), torch.zeros(4, dtype=torch.float64))
        return dense(q, k, s, rows, private=private, contrast=contrast, negative_log_q=nothing)

    assert_same_outcomes(
        lambda q, k, s, n: mb.info_nce_loss(
            q, k, scale=s, negatives=mb.Negatives(n, owner=owner, private=private), contrast=contrast
        ),
        padded,
        [query, key, scale, negatives],
    )


def test_a_memory_bank():
    query, key, scale, negatives = data()
    ids, bank_ids, bank = torch.arange(23), torch.arange(20, 60), unit(40, 8, seed=5)

    def wanted(q, k, s, n):
        logits = s * q @ torch.cat((k, n.flatten(0, 1), bank)).T
        left_out = torch.cat((torch.zeros(23, 23 + 69, dtype=torch.bool), ids[:, None] == bank_ids), 1)
        assert left_out.sum() == 3
        return F.cross_entropy(logits.masked_fill(left_out, -torch.inf), torch.arange(23))

    def mine(q, k, s, n):
        return mb.info_nce_loss(q, k, scale=s, ids=ids, negatives=[mb.Negatives(n), mb.Negatives(bank, ids=bank_ids)])

    with tile_size(5, 4):
        assert_same_outcomes(mine, wanted, [query, key, scale, negatives])
    # Alone, as in MoCo: no other key of the batch is a negative.
    moco = mb.info_nce_loss(query, key, scale=scale, negatives=bank, contrast=())
    logits = scale * torch.cat(((query * key).sum(1, keepdim=True), query @ bank.T), 1)
    torch.testing.assert_close(moco, F.cross_entropy(logits, torch.zeros(23, dtype=torch.int64)))


@examples(40)
@given(
    N=st.integers(1, 20),
    D=st.sampled_from((1, 3, 40)),
    K=st.integers(0, 3),
    tile=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    contrast=st.lists(st.sampled_from(ALL), unique=True),
    symmetric=st.booleans(),
    margin=st.sampled_from([None, -0.3, 0.0, 0.2]),
    log_scale=st.floats(-2, 3),
    seed=st.integers(0, 1000),
)
def test_any_shape(N, D, K, tile, contrast, symmetric, margin, log_scale, seed):
    query, key = leaves(*aligned_pairs(N, D, noise=1.0, seed=seed))
    scale, negatives = leaves(torch.tensor(10**log_scale, dtype=torch.float64), unit(N, K, D, seed=seed + 5))
    options = {"contrast": tuple(contrast), "symmetric": symmetric, "margin": margin}
    with tile_size(*tile):
        assert_same_outcomes(
            lambda q, k, s, n: mb.info_nce_loss(q, k, scale=s, negatives=n, **options),
            lambda q, k, s, n: dense(q, k, s, n, **options),
            [query, key, scale, negatives],
            10**log_scale,
        )


def test_a_key_that_occurs_twice_is_not_above_itself():
    """Whatever rounding does: in float32 the product in a tile and the one of the pair need not have the same last bit."""
    for D in (3, 48, 300):
        key = unit(16, D, seed=0, dtype=torch.float32)
        key = torch.cat((key, key))
        query = unit(32, D, seed=2, dtype=torch.float32)
        found = mb.info_nce_loss(query, key, scale=SCALE, margin=0.0)
        wide = [t.double() for t in (query, key)]
        products = wide[0] @ wide[1].T
        twice = torch.arange(32)[:, None] % 16 == torch.arange(32) % 16
        above = products - products.diagonal()[:, None]
        assert (twice | (above.abs() > 1e-4)).all(), "nothing else is near enough for rounding to decide"
        kept = twice | (above <= 0)
        logits = SCALE * torch.where(kept, products, -torch.inf)
        torch.testing.assert_close(found.double(), F.cross_entropy(logits, torch.arange(32)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_never_negative_and_always_finite(scale, dtype):
    query, key, _, negatives = (t.detach().to(dtype).requires_grad_() for t in data(N=65, noise=0.05))
    value = mb.info_nce_loss(query, key, scale=scale, negatives=negatives, contrast=ALL, symmetric=True, margin=0.1)
    assert value >= 0
    for gradient in torch.autograd.grad(value, (query, key, negatives)):
        assert gradient.isfinite().all()
        assert gradient.dtype == dtype


def test_messages():
    query, key, _, negatives = (t.detach() for t in data())

    def fails(kind, match, **options):
        with pytest.raises(kind, match=match):
            mb.info_nce_loss(query, key, **{"scale": 1.0, **options})

    fails(ValueError, "contrast must be a sequence", contrast=("query-doc",))
    fails(ValueError, "contrast must be a sequence", contrast="query-key")
    fails(ValueError, "contrast must be a sequence", contrast=[["query-key"]])
    hard = torch.stack((key, key), 1)
    fails(TypeError, r"negatives.ids must be a tensor or None, got int", negatives=mb.Negatives(hard, ids=3))
    owner = torch.full((len(key),), len(query))
    fails(ValueError, r"negatives.owner must be numbers of queries, 0 to \d+, got", negatives=mb.Negatives(key, owner=owner))
    fails(ValueError, "contrast must be a sequence", contrast=("query-key", "query-key"))
    fails(TypeError, "negatives must be a tensor, Negatives", negatives=3)
    fails(ValueError, r"negatives must have 23 rows", negatives=negatives[:5])
    fails(ValueError, r"negatives.ids must have shape \(23, 3\)", negatives=mb.Negatives(negatives, ids=torch.arange(23)))
    fails(ValueError, "ids must be given if negatives.ids", negatives=mb.Negatives(negatives[:, 0], ids=torch.arange(23)))
    fails(ValueError, "to be private", negatives=mb.Negatives(negatives[:, 0], private=True))
    fails(ValueError, "owner must be None", negatives=mb.Negatives(negatives, owner=torch.arange(23)))
    fails(
        ValueError, r"negatives\[1\].* same embedding dimension", negatives=[negatives, torch.zeros(4, 3, dtype=torch.float64)]
    )
    fails(
        ValueError,
        "one kind of id",
        negatives=mb.Negatives(negatives, ids=torch.zeros(23, 3, dtype=torch.int64)),
        ids=torch.arange(23),
        contrast=("key-key",),
    )
    fails(ValueError, "negatives.guide must be given", negatives=negatives, guide=(query, key))
    fails(TypeError, "guide must be a pair .*, got Tensor", guide=query)
    fails(TypeError, "guide must be a pair .*, got 3 values", guide=(query, key, key))
    fails(ValueError, r"guide\[0\] must have 23 rows", guide=(query[:4], key[:4]))
    fails(ValueError, r"guide\[1\] must not require a gradient", guide=(query, key.clone().requires_grad_()))
    fails(ValueError, r"margin must have shape \(23,\)", margin=torch.zeros(4))
    fails(ValueError, "log_q must have shape", log_q=torch.zeros(4))
    fails(ValueError, "label_smoothing must be a number", label_smoothing=2.0)
    fails(ValueError, "ids must be None with label smoothing", label_smoothing=0.1, ids=torch.arange(23))
    fails(ValueError, "margin must be None with label smoothing", label_smoothing=0.1, margin=0.1)
    private = mb.Negatives(negatives, private=True)
    fails(ValueError, "negatives must not be private with label smoothing", label_smoothing=0.1, negatives=private)
    fails(ValueError, "contrast must be", label_smoothing=0.1, contrast=ALL)
    with pytest.raises(ValueError, match="query must have at least one row"):
        mb.info_nce_loss(query[:0], key[:0], scale=1.0)
