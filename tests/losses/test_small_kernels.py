"""Losses of small batches by kernels: on a GPU if there is one, otherwise interpreted on the CPU."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from test_small_batches import Calls

import megabatch as mb
from helpers import aligned_pairs, dense_clip, dense_siglip, leaves, no_dense_path, outcomes
from megabatch import dispatch, reference
from megabatch.tiles import plan

triton_launcher = pytest.importorskip("megabatch.kernels.launch")
triton_small_launches = pytest.importorskip("megabatch.kernels.small_gradients")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on inf and NaN, which are meant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, D = 150, 24  # three tiles of rows and two of columns
IDS = (torch.arange(N) // 3).to(DEVICE)
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 4, 5, 5])
LABELS = (LABELS + 6 * torch.arange(N // 15)[:, None]).flatten().to(DEVICE)  # one, two, three or five rows of a label
SOLE = (torch.arange(N) // 2).to(DEVICE)
ALONE = torch.arange(N, device=DEVICE)

LOSSES = {
    "clip": mb.clip_loss,
    "clip ids": lambda x, y, s, **o: mb.clip_loss(x, y, s, ids=IDS, **o),
    "clip sum": lambda x, y, s, **o: mb.clip_loss(x, y, s, reduction="sum", **o),
    "siglip": lambda x, y, s, **o: mb.siglip_loss(x, y, s, s - 25, **o),
    "siglip ids": lambda x, y, s, **o: mb.siglip_loss(x, y, s, -5.0, ids=IDS, **o),
    "siglip positives": lambda x, y, s, **o: mb.siglip_loss(x, y, s, -5.0, ids=IDS, ids_are_positives=True, **o),
    "siglip sum": lambda x, y, s, **o: mb.siglip_loss(x, y, s, -5.0, reduction="sum", **o),
    "info_nce": lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, **o),
    "info_nce symmetric ids": lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, symmetric=True, ids=IDS, **o),
    "nt_xent": mb.nt_xent_loss,
    "nt_xent sum": lambda x, y, s, **o: mb.nt_xent_loss(x, y, s, reduction="sum", **o),
    "sup_con": lambda x, y, s, **o: mb.sup_con_loss(x, LABELS, s, **o) + 0 * y.sum(),
    "sup_con sum": lambda x, y, s, **o: mb.sup_con_loss(x, LABELS, s, reduction="sum", **o) + 0 * y.sum(),
    "sup_con sole": lambda x, y, s, **o: mb.sup_con_loss(x, SOLE, s, **o) + 0 * y.sum(),
    "sup_con alone": lambda x, y, s, **o: mb.sup_con_loss(x, ALONE, s, **o) + 0 * y.sum(),
}

TILES = {name: getattr(triton_small_launches, name) for name in ("_SUMS", "_LABEL_SUMS", "_WEIGHTS", "_SIGMOIDS", "_FULL_ROWS")}


@contextmanager
def tiles(**sizes):
    """Tiles of these sizes where products are given."""
    with mock.patch.multiple(triton_small_launches, **sizes):
        triton_small_launches.launches_of.cache_clear()
        try:
            yield
        finally:
            triton_small_launches.launches_of.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def fewer_programs():
    """Larger tiles on a CPU, where the interpreter takes its time for each program."""
    large = triton_small_launches._LaunchTile(rows=64, columns=128, warps=4)
    with tiles(**(dict.fromkeys(TILES, large) if DEVICE == "cpu" else TILES)):
        yield


def tiled(loss):
    """Over tiles, as if the pairs did not fit in memory."""

    def run(*inputs, **options):
        with dispatch.override(dense_triton=0):
            return loss(*inputs, **options)

    return run


OVER_TILES = ("clip", "clip ids", "clip sum", "siglip", "siglip ids", "siglip positives", "siglip sum", "info_nce", "nt_xent")
LOSSES |= {f"{name} over tiles": tiled(LOSSES[name]) for name in OVER_TILES}
EVERY = pytest.mark.parametrize("name", LOSSES)
EACH_KERNEL = ("clip ids", "siglip positives", "nt_xent", "sup_con", "sup_con alone")
MOST = pytest.mark.parametrize("name", ["clip", "info_nce", "siglip", *EACH_KERNEL])


def kernels(name):
    return lambda *inputs: LOSSES[name](*inputs, backend="triton")


def exact(name):
    """Over tiles of PyTorch operations, which other tests compare with dense losses."""

    def run(*inputs):
        with no_dense_path():
            return LOSSES[name](*inputs, backend="eager")

    return run


def data(dtype=torch.float32, scale=20.0, noise=1.0, seed=1):
    pair = aligned_pairs(N, D, noise=noise, seed=seed)
    return [tensor.to(DEVICE, dtype).requires_grad_() for tensor in pair] + [
        torch.tensor(scale, device=DEVICE).requires_grad_()
    ]


def wide(inputs):
    return leaves(*(tensor.double() for tensor in inputs))


DIFFERENT = ("clip ids", "siglip positives", "sup_con", "info_nce", "clip ids over tiles", "siglip positives over tiles")


@pytest.mark.quick(*({"scale": 20.0, "name": name} for name in DIFFERENT))
@EVERY
@pytest.mark.parametrize("scale", [0.0, -3.0, 20.0, 1000.0])
def test_as_exact_as_float32(name, scale):
    """The error of a similarity, D + 2 roundings of its size, is the relative error of a weight and the error of a loss."""
    inputs = data(scale=scale, noise=3.0)
    noise = (D + 8) * torch.finfo(torch.float32).eps * (1 + abs(scale))
    pairs = N if "sum" in name else 1
    found, wanted = outcomes(kernels(name), inputs), outcomes(exact(name), wide(inputs))
    assert abs(found[0] - wanted[0]) <= pairs * noise + 1e-6 * wanted[0]
    for actual, expected in zip(found[1:], wanted[1:], strict=True):
        assert (actual - expected).abs().max() <= 4 * noise * expected.abs().max() + pairs * noise * (1 + abs(scale)) / N


@pytest.mark.quick({"dtype": torch.float16, "name": "clip ids"}, {"dtype": torch.float16, "name": "sup_con"})
@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Only weights and results are rounded to the type of the inputs; the interpreter truncates to bfloat16."""
    if DEVICE == "cpu" and dtype == torch.bfloat16 and "over tiles" in name:
        pytest.skip("the interpreter has no bfloat16 products")
    assert_right_in_half_precision(name, data(dtype))


