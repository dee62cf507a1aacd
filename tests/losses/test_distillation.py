"""soft_clip_loss against the dense loss and open_clip's DistillClipLoss: values, gradients, hostile scales."""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from helpers import aligned_pairs, assert_equal_to_rounding, examples, leaves, tile_size, unit


def dense(image, text, scale, teacher_image, teacher_text, teacher_scale):
    logits, targets = scale * image @ text.T, teacher_scale * teacher_image @ teacher_text.T
    return (F.cross_entropy(logits, targets.softmax(1)) + F.cross_entropy(logits.T, targets.T.softmax(1))) / 2


def outcomes(function, inputs, *rest):
    value = function(*inputs, *rest)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


@examples(60)
@given(
    N=st.integers(1, 30),
    D=st.sampled_from((1, 3, 70)),
    E=st.sampled_from((1, 5)),
    tile=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    log_scale=st.floats(-3, 3),
    log_teacher_scale=st.floats(-3, 3),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients(N, D, E, tile, log_scale, log_teacher_scale, seed):
    inputs = leaves(*aligned_pairs(N, D, noise=1.0, seed=seed), torch.tensor(10**log_scale, dtype=torch.float64))
    teacher = (*aligned_pairs(N, E, noise=0.5, seed=seed + 5), 10**log_teacher_scale)
    with tile_size(*tile):
        found = outcomes(mb.soft_clip_loss, inputs, *teacher)
    exponent = 10**log_scale + 10**log_teacher_scale
    for actual, expected in zip(found, outcomes(dense, inputs, *teacher), strict=True):
        assert_equal_to_rounding(actual, expected, exponent)


@pytest.mark.quick(
    {"dtype": torch.float32, "teacher_dtype": torch.float32, "scale": 100.0},
    {"dtype": torch.float16, "teacher_dtype": torch.bfloat16, "scale": 1.0},
    {"dtype": torch.bfloat16, "teacher_dtype": torch.float64, "scale": 1e4},
)
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("teacher_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_other_types(dtype, teacher_dtype, scale, backend):
    """Errors of the size of one rounding of the similarities, in a loss that may be as large as they are."""
    if backend == "triton" and teacher_dtype == torch.float64:
        pytest.skip("the kernels have no float64")
    image, text = (t.to(dtype).requires_grad_() for t in aligned_pairs(40, 12, noise=0.3, seed=0))
    teacher = [t.to(teacher_dtype) for t in aligned_pairs(40, 9, noise=0.3, seed=5)]
    with tile_size(16, 24):
        found = mb.soft_clip_loss(image, text, scale, *teacher, 20.0, backend=backend)
    gradients = torch.autograd.grad(found, (image, text))
    wide = leaves(*(t.double() for t in (image, text)))
    wanted = dense(*wide, scale, *(t.double() for t in teacher), 20.0)
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), wanted, rtol=20 * eps, atol=0)
    rounding = torch.finfo(dtype).eps
    for actual, expected in zip(gradients, torch.autograd.grad(wanted, wide), strict=True):
        assert actual.dtype == dtype
        size = expected.abs().max().item()
        torch.testing.assert_close(
            actual.double(), expected, rtol=rounding, atol=(rounding / 4 + 30 * eps * (20 + scale)) * size
        )


SCALES = [(20.0, 5.0), (1e4, 1e-3), (1e-3, 1e4)]


@pytest.mark.quick(
    {"N": 37, "tile": (16, 50), "scale": 20.0},
    {"N": 90, "tile": (70, 40), "scale": 1e4},
    {"N": 1, "tile": (16, 50), "scale": 1e-3},
)
@pytest.mark.parametrize(
    ("N", "tile", "scale", "teacher_scale"),
    [(N, tile, *scales) for N in (1, 37, 90) for tile in ((16, 50), (70, 40)) for scales in SCALES]
    + [(530, (530, 530), 20.0, 5.0)],
)
def test_kernels(N, tile, scale, teacher_scale):
    """Tiles that are narrower and wider than what a program has at once, against float64."""
    inputs = leaves(*(t.float() for t in aligned_pairs(N, 20, noise=1.0, seed=0)), torch.tensor(scale))
    teacher = (*(t.float() for t in aligned_pairs(N, 7, noise=0.5, seed=5)), teacher_scale)
    with tile_size(*tile):
        found = outcomes(partial(mb.soft_clip_loss, backend="triton"), inputs, *teacher)
    exact = leaves(*(t.double() for t in inputs))
    wanted = outcomes(dense, exact, *(t.double() for t in teacher[:2]), teacher_scale)
    eps = torch.finfo(torch.float32).eps
    sizes = [expected.abs().max().item() for expected in wanted]
    if N == 1:
        # Both softmaxes are 1: the gradients are differences of equal terms, whose sizes are scale, scale and 1. Backward may
        # round the logit differently than forward, and each weight then has the relative error of the exponential.
        sizes[1:] = [scale, scale, 1.0]
    for actual, expected, size in zip(found, wanted, sizes, strict=True):
        bound = 20 * eps * (1 + scale + teacher_scale) * size
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound + eps)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on NaN
@pytest.mark.parametrize("side", ["image", "teacher"])
def test_nan_comes_out_of_kernels(side):
    pairs = {name: unit(40, 3, seed=seed, dtype=torch.float32) for seed, name in enumerate(("image", "text", "teacher"))}
    pairs[side][2, 1] = torch.nan
    image, text, teacher = pairs.values()
    assert mb.soft_clip_loss(image, text, 1.0, teacher, text, 1.0, backend="triton").isnan()


