"""Every wrong call gets an error that names the argument, what was expected and what came."""

import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch as mb
from megabatch import checks, dispatch

X = torch.randn(6, 4)
Y = torch.randn(5, 4)
IDS = torch.arange(6)

WRONG_PAIRWISE = [
    ((None, Y), {}, TypeError, "x must be a tensor of embeddings, got NoneType"),
    ((X, [[1.0]]), {}, TypeError, "y must be a tensor of embeddings, got list"),
    ((X.long(), Y), {}, TypeError, "x must be float64, float32, bfloat16 or float16, got int64"),
    ((X, Y.to(torch.complex64)), {}, TypeError, "y must be float64.* got complex64"),
    ((X[0], Y), {}, ValueError, r"x must have 2 dimensions, \(rows, embedding dim\), got shape \(4,\)"),
    ((X, Y[None]), {}, ValueError, r"y must have 2 dimensions.* got shape \(1, 5, 4\)"),
    ((X[:, :0], Y), {}, ValueError, r"x must have an embedding dimension of at least 1, got shape \(6, 0\)"),
    ((X, Y[:, :3]), {}, ValueError, "x and y must have the same embedding dimension, got 4 and 3"),
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


def test_whole_numbers_of_other_libraries_are_whole_numbers():
    wanted = mb.matryoshka_clip_loss(X, X, 2.0, widths=[2, 4], weights=[1.0, 0.5])
    for widths in ([np.int64(2), np.int32(4)], np.array([2, 4]), (2, np.uint8(4))):
        assert torch.equal(mb.matryoshka_clip_loss(X, X, 2.0, widths=widths, weights=np.array([1.0, 0.5])), wanted)
    for wrong in (["2", "4"], "24", [2.0, 4.0], np.array([2.0, 4.0]), [True, 4], 4, None):
        with pytest.raises(TypeError, match="widths must be a sequence of integers, got"):
            mb.matryoshka_clip_loss(X, X, 2.0, widths=wrong)
    for wrong in (["1", "2"], 1.0, [True, 1.0], "12"):
        with pytest.raises(TypeError, match="weights must be None or a sequence of numbers, got"):
            mb.matryoshka_clip_loss(X, X, 2.0, widths=[2, 4], weights=wrong)


def test_fractions_of_other_libraries_are_numbers():
    assert torch.equal(mb.clip_loss(X, X, 2.0, label_smoothing=np.float32(0.5)), mb.clip_loss(X, X, 2.0, label_smoothing=0.5))
    assert torch.equal(mb.clip_loss(X, X, 2.0, label_smoothing=np.int64(0)), mb.clip_loss(X, X, 2.0))
    wanted = mb.hcl_loss(X, X, scale=2.0, beta=1.0, tau_plus=0.25)
    assert torch.equal(mb.hcl_loss(X, X, scale=2.0, beta=np.int64(1), tau_plus=np.float32(0.25)), wanted)
    with pytest.raises(ValueError, match="label_smoothing must be a number from 0 to 1, got True"):
        mb.clip_loss(X, X, 2.0, label_smoothing=True)
    with pytest.raises(ValueError, match=r"beta must be a number of at least 0, got tensor\(1\.\)"):
        mb.hcl_loss(X, X, scale=2.0, beta=torch.tensor(1.0))


@pytest.mark.parametrize("wrap", [lambda keys: keys, mb.Negatives, lambda keys: [mb.Negatives(X), mb.Negatives(keys)]])
@pytest.mark.parametrize("shape", [(6, 2, 3, 4), (4,), ()])
def test_negatives_of_other_dimensions(wrap, shape):
    message = (
        r"negatives(\[1\])? must have shape \(M, D\), or \(N, K, D\) for K negatives of each query, got shape "
        + re.escape(f"{shape}")
    )
    for loss in (mb.info_nce_loss, mb.dcl_loss):
        with pytest.raises(ValueError, match=message):
            loss(X, X, scale=1.0, negatives=wrap(torch.zeros(shape)))


def test_negatives_that_are_no_tensor():
    with pytest.raises(TypeError, match="negatives must be a tensor of embeddings, got list"):
        mb.info_nce_loss(X, X, scale=1.0, negatives=mb.Negatives([[1.0] * 4]))


def test_labels_and_ids_may_be_strided():
    ids = torch.stack((IDS % 3, IDS), dim=1)[:, 0]
    assert not ids.is_contiguous()
    for loss in (
        lambda ids: mb.sup_con_loss(X, ids),
        lambda ids: mb.sup_con_loss(X, ids, form="in"),
        lambda ids: mb.clip_loss(X, X, 2.0, ids=ids),
        lambda ids: mb.pairwise_symmetric_logsumexp(X, exclude=ids).sum(),
    ):
        assert torch.equal(loss(ids), loss(ids.contiguous()))


MARGINS = [torch.tensor(0.1, requires_grad=True), torch.full((6,), 0.1, requires_grad=True)]


@pytest.mark.parametrize("margin", MARGINS, ids=["one", "each"])
@pytest.mark.parametrize("guide", [None, (X, X)], ids=["", "guide"])
def test_a_margin_gets_no_gradient_and_says_so(margin, guide):
    with pytest.raises(ValueError, match=r"margin must not require a gradient, because it gets none; pass margin\.detach\(\)"):
        mb.info_nce_loss(X, X, scale=1.0, margin=margin, guide=guide)
    mb.info_nce_loss(X, X, scale=1.0, margin=margin.detach(), guide=guide)


def test_a_teachers_scale_gets_no_gradient_and_says_so():
    scale = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(ValueError, match="teacher_scale must not require a gradient, because it gets none"):
        mb.soft_clip_loss(X, X, 1.0, X, X, scale)
    # open_clip's loss freezes the teacher, and so does ours with its call.
    found = mb.DistillClipLoss()(X, X, 1.0, X, X, scale, output_dict=True)
    assert torch.equal(found["distill_loss"], mb.soft_clip_loss(X, X, 1.0, X, X, 3.0))


META = {
    "pairwise_logsumexp": lambda x, y, ids: mb.pairwise_logsumexp(x, y, exclude=(ids, ids))[1],
    "pairwise_symmetric_logsumexp": lambda x, y, ids: mb.pairwise_symmetric_logsumexp(x, exclude=ids),
    "pairwise_softplus": lambda x, y, ids: mb.pairwise_softplus(x, y),
    "clip_loss": lambda x, y, ids: mb.clip_loss(x, y, 1.0, ids=ids),
    "clip_loss, smoothed": lambda x, y, ids: mb.clip_loss(x, y, 1.0, label_smoothing=0.1),
    "siglip_loss": lambda x, y, ids: mb.siglip_loss(x, y, 1.0, 0.0, ids=ids),
    "info_nce_loss": lambda x, y, ids: mb.info_nce_loss(
        x, y, scale=1.0, margin=0.1, negatives=mb.Negatives(x[:, None], private=True)
    ),
    "info_nce_loss, owners": lambda x, y, ids: mb.info_nce_loss(x, y, scale=1.0, negatives=mb.Negatives(x, owner=ids)),
    "dcl_loss": lambda x, y, ids: mb.dcl_loss(x, y, scale=1.0),
    "hcl_loss": lambda x, y, ids: mb.hcl_loss(x, y, scale=1.0),
    "soft_clip_loss": lambda x, y, ids: mb.soft_clip_loss(x, y, 1.0, y, y, 1.0),
    "nt_xent_loss": lambda x, y, ids: mb.nt_xent_loss(x, y),
    "sup_con_loss, out": lambda x, y, ids: mb.sup_con_loss(x, ids),
    "sup_con_loss, in": lambda x, y, ids: mb.sup_con_loss(x, ids, form="in"),
    "matryoshka_clip_loss": lambda x, y, ids: mb.matryoshka_clip_loss(x, y, 1.0, widths=(2, 4)),
}


@pytest.mark.parametrize("name", META)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_tensors_give_the_shapes_of_results_and_gradients(name, dtype):
    x, y, ids = X.clone().to(dtype).requires_grad_(), X.to(dtype), IDS % 3
    wanted = META[name](x, y, ids)
    on_meta = x.detach().to("meta").requires_grad_()
    found = META[name](on_meta, y.to("meta"), ids.to("meta"))
    (dx,) = torch.autograd.grad(found.sum(), on_meta)
    for actual, expected in ((found, wanted), (dx, x)):
        assert actual.device.type == "meta"
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


def test_ranks_of_meta_tensors():
    assert [(side.shape, side.dtype) for side in mb.pairwise_rank(X.to("meta"), X.to("meta"))] == [((6,), torch.int64)] * 2


@pytest.mark.parametrize(
    ("capability", "hip", "precision", "chosen", "reason"),
    [
        ((9, 0), None, "bfloat16", "triton", None),
        ((8, 0), None, "tf32", "triton", None),
        ((9, 0), None, "float64", "eager", "float32 at most"),
        ((7, 5), None, "float16", "eager", "need compute capability 8.0 or newer, and cuda:0 has 7.5"),
        ((9, 4), "6.2", "bfloat16", "eager", "tested only on NVIDIA GPUs, and cuda:0 is an AMD GPU"),
    ],
)
def test_which_backend_serves_a_gpu(monkeypatch, capability, hip, precision, chosen, reason):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "_kernels_serve", dispatch._kernels_serve.__wrapped__)  # the answer is not kept
    device = torch.device("cuda:0")
    checks.backend("auto", precision, device)
    assert dispatch.default_engine(precision, device) == chosen
    if reason is None:
        checks.backend("triton", precision, device)
    else:
        with pytest.raises(ValueError, match=reason):
            checks.backend("triton", precision, device)