def assert_right_in_half_precision(name, inputs):
    eps = torch.finfo(inputs[0].dtype).eps
    found, wanted = outcomes(kernels(name), inputs), outcomes(exact(name), wide(inputs))
    # Over tiles, the gradient of the scale is taken from dx, and the rounding of the weights enters.
    of_scale = eps if "over tiles" in name else 5e-6
    for actual, expected, bound in ((found[0], wanted[0], 5e-6), (found[3], wanted[3], of_scale)):
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
    for actual, expected in zip(found[1:3], wanted[1:3], strict=True):
        assert (actual - expected).norm() <= 4 * eps * expected.norm()


@pytest.mark.quick({"name": "clip ids"}, {"name": "siglip positives"})
@pytest.mark.parametrize("name", EACH_KERNEL)
def test_half_precision_of_wide_embeddings(name):
    """Several steps of the width in a product of similarities, and several tiles of it in a gradient."""
    x, y = aligned_pairs(N, 150, noise=1.0, seed=1)
    scale = torch.tensor(20.0, device=DEVICE, requires_grad=True)
    assert_right_in_half_precision(name, [*leaves(x.to(DEVICE, torch.float16), y.to(DEVICE, torch.float16)), scale])


@pytest.mark.quick({"name": "clip ids"}, {"name": "siglip positives"})
@pytest.mark.parametrize("name", EACH_KERNEL)
def test_half_precision_with_library_products(name, monkeypatch):
    """As from 4,097 rows on, with the tiles that a GPU has."""
    monkeypatch.setattr(plan, "KERNEL_MATMUL_ROWS", 0)
    with tiles(**TILES):
        assert_right_in_half_precision(name, data(torch.float16))


@pytest.mark.quick  # none of them in `make test`, and all where other processors are imitated
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize(
    ("noise", "scale", "dtype"),
    [(1.0, 14.0, torch.float16), (2.0, 50.0, torch.float32), (0.5, 100.0, torch.float16), (3.0, 1000.0, torch.float32)],
)
def test_error_is_at_most_twice_the_dense_one(loss, dtype, noise, scale):
    bias = [] if loss == "clip" else [torch.tensor(-10.0, device=DEVICE, requires_grad=True)]
    mine, dense, truth = {
        "clip": (lambda *a: mb.clip_loss(*a, backend="triton"), dense_clip, reference.clip_loss),
        "siglip": (lambda *a: mb.siglip_loss(*a, backend="triton"), dense_siglip, reference.siglip_loss),
    }[loss]
    squares = {mine: 0.0, dense: 0.0}
    for seed in range(0, 16, 2):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in data(scale=scale, noise=noise, seed=seed) + bias]
        wanted = outcomes(truth, wide(inputs))
        for function in squares:
            found = outcomes(function, inputs)
            squares[function] += torch.stack([(a - b).square().sum() for a, b in zip(found, wanted, strict=True)])
    found, bar = (squares[function].sqrt() for function in squares)
    assert (found <= 2 * bar).all(), (found, bar)


