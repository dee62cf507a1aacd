"""The operations inside PyTorch: compile, autocast, checkpointing, functional models, what is saved, and what is refused."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megabatch as mb
from helpers import aligned_pairs, leaves, no_dense_path, tile_size, unit
from megabatch import operators, reference
from megabatch.operators import fused
from megabatch.operators.two_pass import KEPT, SEPARATE, SKIPPED, logsumexp_backward, softplus_backward


def everything(x, y, scale, bias, ids):
    """One number that depends on all operations."""
    row, col = mb.pairwise_logsumexp(x, y, scale, row_bias=bias.expand(len(x)), exclude=(ids, ids + 1))
    total = mb.pairwise_softplus(x, y, scale, bias)
    losses = mb.clip_loss(x, y, scale, ids=ids) + mb.siglip_loss(x, y, scale, bias, ids=ids)
    return losses + row.mean() + col.mean() + total.mean()


def inputs(N=40, dtype=torch.float32):
    x, y = leaves(*(t.to(dtype) for t in aligned_pairs(N, 12, noise=1.0, seed=0)))
    scale, bias = leaves(torch.tensor(10.0, dtype=dtype), torch.tensor(-3.0, dtype=dtype))
    return x, y, scale, bias, torch.arange(N) % 7


@pytest.mark.quick({"dynamic": True})
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic):
    compiled = torch.compile(everything, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for N in (40, 33):
        arguments = inputs(N)
        wanted = everything(*arguments)
        found = compiled(*arguments)
        torch.testing.assert_close(found, wanted)
        for a, b in zip(torch.autograd.grad(found, arguments[:4]), torch.autograd.grad(wanted, arguments[:4]), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor backend needs a C++ compiler")
def test_compiles_with_inductor():
    arguments = inputs()
    compiled = torch.compile(everything, fullgraph=True)
    found, wanted = compiled(*arguments), everything(*arguments)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, arguments[0]), torch.autograd.grad(wanted, arguments[0]))


@pytest.mark.parametrize("loss", ["smoothed", "private negatives"])
def test_losses_of_logits_compile_whole(loss):
    x, y, scale, *_ = inputs()

    def value(x, y, scale):
        if loss == "smoothed":
            return mb.clip_loss(x, y, scale, label_smoothing=0.1)
        return mb.info_nce_loss(x, y, scale=scale, negatives=mb.Negatives(y.flip(0), owner=torch.arange(len(y))))

    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y, scale), value(x, y, scale))


def test_rank_compiles_whole():
    x, y, *_ = inputs()
    found = torch.compile(mb.pairwise_rank, fullgraph=True, backend="aot_eager")(x, y)
    assert all(torch.equal(a, b) for a, b in zip(found, mb.pairwise_rank(x, y), strict=True))


def test_a_compiled_call_follows_the_matmul_setting():
    x, y, *_ = inputs()
    compiled = torch.compile(lambda a, b: mb.pairwise_logsumexp(a, b, 50.0)[0], fullgraph=True, backend="aot_eager")
    exact = compiled(x, y)
    torch.set_float32_matmul_precision("high")
    try:
        rounded = compiled(x, y)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.equal(exact, rounded)


CASES = {
    "kept": (*(None,) * 7, True, KEPT),
    "skipped, offsets": (torch.zeros(6), torch.zeros(6), *(None,) * 5, True, SKIPPED),
    "apart, ids": (None, None, torch.arange(6) % 3, torch.arange(6) % 3, None, None, None, True, SEPARATE),
}


# opcheck reads .grad of copies that are not leaves.
opcheck_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@opcheck_warns
@pytest.mark.parametrize("case", CASES)
def test_operators_keep_their_promises_to_pytorch(case):
    x, y = leaves(unit(6, 4, seed=0, dtype=torch.float32), unit(6, 4, seed=1, dtype=torch.float32))
    scale = torch.tensor(3.0, requires_grad=True)
    torch.library.opcheck(operators.logsumexp, (x, y, scale, *CASES[case], "float32", "float32", "eager", ""))
    plain = [t.detach() for t in (x, y, scale)]
    needs = [True, True, True, CASES[case][0] is not None, False]
    arguments = (
        *plain,
        *CASES[case],
        "float32",
        "float32",
        "eager",
        "",
        torch.ones(2, 6),
        torch.ones(2, 6),
        torch.ones(6),
        None,
        None,
        needs,
    )
    torch.library.opcheck(logsumexp_backward, arguments)


@opcheck_warns
def test_softplus_and_rank_operators_keep_their_promises_to_pytorch():
    x, y = leaves(unit(6, 4, seed=0, dtype=torch.float32), unit(6, 4, seed=1, dtype=torch.float32))
    scale, bias = torch.tensor(3.0, requires_grad=True), torch.zeros(6)
    plain = [t.detach() for t in (x, y, scale, bias)]
    for ids, apart in ((None, False), (torch.arange(6) % 4, True)):
        how = ids, apart, apart, "float32", "eager", ""
        torch.library.opcheck(operators.softplus, (x, y, scale, bias, *how))
        dmatch = torch.ones(6 if apart else 0)
        torch.library.opcheck(softplus_backward, (*plain, *how, torch.ones(6), dmatch, [True, True, True, True]))
    x, y, how = *plain[:2], ("float32", "eager", "")
    torch.library.opcheck(operators.rank, (x, y, None, None, None, None, *how))
    rows, columns = (torch.zeros(len(side), dtype=torch.int64) for side in (x, y))
    torch.library.opcheck(operators.rank, (x, y, x @ y[0], y @ x[0], rows, columns, *how))


@opcheck_warns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_operators_keep_their_promises_to_pytorch(dtype):
    """The rest of opcheck would differentiate the gradients that these operators return, and that is refused."""
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    x, y = (unit(6, 4, seed=seed, dtype=torch.float32).to(dtype) for seed in (0, 1))
    scale, labels, run = torch.tensor(3.0), torch.arange(6) % 3, (str(dtype).removeprefix("torch."), "eager", "")
    for needed in (True, False):
        needs = [needed] * 3
        for ids, columns, mean in ((None, True, True), (labels, False, False)):
            check(fused.cross_entropy, (x, y, scale, ids, columns, mean, *run, needs))
        check(fused.sigmoid, (x, y, scale, torch.zeros(6), None, False, True, *run, True, [needed] * 4))
        check(fused.nt_xent, (x, y, scale, True, *run, needs))
        check(fused.sup_con, (x, scale, labels, True, *run, needs[:2]))
    check(fused.cross_entropy, (x, y, scale, None, True, True, *run, [True, False, False]))
    check(fused.sup_con, (x, scale, labels, True, *run, [False, True]))


@pytest.mark.parametrize("loss", [mb.clip_loss, lambda x, y, s: mb.siglip_loss(x, y, s, -2.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_float32_inputs_once_and_keeps_float32_sums(loss, dtype):
    x, y, scale, *_ = inputs()
    with torch.autocast("cpu", dtype=dtype):
        found = loss(x, y, scale)
    assert found.dtype == torch.float32
    found_gradients = torch.autograd.grad(found, (x, y, scale))
    assert all(g.dtype == torch.float32 for g in found_gradients)
    rounded = leaves(x.to(dtype).float(), y.to(dtype).float(), scale)
    wanted = loss(*rounded)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for actual, expected in zip(found_gradients, torch.autograd.grad(wanted, rounded), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_autocast_lets_one_side_be_float32_already():
    x, y, scale, *_ = inputs()
    half = y.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mb.clip_loss(x, half, scale)
        both = mb.clip_loss(x, half.float(), scale)
    assert torch.equal(mixed, both)
    dx, dy = torch.autograd.grad(mixed, (x, half))
    assert (dx.dtype, dy.dtype) == (torch.float32, torch.bfloat16)


def test_no_grad_and_inference_mode():
    arguments = inputs()
    wanted = everything(*arguments).detach()
    with torch.no_grad():
        found = everything(*arguments)
    assert not found.requires_grad
    assert torch.equal(found, wanted)
    with torch.inference_mode():
        assert torch.equal(everything(*arguments), wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    arguments = inputs()
    wanted = torch.autograd.grad(everything(*arguments), arguments[:4])
    checkpoint(everything, *arguments, use_reentrant=use_reentrant).backward()
    for argument, expected in zip(arguments[:4], wanted, strict=True):
        assert torch.equal(argument.grad, expected)


def test_functional_call_of_a_model_with_a_learned_scale():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Linear(12, 6)
            self.log_scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, y):
            return mb.clip_loss(self.tower(x), self.tower(y), self.log_scale.exp())

    model = Model()
    x, y, *_ = inputs()
    other = {name: (value.detach() + 0.1).requires_grad_() for name, value in model.named_parameters()}
    found = torch.autograd.grad(torch.func.functional_call(model, other, (x, y)), list(other.values()))
    model.load_state_dict(other)
    wanted = torch.autograd.grad(model(x, y), list(model.parameters()))
    by_name = dict(zip([name for name, _ in model.named_parameters()], wanted, strict=True))
    for name, gradient in zip(other, found, strict=True):
        assert torch.equal(gradient, by_name[name])


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y, s: mb.pairwise_logsumexp(x, y, s)[0].sum(),
        lambda x, y, s: mb.pairwise_softplus(x, y, s).sum(),
        mb.clip_loss,
        lambda x, y, s: mb.siglip_loss(x, y, s, -2.0),
    ],
)
def test_differentiating_twice_is_refused_clearly(operation):
    x, y, scale, *_ = inputs()
    (dx,) = torch.autograd.grad(operation(x, y, scale), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dx.square().sum().backward()


def test_a_factor_reaches_gradients_taken_in_forward():
    x, y, scale, *_ = inputs()
    loss = mb.siglip_loss(x, y, scale, -2.0)
    (dx,) = torch.autograd.grad(loss * 3, x)
    (wanted,) = torch.autograd.grad(reference.siglip_loss(x, y, scale, -2.0) * 3, x)
    torch.testing.assert_close(dx, wanted)


def saved_bytes(function):
    """Bytes of the storages kept for backward, apart from the inputs."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    return storages, output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_for_backward_grows_with_the_rows_alone(dtype):
    with tile_size(256, 256):
        for N in (512, 2048):
            x, y, scale, bias, _ = inputs(N, dtype)
            own = {t.untyped_storage().data_ptr() for t in (x, y)}
            two_passes, _ = saved_bytes(lambda: mb.clip_loss(x, y, scale, reduction="none"))  # noqa: B023
            assert sum(size for key, size in two_passes.items() if key not in own) <= 6 * 4 * N + 64
            gradients = x.nbytes + y.nbytes  # the forward pass computes them
            for loss in (lambda: mb.clip_loss(x, y, scale), lambda: mb.siglip_loss(x, y, scale, bias)):  # noqa: B023
                saved, _ = saved_bytes(loss)
                assert sum(size for key, size in saved.items() if key not in own) <= gradients + 4 * N + 64


