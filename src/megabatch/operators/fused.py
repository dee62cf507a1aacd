"""The fused path: operators that compute a loss together with its gradients, for any number of rows and ranks.

In a mean or a sum, the gradient of every pair is known up to one factor before backward is called, so the forward pass can
compute it. Backward only multiplies by the gradient of the loss. In a sum over ranks, each rank has another factor, so such a
call takes the two-pass path. A softmax loss takes two passes over the tiles in any case,
because a softmax weight needs the complete sum. A sigmoid loss takes only one pass, because its gradient is computed while the
tile exists: 6·N²·D operations instead of 8.

Until backward multiplies the gradients by the factor, they are stored in the dtype of the inputs, or in float32 if the inputs
are float16. A factor that is not a power of two causes one more rounding.

`one_gpu` has the same functions with fewer launches, for one process.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from megabatch.dispatch import Execution, transforms_are_active
from megabatch.operators.autograd import (
    TWICE,
    apply,
    choose_grad_scale,
    column_sums,
    define,
    differentiable,
    divide_gradient,
    empty_gradients,
    finish,
    is_batched,
    passes_for,
    refuse,
    statistic,
)
from megabatch.operators.rowwise import positives, positives_backward
from megabatch.operators.two_pass import (
    ALL,
    OTHERS,
    SEPARATE,
    SoftplusInputs,
    logsumexp,
    logsumexp_backward,
    symmetric_logsumexp,
    symmetric_logsumexp_backward,
)
from megabatch.ring.ranks import Ranks
from megabatch.tiles.block import (
    FLOAT16,
    FLOAT32,
    TRITON,
    Block,
    Needs,
    accumulator_dtype,
    exact_matching_logits,
    matching_logits,
    widen_float16,
)
from megabatch.tiles.sums import exact_dtype, exact_softplus, less_match, to_exact


def _dtype_to_save(*inputs: Tensor) -> torch.dtype | None:
    """Returns the dtype of gradients until backward, where None means their own dtype.

    Float16 gradients are stored in float32. They do not contain the loss scale yet, so 1/N would underflow in float16.
    """
    return torch.float32 if any(value.dtype == torch.float16 for value in inputs) else None


def _find_needs(*inputs: Tensor) -> list[bool]:
    is_transformed = transforms_are_active()  # then requires_grad may be False although a gradient is needed
    return [torch.is_grad_enabled() and (is_transformed or value.requires_grad) for value in inputs]


def _scale_in_backward(operator: CustomOpDef, inputs_type: Any, *, learned: int) -> None:
    """Registers the derivative of an operator that returns a loss and the gradients of its first `learned` inputs."""
    group = inputs_type._fields.index("group")

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.dtypes = [value.dtype for value in inputs[:learned]]
        ctx.group, ctx.nothing = inputs[group], (None,) * (len(inputs) - learned)
        ctx.save_for_backward(*output[1:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dloss: Tensor | None, *dgradients: Tensor | None) -> tuple[Any, ...]:
        if any(d is not None for d in dgradients):
            raise RuntimeError(TWICE)
        if dloss is None:
            return *(None,) * learned, *ctx.nothing
        factor = apply(compare_factors, dloss, ctx.group) if ctx.group else dloss
        in_place = _is_last_backward(dloss)
        gradients = [
            None if not need else (gradient.detach().mul_(factor) if in_place else gradient * factor).to(dtype)
            for gradient, dtype, need in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:learned], strict=True)
        ]
        return *gradients, *ctx.nothing

    differentiable(operator, backward, save)


def _is_last_backward(dloss: Tensor) -> bool:
    """Returns whether the saved gradients may be overwritten, because they are freed after this backward pass.

    A second copy of them would be the peak of memory in float32. Transforms and batches of gradients need the copy.
    """
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if keeps_graph is None or torch.compiler.is_compiling() or transforms_are_active() or torch.is_grad_enabled():
        return False
    return not (is_batched(dloss) or keeps_graph())


@torch.library.custom_op("megabatch::compare_factors", mutates_args=())
def compare_factors(dloss: Tensor, group: str) -> Tensor:  # ()
    """Returns the gradient of the loss, which has to be equal on all ranks.

    The gradients of a rank contain losses of other ranks, so they are wrong if another rank multiplies its loss by another
    factor. All ranks then raise an error. On a GPU they return NaN instead, because the host does not wait for the values.
    """
    ranks = Ranks.at(group, "the gradient of the loss", dloss.device)
    factors = torch.cat(ranks.all_gather(dloss.reshape(1)))
    is_equal = (factors == factors[0]).all()
    if dloss.is_cpu and not (is_equal or factors.isnan().any()):
        raise ValueError(
            f"all ranks must multiply the mean of a loss by the same factor, got {factors.tolist()} on ranks 0 to "
            f'{len(factors) - 1}. Use reduction="sum" or reduction="none" for factors that differ'
        )
    return torch.where(is_equal, dloss, torch.nan)


@compare_factors.register_fake
def _(dloss: Tensor, group: str) -> Tensor:
    return torch.empty_like(dloss)


differentiable(compare_factors, refuse)


# ----------------------------------------------------------------------------------------------------------------------
# The softmax cross-entropy of matching pairs, in one or both directions.


def _cross_entropies(negatives: Tensor, match: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (N,), (N,)
    """Returns log(1 + exp(negatives − match)) and its derivative."""
    difference = less_match(negatives, match, dtype)
    return exact_softplus(difference), difference.sigmoid()


class CrossEntropyInputs(NamedTuple):
    """The embeddings and ids. Pairs with equal ids are excluded."""

    x: Tensor  # (N, D)
    y: Tensor  # (N, D)
    scale: Tensor  # ()
    ids: Tensor | None  # (N,) or (N, 2)
    columns: bool  # whether the loss is the mean of both directions
    mean: bool
    precision: str
    backend: str
    group: str


def _cross_entropy_shapes(given: CrossEntropyInputs, needs: list[bool]) -> tuple[Tensor, ...]:
    dtype = _dtype_to_save(given.x, given.y)
    return statistic(given.x), *empty_gradients(given.x, given.y, given.scale, Needs(*needs), dtype)[:3]


@define(CrossEntropyInputs, "bool[] needs", results=4, fake=_cross_entropy_shapes)
def cross_entropy(given: CrossEntropyInputs, needs: list[bool]) -> tuple[Tensor, ...]:
    """Returns this rank's part of the loss, then dx, dy and dscale."""
    by_ids = {"row_ids": given.ids, "col_ids": given.ids}
    block, needed = Block.of(given.x, given.y, given.scale, given.precision, **by_ids, skip_diagonal=True), Needs(*needs)
    terms = {"the direction of the sums": "rows and columns" if given.columns else "rows"}
    passes = passes_for(given.group, given.backend, block, "cross-entropy", needs=needed, mean=True, terms=terms)
    row, col = passes.tiles.logsumexp_statistics(block, columns=given.columns)
    match = exact_matching_logits(block, passes.local.matching_products(block), by_kernels=given.backend == TRITON)
    directions = [_cross_entropies(sums.value(), match, block.dtype) for sums in ((row, col) if given.columns else (row,))]
    losses, weights = zip(*directions, strict=True)
    weight = (passes.mean_weight if given.mean else 1.0) / len(directions)
    loss = (torch.stack(losses).sum(dtype=exact_dtype(match.device)) * weight).to(block.dtype)
    dtype = _dtype_to_save(given.x, given.y)
    if not any(needed):
        return loss, *empty_gradients(given.x, given.y, given.scale, needed, dtype)[:3]
    grad_scale = choose_grad_scale(block.scale, block.precision, *weights, largest=passes.largest)
    drow, dcol = divide_gradient(weights[0], grad_scale), divide_gradient(weights[1], grad_scale) if given.columns else None
    sums = column_sums(block, needed)
    strips = passes.tiles.logsumexp_gradients(block, row, col if given.columns else None, drow, dcol, sums, needed)
    gradients = finish(
        passes.local,
        block,
        strips,
        sums,
        needed,
        scale=given.scale,
        grad_scale=grad_scale * weight,
        dmatch=-(drow if dcol is None else drow + dcol),
        dtype=dtype,
    )
    return loss, *gradients[:3]


