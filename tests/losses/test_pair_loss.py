"""The loss of pairs over tiles with its gradients, by kernels: several strips, several launches, few calls."""

from unittest import mock

import pytest
import torch
from test_small_batches import Calls

import megabatch as mb
from helpers import aligned_pairs, leaves, outcomes
from megabatch import reference
from megabatch.tiles import plan

triton_logsumexp = pytest.importorskip("megabatch.tiles.triton_logsumexp")
triton_launcher = pytest.importorskip("megabatch.tiles.triton_launcher")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on inf and NaN, which are meant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHOLE = plan.TileSize(1024, 1024)
LOSSES = {
    "clip": (mb.clip_loss, reference.clip_loss),
    "info_nce": (
        lambda x, y, s, **o: mb.info_nce_loss(x, y, scale=s, **o),
        lambda x, y, s: reference.info_nce_loss(x, y, scale=s),
    ),
}


@pytest.fixture(autouse=True)
def over_tiles(monkeypatch):
    monkeypatch.setattr(plan, "SMALL_PAIRS", 0)


def inputs_of(N, D, dtype, scale=20.0):
    pair = (side.to(DEVICE, dtype) for side in aligned_pairs(N, D, noise=1.0, seed=3))
    return leaves(*pair, torch.tensor(scale, device=DEVICE))


@pytest.mark.quick({"strip": (512, 256), "dtype": torch.float16, "name": "clip"})
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("strip", [(256, 256), (512, 256), (256, 1024)])
def test_strips_add_up(monkeypatch, strip, dtype, name):
    """One row has a shift of its own, in the last rows of strips: all its similarities are negative, at a scale of 100."""
    mine, truth = LOSSES[name]
    x, y, scale = inputs_of(520, 24, dtype, scale=100.0)
    with torch.no_grad():
        y[:, 0] = y[:, 0].abs() + 0.2
        y.div_(y.norm(dim=1, keepdim=True))
        x[515] = -torch.eye(24, dtype=dtype, device=DEVICE)[0]
    inputs, found = (x, y, scale), []
    with mock.patch.object(triton_logsumexp, "complete_sums", wraps=triton_logsumexp.complete_sums) as completed:
        for size in (WHOLE, plan.TileSize(*strip)):
            monkeypatch.setattr(plan, "pair_strip", lambda N, D, element_size, size=size: size)
            found.append(outcomes(lambda *a: mine(*a, backend="triton"), inputs))
    own = completed.call_args.args[3].shift[:520].isfinite()
    assert own.nonzero().flatten().tolist() == [515]
    wanted = outcomes(truth, leaves(*(tensor.double() for tensor in inputs)))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-3
    for whole, several, expected in zip(*found, wanted, strict=True):
        for actual in (whole, several):
            assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.quick({"name": "clip"})
@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_several_launches_are_those_of_one(monkeypatch, name):
    mine, _ = LOSSES[name]
    inputs = inputs_of(512, 24, torch.float32)
    one = outcomes(lambda *a: mine(*a, backend="triton"), inputs)
    monkeypatch.setattr(plan, "LAUNCH_ROWS", 256)
    monkeypatch.setattr(plan, "LAUNCH_PANELS", 1)
    for found, expected in zip(outcomes(lambda *a: mine(*a, backend="triton"), inputs), one, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.quick(
    {"dtype": torch.float32, "needs": (1, 2)},
    {"dtype": torch.float16, "needs": (0,)},
    {"dtype": torch.float16, "needs": ()},
)
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (0, 2), (1, 2), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_gradients_may_be_asked_for(dtype, needs):
    inputs = inputs_of(200, 24, dtype)
    loss = mb.clip_loss(*inputs, backend="triton")
    gradients = torch.autograd.grad(loss, inputs)
    some = [tensor if i in needs else tensor.detach() for i, tensor in enumerate(inputs)]
    again = mb.clip_loss(*some, backend="triton")
    assert torch.equal(again, loss)
    if needs:
        for i, found in zip(needs, torch.autograd.grad(again, [some[i] for i in needs]), strict=True):
            assert torch.equal(found, gradients[i])


def test_few_calls():
    inputs = inputs_of(512, 64, torch.float32)
    launches = []
    with (
        mock.patch.object(triton_launcher.Launcher, "__call__", lambda self, *tensors: launches.append(self)),
        Calls() as calls,
    ):
        mb.clip_loss(*inputs, backend="triton")  # what is made once
        launches.clear()
        calls.names.clear()
        torch.autograd.grad(mb.clip_loss(*(x.bfloat16() for x in inputs[:2]), inputs[2], backend="triton"), inputs)
    assert len(launches) == 9  # one of them in backward
    work = [name for name in calls.names if not name.startswith(("aten::_to_copy", "aten::detach"))]
    assert len(work) <= 22, work
