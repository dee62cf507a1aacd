"""The meter against hand counts, and against what autograd really saves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch_train.planning.models import ALLOCATION_UNIT, Meter, StandIn, _Float32, count_tensors, nowhere, without_data
from megabatch_train.towers.small import SmallConfig, SmallImageTower

KIB = 1024


def test_what_is_alive_and_what_was_at_the_peak():
    meter = Meter()
    with nowhere():
        x = torch.empty(256, 256)  # 256 KiB
        meter.ignore([x])
        with count_tensors(meter, None):
            y = x + 1
            assert meter.alive == 256 * KIB
            view = y[:3]
            assert meter.alive == 256 * KIB
            z = y * 2
            del y
            assert meter.alive == 512 * KIB  # the view holds it
            del view
            assert meter.alive == 256 * KIB
            z += 1
            assert (meter.alive, meter.peak) == (256 * KIB, 512 * KIB)
            one = torch.ones(())
            assert meter.alive == 256 * KIB + ALLOCATION_UNIT
            del one, z
            assert meter.alive == 0


def test_a_backward_pass_by_hand():
    n, a, b, c = 128, 64, 256, 32
    meter = Meter()
    with nowhere():
        x, w, v = torch.empty(n, a), torch.empty(a, b, requires_grad=True), torch.empty(b, c, requires_grad=True)
        w.grad, v.grad = torch.empty_like(w), torch.empty_like(v)
        meter.ignore([x, w, v, w.grad, v.grad])
        with count_tensors(meter, None):
            y = torch.relu(x @ w) @ v
            hidden, output = 4 * n * b, 4 * n * c
            assert meter.alive == hidden + output
            assert meter.peak == 2 * hidden  # before and after relu, for a moment
            assert meter.operations == 2 * n * a * b + 2 * n * b * c
            y.backward(torch.ones_like(y))
            # Hidden layer, its gradient before and after relu, beside output and gradient of the output.
            assert meter.peak == 3 * hidden + 2 * output
            assert meter.operations == 2 * n * a * b * 2 + 2 * n * b * c * 3
            del y
        assert meter.alive == 0


def test_autocast_as_on_cuda():
    """Weights are cast once, normalisation is in float32, products are in half precision."""
    meter = Meter()
    with nowhere():
        layer, norm, x = nn.Linear(64, 64), nn.LayerNorm(64), torch.empty(128, 64)
        meter.ignore([x, *layer.parameters(), *norm.parameters()])
        with count_tensors(meter, torch.bfloat16), torch.no_grad():
            y = layer(x)
            assert y.dtype == torch.bfloat16
            casts = 2 * 64 * 64 + ALLOCATION_UNIT
            assert meter.alive == casts + 2 * 128 * 64
            del y
            layer(x)
            assert meter.alive == casts
            assert norm(layer(x)).dtype == torch.float32
            assert F.normalize(layer(x), dim=-1).dtype == torch.float32


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["transformer", "convolutions"])
def test_what_autograd_saves_is_what_it_really_saves(kind, half):
    def made():
        if kind == "transformer":
            return StandIn(4 * 12 * 64**2, 17, 64), torch.ones(6, 17, 64)
        config = SmallConfig(width=32, channels=(8, 16), blocks=1)
        return SmallImageTower(config), torch.ones(6, 3, 32, 32)

    module, inputs = made()
    known = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), inputs)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=half is not None)
    with autocast, _Float32(half is not None), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(inputs)
        held = sum(map(rounded, saved.values()))
        if output.untyped_storage().data_ptr() not in saved:
            held += rounded(output.untyped_storage())
    # Autocast keeps its copies of biases, which no backward pass needs.
    biases = sum(-(-2 * p.numel() // ALLOCATION_UNIT) * ALLOCATION_UNIT for p in module.parameters() if p.dim() == 1)

    meter = Meter()
    with torch.device("meta"):
        empty = made()[0]
    with nowhere():
        without_data(empty)
        samples = torch.empty(inputs.shape)
        meter.ignore([samples, *empty.parameters(), *empty.buffers()])
        with count_tensors(meter, half):
            result = empty(samples)
            alive = meter.alive
    assert (result.shape, result.dtype) == (output.shape, output.dtype)
    assert held <= alive <= held + (biases if half else 0)


def rounded(storage):
    return -(-storage.nbytes() // ALLOCATION_UNIT) * ALLOCATION_UNIT


def test_attention_is_counted_without_a_device():
    n, heads, length, width = 2, 3, 40, 16
    meter = Meter()
    with nowhere():
        q, k, v = (torch.empty(n, heads, length, width, requires_grad=True) for _ in range(3))
        with count_tensors(meter, None):
            out = F.scaled_dot_product_attention(q, k, v)
            products = 2 * n * heads * length**2 * width
            assert meter.operations == 2 * products
            assert meter.alive < 4 * n * heads * length**2  # no matrix of weights
            out.sum().backward()
            assert meter.operations == 7 * products  # the weights once more, and the gradients of both products