@pytest.mark.parametrize("scale", [20.0, 80.0])
def test_almost_certain_pairs_keep_their_digits(scale):
    """Where the dense float32 loss is 0 and has no gradient."""
    inputs = leaves(torch.eye(8, device=DEVICE), torch.eye(8, device=DEVICE), torch.tensor(scale, device=DEVICE))
    loss, dx, dy, dscale = outcomes(kernels("clip"), inputs)
    right = 7 * torch.tensor(-scale, dtype=torch.float64, device=DEVICE).exp()  # up to its square
    for actual, expected in ((loss, right), (dscale, -right), (dx.diagonal(), (-scale / 8 * right).expand(8))):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert torch.equal(dx, dy)


def test_equal_rows_have_the_logarithm_of_their_number():
    x = torch.ones(64, 4, device=DEVICE)
    assert mb.clip_loss(x, x, 1000.0, backend="triton").item() == torch.tensor(64.0, dtype=torch.float64).log().float().item()


@pytest.mark.quick({"scale": 1e30})
@pytest.mark.parametrize("scale", [1e8, 1e30])
@pytest.mark.parametrize("name", ["clip", "info_nce", "nt_xent", "sup_con", "sup_con sole"])
def test_exponents_beyond_all_reason(name, scale):
    """A softmax weight is at most 1, however far rounding moves the similarities."""
    inputs = data(scale=scale)
    loss, dx, dy, _ = outcomes(kernels(name), inputs)
    assert loss.isfinite()
    assert loss >= 0
    rows = 2 * N if name == "nt_xent" else N
    for gradient in (dx, dy):
        assert (gradient.norm(dim=1) <= 4 * scale / rows * (2 if "sup" in name or name == "nt_xent" else 1)).all()


@pytest.mark.parametrize("factor", [1e2, 1e6, 1e18])
def test_one_outlier_does_not_cost_the_others_their_digits(factor):
    x, y, scale = data(noise=3.0)
    x.data[9] *= factor
    found, wanted = outcomes(kernels("info_nce"), [x, y, scale]), outcomes(exact("info_nce"), wide([x, y, scale]))
    others = torch.arange(N, device=DEVICE) != 9
    torch.testing.assert_close(found[1][others], wanted[1][others], rtol=0, atol=1e-5 * wanted[1][others].abs().max().item())


@pytest.mark.quick(*({"bad": float("inf"), "name": name} for name in EACH_KERNEL))
@EVERY
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(name, bad):
    x, y, scale = data()
    x.data[3, 2] = bad
    few, many = outcomes(kernels(name), [x, y, scale]), outcomes(exact(name), wide([x, y, scale]))
    assert few[0].isfinite() == ("alone" in name)  # where no row has a positive, the loss is 0 whatever the similarities are
    for one, other in zip(few[1:], many[1:], strict=True):
        assert not one.isfinite().all() or other.isfinite().all()


@pytest.mark.quick(
    {"layout": "transposed", "name": "clip", "dtype": torch.float16},
    {"layout": "odd offset", "name": "siglip", "dtype": torch.float32},
)
@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["transposed", "odd offset", "expanded"])
def test_any_memory_layout(layout, dtype, name):
    x, y, scale = data(dtype)
    base = {
        "transposed": lambda: x.detach().T.contiguous().T,
        "odd offset": lambda: torch.cat((x.detach().flatten(), x.detach()[0]))[1 : 1 + N * D].view(N, D),
        "expanded": lambda: x.detach()[:1].expand(N, D),
    }[layout]()
    view, plain = base.requires_grad_(), base.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    found, wanted = (outcomes(kernels(name), [tensor, y, scale]) for tensor in (view, plain))
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_strided_ids_of_another_type():
    x, y, scale = data()
    strided = torch.stack((IDS, IDS + 1), dim=1).to(torch.int32)[:, 0]
    assert torch.equal(mb.clip_loss(x, y, scale, ids=strided, backend="triton"), kernels("clip ids")(x, y, scale))


@pytest.mark.quick({"name": "clip"}, {"name": "siglip"}, {"name": "sup_con"})
@MOST
@pytest.mark.thorough
def test_bitwise_the_same_over_repeated_runs(name):
    inputs = data(torch.float16)
    first = outcomes(kernels(name), inputs)
    for _ in range(3 if DEVICE == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, outcomes(kernels(name), inputs), strict=True))


