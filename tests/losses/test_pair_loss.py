"""Losses of pairs over tiles with their gradients, by kernels: several strips, several launches, few calls."""

from unittest import mock

import pytest
import torch
from test_small_batches import Calls

import megabatch as mb
from helpers import aligned_pairs, leaves, no_dense_path, outcomes
from megabatch import dispatch, reference
from megabatch.kernels import plan as kernel_plan
from megabatch.tiles import plan

triton_logsumexp = pytest.importorskip("megabatch.kernels.logsumexp")
triton_launcher = pytest.importorskip("megabatch.kernels.launch")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on inf and NaN, which are meant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHOLE = plan.TileSize(1024, 1024)
LOSSES = {
    "clip": (mb.clip_loss, reference.clip_loss),
    "info_nce": (
        lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, **o),
        lambda x, y, s: reference.info_nce_loss(x, y, scale=s),
    ),
    "siglip": (
        lambda x, y, s, **o: mb.siglip_loss(x, y, s, 0.1 * s - 9, **o),
        lambda x, y, s: reference.siglip_loss(x, y, s, 0.1 * s - 9),
    ),
}
SOFTMAX = pytest.mark.parametrize("name", ["clip", "info_nce"])


@pytest.fixture(autouse=True)
def over_tiles():
    with dispatch.override(dense_triton=0):
        yield


def inputs_of(N, D, dtype, scale=20.0):
    pair = (side.to(DEVICE, dtype) for side in aligned_pairs(N, D, noise=1.0, seed=3))
    return leaves(*pair, torch.tensor(scale, device=DEVICE))


