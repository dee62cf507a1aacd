"""Losses of pairs inside PyTorch: errors, kernels, compile, autocast, memory, refusals."""

import sys

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, leaves, outcomes, tile_size, unit
from megabatch_train.bench.measure import fresh_process, peak_memory

TWO_VIEWS = ("query-key", "query-query")
MARGIN = 0.3


def dense_info_nce(query, key, scale):
    """Two views, and what is above the margin left out, in the type of the inputs."""
    own = torch.eye(len(query), dtype=torch.bool)
    products = query @ key.T
    limit = products.detach().diagonal()[:, None] + MARGIN
    within = query @ query.T
    across = (scale * products).masked_fill((products > limit) & ~own, -torch.inf)
    logits = torch.cat((across, (scale * within).masked_fill(own | (within > limit), -torch.inf)), 1)
    return F.cross_entropy(logits, torch.arange(len(query)))


def dense_dcl(query, key, scale):
    logits = scale * query @ key.T
    own = torch.eye(len(query), dtype=torch.bool)
    return (logits.masked_fill(own, -torch.inf).logsumexp(1) - logits.diagonal()).mean()


def dense_soft(image, text, scale):
    logits, targets = scale * image @ text.T, scale.detach() * text.detach() @ image.detach().T
    return (F.cross_entropy(logits, targets.softmax(1)) + F.cross_entropy(logits.T, targets.T.softmax(1))) / 2


def dense_several(image, text, scale):
    ids = torch.arange(len(image)) % 8
    signs = torch.where(ids[:, None] == ids, 1.0, -1.0).to(image.dtype)
    return -F.logsigmoid(signs * (scale * image @ text.T)).sum() / len(image)


def dense_smoothing(image, text, scale):
    logits, labels = scale * image @ text.T, torch.arange(len(image))
    rows = F.cross_entropy(logits, labels, label_smoothing=0.1)
    return (rows + F.cross_entropy(logits.T, labels, label_smoothing=0.1)) / 2


def several(image, text, scale, backend="auto"):
    ids = torch.arange(len(image)) % 8
    return mb.siglip_loss(image, text, scale, 0.0, ids=ids, ids_are_positives=True, backend=backend)


LOSSES = {
    "info_nce_loss": (
        lambda q, k, s, **o: mb.info_nce_loss(q, k, scale=s, contrast=TWO_VIEWS, margin=MARGIN, **o),
        dense_info_nce,
    ),
    "dcl_loss": (lambda q, k, s, **o: mb.dcl_loss(q, k, scale=s, **o), dense_dcl),
    "soft": (lambda q, k, s, **o: mb.soft_clip_loss(q, k, s, k.detach(), q.detach(), s.detach(), **o), dense_soft),
    "several positives": (several, dense_several),
    "smoothing": (lambda q, k, s, **o: mb.clip_loss(q, k, s, label_smoothing=0.1, **o), dense_smoothing),
}


def errors(function, truth, draws):
    squares = []
    for inputs in draws:
        wanted = outcomes(truth, leaves(*(t.double() for t in inputs)))
        found = outcomes(function, leaves(*inputs))
        squares.append(torch.stack([(a - b).square().sum() for a, b in zip(found, wanted, strict=True)]))
    return torch.stack(squares).mean(0).sqrt()


def check_errors(loss, dtype, noise, scale, *, rows, seeds, backend):
    mine, dense = LOSSES[loss]
    draws = [
        [t.to(dtype) for t in (*aligned_pairs(rows, 24, noise=noise, seed=seed), torch.tensor(scale))]
        for seed in range(0, 2 * seeds, 2)
    ]
    with tile_size(40, 28):
        found = errors(lambda *a: mine(*a, backend=backend), dense, draws)
    bar = errors(dense, dense, draws)
    assert (found <= 2 * bar).all(), (found.tolist(), bar.tolist())


@pytest.mark.quick({"scale": 14.0, "dtype": torch.float32}, {"scale": 14.0, "dtype": torch.float16, "loss": "info_nce_loss"})
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("noise", "scale"), [(1.5, 14.0), (0.3, 100.0)])
def test_error_is_at_most_twice_the_dense_one(loss, dtype, noise, scale):
    check_errors(loss, dtype, noise, scale, rows=96, seeds=16, backend="eager")