_scale_in_backward(cross_entropy, CrossEntropyInputs, learned=3)


def cross_entropy_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,) or (N, 2)
    run: Execution,
    *,
    columns: bool,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of −log softmax(s)_ii over rows, or with `columns` over both directions.

    Pairs with equal ids are excluded.
    """
    loss: Tensor = apply(cross_entropy, x, y, scale, ids, columns, mean, *run, _find_needs(x, y, scale))[0]
    return loss


# ----------------------------------------------------------------------------------------------------------------------
# The sigmoid loss.


def _sigmoid_shapes(given: SoftplusInputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    gradients = empty_gradients(given.x, given.y, given.scale, Needs(*needs), _dtype_to_save(given.x, given.y))
    return statistic(given.x), *gradients[:4]


@define(SoftplusInputs, "bool mean, bool[] needs", results=5, fake=_sigmoid_shapes)
def sigmoid(given: SoftplusInputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    """Returns the loss Σ_i [softplus(−s_ii) + Σ_{j≠i} softplus(s_ij)] · mean_weight, then dx, dy, dscale and drow_bias.

    The diagonal has to be separate. The `mean_weight` of a mean is 1/N for one process. Over R ranks with a total of B pairs,
    it is R/B, so that the mean over ranks is the loss. The `mean_weight` of a sum is 1.
    """
    block, needed = given.block(), Needs(*needs)
    passes = passes_for(given.group, given.backend, block, "sigmoid loss", needs=needed, mean=True)
    mean_weight = passes.mean_weight if mean else 1.0
    match = matching_logits(block, passes.local.matching_products(block))
    dtype = _dtype_to_save(given.x, given.y)
    if any(needed):
        total = block.zeros(block.N)
        sums = column_sums(block, needed)
        grad_scale = torch.full_like(block.scale, 2.0**-14 if block.precision == FLOAT16 else 1.0)
        weight = torch.ones_like(total) / grad_scale if block.precision == FLOAT16 else None
        strips = passes.tiles.softplus_gradients(block, weight, sums, needed, total=total)
        gradients = finish(
            passes.local,
            block,
            strips,
            sums,
            needed,
            scale=given.scale,
            grad_scale=grad_scale * mean_weight,
            dmatch=-torch.sigmoid(-match) / grad_scale,
            dtype=dtype,
        )
    else:
        total = passes.tiles.softplus_sums(block)
        gradients = empty_gradients(given.x, given.y, given.scale, needed, dtype)
    total -= F.logsigmoid(match)
    loss = total.sum(dtype=exact_dtype(total.device)) * mean_weight
    return loss.to(block.dtype), *gradients[:4]


_scale_in_backward(sigmoid, SoftplusInputs, learned=4)


def sigmoid_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    bias: Tensor,  # ()
    ids: Tensor | None,  # (N,) or (N, 2)
    run: Execution,
    *,
    ids_are_positives: bool,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of softplus(−s_ii) + Σ_{j≠i} softplus(s_ij) over all rows i.

    `primitives.sigmoid_loss` explains ids.
    """
    inputs = x, y, scale, bias.expand(x.shape[0])
    loss: Tensor = apply(sigmoid, *inputs, ids, ids_are_positives, True, *run, mean, _find_needs(*inputs))[0]
    return loss