STRIPS = pytest.mark.parametrize("strip", [(256, 256), (512, 256), (256, 1024)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def in_one_strip_and_several(monkeypatch, loss, inputs, strip):
    found = []
    for size in (WHOLE, plan.TileSize(*strip)):
        monkeypatch.setattr(plan, "pair_strip", lambda N, element_size, size=size: size)
        found.append(outcomes(lambda *a: loss(*a, backend="triton"), inputs))
    return found


def assert_right(found, truth, inputs):
    wanted = outcomes(truth, leaves(*(tensor.double() for tensor in inputs)))
    tolerance = 2e-5 if inputs[0].dtype == torch.float32 else 2e-3
    for actual, expected in zip(found, wanted, strict=True):
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.quick  # none of them in `make test`, and all where other processors are imitated
@SOFTMAX
@DTYPES
@STRIPS
def test_strips_add_up(monkeypatch, strip, dtype, name):
    """One row has a shift of its own, in the last rows of strips: all its similarities are negative, at a scale of 100."""
    mine, truth = LOSSES[name]
    x, y, scale = inputs_of(520, 24, dtype, scale=100.0)
    with torch.no_grad():
        y[:, 0] = y[:, 0].abs() + 0.2
        y.div_(y.norm(dim=1, keepdim=True))
        x[515] = -torch.eye(24, dtype=dtype, device=DEVICE)[0]
    inputs = x, y, scale
    with mock.patch.object(triton_logsumexp, "complete_sums", wraps=triton_logsumexp.complete_sums) as completed:
        found = in_one_strip_and_several(monkeypatch, mine, inputs, strip)
    own = completed.call_args.args[3].shift[:520].isfinite()
    assert own.nonzero().flatten().tolist() == [515]
    for outcome in found:
        assert_right(outcome, truth, inputs)


@pytest.mark.quick({"strip": (2, 1), "dtype": torch.float16})
@DTYPES
@pytest.mark.parametrize("strip", [(1, 1), (2, 1), (1, 4)])
def test_strips_of_a_sigmoid_add_up(monkeypatch, strip, dtype):
    """In small tiles where kernels are interpreted: products of many terms, of which a softplus is made, take seconds there."""
    mine, truth = LOSSES["siglip"]
    unit = 256
    if DEVICE == "cpu":
        unit, tile = 32, kernel_plan.KernelTile(rows=32, columns=32, dims=32, warps=4, stages=2)
        monkeypatch.setattr(kernel_plan, "gradient_tile", lambda precision, device: tile)
    inputs = inputs_of(2 * unit + 8, 24, dtype)
    for outcome in in_one_strip_and_several(monkeypatch, mine, inputs, [unit * side for side in strip]):
        assert_right(outcome, truth, inputs)


@pytest.mark.quick({"dtype": torch.float32, "ids": "positives"}, {"dtype": torch.float16, "ids": None})
@pytest.mark.parametrize("ids", [None, "left out", "positives"])
@DTYPES
def test_a_sigmoid_loss_as_by_its_operator(dtype, ids):
    """The operator serves ranks and compiled calls, and takes the same strips."""
    x, y, scale = inputs_of(70, 40, dtype)
    bias = torch.tensor(-7.0, device=DEVICE, requires_grad=True)
    options = {} if ids is None else {"ids": torch.arange(70, device=DEVICE) // 3, "ids_are_positives": ids == "positives"}

    def loss(*inputs):
        return mb.siglip_loss(*inputs, **options, backend="triton")

    found = outcomes(loss, (x, y, scale, bias))
    with no_dense_path():
        wanted = outcomes(loss, (x, y, scale, bias))
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5 if actual.dim() == 0 else 2e-3, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sigmoid_loss_does_not_hide_what_is_not_finite(value):
    x, y, scale = inputs_of(70, 24, torch.float32)
    bias = torch.tensor(-7.0, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        x[3, 2] = value
    found = outcomes(lambda *a: mb.siglip_loss(*a, backend="triton"), (x, y, scale, bias))
    assert not any(result.isfinite().all() for result in found)


@pytest.mark.thorough
@SOFTMAX
def test_sums_of_several_launches_are_those_of_one(monkeypatch, name):
    mine, _ = LOSSES[name]
    inputs = inputs_of(512, 24, torch.float32)
    one = outcomes(lambda *a: mine(*a, backend="triton"), inputs)
    monkeypatch.setattr(kernel_plan, "LAUNCH_ROWS", 256)
    monkeypatch.setattr(kernel_plan, "LAUNCH_PANELS", 1)
    for found, expected in zip(outcomes(lambda *a: mine(*a, backend="triton"), inputs), one, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.quick(
    {"dtype": torch.float32, "needs": (1, 2)},
    {"dtype": torch.float16, "needs": (0,)},
)
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (0, 2), (1, 2), ()])
@DTYPES
@pytest.mark.thorough
def test_any_gradients_may_be_asked_for(dtype, needs):
    assert_any_gradients(mb.clip_loss, inputs_of(200, 24, dtype), needs)


@pytest.mark.quick({"dtype": torch.float16, "needs": (1, 3)}, {"dtype": torch.float32, "needs": (3,)})
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (3,), (1, 3), (0, 2), (2, 3), ()])
@DTYPES
def test_any_gradients_of_a_sigmoid_may_be_asked_for(dtype, needs):
    bias = torch.tensor(-7.0, device=DEVICE, requires_grad=True)
    assert_any_gradients(mb.siglip_loss, (*inputs_of(70, 24, dtype), bias), needs)


def assert_any_gradients(function, inputs, needs):
    loss = function(*inputs, backend="triton")
    gradients = torch.autograd.grad(loss, inputs)
    some = [tensor if i in needs else tensor.detach() for i, tensor in enumerate(inputs)]
    again = function(*some, backend="triton")
    assert torch.equal(again, loss)
    if needs:
        for i, found in zip(needs, torch.autograd.grad(again, [some[i] for i in needs]), strict=True):
            assert torch.equal(found, gradients[i])


@pytest.mark.parametrize(("loss", "most_launches", "most_calls"), [(mb.clip_loss, 9, 22), (mb.siglip_loss, 5, 21)])
def test_few_calls(loss, most_launches, most_calls):
    """One of the launches is in backward."""
    bias = torch.tensor(-7.0, device=DEVICE, requires_grad=True)
    inputs = *inputs_of(512, 64, torch.float32), *((bias,) if loss is mb.siglip_loss else ())
    launches = []
    with (
        mock.patch.object(triton_launcher.Launcher, "__call__", lambda self, *tensors: launches.append(self)),
        Calls() as calls,
    ):
        loss(*inputs, backend="triton")  # what is made once
        launches.clear()
        calls.names.clear()
        torch.autograd.grad(loss(*(x.bfloat16() for x in inputs[:2]), *inputs[2:], backend="triton"), inputs)
    assert len(launches) == most_launches
    work = [name for name in calls.names if not name.startswith(("aten::_to_copy", "aten::detach"))]
    assert len(work) <= most_calls, work


@pytest.mark.quick({"dtype": torch.float32, "outlier": True}, {"dtype": torch.float16, "outlier": False})
@pytest.mark.parametrize("outlier", [False, True])
@DTYPES
def test_views_in_several_squares(monkeypatch, dtype, outlier):
    """300 samples are squares of 256 and 44 rows: on and above the diagonal within a view, and all of them between views."""
    z1, z2, scale = inputs_of(300, 24, dtype, scale=100.0)
    if outlier:  # all similarities of this view are negative, so its sum leaves the range of float32
        with torch.no_grad():
            for z in (z1, z2):
                z[:, 0] = z[:, 0].abs() + 0.2
                z.div_(z.norm(dim=1, keepdim=True))
            z2[270] = -torch.eye(24, dtype=dtype, device=DEVICE)[0]
    found = []
    for rows in (None, 512, 256):  # all logits at once, or each view in squares of so many rows
        monkeypatch.setattr(plan, "fits_one_square", lambda N, element_size, rows=rows: rows is None)
        monkeypatch.setattr(plan, "pair_square", lambda N, element_size, rows=rows: rows)
        with Calls() as calls:
            found.append(outcomes(lambda *a: mb.nt_xent_loss(*a, backend="triton"), (z1, z2, scale)))
        assert not any("megabatch" in call for call in calls.names), "an operator ran"
    for outcome in found:
        assert_right(outcome, reference.nt_xent_loss, (z1, z2, scale))


@pytest.mark.quick({"dtype": torch.float32, "needs": (1,)}, {"dtype": torch.float16, "needs": (2,)})
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (0, 2), ()])
@DTYPES
def test_any_gradients_of_views_may_be_asked_for(monkeypatch, dtype, needs):
    monkeypatch.setattr(plan, "fits_one_square", lambda N, element_size: False)
    assert_any_gradients(mb.nt_xent_loss, inputs_of(150, 24, dtype), needs)