@pytest.mark.quick({"name": "clip"}, {"name": "siglip"})
@MOST
@pytest.mark.thorough
def test_buffers_are_not_read_before_they_are_written(name):
    """Fresh memory is full of NaN."""

    def poisoned_by(make):
        def poisoned(*arguments, **options):
            made = make(*arguments, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return poisoned

    poisoned, poisoned_like = poisoned_by(torch.empty), poisoned_by(torch.empty_like)
    inputs = data()
    expected = outcomes(kernels(name), inputs)
    poisoned_new = lambda self, *shape, **options: poisoned(*shape, **({"dtype": self.dtype, "device": self.device} | options))  # noqa: E731
    with (
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(torch, "empty_like", poisoned_like),
        mock.patch.object(torch.Tensor, "new_empty", poisoned_new),
    ):
        found = outcomes(kernels(name), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.quick({"name": "clip ids"})
@MOST
@pytest.mark.thorough
def test_only_what_is_asked_for_is_computed(name):
    whole = data()
    expected = torch.autograd.grad(kernels(name)(*whole), whole)
    for wanted in range(3):
        inputs = [tensor.detach().clone() for tensor in whole]
        inputs[wanted].requires_grad_()
        if not (wanted == 1 and "sup" in name):
            assert torch.equal(torch.autograd.grad(kernels(name)(*inputs), inputs[wanted])[0], expected[wanted])
    with torch.no_grad():
        loss = kernels(name)(*whole)
    assert not loss.requires_grad
    assert torch.equal(loss, kernels(name)(*whole))


@pytest.mark.quick({"name": "clip"})
@pytest.mark.parametrize("name", ["clip", "nt_xent"])
def test_differentiating_twice_is_refused(name):
    inputs = data()
    (dx,) = torch.autograd.grad(kernels(name)(*inputs), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        (dx.square().sum() + inputs[0].sum()).backward()


@pytest.mark.quick({"name": "clip"}, {"name": "siglip"})
@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "sup_con"])
def test_autocast_rounds_inputs_and_nothing_else(name):
    inputs = data()
    halves = [tensor.detach().half().float().requires_grad_() for tensor in inputs[:2]]
    with torch.autocast(DEVICE, dtype=torch.float16):
        mixed = outcomes(kernels(name), inputs)
        beside = outcomes(kernels(name), [inputs[0].detach().half().requires_grad_(), *inputs[1:]])
    wanted = outcomes(exact(name), wide([*halves, inputs[2]]))
    for found in (mixed, beside):
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(found[2], wanted[2], rtol=0, atol=2e-3 * wanted[2].abs().max().item())


def test_tf32_inputs_are_rounded_to_nearest():
    inputs = data(scale=100.0)
    with mock.patch("megabatch.primitives.compute_precision", return_value="tf32"):
        found = outcomes(kernels("clip"), inputs)
    nearest = [((t.detach().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).requires_grad_() for t in inputs[:2]]
    wanted = outcomes(exact("clip"), wide([*nearest, inputs[2]]))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-3 * wanted[1].abs().max().item())


WORK = (
    "aten::mm",
    "aten::mul",
    "aten::cat",
    "aten::add",
    "aten::copy_",
    "aten::fill_",
    "aten::sum",
    "aten::full",
    "aten::_to_copy",
)


@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce", "nt_xent", "sup_con sole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_launches_or_fewer(name, dtype):
    """Kernels, products and elementwise work of forward and backward; the rest of the calls only makes tensors and views."""
    *inputs, scale = data(dtype)
    loss = {"sup_con sole": lambda x, y, s, **o: mb.sup_con_loss(x, SOLE, s, **o)}.get(name, LOSSES[name])
    if name == "siglip":
        bias = torch.tensor(-5.0, device=DEVICE, requires_grad=True)
        loss = lambda x, y, s, **o: mb.siglip_loss(x, y, s, bias, **o)  # noqa: E731
    launches = []
    with (
        mock.patch.object(triton_launcher.Launcher, "__call__", lambda self, *tensors: launches.append(self)),
        Calls() as calls,
    ):
        loss(*inputs, scale, backend="triton").backward()
    widened = 0 if DEVICE == "cuda" or dtype == torch.float32 else None  # on a CPU, products of halves are widened first
    work = [call for call in calls.names if call.startswith(WORK) and not (widened is None and "_to_copy" in call)]
    assert len(launches) == {"siglip": 3, "info_nce": 3, "nt_xent": 4}.get(name, 5)  # one of them in backward
    assert len(launches) + len(work) <= 9, calls.names
