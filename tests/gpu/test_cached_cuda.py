"""The cached step on a CUDA device: random numbers replayed, inputs streamed from the host, memory that does not grow."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megabatch as mb
from helpers import dense_clip
from megabatch.cached.streaming import Clock, phase
from megabatch_train.bench.measure import peak_memory

pytestmark = pytest.mark.gpu

N = 50


def tower(width, seed, dropout=0.0, hidden=32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 16)).double().cuda()


def data(width, seed, rows=N):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clip(x, y):
    return dense_clip(F.normalize(x, dim=1), F.normalize(y, dim=1), torch.tensor(5.0, dtype=x.dtype, device=x.device))


def gradients(*modules):
    found = [p.grad.clone() for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return found


def in_one_graph(pairs, size):
    loss = clip(*(torch.cat([module(part) for part in x.split(size)]) for module, x in pairs))
    loss.backward()
    return [loss.detach(), *gradients(*(module for module, _ in pairs))]


def cached(pairs, **options):
    loss = mb.cached_backward(clip, pairs, **options)
    return [loss, *gradients(*(module for module, _ in pairs))]


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("budget", [None, 30_000, "all", "auto"])
@pytest.mark.parametrize("embeddings", ["device", "host"])
def test_dropout_is_the_same_in_both_passes(budget, embeddings):
    pairs = [(tower(6, 0, dropout=0.5), data(6, 0).cuda()), (tower(5, 1, dropout=0.3), data(5, 1).cuda())]
    torch.manual_seed(7)
    wanted = in_one_graph(pairs, 16)
    after = torch.rand(3, device="cuda"), torch.rand(3)
    torch.manual_seed(7)
    assert_same(cached(pairs, chunk_size=16, budget=budget, embeddings=embeddings), wanted)
    assert torch.equal(torch.rand(3, device="cuda"), after[0])
    assert torch.equal(torch.rand(3), after[1])
    torch.manual_seed(8)
    assert (cached(pairs, chunk_size=16, budget=budget)[0] - wanted[0]).abs() > 1e-6


class Texts(nn.Module):
    """The mean over unmasked tokens; counts the tokens."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.head = nn.Embedding(50, 16).double().cuda(), nn.Linear(16, 16).double().cuda()
        self.tokens = 0

    def forward(self, input_ids, attention_mask):
        self.tokens += input_ids.numel()
        mask = attention_mask[..., None]
        return self.head(torch.tanh((self.words(input_ids) * mask).sum(1) / mask.sum(1)))


@pytest.mark.parametrize("budget", [None, 100_000, "all"])
@pytest.mark.parametrize("embeddings", ["device", "host"])
@pytest.mark.parametrize("place", ["device", "host", "pinned"])
def test_texts_are_sorted_and_cut(place, embeddings, budget):
    towers = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        lengths = 1 + (torch.rand(200, generator=generator) ** 3 * 90).long()
        ids = torch.randint(0, 50, (200, 90), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(90) < lengths[:, None]).long()}
        towers.append((Texts(seed), inputs))
    wanted = clip(*(module(**{key: value.cuda() for key, value in inputs.items()}) for module, inputs in towers))
    wanted.backward()
    wanted = [wanted.detach(), *gradients(*(module for module, _ in towers))]
    moved = {"device": torch.Tensor.cuda, "host": torch.Tensor.clone, "pinned": torch.Tensor.pin_memory}[place]
    pairs = [(module, {key: moved(value) for key, value in inputs.items()}) for module, inputs in towers]
    for module, _ in pairs:
        module.tokens = 0
    assert_same(cached(pairs, chunk_size=8, budget=budget, embeddings=embeddings), wanted)
    assert all(module.tokens < (1 if budget == "all" else 2) * 200 * 90 / 2 for module, _ in pairs)


@pytest.mark.parametrize("budget", [None, 30_000, "all"])
@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_on_the_host_are_streamed(budget, pinned):
    """Many small chunks, so that the copies have every chance to overtake the work."""
    image, text = tower(600, 0, hidden=500), tower(5, 1)
    x, y = data(600, 0, 400), data(5, 1, 400)
    wanted = in_one_graph([(image, x.cuda()), (text, y.cuda())], 10)
    host = x.pin_memory() if pinned else x
    for inputs in (host, mb.HostSource(host), mb.HostSource(host, device="cuda")):
        assert_same(cached([(image, inputs), (text, y)], chunk_size=10, budget=budget), wanted)


def test_at_most_two_chunks_are_on_the_device():
    rows, width, size = 4096, 16384, 256
    x = torch.randn(rows, width).pin_memory()  # 256 MiB in chunks of 16 MiB
    image, text = nn.Linear(width, 16).cuda(), nn.Linear(4, 16).cuda()
    pairs = [(image, x), (text, torch.randn(rows, 4, device="cuda"))]
    mb.cached_backward(clip, pairs, chunk_size=size)  # gradients and workspaces are there from now on
    _, peak = peak_memory(lambda: mb.cached_backward(clip, pairs, chunk_size=size), "cuda")
    chunk = size * width * 4
    dense = 3 * 4 * rows * rows * 4  # similarities of the dense loss and what it saves of them
    assert peak < 2 * chunk + dense
    _, streaming = peak_memory(
        lambda: [c.sum() for c in mb.HostSource(x).chunks(spans(rows, size), torch.device("cuda"))], "cuda"
    )
    assert 2 * chunk <= streaming <= 2 * chunk + 2**22


