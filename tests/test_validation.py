"""Every wrong call gets an error that names the argument, what was expected and what came."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch as mb
from megabatch import validation
from megabatch.tiles import backends

X = torch.randn(6, 4)
Y = torch.randn(5, 4)
IDS = torch.arange(6)

WRONG_PAIRWISE = [
    ((None, Y), {}, TypeError, "x must be a tensor of embeddings, got NoneType"),
    ((X, [[1.0]]), {}, TypeError, "y must be a tensor of embeddings, got list"),
    ((X.long(), Y), {}, TypeError, "x must be float64, float32, bfloat16 or float16, got int64"),
    ((X, Y.to(torch.complex64)), {}, TypeError, "y must be float64.* got complex64"),
    ((X[0], Y), {}, ValueError, r"x must have 2 dimensions, \(rows, width\), got shape \(4,\)"),
    ((X, Y[None]), {}, ValueError, r"y must have 2 dimensions.* got shape \(1, 5, 4\)"),
    ((X[:, :0], Y), {}, ValueError, r"x must have a width of at least 1, got shape \(6, 0\)"),
    ((X, Y[:, :3]), {}, ValueError, "x and y must have the same width, got 4 and 3"),
    ((X, Y.double()), {}, TypeError, "x and y must have the same dtype, got float32 and float64"),
    ((X, Y.bfloat16()), {}, TypeError, "x and y must have the same dtype, got float32 and bfloat16"),
    ((X, Y.to("meta")), {}, ValueError, "x and y must be on the same device, got cpu and meta"),
    ((X, Y, torch.ones(2)), {}, ValueError, r"scale must be a float or a tensor of one element, got shape \(2,\)"),
    ((X, Y, torch.tensor(1)), {}, TypeError, "scale must be a floating-point tensor, got int64"),
    ((X, Y, "1"), {}, TypeError, "scale must be a float or a tensor of one element, got str"),
    ((X, Y, True), {}, TypeError, "scale must be a float or a tensor of one element, got bool"),
    ((X, Y, torch.ones((), device="meta")), {}, ValueError, "scale must be on cpu, where the embeddings are, got meta"),
    ((X, Y), {"group": X}, TypeError, "group must be a torch.distributed process group.*, got a tensor of float32"),
    ((X, Y), {"group": "world"}, TypeError, "group must be a torch.distributed process group.*, got str"),
    ((X, Y), {"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'eager', 'triton', got 'cuda'"),
    ((X.double(), Y.double()), {"backend": "triton"}, ValueError, 'backend="triton" cannot serve this call: .*float64'),
]


@pytest.mark.parametrize("operation", [mb.pairwise_logsumexp, mb.pairwise_softplus])
@pytest.mark.parametrize(("arguments", "options", "error", "message"), WRONG_PAIRWISE)
def test_wrong_pairwise_calls(operation, arguments, options, error, message):
    with pytest.raises(error, match=message):
        operation(*arguments, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"row_bias": torch.zeros(5)},
            ValueError,
            r"row_bias must have shape \(6,\), one entry for each row of x, got .*\(5,\)",
        ),
        ({"col_bias": torch.zeros(5, 1)}, ValueError, r"col_bias must have shape \(5,\), one entry for each row of y"),
        (
            {"row_bias": torch.zeros(6).long()},
            TypeError,
            "row_bias must be a floating-point tensor or None, got a tensor of int64",
        ),
        ({"col_bias": 1.0}, TypeError, "col_bias must be a floating-point tensor or None, got float"),
        ({"col_bias": torch.zeros(5, device="meta")}, ValueError, "col_bias must be on cpu"),
        ({"exclude": "rows"}, ValueError, r'exclude must be None, "diagonal" or a pair \(row ids, column ids\), got \'rows\''),
        ({"exclude": IDS}, ValueError, "exclude must be None.*got a tensor of int64"),
        ({"exclude": (IDS,)}, ValueError, "exclude must be None.*got tuple"),
        ({"exclude": (IDS, None)}, TypeError, r"exclude\[1\] must be a tensor of integers \(int64.*got None"),
        ({"exclude": (IDS.float(), IDS[:5])}, TypeError, r"exclude\[0\] must be a tensor of integers.*float32"),
        (
            {"exclude": (IDS, IDS)},
            ValueError,
            r"exclude\[1\] must have shape \(5,\), one entry for each row of y, got .*\(6,\)",
        ),
    ],
)
def test_wrong_options_of_logsumexp(options, error, message):
    with pytest.raises(error, match=message):
        mb.pairwise_logsumexp(X, Y, **options)


def test_wrong_bias_of_softplus():
    with pytest.raises(ValueError, match=r"bias must be a float or a tensor of one element, got shape \(3,\)"):
        mb.pairwise_softplus(X, Y, 1.0, torch.zeros(3))


def test_rank_needs_matching_rows():
    with pytest.raises(ValueError, match=r"x and y must have the same number of rows.*got 6 and 5"):
        mb.pairwise_rank(X, Y)


@pytest.mark.parametrize(
    "loss", [lambda *a, **k: mb.clip_loss(*a, 1.0, **k), lambda *a, **k: mb.siglip_loss(*a, 1.0, 0.0, **k)]
)
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, Y), {}, ValueError, "image and text must have the same number of rows.*got 6 and 5"),
        ((X, "text"), {}, TypeError, "text must be a tensor of embeddings, got str"),
        ((X[:0], Y[:0]), {}, ValueError, r"image must have at least one row.*got shape \(0, 4\)"),
        ((X, X), {"ids": IDS[:5]}, ValueError, r"ids must have shape \(6,\), one entry for each row of image, got .*\(5,\)"),
        ((X, X), {"ids": IDS.double()}, TypeError, "ids must be a tensor of integers or None.*got a tensor of float64"),
        ((X, X), {"ids": list(range(6))}, TypeError, "ids must be a tensor of integers or None.*got list"),
        ((X, X), {"ids": IDS.to("meta")}, ValueError, "ids must be on cpu"),
        ((X, X), {"backend": "fast"}, ValueError, "backend must be one of"),
    ],
)
def test_wrong_loss_calls(loss, arguments, options, error, message):
    with pytest.raises(error, match=message):
        loss(*arguments, **options)


def test_wrong_scale_and_bias_are_named_as_the_caller_named_them():
    with pytest.raises(ValueError, match="logit_scale must be"):
        mb.clip_loss(X, X, torch.ones(6))
    with pytest.raises(ValueError, match="logit_bias must be"):
        mb.siglip_loss(X, X, 1.0, torch.ones(6))


class NoWork(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} ran before the arguments were checked")


@pytest.mark.parametrize(("arguments", "options", "error", "message"), WRONG_PAIRWISE)
def test_errors_come_before_any_work(arguments, options, error, message):
    with NoWork(), pytest.raises(error, match=message):
        mb.pairwise_logsumexp(*arguments, **options)


def test_numbers_of_other_libraries_are_numbers():
    assert torch.equal(mb.clip_loss(X, X, np.float32(2)), mb.clip_loss(X, X, 2.0))
    assert torch.equal(mb.clip_loss(X, X, 2), mb.clip_loss(X, X, 2.0))


@pytest.mark.parametrize(
    ("capability", "hip", "precision", "chosen", "reason"),
    [
        ((9, 0), None, "bfloat16", "triton", None),
        ((8, 0), None, "tf32", "triton", None),
        ((9, 0), None, "float64", "eager", "float32 at most"),
        ((7, 5), None, "float16", "eager", "need compute capability 8.0 or newer, and cuda:0 has 7.5"),
        ((9, 4), "6.2", "bfloat16", "eager", "run on NVIDIA GPUs"),
    ],
)
def test_which_backend_serves_a_gpu(monkeypatch, capability, hip, precision, chosen, reason):
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    monkeypatch.setattr(backends, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda:0")
    assert validation.backend("auto", precision, device) == chosen
    if reason is None:
        assert validation.backend("triton", precision, device) == "triton"
    else:
        with pytest.raises(ValueError, match=reason):
            validation.backend("triton", precision, device)
