"""Late interaction against the dense oracle in float64: shapes, masks, packed items, ties, empty items, ranks."""

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import assert_equal_to_rounding, gradients, leaves, tile_size, unit
from megabatch import reference, ring
from megabatch.kernels import plan as kernel_plan

LAYOUTS = ("padded", "masked", "packed", "packed and masked")


class Case:
    """Queries and documents in one of the layouts, and the same as lists for the oracle."""

    def __init__(self, layout, N, M, Lq, Ld, D=6, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.layout, self.sides, self.masks, self.lengths = layout, [], [], []
        for count, width in ((N, Lq), (M, Ld)):
            values = unit(count, width, D, seed=len(self.sides) + seed)
            mask = torch.rand(count, width, generator=generator) > 0.3 if "masked" in layout else None
            if mask is not None:
                mask[:, 0] = True
            lengths = torch.randint(1, width + 1, (count,), generator=generator) if "packed" in layout else None
            if lengths is not None:
                present = torch.arange(width) < lengths[:, None]
                values, mask = values[present], None if mask is None else mask[present]
            self.sides.append(values.requires_grad_())
            self.masks.append(mask)
            self.lengths.append(lengths)

    def tokens(self):
        return [mb.Tokens(*parts) for parts in zip(self.sides, self.masks, self.lengths, strict=True)]

    def lists(self, sides=None):
        for values, mask, lengths in zip(self.sides if sides is None else sides, self.masks, self.lengths, strict=True):
            items = list(values) if lengths is None else list(values.split(lengths.tolist()))
            kept = [None] * len(items) if mask is None else (list(mask) if lengths is None else mask.split(lengths.tolist()))
            yield [item if keep is None else item[keep] for item, keep in zip(items, kept, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("N", "M", "Lq", "Ld"), [(1, 1, 1, 1), (5, 8, 4, 7), (9, 3, 1, 6)])
def test_logsumexps_and_gradients_match_the_oracle(layout, N, M, Lq, Ld):
    case = Case(layout, N, M, Lq, Ld, seed=N)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(N, dtype=torch.float64), torch.randn(M, dtype=torch.float64)
    with tile_size(6, 9):
        found = mb.maxsim_logsumexp(*case.tokens(), scale, normalize=N == 5)
        gained = gradients(found, weights, [*case.sides, scale])
    s = reference.maxsim(*case.lists(), scale, normalize=N == 5)
    wanted = reference.logsumexp(s, 1), reference.logsumexp(s, 0)
    for actual, expected in zip([*found, *gained], [*wanted, *gradients(wanted, weights, [*case.sides, scale])], strict=True):
        assert_equal_to_rounding(actual.detach(), expected.detach(), 30.0)


def dense_loss(case, scale, *, ids=None, negatives=(), symmetric=False, sides=None):
    queries, documents = case.lists(sides)
    s = reference.maxsim(queries, documents, scale)
    same = reference.same_id(ids, len(s))
    s = s if same is None else s.masked_fill(same, -torch.inf)
    labels = torch.arange(len(s))
    further = [reference.maxsim(queries, list(n.flatten(0, -3)), scale) for n in negatives]
    loss = F.cross_entropy(torch.cat([s, *further], 1), labels)
    return (loss + F.cross_entropy(s.T, labels)) / 2 if symmetric else loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_loss_matches_the_oracle(monkeypatch, layout, symmetric):
    monkeypatch.setattr(kernel_plan, "documents_at_once", lambda width, D: 4)
    case = Case(layout, 6, 6, 5, 7, seed=4)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 2, 0, 4, 1])
    negatives = [unit(3, 4, 6, seed=7).requires_grad_(), unit(6, 2, 3, 6, seed=8).requires_grad_()]
    inputs = [*case.sides, scale, *negatives]
    with tile_size(10, 10):
        loss = mb.late_interaction_loss(*case.tokens(), scale=scale, ids=ids, negatives=negatives, symmetric=symmetric)
        found = [loss, *torch.autograd.grad(loss, inputs)]
    loss = dense_loss(case, scale, ids=ids, negatives=negatives, symmetric=symmetric)
    for actual, expected in zip(found, [loss, *torch.autograd.grad(loss, inputs)], strict=True):
        assert_equal_to_rounding(actual.detach(), expected.detach(), 30.0)