def spans(rows, size):
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def test_streamed_chunks_are_what_was_sent():
    x = torch.arange(1000.0)[:, None].expand(1000, 2048).contiguous()
    chunks = mb.HostSource({"a": x, "b": x.long()}).chunks(spans(1000, 37), torch.device("cuda"))
    for (start, stop), chunk in zip(spans(1000, 37), chunks, strict=True):
        torch.cuda._sleep(200_000)  # the work is slower than the copies
        wanted = torch.arange(start, stop, device="cuda")
        assert torch.equal(chunk["a"][:, 7], wanted.float())
        assert torch.equal(chunk["b"][:, 9], wanted)


def test_the_clock_measures_the_device_and_not_the_host():
    clock = Clock(torch.device("cuda"))
    for waits, busy in ((0.2, False), (0.05, True)):
        clock.lap()
        with clock.activate():
            with phase("forward"):
                if busy:
                    torch.cuda._sleep(400_000_000)  # 0.2 s or more
            with phase("data"):
                time.sleep(waits)  # of the host
        torch.cuda.synchronize()
        found = clock.lap()
        assert found["data"] == pytest.approx(0.0 if busy else waits, abs=0.02)
        assert (found["forward"] > 0.1) is busy


def augmented(i, generator):
    image = torch.full((600,), i / 100, dtype=torch.float64)
    return image + torch.randn(600, generator=generator, dtype=torch.float64)


def test_replay_equals_the_batch_in_memory():
    image, text = tower(600, 0, dropout=0.5), tower(5, 1)
    y = data(5, 1, 100).cuda()
    source = mb.ReplaySource(range(100), augmented, seed=4, workers=4)
    (whole,) = (chunk.clone() for chunk in source.chunks([(0, 100)], torch.device("cuda")))
    torch.manual_seed(1)
    wanted = cached([(image, whole), (text, y)], chunk_size=9)
    torch.manual_seed(1)
    found = cached([(image, source), (text, y)], chunk_size=9)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_memory_does_not_grow_with_the_batch_and_the_budget_is_kept():
    """A deep tower, inputs on the host; embeddings and the loss are small beside the activations."""
    image = nn.Sequential(nn.Linear(64, 2048), *(m for _ in range(6) for m in (nn.GELU(), nn.Linear(2048, 2048)))).cuda()
    text = nn.Linear(4, 2048).cuda()

    def step(rows, budget=None):
        def loss(x, y):
            return (x * y).mean()

        pairs = [(image, torch.randn(rows, 64)), (text, torch.randn(rows, 4))]
        return peak_memory(lambda: mb.cached_backward(loss, pairs, chunk_size=1024, budget=budget, embeddings="host"), "cuda")[
            1
        ]

    step(2048)
    small, large = step(2048), step(8192)
    embeddings = (2 * 2 + 1) * 8192 * 2048 * 4  # both towers', their gradients, and the loss's own product of the two
    assert large < 1.1 * max(small, embeddings)
    chunk = 12 * 1024 * 2048 * 4
    kept = step(8192, budget=3 * chunk)
    assert large < kept < 3 * chunk + max(large, 2 * embeddings)


@pytest.mark.parametrize("budget", [None, "auto"])
def test_autocast_and_scaler(budget):
    image, text = tower(64, 0).float(), tower(32, 1).float()
    pairs = [(image, data(64, 0, 96).float().cuda()), (text, data(32, 1, 96).float().cuda())]
    with torch.autocast("cuda", dtype=torch.float16):
        loss = clip(*(torch.cat([module(part) for part in x.split(32)]) for module, x in pairs))
    (1024 * loss).backward()
    wanted = gradients(image, text)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with torch.autocast("cuda", dtype=torch.float16):
        value = mb.cached_backward(clip, pairs, chunk_size=32, budget=budget, scaler=scaler)
    torch.testing.assert_close(value, loss.detach())
    found = gradients(image, text)
    assert all(g.abs().max() > 0 for g in found)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm()  # one graph sums a weight's gradient over chunks in float16


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:TensorFloat32:UserWarning")  # the compiler's own
@pytest.mark.parametrize("budget", [None, "all"])
def test_compiled_tower_with_dropout(budget):
    """The graph without a backward pass and the one with it draw the same masks; the step warns if they do not."""
    image, text = tower(64, 0, dropout=0.5).float(), tower(32, 1).float()
    pairs = [(image, data(64, 0, 96).float().cuda()), (text, data(32, 1, 96).float().cuda())]
    compiled = torch.compile(image)
    torch.manual_seed(3)
    mb.cached_backward(clip, [(compiled, pairs[0][1]), pairs[1]], chunk_size=32, budget=budget)
    first = gradients(image, text)
    torch.manual_seed(3)
    loss = clip(torch.cat([compiled(part) for part in pairs[0][1].split(32)]), text(pairs[1][1]))
    loss.backward()
    for a, b in zip(first, gradients(image, text), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