# ----------------------------------------------------------------------------------------------------------------------
# Losses of a batch against itself. They run the operators of the two-pass path, forward and backward, one after another.


class ViewsInputs(NamedTuple):
    """The embeddings of both views."""

    z1: Tensor  # (N, D)
    z2: Tensor  # (N, D)
    scale: Tensor  # ()
    mean: bool
    precision: str
    backend: str
    group: str


def _views_shapes(given: ViewsInputs, needs: list[bool]) -> tuple[Tensor, ...]:
    dtype = _dtype_to_save(given.z1, given.z2)
    return statistic(given.z1), *empty_gradients(given.z1, given.z2, given.scale, Needs(*needs), dtype)[:3]


@define(ViewsInputs, "bool[] needs", results=4, fake=_views_shapes)
def nt_xent(given: ViewsInputs, needs: list[bool]) -> tuple[Tensor, ...]:
    """Returns this rank's part of the loss, then dz1, dz2 and dscale.

    One pass sums over the negatives from the other view, and the symmetric passes sum over the negatives from the same view.
    """
    z1, z2, dtype = widen_float16(given.z1), widen_float16(given.z2), accumulator_dtype(given.z1.dtype)
    scale, run = to_exact(given.scale), (given.precision, given.backend, given.group)
    _agree(given, z1, z2, needs)
    pair = z1, z2, scale, *(None,) * 7, True, SEPARATE, given.precision, FLOAT32, given.backend, given.group
    *across, match, mean_weight, row, col = logsumexp(*pair)
    within, packed = zip(*(symmetric_logsumexp(z, scale, None, OTHERS, *run) for z in (z1, z2)), strict=True)
    negatives = [torch.logaddexp(*parts) for parts in zip(across, within, strict=True)]
    losses, weights = zip(*(_cross_entropies(total, match, dtype) for total in negatives), strict=True)
    weight = (mean_weight if given.mean else 1.0) / 2
    loss = (torch.stack(losses).sum(dtype=exact_dtype(match.device)) * weight).to(dtype)
    if not any(needs):
        return loss, *empty_gradients(z1, z2, given.scale, Needs(*needs))[:3]
    dmatch = -to_exact(weights[0] + weights[1]) * weight
    dacross, dwithin = (
        [_share(part, total, p) * weight for part, total, p in zip(parts, negatives, weights, strict=True)]
        for parts in (across, within)
    )
    dz1, dz2, dscale, *_ = logsumexp_backward(*pair, row, col, *dacross, dmatch, [*needs, False, False])
    for dz, z, sums, d, need in zip((dz1, dz2), (z1, z2), packed, dwithin, needs, strict=False):
        if need or needs[2]:
            more, more_dscale = symmetric_logsumexp_backward(z, scale, None, OTHERS, *run, sums, d, [need, needs[2]])
            dscale += more_dscale
            if need:
                dz += more
    return loss, dz1, dz2, dscale.to(given.scale.dtype)