def test_ties_go_to_the_first_vector():
    query = torch.ones(1, 2, 3, dtype=torch.float64)
    document = torch.ones(2, 4, 3, dtype=torch.float64, requires_grad=True)
    row, _ = mb.maxsim_logsumexp(query, document)
    row.sum().backward()
    assert document.grad[:, 0].eq(1.0).all()  # two query vectors, half of the softmax
    assert not document.grad[:, 1:].any()


def test_masked_vectors_may_be_nan_and_items_may_be_empty():
    query, document = leaves(unit(3, 2, 4, seed=0), unit(3, 5, 4, seed=1))
    query_mask, document_mask = torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool)
    query_mask[0], document_mask[1], document_mask[2, 3] = False, False, False
    with torch.no_grad():
        query[0], document[1], document[2, 3] = torch.nan, torch.nan, torch.inf
    row, col = mb.maxsim_logsumexp(query, document, 2.0, query_mask=query_mask, document_mask=document_mask)
    assert row[0].item() == pytest.approx(torch.tensor(2.0).log().item())  # a query without vectors scores 0 everywhere
    assert col[1] == -torch.inf  # a document without vectors is nowhere
    for gradient in torch.autograd.grad(row.sum() + col[[0, 2]].sum(), (query, document)):
        assert gradient.isfinite().all()
    with torch.no_grad():
        document[0, 0] = torch.nan
    assert mb.maxsim_logsumexp(query, document, document_mask=document_mask).row.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_the_dense_computation(dtype):
    """Twice the dense error of the same type at most, and a loss that is never negative."""
    case, scale = Case("padded", 12, 12, 4, 9, D=16, seed=2), 8.0
    rounded = [side.detach().to(dtype).requires_grad_() for side in case.sides]
    wide = leaves(*(side.double() for side in rounded))
    with tile_size(16, 16):
        loss = mb.late_interaction_loss(*rounded, scale=scale)
        found = [loss, *torch.autograd.grad(loss, rounded)]
    loss = dense_loss(case, scale, sides=wide)
    truth = [loss, *torch.autograd.grad(loss, wide)]
    loss = dense_loss(case, scale, sides=rounded)
    dense = [loss, *torch.autograd.grad(loss, rounded)]
    for actual, there, exact in zip(found, dense, truth, strict=True):
        floor = torch.finfo(actual.dtype).eps * exact.abs().max()
        assert (actual.double() - exact).abs().max() <= 2 * (there.double() - exact).abs().max() + floor