@pytest.mark.parametrize(("N", "element_size", "rows"), [(8192, 2, 8192), (32768, 2, 16384), (32768, 4, 11008), (300, 2, 512)])
def test_a_square_of_views_fits_the_workspace(N, element_size, rows):
    assert plan.pair_square(N, element_size) == rows
    assert rows * rows * element_size <= 512 * 2**20


# Labels of 70 rows: alone, in pairs and in larger groups, in all orders.
LABELS = {
    "pairs": lambda N: torch.arange(N).roll(5) // 2,
    "groups": lambda N: torch.arange(N) * 7 % 12,
    "all kinds": lambda N: (torch.arange(N) % 40).where(torch.arange(N) % 40 < 25, 100 + torch.arange(N)),
    "no positives": torch.arange,
}


@pytest.mark.quick({"kind": "all kinds", "dtype": torch.float32}, {"kind": "pairs", "dtype": torch.float16})
@pytest.mark.parametrize("kind", LABELS)
@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels_in_several_strips(monkeypatch, kind, dtype, reduction):
    """Rows are compared with each other, and each row has the mean of its positives in place of a matching row."""
    N = 300
    z, _, scale = inputs_of(N, 24, dtype)
    labels = LABELS[kind](N).to(DEVICE)

    def loss(z, scale, **options):
        return mb.sup_con_loss(z, labels, scale, reduction=reduction, **options)

    def truth(z, scale):
        rows_with_positives = ((labels[:, None] == labels).sum(1) > 1).sum()
        return reference.sup_con_loss(z, labels, scale) * (1 if reduction == "mean" else rows_with_positives)

    with Calls() as calls:
        found = in_one_strip_and_several(monkeypatch, loss, (z, scale), (256, 256))
    assert not any("megabatch" in call for call in calls.names), "an operator ran"
    if kind == "no positives":
        assert not any(result.any() for outcome in found for result in outcome)
        return
    for outcome in found:
        assert_right(outcome, truth, (z, scale))


@pytest.mark.parametrize("scale", [1e4, 1e8])
def test_labels_of_equal_rows_at_large_scales(scale):
    """The probability of each of 7 equal positives is 1/7, and the probability of a sole equal positive is 1."""
    for group, expected in ((8, torch.tensor(7.0).log()), (2, torch.tensor(0.0))):
        z = torch.eye(16, device=DEVICE).repeat_interleave(group, 0).requires_grad_()
        labels = torch.arange(16, device=DEVICE).repeat_interleave(group)
        loss = mb.sup_con_loss(z, labels, scale, backend="triton")
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-6, atol=0)


def test_labels_do_not_hide_what_is_not_finite():
    z, _, scale = inputs_of(70, 24, torch.float32)
    with torch.no_grad():
        z[3, 2] = float("nan")
    loss = mb.sup_con_loss(z, torch.arange(70, device=DEVICE) // 4, scale, backend="triton")
    assert loss.isnan()
    assert torch.autograd.grad(loss, z)[0].isnan().any()
