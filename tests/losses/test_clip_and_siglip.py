"""The two losses: against the reference and open_clip in float64, at the edges, and as drop-in modules."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import megabatch as mb
from helpers import aligned_pairs, assert_equal_to_rounding, examples, leaves, tile_size, unit
from megabatch import reference

LOSSES = ["clip", "siglip"]


def parameters(loss, scale=20.0, bias=-5.0, shape=()):
    values = [scale] if loss == "clip" else [scale, bias]
    return [torch.full(shape, value, dtype=torch.float64, requires_grad=True) for value in values]


def functions(loss):
    return (mb.clip_loss, reference.clip_loss) if loss == "clip" else (mb.siglip_loss, reference.siglip_loss)


@pytest.mark.parametrize("loss", LOSSES)
@examples(80)
@given(
    N=st.integers(1, 40),
    D=st.sampled_from((1, 3, 384)),
    tile=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    log_scale=st.floats(-3, 4),
    noise=st.sampled_from([0.0, 0.3, 10.0]),
    id_count=st.sampled_from([None, 1, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients(loss, N, D, tile, log_scale, noise, id_count, seed):
    mine, dense = functions(loss)
    inputs = [*leaves(*aligned_pairs(N, D, noise=noise, seed=seed)), *parameters(loss, scale=10**log_scale)]
    ids = None if id_count is None else torch.randint(id_count, (N,), generator=torch.Generator().manual_seed(seed))
    with tile_size(*tile):
        found = mine(*inputs, ids=ids)
        found_gradients = torch.autograd.grad(found, inputs)
    wanted = dense(*inputs, ids=ids)
    wanted_gradients = torch.autograd.grad(wanted, inputs)
    assert found >= 0
    for actual, expected in zip([found.detach(), *found_gradients], [wanted.detach(), *wanted_gradients], strict=True):
        assert_equal_to_rounding(actual, expected, 10**log_scale)


@pytest.mark.quick({"scale": 100.0, "noise": 0.05}, {"scale": 1e4, "noise": 0.0})
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0, 100.0])
def test_never_negative_and_always_finite(loss, dtype, scale, noise):
    x, y = (t.to(dtype).requires_grad_() for t in aligned_pairs(65, 24, noise=noise, seed=3))
    with tile_size(16, 24):
        value = functions(loss)[0](x, y, *parameters(loss, scale=scale))
    assert value >= 0
    assert value.isfinite()
    for gradient in torch.autograd.grad(value, (x, y)):
        assert gradient.isfinite().all()
        assert gradient.dtype == dtype


def test_small_losses_keep_their_digits():
    # Dense float32 sees 1 + 1e-9 = 1 here and returns exactly 0, with no gradient at all.
    x = torch.eye(64, dtype=torch.float32, requires_grad=True)
    loss = mb.clip_loss(x, x.detach(), 25.0)
    wanted = torch.log1p(63 * torch.exp(torch.tensor(-25.0, dtype=torch.float64)))
    assert abs(loss.item() / wanted.item() - 1) < 1e-6
    (gradient,) = torch.autograd.grad(loss, x)
    reference_input = torch.eye(64, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(reference.clip_loss(reference_input, reference_input.detach(), 25.0), reference_input)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_one_pair(loss):
    x, y = leaves(unit(1, 8, seed=0), unit(1, 8, seed=1))
    inputs = [x, y, *parameters(loss)]
    found = functions(loss)[0](*inputs)
    wanted = functions(loss)[1](*inputs)
    torch.testing.assert_close(found, wanted)
    for actual, expected in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck(loss):
    inputs = [*leaves(unit(7, 4, seed=0), unit(7, 4, seed=1)), *parameters(loss, scale=3.0)]
    ids = torch.tensor([0, 1, 2, 0, 4, 5, 1])
    with tile_size(4, 3):
        assert torch.autograd.gradcheck(lambda *a: functions(loss)[0](*a, ids=ids), inputs)


@pytest.mark.parametrize("loss", LOSSES)
def test_ids_all_alike_leave_no_negatives(loss):
    x, y = leaves(unit(9, 4, seed=0), unit(9, 4, seed=1))
    value = functions(loss)[0](x, y, *parameters(loss), ids=torch.zeros(9, dtype=torch.int64))
    assert value.isfinite()
    if loss == "clip":
        assert value == 0
    for gradient in torch.autograd.grad(value, (x, y)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_frozen_side_gets_no_gradient_and_the_other_the_right_one(loss):
    x, y = unit(20, 6, seed=0), unit(20, 6, seed=1).requires_grad_()
    mine, dense = functions(loss)
    arguments = [x, y, *(p.detach() for p in parameters(loss))]
    with tile_size(7, 7):
        (found,) = torch.autograd.grad(mine(*arguments), y)
    (wanted,) = torch.autograd.grad(dense(*arguments), y)
    assert_equal_to_rounding(found, wanted, 20.0)
    assert x.grad is None


@pytest.mark.parametrize("tile", [2048, 1024])  # in memory, and in tiles
def test_a_loss_scale_reaches_sigmoid_gradients_in_fp16(tile):
    # Without a wider type in between, 1/N · 2⁻¹² would be gone before the loss scale multiplies it.
    x, y = (t.half().requires_grad_() for t in aligned_pairs(2000, 16, noise=1.0, seed=0))
    with tile_size(tile, tile):
        (mb.siglip_loss(x, y, 1.0, -12.0) * 2.0**14).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    (reference.siglip_loss(*wide, 1.0, -12.0) * 2.0**14).backward()
    for half, double in zip((x, y), wide, strict=True):
        torch.testing.assert_close(half.grad.double(), double.grad, rtol=2e-3, atol=2e-3 * double.grad.abs().max().item())


@pytest.fixture(scope="module")
def open_clip_losses():
    return pytest.importorskip("open_clip.loss")


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_signatures_are_open_clips(open_clip_losses, name):
    theirs, mine = getattr(open_clip_losses, name), getattr(mb, name)
    for method in ("__init__", "forward"):
        wanted = inspect.signature(getattr(theirs, method)).parameters.values()
        found = list(inspect.signature(getattr(mine, method)).parameters.values())
        assert [(p.name, p.default, p.kind) for p in found[: len(wanted)]] == [(p.name, p.default, p.kind) for p in wanted]
        assert [p.name for p in found[len(wanted) :]] in ([], ["chunk_size"])  # of open_clip 4


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("output_dict", [False, True])
def test_modules_equal_open_clips(open_clip_losses, name, shape, output_dict):
    bias = torch.full(shape, -3.0, dtype=torch.float64, requires_grad=True)
    scale = torch.full(shape, 12.0, dtype=torch.float64, requires_grad=True)
    x, y = leaves(*aligned_pairs(50, 16, noise=1.0, seed=0))
    results = []
    for module in (getattr(open_clip_losses, name)(), getattr(mb, name)()):
        value = module(image_features=x, text_features=y, logit_scale=scale, logit_bias=bias, output_dict=output_dict)
        if output_dict:
            assert list(value) == ["contrastive_loss"]
            value = value["contrastive_loss"]
        results.append([value.detach(), *torch.autograd.grad(value, (x, y, scale, bias))])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_bias_gets_a_gradient_of_zero_in_softmax():
    x, y = unit(5, 3, seed=0), unit(5, 3, seed=1).requires_grad_()
    bias = nn.Parameter(torch.tensor(-10.0))
    mb.ClipLoss()(x, y, 10.0, logit_bias=bias).backward()
    assert bias.grad == 0


@pytest.mark.parametrize("bias", [torch.inf, -torch.inf, 3.0])
def test_a_bias_of_any_size_and_type_leaves_the_softmax_alone(bias):
    x, y = (unit(5, 3, seed=s, dtype=torch.float32) for s in (0, 1))
    loss = mb.ClipLoss()(x, y, 10.0, logit_bias=torch.tensor([bias], dtype=torch.float64))
    assert torch.equal(loss, mb.ClipLoss()(x, y, 10.0))
    with pytest.raises(TypeError, match="logit_bias"):
        mb.ClipLoss()(x, y, 10.0, logit_bias="3")


def test_siglip_without_a_bias(open_clip_losses):
    x, y = unit(5, 3, seed=0), unit(5, 3, seed=1)
    torch.testing.assert_close(mb.SigLipLoss()(x, y, 10.0, None), open_clip_losses.SigLipLoss()(x, y, 10.0, None))


def test_modules_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="use_horovod"):
        mb.ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match="dist_impl"):
        mb.SigLipLoss(dist_impl="carrier pigeon")
    for module in (mb.ClipLoss, mb.SigLipLoss):
        with pytest.raises(ValueError, match=r"world_size must be 1 unless .* has been initialized, got 2"):
            module(rank=0, world_size=2)(unit(3, 2, seed=0), unit(3, 2, seed=1), 1.0, None)


def test_modules_accept_open_clips_options():
    x, y = unit(5, 3, seed=0), unit(5, 3, seed=1)
    plain = mb.ClipLoss()(x, y, 10.0)
    assert torch.equal(mb.ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True)(x, y, 10.0), plain)
    assert mb.SigLipLoss(cache_labels=True, dist_impl="gather")(x, y, 10.0, -10.0) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [93.0, 97.0, 100.0, 105.0])
def test_gradients_of_almost_certain_pairs_are_finite(dtype, scale):
    """Losses of 1e-40, whose gradients are at the end of float32's range or beyond it."""
    x, y = (torch.eye(8, dtype=dtype).requires_grad_() for _ in range(2))
    logit_scale = torch.tensor(scale, requires_grad=True)
    mb.clip_loss(x, y, logit_scale).backward()
    for gradient in (x.grad, y.grad, logit_scale.grad):
        assert gradient.isfinite().all()
        assert gradient.float().abs().max() < 1e-30