@pytest.mark.quick({"loss": "info_nce_loss", "dtype": torch.float32})
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on inf, which is meant
@pytest.mark.parametrize("loss", ["info_nce_loss", "several positives"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.thorough
def test_so_are_those_of_kernels(loss, dtype):
    pytest.importorskip("triton")
    check_errors(loss, dtype, 0.3, 100.0, rows=64, seeds=4, backend="triton")


def everything(query, key, scale, negatives, ids, log_q):
    further = mb.Negatives(negatives, private=True)
    total = mb.info_nce_loss(query, key, scale=scale, negatives=further, contrast=TWO_VIEWS, symmetric=True, log_q=log_q)
    total = total + mb.info_nce_loss(query, key, scale=scale, negatives=negatives, margin=0.1, ids=ids)
    total = total + mb.info_nce_loss(query, key, scale=scale, negatives=negatives[:, 0], label_smoothing=0.1)
    seen = negatives.detach()
    hard = mb.Negatives(negatives, guide=seen)
    total = total + mb.info_nce_loss(
        query, key, scale=scale, negatives=hard, guide=(seen[:, 0], seen[:, 1]), contrast=("key-key",)
    )
    total = (
        total
        + mb.dcl_loss(query, key, scale=scale)
        + mb.hcl_loss(query, key, scale=scale)
        + mb.hcl_loss(query, key, scale=scale, ids=ids)
    )
    total = total + mb.soft_clip_loss(query, key, scale, key.detach(), query.detach(), 3.0)
    return total + mb.siglip_loss(query, key, scale, 0.0, ids=ids, ids_are_positives=True)


def inputs(N=20):
    query, key, negatives = leaves(*(t.float() for t in (*aligned_pairs(N, 6, noise=1.0, seed=0), unit(N, 2, 6, seed=2))))
    return [query, key, torch.tensor(10.0, requires_grad=True), negatives, torch.arange(N) % 7, torch.linspace(-2, 0, N)]


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(20,), (20, 13)])
def test_compiles_whole(sizes):
    compiled = torch.compile(everything, fullgraph=True, dynamic=len(sizes) > 1, backend="aot_eager")
    for N in sizes:
        arguments = inputs(N)
        found, wanted = compiled(*arguments), everything(*arguments)
        torch.testing.assert_close(found, wanted)
        for a, b in zip(torch.autograd.grad(found, arguments[:4]), torch.autograd.grad(wanted, arguments[:4]), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_once(dtype):
    arguments = inputs()
    with torch.autocast("cpu", dtype):
        found = everything(*arguments)
    assert found.dtype == torch.float32
    rounded = [t.detach().to(dtype).float().requires_grad_() if t.dim() > 1 else t for t in arguments]
    torch.testing.assert_close(found, everything(*rounded), rtol=1e-5, atol=0)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(found, arguments[:4]))


def test_no_grad():
    arguments = inputs()
    with torch.no_grad():
        found = everything(*arguments)
    assert not found.requires_grad
    torch.testing.assert_close(found, everything(*arguments).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("loss", ["info_nce_loss", "soft"])
def test_differentiating_twice_is_refused_clearly(loss):
    query, key, scale, *_ = inputs()
    (gradient,) = torch.autograd.grad(LOSSES[loss][0](query, key, scale), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        gradient.square().sum().backward()


def test_what_is_saved_for_backward_grows_with_the_rows_alone():
    for N in (256, 1024):
        query, key, scale, *_ = inputs(N)
        guide = query.detach().clone(), key.detach().clone()
        for loss in (
            lambda q, k, s: mb.info_nce_loss(q, k, scale=s, contrast=TWO_VIEWS, guide=guide),  # noqa: B023
            lambda q, k, s: mb.hcl_loss(q, k, scale=s),
            lambda q, k, s: mb.soft_clip_loss(q, k, s, *guide, 3.0),  # noqa: B023
        ):
            storages = {}

            def pack(tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()  # noqa: B023
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), tile_size(64, 64):
                value = loss(query, key, scale)
            own = {t.untyped_storage().data_ptr() for t in (query, key, *guide)}
            assert sum(size for place, size in storages.items() if place not in own) <= 40 * 4 * N + 512
            assert value.requires_grad


def peaks(sizes: tuple[int, ...], D: int) -> dict[str, list[int]]:
    """Bytes that one forward and backward take beyond the inputs, the gradients included, for each size of the batch."""

    def tensors(count: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [F.normalize(torch.randn(count, D, generator=generator), dim=-1).requires_grad_() for _ in range(2)]

    losses = {
        "guide": lambda q, k: mb.info_nce_loss(q, k, scale=20.0, guide=(q.detach(), k.detach()), margin=0.1),
        "hcl_loss": lambda q, k: mb.hcl_loss(q, k, scale=5.0),
        "soft": lambda q, k: mb.soft_clip_loss(q, k, 20.0, q.detach(), k.detach(), 20.0),
        "smoothing": lambda q, k: mb.clip_loss(q, k, 20.0, label_smoothing=0.1),
    }
    found: dict[str, list[int]] = {}
    for name, loss in losses.items():
        loss(*tensors(8)).backward()  # threads and libraries
        for size in sizes:
            given = tensors(size)
            found.setdefault(name, []).append(peak_memory(lambda: loss(*given).backward())[1])  # noqa: B023
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_four_times_the_batch_takes_at_most_four_times_the_memory():
    for name, (small, large) in fresh_process(peaks, (1536, 6144), 16).items():
        assert large <= 4.1 * small, name
        assert large < 48 * 2**20, f"{name}: one matrix of similarities would be 144 MiB"
