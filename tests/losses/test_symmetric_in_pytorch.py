"""nt_xent_loss, sup_con_loss and matryoshka_clip_loss inside PyTorch: compile, autocast, operators, memory."""

import sys

import pytest
import torch

import megabatch as mb
from helpers import aligned_pairs, leaves, outcomes, tile_size, unit
from megabatch import operators
from megabatch.operators.rowwise import positives_backward
from megabatch.operators.two_pass import ALL, EQUAL_IDS, OTHERS, symmetric_logsumexp_backward
from megabatch_train.bench.measure import fresh_process, peak_memory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MIB, GIB = 2**20, 2**30


def labels(N):
    return torch.arange(N) % max(1, N // 5)


LOSSES = {
    "nt_xent_loss": mb.nt_xent_loss,
    "sup_con_loss out": lambda x, y, scale: mb.sup_con_loss(torch.cat((x, y)), labels(2 * len(x)), scale),
    "sup_con_loss in": lambda x, y, scale: mb.sup_con_loss(torch.cat((x, y)), labels(2 * len(x)), scale, form="in"),
    "matryoshka": lambda x, y, scale: mb.matryoshka_clip_loss(x, y, scale, widths=[x.shape[1] // 2, x.shape[1]]),
}


def inputs(dtype=torch.float32, N=20):
    return leaves(*(t.to(dtype) for t in aligned_pairs(N, 8, noise=1.0, seed=0)), torch.tensor(5.0))


@pytest.mark.quick({"loss": next(iter(LOSSES))})
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.thorough
def test_compiles_as_one_graph(loss):
    with tile_size(8, 8):  # a compiled loss is computed over tiles, however small
        found = outcomes(torch.compile(LOSSES[loss], fullgraph=True, backend="aot_eager"), inputs())
        torch.testing.assert_close(found, outcomes(LOSSES[loss], inputs()))


# matryoshka_clip_loss normalises in float32 first; test_matryoshka_kernels.py compares its autocast with dense code.
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "matryoshka"])
def test_autocast_rounds_float32_inputs_once(loss):
    x, y, scale = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = outcomes(LOSSES[loss], (x, y, scale))
    halves = [t.detach().bfloat16().requires_grad_() for t in (x, y)]
    wanted = outcomes(LOSSES[loss], [*halves, scale])
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-2, atol=1e-3)  # those of bfloat16 inputs are rounded


@pytest.mark.parametrize("loss", LOSSES)
def test_same_bits_every_time(loss):
    first, second = (outcomes(LOSSES[loss], inputs(N=300)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_differentiating_twice_is_refused(loss):
    x, y, scale = inputs()
    (gradient,) = torch.autograd.grad(LOSSES[loss](x, y, scale), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()


# opcheck reads .grad of copies that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operators_keep_their_promises_to_pytorch():
    (z,) = leaves(unit(6, 4, seed=0, dtype=torch.float32))
    scale, ids, ones = torch.tensor(3.0, requires_grad=True), torch.arange(6) % 3, torch.ones(6)
    plain = [t.detach() for t in (z, scale)]
    for given, pairs in ((ids, ALL), (None, OTHERS), (ids, EQUAL_IDS)):
        torch.library.opcheck(operators.symmetric_logsumexp, (z, scale, given, pairs, "float32", "eager", ""))
        arguments = (plain[0], plain[1], given, pairs, "float32", "eager", "", torch.ones(2, 6), ones, [True, True])
        torch.library.opcheck(symmetric_logsumexp_backward, arguments)
    torch.library.opcheck(operators.positives, (z, scale, ids, "float32", "eager", ""))
    torch.library.opcheck(positives_backward, (plain[0], plain[1], ids, "float32", "eager", "", ids, ones, [True, True]))


def step(loss, rows, D):
    """Bytes that one forward and backward over `rows` rows in all take beyond the inputs, the gradients included."""

    def forward_backward(count):
        x, y = leaves(*(torch.randn(count // 2, D, generator=torch.Generator().manual_seed(s)) for s in range(2)))
        return lambda: LOSSES[loss](x, y, 0.1).backward()

    forward_backward(8)()  # threads and libraries
    return peak_memory(forward_backward(rows))[1]


@pytest.mark.thorough
@linux
@pytest.mark.parametrize("loss", ["nt_xent_loss", "sup_con_loss in", "matryoshka"])
def test_memory_is_that_of_embeddings_and_tiles(loss, monkeypatch):
    """A matrix of 8,192 rows would take 256 MiB, of 4,096 pairs 64 MiB. All embeddings take 2 MiB, a tile takes 4."""
    # What is freed goes back to the system at once. Left to itself, the allocator keeps up to 25 MiB of it, by chance.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert fresh_process(step, loss, 8192, 64) < 6 * 2 * MIB + 8 * 4 * MIB


@linux
@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["nt_xent_loss", "sup_con_loss out"])
def test_32k_rows_on_a_cpu(loss):
    assert fresh_process(step, loss, 32768, 64) < 250 * MIB  # one matrix of logits: 4 GiB


def pytorch_metric_learning_step(rows):
    from pytorch_metric_learning.losses import NTXentLoss

    z = torch.randn(rows, 64, requires_grad=True)
    NTXentLoss()(z, torch.arange(rows) % (rows // 2)).backward()


@linux
@pytest.mark.thorough
def test_where_pytorch_metric_learning_stops():
    """A number for each positive pair and each negative pair: 4 GiB in float32 at 1,024 rows, and several of them at once."""
    pytest.importorskip("pytorch_metric_learning")
    fresh_process(pytorch_metric_learning_step, 128, memory_limit=4 * GIB)
    with pytest.raises(MemoryError):
        fresh_process(pytorch_metric_learning_step, 1024, memory_limit=4 * GIB)