_scale_in_backward(nt_xent, ViewsInputs, learned=3)


def nt_xent_loss(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of the losses of all samples.

    The loss of a sample is the mean of −log softmax(s)_ij over its two views i. View j is the other view.
    """
    loss: Tensor = apply(nt_xent, z1, z2, scale, mean, *run, _find_needs(z1, z2, scale))[0]
    return loss


class LabelsInputs(NamedTuple):
    """The embeddings and labels."""

    z: Tensor  # (N, D)
    scale: Tensor  # ()
    labels: Tensor  # (N,)
    mean: bool
    precision: str
    backend: str
    group: str


def _labels_shapes(given: LabelsInputs, needs: list[bool]) -> tuple[Tensor, ...]:
    dtype = _dtype_to_save(given.z)
    return (
        statistic(given.z),
        given.z.new_empty(given.z.shape if needs[0] else (0,), dtype=dtype),
        torch.empty_like(given.scale),
    )


@define(LabelsInputs, "bool[] needs", results=3, fake=_labels_shapes)
def sup_con(given: LabelsInputs, needs: list[bool]) -> tuple[Tensor, ...]:
    """Returns this rank's part of the loss of form "out", then dz and dscale.

    A sole positive is excluded from the sums over the other rows, so that neither the loss nor its gradient loses digits if its
    probability is near 1. With several positives, no probability is near 1, because the loss is at least the log of their
    number.
    """
    z, dtype = widen_float16(given.z), accumulator_dtype(given.z.dtype)
    scale, run = to_exact(given.scale), (given.precision, given.backend, given.group)
    _agree(given, z, z, [needs[0], False, needs[1]])
    mean_logit, sole, mean_weight, count = positives(z, scale, given.labels, *run)
    others, packed = symmetric_logsumexp(z, scale, sole, ALL, *run)
    losses, probabilities = _cross_entropies(others, mean_logit, dtype)
    weight = mean_weight if given.mean else torch.ones_like(mean_weight)
    losses = torch.where(count == 1, losses, others - mean_logit).where(count > 0, 0.0)
    loss = (losses.sum(dtype=exact_dtype(losses.device)) * weight).to(dtype)
    if not any(needs):
        return loss, *empty_gradients(z, z, given.scale, Needs(False, False, False))[1:3]
    d = torch.where(count == 1, to_exact(probabilities), 1.0).where(count > 0, 0.0) * weight
    dz, dscale = symmetric_logsumexp_backward(z, scale, sole, ALL, *run, packed, d, needs)
    of_positives, dscale_of_positives = positives_backward(z, scale, given.labels, *run, count, -d, needs)
    dz += of_positives
    return loss, dz if needs[0] else dz.new_empty(0), (dscale + dscale_of_positives).to(given.scale.dtype)


_scale_in_backward(sup_con, LabelsInputs, learned=2)


def sup_con_loss(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: Tensor,  # ()
    run: Execution,
    *,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of the losses of all rows i that share their label.

    The loss of row i is the mean of −log softmax(s)_ij over the other rows j with its label. A row is not compared with itself.
    """
    loss: Tensor = apply(sup_con, z, scale, labels, mean, *run, _find_needs(z, scale))[0]
    return loss


def _agree(given: ViewsInputs | LabelsInputs, x: Tensor, y: Tensor, needs: list[bool]) -> None:
    """Raises an error on all ranks if the ranks need different gradients. Without this, some ranks would hang in backward."""
    if given.group:
        block = Block.of(x, y, given.scale, given.precision)
        passes_for(given.group, given.backend, block, "loss of a batch against itself", needs=Needs(*needs))


def _share(part: Tensor, total: Tensor, weight: Tensor) -> Tensor:  # (N,)
    """Returns weight · exp(part − total), the derivative with respect to one part of a logsumexp. It is 0 for an empty sum."""
    return torch.where(part == -torch.inf, 0.0, to_exact(weight) * (part - total).exp())
