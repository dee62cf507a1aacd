"""Late interaction and top-k on a GPU: half precision, sizes of several strips, memory, and the same bits in every run."""

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from megabatch import dispatch
from megabatch.kernels import plan as kernel_plan
from megabatch.tiles import plan

pytestmark = pytest.mark.gpu


def vectors(*shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1).to("cuda", dtype).requires_grad_()


def outcomes(loss, *inputs):
    value = loss(*inputs)
    return [value.detach().double(), *(part.double() for part in torch.autograd.grad(value, inputs))]


@pytest.mark.parametrize("way", ["dense", "strips", "kept"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("B", "Lq", "Ld", "D"), [(96, 32, 128, 128), (70, 20, 180, 96), (40, 150, 33, 128), (33, 5, 300, 320)])
def test_kernels_are_as_accurate_as_the_dense_computation(B, Lq, Ld, D, dtype, way, monkeypatch):
    """On the dense path, in several strips, and in one, whose winners forward keeps."""
    if way == "strips":
        monkeypatch.setattr(kernel_plan, "MAXSIM_SCORES", plan.TileSize(64, 50))
        monkeypatch.setattr(kernel_plan, "maxsim_strip", lambda rows: plan.TileSize(50, 30))
        monkeypatch.setattr(kernel_plan, "maxsim_is_kept", lambda *sizes: False)
    query, document = vectors(B, Lq, D, seed=0, dtype=dtype), vectors(B, Ld, D, seed=1, dtype=dtype)
    mask = torch.rand(B, Ld, generator=torch.Generator().manual_seed(2)).to("cuda") > 0.2

    def dense(query, document):
        products = torch.einsum("itd,jud->ijtu", query, document).masked_fill(~mask[None, :, None], -torch.inf)
        return F.cross_entropy(products.amax(3).float().sum(2), torch.arange(B, device="cuda"))

    def exact(query, document):
        products = torch.einsum("itd,jud->ijtu", query, document).masked_fill(~mask[None, :, None], -torch.inf)
        return F.cross_entropy(products.amax(3).sum(2), torch.arange(B, device="cuda"))

    truth = outcomes(exact, *(part.detach().double().requires_grad_() for part in (query, document)))
    there = outcomes(dense, query, document)
    with dispatch.override(late_triton=dispatch.limits().late_triton if way == "dense" else 0):
        ours = outcomes(
            lambda q, d: mb.late_interaction_loss(q, d, scale=1.0, document_mask=mask, backend="triton"), query, document
        )
    for what, found, other, right in zip(("loss", "dquery", "ddocument"), ours, there, truth, strict=True):
        error, bar = ((part - right).norm() / right.norm() for part in (found, other))
        assert error <= 2 * bar + 2 * torch.finfo(dtype if what != "loss" else torch.float32).eps, (what, error, bar)


def test_packed_documents_are_the_padded_ones():
    lengths = torch.randint(1, 200, (300,), generator=torch.Generator().manual_seed(0))
    query, packed = (
        vectors(300, 32, 128, seed=1, dtype=torch.bfloat16),
        vectors(int(lengths.sum()), 128, seed=2, dtype=torch.bfloat16),
    )
    mask = torch.arange(200) < lengths[:, None]
    padded = torch.zeros(300, 200, 128, dtype=torch.bfloat16, device="cuda")
    padded[mask.cuda()] = packed.detach()
    padded.requires_grad_()
    first = outcomes(lambda q, d: mb.late_interaction_loss(q, mb.Tokens(d, lengths=lengths.cuda()), scale=1.0), query, packed)
    second = outcomes(lambda q, d: mb.late_interaction_loss(q, d, scale=1.0, document_mask=mask.cuda()), query, padded)
    second[2] = second[2][mask.cuda()]
    for found, other in zip(first, second, strict=True):
        assert (found - other).norm() <= 1e-2 * other.norm()


def test_the_same_bits_and_linear_memory():
    """At 16,384 pairs all winners would take 16 GiB and all scores one."""
    query, document = (vectors(16384, length, 128, seed=length, dtype=torch.bfloat16) for length in (32, 64))
    runs = []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runs.append(torch.autograd.grad(mb.late_interaction_loss(query, document, scale=1.0), (query, document)))
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 2 * (query.nbytes + document.nbytes) + 2**30
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize(("B", "Lq", "Ld"), [(256, 32, 128), (32, 128, 8192)])
def test_the_dense_path_is_deterministic(B, Lq, Ld):
    query, document = (vectors(B, length, 128, seed=length, dtype=torch.bfloat16) for length in (Lq, Ld))
    runs = [torch.autograd.grad(mb.late_interaction_loss(query, document, scale=1.0), (query, document)) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_scores_and_the_best_documents_match_float64():
    """Documents on the GPU, and in host memory, from which parts are copied."""
    query = vectors(70, 32, 128, seed=0, dtype=torch.bfloat16).detach()
    lengths = torch.randint(1, 200, (5000,), generator=torch.Generator().manual_seed(0))
    packed = vectors(int(lengths.sum()), 128, seed=2, dtype=torch.bfloat16).detach()
    present = (torch.arange(200) < lengths[:, None]).cuda()
    padded = torch.zeros(5000, 200, 128, dtype=torch.float64, device="cuda")
    padded[present] = packed.double()
    exact = torch.stack(
        [
            torch.einsum("td,jud->jtu", q.double(), padded).masked_fill_(~present[:, None], -torch.inf).amax(2).sum(1)
            for q in query
        ]
    )
    best = exact.topk(10)
    for document in (mb.Tokens(packed, lengths=lengths.cuda()), mb.Tokens(packed.cpu(), lengths=lengths)):
        assert (mb.maxsim_scores(query, document) - exact).abs().max() <= 1e-4
        values, numbers = mb.maxsim_topk(query, document, 10)
        assert (values - best.values).abs().max() <= 1e-4
        assert (numbers == best.indices).float().mean() >= 0.999  # scores that differ by less than their rounding may swap
        reranked = mb.maxsim_scores(query, document, candidates=numbers)
        assert (reranked - values).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("N", "M", "D", "k"), [(3000, 40000, 256, 10), (257, 70001, 100, 16), (500, 3000, 64, 200), (300, 140001, 64, 1024)]
)
def test_topk_finds_the_best_of_float64(N, M, D, k, dtype):
    x, y = vectors(N, D, seed=0, dtype=dtype).detach(), vectors(M, D, seed=1, dtype=dtype).detach()
    y[M // 2 : M // 2 + 50] = y[:50]  # ties
    found = mb.pairwise_topk(x, y, k, backend="triton")
    s = x.double() @ y.double().T
    values = s.topk(k).values
    assert (found.values - values).abs().max() < 1e-5
    assert (s.gather(1, found.indices) - values).abs().max() < 1e-5
    place = {index: i for i, index in enumerate(found.indices[0].tolist())}
    for index, i in place.items():
        twin = index - M // 2
        if 0 <= twin < 50:
            assert place[twin] < i  # of equal products the smaller index comes first