def test_distillation_matches_kl_divergence():
    query, document = leaves(unit(4, 3, 6, seed=0), unit(4, 5, 7, 6, seed=1))
    mask = torch.rand(4, 5, 7) > 0.3
    teacher, scale = torch.randn(4, 5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with tile_size(12, 20):
        found = mb.late_distillation_loss(query, document, teacher, scale=scale, document_mask=mask)
    products = torch.einsum("itd,ikud->iktu", query, document).masked_fill(~mask[:, :, None], -torch.inf)
    student = (scale * products.amax(3).sum(2)).log_softmax(1)
    wanted = F.kl_div(student, teacher.log_softmax(1), log_target=True, reduction="batchmean")
    for actual, expected in zip(
        *([loss, *torch.autograd.grad(loss, (query, document, scale))] for loss in (found, wanted)), strict=True
    ):
        assert_equal_to_rounding(actual.detach(), expected.detach(), 30.0)


def distillation_on_a_rank(group, rank, counts):
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    query, document = leaves(unit(3, 2, 4, seed=0)[own], unit(3, 5, 3, 4, seed=1)[own])
    teacher = unit(3, 5, seed=2)[own]
    loss = mb.late_distillation_loss(query, document, teacher, scale=3.0, group=group)
    return [loss.detach(), *torch.autograd.grad(loss, (query, document))]


@pytest.mark.parametrize("counts", [(3, 0), (1, 2)])
def test_distillation_over_ranks_some_of_which_have_no_queries(pool, counts):
    losses, *parts = zip(*pool.run(distillation_on_a_rank, 2, counts), strict=True)
    wanted = distillation_on_a_rank(None, 0, (3,))
    for found, expected in zip([sum(losses) / 2, *(torch.cat(part) / 2 for part in parts)], wanted, strict=True):
        torch.testing.assert_close(found, expected)


def test_losses_need_a_pair():
    query, document = unit(3, 2, 4, seed=0)[:0], unit(3, 5, 4, seed=1)[:0]
    for call in (
        lambda: mb.late_interaction_loss(query, document, scale=1.0),
        lambda: mb.late_distillation_loss(query, document[:, None], torch.zeros(0, 1)),
    ):
        with pytest.raises(ValueError, match="query must have at least one item: the mean over no pairs is undefined"):
            call()


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0])
@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("symmetric", [False, True])
def test_an_own_document_without_vectors_makes_the_loss_infinite(scale, N, symmetric):
    query_mask, document_mask = torch.ones(N, 2, dtype=torch.bool), torch.ones(N, 5, dtype=torch.bool)
    document_mask[0] = False
    for without_query in (False, True):
        query_mask[0] = not without_query
        losses = mb.late_interaction_loss(
            unit(N, 2, 4, seed=0),
            unit(N, 5, 4, seed=1),
            scale=scale,
            query_mask=query_mask,
            document_mask=document_mask,
            symmetric=symmetric,
            reduction="none",
        )
        assert losses[0] == torch.inf
        assert losses[1:].isfinite().all()


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0])
@pytest.mark.parametrize("query_counts", [True, False])
def test_candidates_without_vectors_are_left_out_of_distillation(scale, query_counts):
    query, document = leaves(unit(3, 2, 4, seed=0), unit(3, 4, 5, 4, seed=1))
    teacher, mask = unit(3, 4, seed=2), torch.ones(3, 4, 5, dtype=torch.bool)
    mask[0, 1:3], mask[1] = False, False
    query_mask = torch.ones(3, 2, dtype=torch.bool)
    query_mask[0] = query_counts
    inputs, factor = (query, document), torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    options = {"scale": factor, "reduction": "none"}
    losses = mb.late_distillation_loss(*inputs, teacher, query_mask=query_mask, document_mask=mask, **options)
    found = [losses.detach(), *torch.autograd.grad(losses.sum(), (*inputs, factor))]
    kept = [
        mb.late_distillation_loss(query[:1], document[:1, [0, 3]], teacher[:1, [0, 3]], query_mask=query_mask[:1], **options),
        torch.zeros(1, dtype=torch.float64),
        mb.late_distillation_loss(query[2:], document[2:], teacher[2:], **options),
    ]
    losses = torch.cat(kept)
    for actual, expected in zip(found, [losses.detach(), *torch.autograd.grad(losses.sum(), (*inputs, factor))], strict=True):
        torch.testing.assert_close(actual, expected)


def test_nothing_of_the_size_of_the_scores_is_saved():
    """Inputs, and two numbers of each query, in float32: shift and total."""
    N, query, document = 96, *leaves(unit(96, 2, 4, seed=0).float(), unit(96, 3, 4, seed=1).float())
    saved: dict[int, int] = {}

    def keep(tensor):
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mb.late_interaction_loss(query, document, scale=3.0)
    inputs = sum(part.numel() * part.element_size() for part in (query, document))
    assert sum(saved.values()) <= inputs + 100 * N  # a matrix of scores would have 384 bytes a query


