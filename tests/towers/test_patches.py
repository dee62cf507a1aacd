"""Patch embeddings as matrix products: the numbers and gradients of the convolution, and which convolutions they replace."""

import copy
import io

import pytest
import torch
from torch import nn

from helpers import leaves
from megabatch_train.towers.layers.fast_layers import PatchConv2d, replace_patch_convolutions


def both(*arguments, dtype=torch.float64, **options):
    """A convolution, and the same one as a product."""
    plain = nn.Conv2d(*arguments, dtype=dtype, **options)
    product = copy.deepcopy(plain)
    replace_patch_convolutions([product])
    assert type(product) is PatchConv2d
    return plain, product


def results(layer, images, seed=1):
    """Values, and the gradients of a random combination of them."""
    (images,) = leaves(images)
    values = layer(images)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=values.dtype)
    return [values.detach(), *torch.autograd.grad((values * weights).sum(), [images, *layer.parameters()])]


def assert_same(found, wanted, bound=1e-12):
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound * expected.abs().max().item())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("channels", "kernel", "image"),
    [
        (3, 4, (12, 16)),
        (3, 5, (17, 14)),  # pixels at the right and at the bottom are in no window
        (1, (2, 7), (9, 7)),
        (2, (3, 1), (5, 6)),
        (3, 6, (6, 6)),
    ],
)
def test_values_and_gradients_are_those_of_the_convolution(channels, kernel, image, bias):
    plain, product = both(channels, 7, kernel, stride=kernel, bias=bias)
    images = torch.randn(3, channels, *image, dtype=torch.float64)
    wanted = results(plain, images)
    assert_same(results(product, images), wanted)
    assert_same(results(product, images.to(memory_format=torch.channels_last)), wanted)
    assert_same(results(product, images.mT.contiguous().mT), wanted)


def test_other_numbers_of_images():
    plain, product = both(3, 4, 5, stride=5, padding="valid")
    assert product(torch.empty(0, 3, 10, 10, dtype=torch.float64)).shape == (0, 4, 2, 2)
    image = torch.randn(3, 11, 12, dtype=torch.float64)
    assert_same(results(product, image), results(plain, image))


@pytest.mark.parametrize("shape", [(2, 3, 4, 9), (2, 3, 9, 4), (2, 1, 9, 9), (9, 9)])
def test_errors_are_those_of_the_convolution(shape):
    messages = []
    for layer in both(3, 4, 5, stride=5):
        with pytest.raises(RuntimeError) as raised:
            layer(torch.zeros(shape, dtype=torch.float64))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    plain, product = both(3, 8, 4, stride=4, dtype=torch.float32)
    images = torch.randn(2, 3, 9, 8)
    with torch.autocast("cpu", dtype):
        wanted, found = (results(layer, images) for layer in (plain, product))
    assert found[0].dtype == dtype
    assert_same(found, wanted, bound=4 * torch.finfo(dtype).eps)  # sums of 48 products may be rounded differently


class Own(nn.Conv2d):
    """What it computes is not known."""


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, stride=(3, 2)),
        nn.Conv2d(4, 4, 2, stride=3),
        nn.Conv2d(4, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, padding=(0, 1)),
        nn.Conv2d(4, 4, 2, stride=2, padding_mode="reflect"),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(4, 4, 2, stride=2, dilation=2),
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 1, padding="same"),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        Own(4, 4, 2, stride=2),
    ],
    ids=str,
)
def test_other_convolutions_stay(layer):
    kind = type(layer)
    replace_patch_convolutions([nn.Sequential(layer)])
    assert type(layer) is kind


def test_names_copies_and_pickles():
    plain, product = both(3, 4, 2, stride=2)
    assert product.state_dict().keys() == plain.state_dict().keys()
    assert vars(product).keys() == vars(plain).keys()
    images = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    file = io.BytesIO()
    torch.save(product, file)
    file.seek(0)
    for made in (copy.deepcopy(product), torch.load(file, weights_only=False)):
        assert torch.equal(made(images), product(images))
    plain.load_state_dict(product.state_dict())


@pytest.mark.thorough
def test_compiled_whole_and_for_images_of_another_size():
    plain, product = both(3, 4, 4, stride=4)
    tower = nn.Sequential(product, nn.GELU())
    tower.compile(backend="aot_eager", fullgraph=True)
    for shape in ((2, 3, 8, 8), (5, 3, 10, 15)):
        images = torch.randn(shape, dtype=torch.float64)
        assert_same(results(tower, images), results(nn.Sequential(plain, nn.GELU()), images))
    torch._dynamo.reset()


def test_open_clip_gives_the_same_embeddings():
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    vision = {"image_size": 32, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8}
    text = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(embed_dim=12, vision_cfg=vision, text_cfg=text).double()
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    wanted, names = model.encode_image(images, normalize=True), list(model.state_dict())
    replace_patch_convolutions([model])
    assert type(model.visual.conv1) is PatchConv2d
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model.encode_image(images, normalize=True), wanted, rtol=1e-12, atol=1e-12)
