"""Every loss and operation under the transforms of `torch.func`, and the derivatives that are refused."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import megabatch as mb
from helpers import aligned_pairs, leaves, tile_size, unit

# PyTorch's own, as soon as there are dual numbers.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

IDS = torch.arange(10) % 4
TEACHER = unit(10, 5, seed=7), unit(10, 5, seed=8)
HARD = unit(10, 2, 6, seed=9)
LOG_Q = torch.linspace(-2.0, 0.0, 10, dtype=torch.float64)
EVERY = ("query-key", "query-query", "key-query", "key-key")

OPERATIONS = {
    "pairwise_logsumexp": lambda x, y, s: sum(side.square().sum() for side in mb.pairwise_logsumexp(x, y, s)),
    "pairwise_symmetric_logsumexp": lambda x, y, s: mb.pairwise_symmetric_logsumexp(x + y, s).sum(),
    "pairwise_softplus": lambda x, y, s: mb.pairwise_softplus(x, y, s, s.neg()).sum(),
    "clip_loss": mb.clip_loss,
    "clip_loss, smoothed": lambda x, y, s: mb.clip_loss(x, y, s, label_smoothing=0.1),
    "clip_loss, ids": lambda x, y, s: mb.clip_loss(x, y, s, ids=IDS),
    "siglip_loss": lambda x, y, s: mb.siglip_loss(x, y, s, s.neg()),
    "info_nce_loss": lambda x, y, s: mb.info_nce_loss(x, y, scale=s),
    "info_nce_loss, all contrasts": lambda x, y, s: mb.info_nce_loss(
        x, y, scale=s, contrast=EVERY, symmetric=True, log_q=LOG_Q
    ),
    "info_nce_loss, hard": lambda x, y, s: mb.info_nce_loss(
        x, y, scale=s, negatives=mb.Negatives(HARD, private=True), margin=0.1
    ),
    "info_nce_loss, bank alone": lambda x, y, s: mb.info_nce_loss(x, y, scale=s, negatives=HARD, contrast=()),
    "dcl_loss": lambda x, y, s: mb.dcl_loss(x, y, scale=s),
    "hcl_loss": lambda x, y, s: mb.hcl_loss(x, y, scale=s, symmetric=True),
    "soft_clip_loss": lambda x, y, s: mb.soft_clip_loss(x, y, s, *TEACHER, 3.0),
    "nt_xent_loss": mb.nt_xent_loss,
    "sup_con_loss, out": lambda x, y, s: mb.sup_con_loss(x + y, IDS, s),
    "sup_con_loss, in": lambda x, y, s: mb.sup_con_loss(x + y, IDS, s, form="in"),
    "matryoshka_clip_loss": lambda x, y, s: mb.matryoshka_clip_loss(x, y, s, widths=(2, 6)),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


@pytest.fixture(autouse=True)
def _several_tiles():
    """Operators over tiles serve transforms and the compiler, and here autograd too, so that results have the same bits."""
    with tile_size(8, 8):
        yield


def inputs(seed=0):
    x, y = aligned_pairs(10, 6, noise=1.0, seed=seed)
    return x, y, torch.tensor(4.0, dtype=torch.float64)


def by_autograd(operation, *arguments):
    arguments = leaves(*arguments)
    return torch.autograd.grad(operation(*arguments), arguments)


@every_operation
def test_reverse_mode_of_torch_func_is_autograds(operation):
    x, y, scale = inputs()
    wanted = by_autograd(operation, x, y, scale)
    found, value = func.grad_and_value(operation, argnums=(0, 1, 2))(x, y, scale)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(value, operation(x, y, scale))
    value, pull_back = func.vjp(operation, x, y, scale)
    torch.testing.assert_close(pull_back(torch.full_like(value, 3.0)), tuple(3 * g for g in wanted), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(func.jacrev(operation)(x, y, scale), wanted[0], rtol=1e-12, atol=1e-12)


@every_operation
def test_vmap_is_a_loop(operation):
    batches = [inputs(seed) for seed in (0, 10, 20)]
    x, y, scale = map(torch.stack, zip(*batches, strict=True))
    wanted = torch.stack([operation(*batch) for batch in batches])
    torch.testing.assert_close(func.vmap(operation)(x, y, scale), wanted, rtol=1e-12, atol=1e-12)
    shared = torch.stack([operation(a, b, scale[0]) for a, b, _ in batches])
    torch.testing.assert_close(func.vmap(operation, in_dims=(0, 0, None))(x, y, scale[0]), shared, rtol=1e-12, atol=1e-12)
    wanted = tuple(map(torch.stack, zip(*(by_autograd(operation, *batch) for batch in batches), strict=True)))
    found = func.vmap(func.grad(operation, argnums=(0, 1, 2)))(x, y, scale)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    found = func.grad(lambda *batched: func.vmap(operation)(*batched).sum(), argnums=(0, 1, 2))(x, y, scale)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@every_operation
@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_is_refused_clearly(operation, which):
    arguments = inputs()
    tangent = torch.ones_like(arguments[which])

    def of_one(argument):
        return operation(*arguments[:which], argument, *arguments[which + 1 :])

    with pytest.raises(RuntimeError, match=r"no forward-mode derivative.*loss\.backward"):
        func.jvp(of_one, (arguments[which],), (tangent,))
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        func.jacfwd(of_one)(arguments[which])
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        of_one(forward_ad.make_dual(arguments[which], tangent))


@every_operation
def test_second_derivatives_by_torch_func_are_refused_clearly(operation):
    x, y, scale = inputs()

    def of_x(x):
        return operation(x, y, scale)

    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        func.hessian(of_x)(x)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        func.jvp(func.grad(of_x), (x,), (x,))
    with pytest.raises(RuntimeError, match="differentiated twice"):
        func.grad(lambda x: func.grad(of_x)(x).square().sum())(x)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        func.jacrev(func.jacrev(of_x))(x)


def test_inputs_without_a_tangent_may_stand_beside_one():
    x, y, scale = inputs()
    with forward_ad.dual_level():
        other = forward_ad.make_dual(scale, torch.ones_like(scale))
        loss = mb.clip_loss(x, y, scale) * other
        assert torch.equal(forward_ad.unpack_dual(loss).tangent, mb.clip_loss(x, y, scale))


@pytest.mark.skipif(
    torch.__version__.startswith(("2.8.", "2.9.")),
    reason="these versions cannot compile torch.func.grad of an autograd.Function",
)
@pytest.mark.quick({"name": "siglip_loss"})
@pytest.mark.parametrize("name", ["clip_loss, smoothed", "siglip_loss", "info_nce_loss, hard"])
def test_transforms_compile_whole(name):
    x, y, scale = inputs()
    operation = OPERATIONS[name]
    torch.compiler.reset()  # of all operations, func.grad is the same function
    compiled = torch.compile(func.grad(operation), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y, scale), by_autograd(operation, x, y, scale)[0], rtol=1e-12, atol=1e-12)


def test_a_compiled_forward_mode_is_refused():
    x, y, scale = inputs()
    compiled = torch.compile(lambda x: func.jvp(lambda x: mb.clip_loss(x, y, scale), (x,), (x,)), backend="aot_eager")
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        compiled(x)