def test_errors_name_the_argument():
    query, document = unit(3, 2, 4, seed=0), unit(3, 5, 4, seed=1)
    for arguments, options, message in (
        ((query[0], document), {}, r"query must have shape \(items, vectors, dim\)"),
        ((query, document[:2]), {}, "same number of items"),
        ((query, document), {"document_mask": torch.ones(3, 4)}, r"the mask of document must have shape \(3, 5\)"),
        (
            (query, mb.Tokens(document.flatten(0, 1), lengths=torch.tensor([5, 0, 10]))),
            {},
            "document.lengths must be at least 1",
        ),
        ((query, document), {"ids": torch.arange(4)}, r"ids must have shape \(3,\)"),
        ((query, document), {"negatives": unit(3, 5, 3, seed=2)}, "must have the same embedding dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            mb.late_interaction_loss(*arguments, scale=1.0, **options)


@pytest.mark.parametrize("exclude", ["rows", (None, None), (torch.arange(3), None), (torch.arange(3),), torch.arange(3)])
def test_what_is_excluded_is_checked(exclude):
    with pytest.raises((TypeError, ValueError), match="exclude"):
        mb.maxsim_logsumexp(unit(3, 2, 4, seed=0), unit(3, 5, 4, seed=1), exclude=exclude)


def test_errors_of_further_arguments():
    query, document, candidates = unit(3, 2, 4, seed=0), unit(3, 5, 4, seed=1), unit(3, 2, 5, 4, seed=2)
    packed = mb.Tokens(document.flatten(0, 1), lengths=torch.tensor(15))
    teacher = torch.zeros(3, 2)
    for call, message in (
        (lambda: mb.late_interaction_loss(query, packed, scale=1.0), r"document.lengths must have shape \(items,\), got \(\)"),
        (
            lambda: mb.late_interaction_loss(query, document, scale=1.0, negatives=5),
            "negatives must be a tensor, Tokens or a list",
        ),
        (lambda: mb.late_distillation_loss(query, candidates, teacher.to("meta")), "teacher must be on cpu, got meta"),
        (lambda: mb.late_distillation_loss(query, candidates, teacher[0]), r"teacher must be .*, got torch\.float\d+ \(\d+,\)"),
        (
            lambda: mb.late_distillation_loss(query, candidates, teacher, document_mask=5),
            "the mask of document must have shape",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.thorough
def test_compiled():
    query, document = leaves(unit(4, 2, 4, seed=0), unit(4, 3, 4, seed=1))
    compiled = torch.compile(lambda q, d: mb.late_interaction_loss(q, d, scale=3.0), backend="aot_eager", fullgraph=True)
    compiled(query, document).backward()
    loss = mb.late_interaction_loss(query, document, scale=3.0)
    for found, wanted in zip((query.grad, document.grad), torch.autograd.grad(loss, (query, document)), strict=True):
        torch.testing.assert_close(found, wanted)


def loss_on_a_rank(group, rank, route, counts, layout, symmetric):
    case, own = Case(layout, sum(counts), sum(counts), 3, 4, D=4, seed=5), slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    tokens, inputs = [], [scale]
    for values, mask, lengths in case.tokens():
        part = own if lengths is None else slice(int(lengths[: own.start].sum()), int(lengths[: own.stop].sum()))
        (values,) = leaves(values[part])
        inputs.append(values)
        tokens.append(mb.Tokens(values, None if mask is None else mask[part], None if lengths is None else lengths[own]))
    ids = (torch.arange(sum(counts)) % 5)[own]
    with ring.use_route(route), tile_size(5, 5):
        loss = mb.late_interaction_loss(*tokens, scale=scale, ids=ids, symmetric=symmetric, normalize=True, group=group)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.quick(
    {"world": 2, "route": "gather", "layout": "masked", "symmetric": True},
    {"world": 3, "route": "ring", "layout": "packed", "symmetric": True},
    {"world": 4, "route": "two_level:2", "layout": "padded", "symmetric": False},
)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "route"), [(1, "ring"), (2, "gather"), (3, "ring"), (4, "gather"), (4, "two_level:2")])
def test_ranks_compute_what_one_process_does(pool, world, route, layout, symmetric):
    counts = [(3 * r) % 5 for r in range(1, world + 1)]
    counts = [0 if world == 4 and r == 2 else count for r, count in enumerate(counts)]
    answers = pool.run(loss_on_a_rank, world, route, counts, layout, symmetric)
    case, scale = Case(layout, sum(counts), sum(counts), 3, 4, D=4, seed=5), torch.tensor(2.0, dtype=torch.float64)
    scale.requires_grad_()
    ids = torch.arange(sum(counts)) % 5
    loss = mb.late_interaction_loss(*case.tokens(), scale=scale, ids=ids, symmetric=symmetric, normalize=True)
    wanted = [loss, *torch.autograd.grad(loss, [scale, *case.sides])]
    together = [sum(part) / world for part in list(zip(*answers, strict=True))[:2]]
    together += [torch.cat(part) / world for part in list(zip(*answers, strict=True))[2:]]
    for actual, expected in zip(together, wanted, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-10, atol=1e-10, equal_nan=True)


def kernels_on_a_rank(group, rank):
    query, document = (part.float().chunk(2)[rank] for part in (unit(6, 3, 8, seed=0), unit(6, 5, 8, seed=1)))
    inputs = leaves(query, document)
    loss = mb.late_interaction_loss(*inputs, scale=2.0, symmetric=True, group=group, backend="triton")
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.thorough
def test_kernels_of_ranks_together_are_one_process(pool):
    pytest.importorskip("triton")
    losses, *parts = zip(*pool.run(kernels_on_a_rank, 2), strict=True)
    inputs = leaves(unit(6, 3, 8, seed=0), unit(6, 5, 8, seed=1))
    loss = mb.late_interaction_loss(*inputs, scale=2.0, symmetric=True)
    wanted = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    for found, expected in zip([sum(losses) / 2, *(torch.cat(part) / 2 for part in parts)], wanted, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=20 * torch.finfo(torch.float32).eps)