FUSED_LOSSES = {
    "clip": lambda x, y, s: mb.clip_loss(x, y, s),
    "siglip": lambda x, y, s: mb.siglip_loss(x, y, s, -2.0),
    "nt_xent": lambda x, y, s: mb.nt_xent_loss(x, y, s),
    "sup_con": lambda x, y, s: mb.sup_con_loss(torch.cat((x, y)), torch.arange(2 * len(x)) % 9, s),
}


@pytest.mark.parametrize("name", FUSED_LOSSES)
def test_backward_may_run_twice_if_the_graph_is_kept(name):
    """The last backward pass overwrites the gradients that forward has computed. Earlier ones must not."""
    x, y, scale, *_ = inputs()
    with no_dense_path():
        loss = FUSED_LOSSES[name](x, y, scale)
    first = torch.autograd.grad(3 * loss, (x, y, scale), retain_graph=True)
    assert not any(gradient.requires_grad for gradient in first)
    several = torch.autograd.grad(loss, (x, y, scale), torch.tensor([1.0, 3.0]), retain_graph=True, is_grads_batched=True)
    last = torch.autograd.grad(3 * loss, (x, y, scale))
    assert not any(gradient.requires_grad for gradient in last)
    for one, both, other in zip(first, several, last, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(both[1], one, rtol=1e-6, atol=0)
        torch.testing.assert_close(3 * both[0], one, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FUSED_LOSSES)
def test_batches_of_gradients_and_second_derivatives_without_a_kept_graph(name):
    x, y, scale, *_ = inputs()
    with no_dense_path():
        losses = [FUSED_LOSSES[name](x, y, scale) for _ in range(3)]
    wanted = torch.autograd.grad(losses[0], x)[0]
    both = torch.autograd.grad(losses[1], x, torch.tensor([1.0, 3.0]), is_grads_batched=True)[0]
    torch.testing.assert_close(both, torch.stack((wanted, 3 * wanted)), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(losses[2], x, create_graph=True, retain_graph=False)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(gradient.square().sum() + x.square().sum(), x)
