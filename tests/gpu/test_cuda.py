"""The same operations on a CUDA device: values and errors, no waiting for the device, graphs, memory, determinism."""

from functools import partial

import pytest
import torch

import megabatch as mb
from helpers import aligned_pairs, assert_equal_to_rounding, dense_clip, dense_siglip, leaves, outcomes, tile_size, unit
from megabatch import dispatch, reference
from megabatch_train.bench.losses import clip_truth
from megabatch_train.bench.measure import peak_memory
from rounding import half_units

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("both_ways")]

BACKENDS = ["eager", "triton"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def pairs(N, D, *, noise=1.0, seed=0, dtype=torch.float32):
    return [t.to("cuda", dtype).requires_grad_() for t in aligned_pairs(N, D, noise=noise, seed=seed)]


def numbers(*values, dtype=torch.float32):
    return [torch.tensor(value, device="cuda", dtype=dtype, requires_grad=True) for value in values]


@pytest.mark.parametrize("exclude", [None, "diagonal", "ids"])
def test_float64_equals_the_reference(exclude):
    x, y = leaves(unit(300, 65, seed=0, device="cuda"), unit(200, 65, seed=1, device="cuda"))
    (scale,) = numbers(30.0, dtype=torch.float64)
    ids = (torch.arange(300, device="cuda") % 50, torch.arange(200, device="cuda") % 40)
    masks = {None: None, "diagonal": torch.eye(300, 200, dtype=torch.bool, device="cuda"), "ids": ids[0][:, None] == ids[1]}
    with tile_size(64, 48):
        found = mb.pairwise_logsumexp(x, y, scale, exclude=ids if exclude == "ids" else exclude)
        gradients = torch.autograd.grad(found[0].sum() + found[1].square().sum(), (x, y, scale))
    wanted = reference.pairwise_logsumexp(x, y, scale, left_out=masks[exclude])
    expected = torch.autograd.grad(wanted[0].sum() + wanted[1].square().sum(), (x, y, scale))
    for a, b in zip([*found, *gradients], [*wanted, *expected], strict=True):
        assert_equal_to_rounding(a.detach(), b.detach(), 30.0)


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize(("noise", "scale"), [(10.0, 14.0), (2.0, 50.0), (2.5, 100.0), (3.0, 1000.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "tf32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_error_is_at_most_twice_the_dense_one(loss, noise, scale, dtype, backend):
    mine, dense, truth = {
        "clip": (partial(mb.clip_loss, backend=backend), dense_clip, reference.clip_loss),
        "siglip": (partial(mb.siglip_loss, backend=backend), dense_siglip, reference.siglip_loss),
    }[loss]
    values = [scale] if loss == "clip" else [scale, -10.0]
    real_dtype = torch.float32 if dtype == "tf32" else dtype
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    squares = {mine: 0.0, dense: 0.0, "least": 0.0}
    try:
        for seed in range(0, 32, 2):
            N = 1024 if seed % 4 else 1000  # kernels are compiled apart for what can be divided by 16
            inputs = [*pairs(N, 200, noise=noise, seed=seed, dtype=real_dtype), *numbers(*values, dtype=real_dtype)]
            wanted = outcomes(truth, [t.detach().double().requires_grad_() for t in inputs])
            squares["least"] += torch.stack(half_units(wanted)).square()
            for function in (mine, dense):
                with tile_size(256, 384):
                    found = outcomes(function, inputs)
                squares[function] += torch.stack([(a - b).square().sum() for a, b in zip(found, wanted, strict=True)])
    finally:
        torch.set_float32_matmul_precision("highest")
    found, bar, least = (total.sqrt() for total in squares.values())
    assert (found <= torch.maximum(2 * bar, least)).all(), (found.tolist(), bar.tolist(), least.tolist())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_waits_for_the_device(dtype, backend):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels have no float64")
    clip_loss, siglip_loss, logsumexp, softplus, rank = (
        partial(function, backend=backend)
        for function in (mb.clip_loss, mb.siglip_loss, mb.pairwise_logsumexp, mb.pairwise_softplus, mb.pairwise_rank)
    )
    x, y = pairs(700, 64, dtype=dtype)
    scale, bias = numbers(20.0, -5.0)
    ids = torch.arange(700, device="cuda") % 100

    def step():
        row, col = logsumexp(x, y, scale, row_bias=bias.expand(700), exclude=(ids, ids))
        loss = clip_loss(x, y, scale, ids=ids) + siglip_loss(x, y, scale, bias) + siglip_loss(x, y, 10.0, -10.0)
        (loss + row[0] * 0 + col[0] * 0 + softplus(x, y, scale, bias).mean()).backward()
        return rank(x, y)

    with tile_size(256, 256):
        step()
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # of the warm-up's graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_can_be_captured_in_a_cuda_graph(dtype, backend):
    x, y = pairs(600, 64, dtype=dtype)
    scale, bias = numbers(20.0, -5.0)
    parameters = [x, y, scale, bias]

    def step():
        loss = mb.clip_loss(x, y, scale, backend=backend) + mb.siglip_loss(x, y, scale, bias, backend=backend)
        return loss, *torch.autograd.grad(loss, parameters)

    with tile_size(256, 256):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            x.copy_(unit(600, 64, seed=9).to("cuda", dtype))
        graph.replay()
        for replayed, wanted in zip(captured, step(), strict=True):
            assert torch.equal(replayed, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bitwise_the_same_over_repeated_runs(dtype, backend):
    x, y = pairs(1500, 96, dtype=dtype)
    scale, bias = numbers(20.0, -5.0)
    first = None
    for _ in range(100):
        loss = mb.clip_loss(x, y, scale, backend=backend) + mb.siglip_loss(x, y, scale, bias, backend=backend)
        found = [loss, *torch.autograd.grad(loss, (x, y, scale, bias))]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_linear_and_the_workspace_capped(dtype, loss, backend):
    def step(N):
        x, y = (torch.randn(N, 256, device="cuda", dtype=dtype).div_(16).requires_grad_() for _ in range(2))

        def run():
            clip, siglip = (partial(function, backend=backend) for function in (mb.clip_loss, mb.siglip_loss))
            value = clip(x, y, 20.0) if loss == "clip" else siglip(x, y, 20.0, -10.0)
            value.backward()

        run()
        x.grad = y.grad = None
        _, used = peak_memory(run, "cuda")
        accumulator = 4 * N * 256
        returned = x.nbytes + y.nbytes
        statistics, workspace = 64 * N, 512 * 2**20
        saved = returned  # gradients that backward only multiplies
        assert used <= max(returned + accumulator + workspace, returned + saved) + statistics + saved
        on_one_gpu = backend == "triton" and dispatch.find_rule(dispatch.BOTH, N, 256, "triton").module == "one_gpu"
        if on_one_gpu:  # the workspace is freed before gradients are allocated
            partial_sums = 48 * 2**20 if loss == "siglip" else 0  # of the rows of a strip
            assert used <= max(returned + accumulator + workspace + partial_sums, 2 * returned) + statistics
        return used

    assert step(131072) <= 4.1 * step(32768)
    if backend == "triton":
        for N in (16384, 65536):  # one strip, and several, of 512 MiB in bfloat16 (`plan.pair_strip`)
            step(N)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_batch_against_float64_on_sampled_rows(backend):
    x, y = pairs(40000, 512, noise=1.0, dtype=torch.bfloat16)
    loss = mb.clip_loss(x, y, 50.0, backend=backend)
    loss.backward()
    sample = torch.tensor([0, 1, 17, 20001, 39999], device="cuda")
    wanted_loss, dx, dy = clip_truth(x.detach(), y.detach(), 50.0, sample)[:3]
    assert abs(loss.item() / float(wanted_loss) - 1) < 1e-4
    for found, wanted in ((x.grad[sample], dx), (y.grad[sample], dy)):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < 5e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_columns_do_not_underflow_in_fp16(backend):
    # A softmax over 200,000 columns is 5e-6 each: with weights of at most 1, fp16 tiles would hold it with few digits.
    x, y = (t.to("cuda", torch.float16).requires_grad_() for t in (unit(64, 32, seed=0), unit(200_000, 32, seed=1)))
    (dx,) = torch.autograd.grad(mb.pairwise_logsumexp(x, y, 2.0, backend=backend)[0].sum(), x)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(reference.pairwise_logsumexp(wide, y.detach().double(), 2.0)[0].sum(), wide)
    assert (dx.double() - wanted).norm() / wanted.norm() < 1e-3


def test_more_than_two_to_the_31_elements():
    # 4.3 million rows of 512 are 2.2e9 elements: an index in 32 bits would wrap, and reach other rows.
    N, D = 4_300_000, 512
    x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).div_(16).requires_grad_()
    y = unit(300, D, seed=1, dtype=torch.bfloat16, device="cuda").requires_grad_()
    row, col = mb.pairwise_logsumexp(x, y, 5.0, backend="triton")
    (row.sum() + col.sum()).backward()
    for rows in (slice(0, 50), slice(N - 50, N)):
        wide = x.detach()[rows].double().requires_grad_()
        s = 5.0 * wide @ y.detach().double().T
        close = s.logsumexp(1)
        assert (row.detach()[rows] - close.detach()).abs().max() < 1e-4
        weights = (s - close[:, None]).exp() + (s - col.detach().double()).exp()
        wanted = 5.0 * weights.detach() @ y.detach().double()
        assert (x.grad[rows].double() - wanted).norm() / wanted.norm() < 5e-3


@pytest.mark.parametrize(
    ("N", "M", "D"),
    [
        (1000, 777, 100),
        (1, 5, 1),
        (257, 4099, 33),
        (3, 130, 768),
        (520, 700, 1000),
        (700, 900, 1152),
        (300, 400, 1500),
        (300, 400, 1601),
        (128, 64, 512),
    ],
)
@pytest.mark.parametrize("options", ["plain", "diagonal", "ids", "offsets", "hostile"])
def test_bfloat16_kernels_on_odd_shapes(N, M, D, options):
    dtype = torch.bfloat16
    x, y = (t.to("cuda", dtype).requires_grad_() for t in (unit(N, D, seed=0), unit(M, D, seed=1)))
    (scale,) = numbers(20.0)
    extra, left_out, exclude = [], None, None
    if options == "diagonal":
        exclude, left_out = "diagonal", torch.eye(N, M, dtype=torch.bool, device="cuda")
    if options == "ids":
        exclude = (torch.arange(N, device="cuda") % 7, torch.arange(M, device="cuda") % 5)
        left_out = exclude[0][:, None] == exclude[1]
    if options == "offsets":
        extra = [(3 * unit(1, size, seed=size).squeeze(0)).to("cuda", torch.float32).requires_grad_() for size in (N, M)]
    if options == "hostile":
        scale = (scale.detach() * 50).requires_grad_()
        x = (x.detach() * torch.linspace(0.01, 3, N, device="cuda", dtype=dtype)[:, None]).requires_grad_()
    inputs = [x, y, scale, *extra]
    wide = leaves(*(t.double() for t in inputs))
    results = []
    for function, arguments in (
        (partial(mb.pairwise_logsumexp, exclude=exclude, backend="triton"), inputs),
        (partial(reference.pairwise_logsumexp, left_out=left_out), wide),
    ):
        row, col = function(*arguments)
        total = sum(torch.where(v.isinf(), 0.0, v).sum() for v in (row, col))
        results.append([row.detach(), col.detach(), *torch.autograd.grad(total, arguments)])
    for actual, expected in zip(*results, strict=True):
        finite = expected.isfinite()
        error = (actual.double() - expected)[finite].norm() / (1e-30 + expected[finite].norm())
        assert error < 5e-3


def test_hooks_for_launches_are_called_while_they_are_set():
    """As those of a profiler. Without them, launches take another way."""
    hook = pytest.importorskip("triton").knobs.runtime.launch_enter_hook
    x, y = pairs(300, 64)
    names = []

    def note(launch):
        names.append(launch.get()["name"])

    def step():
        return torch.autograd.grad(mb.clip_loss(x, y, 20.0), x)[0]

    step()
    before = step()
    hook.add(note)
    try:
        during = step()
    finally:
        hook.remove(note)
    launches = len(names)
    assert names[-1] == "_multiply_kernel"
    assert launches >= 5
    assert torch.equal(before, during)
    assert torch.equal(before, step())
    assert len(names) == launches


def test_autocast_on_the_device():
    x, y = pairs(500, 64)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = mb.clip_loss(x, y, 20.0)
    wanted = mb.clip_loss(x.bfloat16(), y.bfloat16(), 20.0)
    torch.testing.assert_close(found, wanted)
    assert torch.autograd.grad(found, x)[0].dtype == torch.float32


def test_a_device_mix_is_refused():
    x, _ = pairs(5, 4)
    with pytest.raises(ValueError, match="must be on the same device"):
        mb.clip_loss(x, x.detach().cpu(), 1.0)
    with pytest.raises(ValueError, match="logit_scale must be on cuda:0"):
        mb.clip_loss(x, x.detach(), torch.tensor(1.0))
