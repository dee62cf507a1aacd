"""Self-attention of compiled towers: values and gradients of `nn.MultiheadAttention`, and the kernel for short sequences."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import leaves
from megabatch import dispatch
from megabatch_train.towers.layers import fast_layers
from megabatch_train.towers.layers.fast_layers import SelfAttention, replace_self_attention

CPU = torch.device("cpu")


def causal_mask(tokens):
    return torch.full((tokens, tokens), float("-inf")).triu_(1)


class Texts(nn.Module):
    """The parts of an open_clip model that tell whether the attention of its texts is causal."""

    def __init__(self, mask, **options):
        super().__init__()
        self.text_pool_type, self.transformer = (
            "argmax",
            nn.ModuleList([nn.MultiheadAttention(32, 2, batch_first=True, **options)]),
        )
        self.register_buffer("attn_mask", mask)


def results(attention, x, mask=None, **options):
    (x,) = leaves(x)
    output = attention(x, x, x, need_weights=False, attn_mask=mask, **options)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [x, *attention.parameters()])]


def compare(found, wanted):
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_self_attention_equals_that_of_pytorch(masked, bias):
    plain = Texts(causal_mask(9), bias=bias).double()
    packed = copy.deepcopy(plain)
    replace_self_attention([packed], CPU)
    (attention,) = packed.transformer
    assert type(attention) is SelfAttention
    assert attention.causal
    assert packed.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    mask = causal_mask(9)[:5, :5].double() if masked else None
    compare(results(attention, x, mask), results(plain.transformer[0], x, mask))


def test_masks_that_are_not_causal_are_added():
    mask = torch.randn(5, 5, dtype=torch.float64)
    plain = Texts(mask).double()
    packed = copy.deepcopy(plain)
    replace_self_attention([packed], CPU)
    assert not packed.transformer[0].causal
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    compare(results(packed.transformer[0], x, mask), results(plain.transformer[0], x, mask))
    for_each_head = torch.randn(4, 5, 5, dtype=torch.float64)  # of a causal model, with padding: (samples · heads, L, L)
    packed.transformer[0].causal = True
    compare(results(packed.transformer[0], x, for_each_head), results(plain.transformer[0], x, for_each_head))


def test_other_calls_are_left_to_pytorch():
    plain = nn.Sequential(nn.MultiheadAttention(32, 2, batch_first=True)).double()
    packed = copy.deepcopy(plain)
    replace_self_attention([packed], CPU)
    query, key = (torch.randn(2, tokens, 32, dtype=torch.float64) for tokens in (3, 5))
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    for options in ({}, {"need_weights": False}, {"need_weights": False, "key_padding_mask": padding}):
        for theirs, ours in zip(plain[0](query, key, key, **options), packed[0](query, key, key, **options), strict=True):
            assert (theirs is None) == (ours is None)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(32, 2),  # (L, n, E)
        nn.MultiheadAttention(32, 2, batch_first=True, dropout=0.1),
        nn.MultiheadAttention(32, 2, batch_first=True, kdim=16, vdim=16),
        nn.MultiheadAttention(32, 2, batch_first=True, add_bias_kv=True),
        nn.TransformerEncoderLayer(32, 2, 64, batch_first=True),
    ],
)
def test_other_layers_are_not_replaced(layer):
    model = nn.Sequential(layer)
    replace_self_attention([model], CPU)
    assert not any(isinstance(part, SelfAttention) for part in model.modules())


@pytest.mark.parametrize(
    ("samples", "tokens", "heads", "dim", "causal"),
    [(2, 50, 3, 64, False), (2, 21, 2, 64, True), (1, 128, 1, 64, False), (3, 1, 2, 32, True), (0, 7, 2, 32, False)],
)
def test_the_kernel(samples, tokens, heads, dim, causal):
    """float16 in the interpreter: at most twice the error of PyTorch's attention in float16, against float64."""
    kernels = pytest.importorskip("megabatch_train.towers.layers.attention_kernels")
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(samples, tokens, 3 * heads * dim, generator=generator).half()
    weights = torch.randn(samples, tokens, heads * dim, generator=generator).half()

    def reference(dtype):
        x = projected.to(dtype).requires_grad_()
        q, k, v = (part.unflatten(2, (heads, dim)).transpose(1, 2) for part in x.chunk(3, 2))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        return output.detach(), torch.autograd.grad(output, x, weights.to(dtype))[0]

    found = kernels.forward(projected, heads, causal), kernels.backward(projected, weights, heads, causal)
    for actual, half, exact in zip(found, reference(torch.float16), reference(torch.float64), strict=True):
        error, bound = ((one.double() - exact).norm() for one in (actual, half))
        assert error <= 2 * bound + torch.finfo(torch.float16).eps * exact.norm()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_operators_describe_their_outputs():
    """`torch.compile` reads shapes, dtypes and gradients from these descriptions."""
    pytest.importorskip("triton")
    projected = torch.randn(2, 5, 3 * 64).half().requires_grad_()
    torch.library.opcheck(fast_layers._short_attention, (projected, 2, True))


@pytest.mark.parametrize(
    ("capability", "hip", "uses_kernel"),
    [((9, 0), None, True), ((8, 0), None, True), ((7, 5), None, False), ((9, 4), "6.2", False)],
)
def test_the_kernel_runs_on_the_gpus_of_the_other_kernels(monkeypatch, capability, hip, uses_kernel):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = nn.Sequential(nn.MultiheadAttention(32, 2, batch_first=True))
    replace_self_attention([model], torch.device("cuda"))
    assert model[0].has_kernel == uses_kernel