def test_its_own_teacher_is_its_minimum():
    image, text = leaves(*aligned_pairs(30, 6, noise=1.0, seed=0))
    loss = mb.soft_clip_loss(image, text, 10.0, image.detach(), text.detach(), 10.0)
    for gradient in torch.autograd.grad(loss, (image, text)):
        assert gradient.abs().max() < 1e-15
    logits = (10 * image @ text.T).detach()
    entropies = [-(logits.softmax(dim) * logits.log_softmax(dim)).sum(dim).mean() for dim in (0, 1)]
    torch.testing.assert_close(loss.detach(), sum(entropies) / 2)


def test_gradcheck():
    inputs = leaves(unit(6, 4, seed=0), unit(6, 4, seed=1), torch.tensor(3.0, dtype=torch.float64))
    teacher = unit(6, 2, seed=2), unit(6, 2, seed=3), 5.0
    with tile_size(4, 3):
        assert torch.autograd.gradcheck(lambda *a: mb.soft_clip_loss(*a, *teacher), inputs)


def test_a_frozen_side():
    image, text = unit(20, 6, seed=0), unit(20, 6, seed=1).requires_grad_()
    teacher = unit(20, 3, seed=2), unit(20, 3, seed=3), 4.0
    with tile_size(7, 7):
        (found,) = torch.autograd.grad(mb.soft_clip_loss(image, text, 10.0, *teacher), text)
    assert_equal_to_rounding(found, torch.autograd.grad(dense(image, text, 10.0, *teacher), text)[0], 10.0)


def test_nan_comes_out():
    image, text = unit(5, 3, seed=0), unit(5, 3, seed=1)
    image[2, 1] = torch.nan
    assert mb.soft_clip_loss(image, text, 1.0, text, text, 1.0).isnan()


@pytest.mark.parametrize("output_dict", [False, True])
def test_distill_clip_loss_of_open_clip(output_dict):
    theirs = pytest.importorskip("open_clip.loss").DistillClipLoss
    for method in ("__init__", "forward"):
        wanted, found = (inspect.signature(getattr(cls, method)).parameters.values() for cls in (theirs, mb.DistillClipLoss))
        assert [(p.name, p.default, p.kind) for p in found] == [(p.name, p.default, p.kind) for p in wanted]
    inputs = leaves(*aligned_pairs(25, 6, noise=1.0, seed=0), torch.tensor(15.0, dtype=torch.float64))
    teacher = (*aligned_pairs(25, 4, noise=0.3, seed=5), torch.tensor(30.0, dtype=torch.float64))
    results = []
    for loss in (mb.DistillClipLoss(), theirs()):
        given = loss(*inputs, *teacher, output_dict=output_dict)
        pair = (given["contrastive_loss"], given["distill_loss"]) if output_dict else given
        results.append(
            [value for part in pair for value in (part.detach(), *torch.autograd.grad(part, inputs, retain_graph=True))]
        )
    for actual, expected in zip(*results, strict=True):
        assert_equal_to_rounding(actual, expected, 45.0)


def test_messages():
    image, text = unit(5, 3, seed=0, dtype=torch.float32), unit(5, 3, seed=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="the inputs are float64"):
        mb.soft_clip_loss(image, text, 1.0, image.double(), text.double(), 1.0, backend="triton")
    with pytest.raises(ValueError, match="backend must be one of"):
        mb.soft_clip_loss(image, text, 1.0, image, text, 1.0, backend="cuda")
    with pytest.raises(ValueError, match="teacher_image must have 5 rows, one for each row of image"):
        mb.soft_clip_loss(image, text, 1.0, image[:3], text[:3], 1.0)
    with pytest.raises(ValueError, match=r"teacher_text must not require a gradient, .* pass teacher_text.detach\(\)"):
        mb.soft_clip_loss(image, text, 1.0, image, text.clone().requires_grad_(), 1.0)
    with pytest.raises(ValueError, match="image must have at least one row"):
        mb.soft_clip_loss(image[:0], text[:0], 1.0, image[:0], text[:0], 1.0)
