"""Losses of images and texts: CLIP's softmax loss, SigLIP's sigmoid loss, distillation, and CLIP's loss of several prefixes."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Group, Reduction
from megabatch.losses.info_nce import info_nce_loss
from megabatch.primitives import (
    SEPARATE,
    autocast_device,
    cross_entropy,
    cross_entropy_loss,
    describe_loss,
    exact_dtype,
    execution,
    logsumexp,
    mean_logit,
    number,
    pairs,
    reduce_losses,
    sigmoid_loss,
    soft_cross_entropy,
    sum_over_ranks,
    to_exact,
    widen_float16,
)

# ----------------------------------------------------------------------------------------------------------------------
# CLIP: each image finds its text among all texts, and each text its image among all images.


def clip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    *,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the symmetric cross-entropy of CLIP without storing a large N×N matrix of logits.

    It has the same value and gradients as

        logits = logit_scale * image @ text.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    The loss is never negative and can be differentiated once. Its dtype is float32, or float64 for float64 inputs. See
    `pairwise_logsumexp` for the precision. If a gradient is needed, the forward pass computes it, except with label smoothing
    and with `reduction="none"`.

    Examples:
        ```python
        loss = mb.clip_loss(F.normalize(image, dim=1), F.normalize(text, dim=1), log_scale.exp())
        ```

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings. Row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        ids: (N,) integers. Pairs with equal ids, such as a caption that occurs twice, are not each other's negatives. Ids of
            shape (N, 2) can have the number of the image and the number of the text. Pairs that agree in one of the two columns
            are then not each other's negatives.
        label_smoothing: the part of the target that is spread evenly over the batch, as in `F.cross_entropy`. It must be 0 if
            ids are given.
        reduction: "mean", "sum" or "none". "none" returns one value for each pair, (N,), the mean of its two directions.
        group: a process group, or a `DeviceMesh` of one dimension, whose ranks share the batch (default: this process only).
            Each rank passes its own pairs, and all ranks must run backward. "mean" returns this rank's part of the mean. The
            mean of these parts over ranks is the loss of the whole batch, and the mean of the gradients in DDP is its gradient.
            All ranks must multiply this mean by the same factor. "sum" and "none" return the losses of this rank's pairs.
            See docs/ring.md.
        backend: "auto", "eager" (PyTorch operations) or "triton" (kernels). It changes the speed but not the result.
    """
    label_smoothing = checks.check_smoothing(label_smoothing, ids=ids)
    loss = describe_loss(group, "clip_loss", label_smoothing=label_smoothing, reduction=reduction)
    run = pairs(image, text, ("image", "text"), ids=ids, reduction=reduction, group=group, loss=loss, backend=backend)
    standard = label_smoothing == 0
    loss_at_once = cross_entropy_loss(
        image, text, logit_scale, run, columns=True, name="logit_scale", ids=ids, reduction=reduction, standard=standard
    )
    if loss_at_once is not None:
        return loss_at_once
    scale = number(logit_scale, "logit_scale", image)
    if label_smoothing > 0:
        image, text = widen_float16(image), widen_float16(text)
    row, col, match, mean_weight = logsumexp(image, text, scale, run, ids=(ids, ids), diagonal=SEPARATE, columns=True)
    losses = [cross_entropy(row, match, image), cross_entropy(col, match, image)]
    if label_smoothing > 0:
        means = mean_logit(image, [(text, None)], scale, run), mean_logit(text, [(image, None)], scale, run)
        losses = [loss + label_smoothing * (match - mean) for loss, mean in zip(losses, means, strict=True)]
    return reduce_losses(losses, mean_weight, reduction, image)


# ----------------------------------------------------------------------------------------------------------------------
# SigLIP: every pair, matching or not, is a binary classification.


def siglip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    *,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    ids_are_positives: bool = False,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the sigmoid loss of SigLIP without storing a large N×N matrix of logits.

    It has the same value and gradients as

        logits = logit_scale * image @ text.T + logit_bias
        signs = 2 * torch.eye(len(logits)) - 1
        return -F.logsigmoid(signs * logits).sum() / len(logits)

    The loss is never negative and can be differentiated once. Its dtype is float32, or float64 for float64 inputs. See
    `pairwise_logsumexp` for the precision.
    If a gradient is needed, the forward pass computes it, in three quarters of the operations of two passes. With
    `reduction="none"`, the backward pass computes the gradient.

    Examples:
        ```python
        loss = mb.siglip_loss(F.normalize(image, dim=1), F.normalize(text, dim=1), log_scale.exp(), bias)
        ```

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings. Row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        logit_bias: a float, or a tensor of one element.
        ids: (N,) integers. Pairs with equal ids, such as a caption that occurs twice, are not each other's negatives. Ids of
            shape (N, 2) can have the number of the image and the number of the text. Pairs that agree in one of the two columns
            are then not each other's negatives.
        ids_are_positives: whether pairs with equal ids are positives, which have the sign +1 in the code above, instead of
            being excluded.
        reduction: "mean", "sum" or "none". "none" returns the row sums of the code above, (N,). See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    if ids_are_positives and ids is None:
        raise ValueError("ids must be given if ids_are_positives is True, got None")
    loss = describe_loss(group, "siglip_loss", reduction=reduction)
    run = pairs(image, text, ("image", "text"), ids=ids, reduction=reduction, group=group, loss=loss, backend=backend)
    scale, bias = number(logit_scale, "logit_scale", image), number(logit_bias, "logit_bias", image)
    return sigmoid_loss(image, text, scale, bias, run, ids=ids, ids_are_positives=ids_are_positives, reduction=reduction)


# ----------------------------------------------------------------------------------------------------------------------
# Distillation: a student's logits follow the logits of a teacher, which are computed tile by tile and never stored.


def soft_clip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    teacher_image: Tensor,  # (N, E)
    teacher_text: Tensor,  # (N, E)
    teacher_scale: float | Tensor,
    *,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the symmetric cross-entropy of CLIP with a teacher's softmax as soft targets, without storing logits.

    It has the same value and gradients as

        logits = logit_scale * image @ text.T
        targets = teacher_scale * teacher_image @ teacher_text.T
        rows = F.cross_entropy(logits, targets.softmax(1))
        columns = F.cross_entropy(logits.T, targets.T.softmax(1))
        return (rows + columns) / 2

    The loss is never below the entropy of the targets and can be differentiated once. Its dtype is float32, or float64 for
    float64 inputs. The teacher gets no gradient. On a GPU, cuBLAS matmuls compute the logits of student and teacher tile by
    tile in memory, and kernels read these tiles.

    Examples:
        ```python
        loss = mb.soft_clip_loss(image, text, log_scale.exp(), teacher_image, teacher_text, 100.0)
        ```

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings. Row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        teacher_image: (N, E) the teacher's embeddings of the same images, of any embedding dimension and dtype.
        teacher_text: (N, E) the teacher's embeddings of the same texts.
        teacher_scale: the teacher's inverse temperature.
        reduction: "mean", "sum" or "none". See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    loss = describe_loss(group, "soft_clip_loss", reduction=reduction)
    run = pairs(image, text, ("image", "text"), reduction=reduction, group=group, loss=loss, backend=backend)
    names = ("teacher_image", "teacher_text")
    teacher_run = execution(teacher_image, teacher_text, names, same_rows=True, backend=backend)
    checks.same_rows(teacher_image, names[0], image, "image")
    checks.without_gradient((teacher_image, teacher_text), names)
    scale, target_scale = number(logit_scale, "logit_scale", image), number(teacher_scale, "teacher_scale", image)
    if isinstance(teacher_scale, Tensor):
        checks.without_gradient([teacher_scale], ["teacher_scale"])
    teacher = teacher_image, teacher_text, target_scale
    row, col, mean_weight = soft_cross_entropy((image, text, scale), teacher, (run, teacher_run))
    return reduce_losses((row, col), mean_weight, reduction, image)


# ----------------------------------------------------------------------------------------------------------------------
# Matryoshka: CLIP's loss of several prefixes of the embeddings, so that their first columns are good embeddings.


def matryoshka_clip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    *,
    widths: Sequence[int],
    weights: Sequence[float] | None = None,
    symmetric: bool = True,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the weighted sum of CLIP's losses of several prefixes of the embeddings.

    It has the same value and gradients as

        def prefix(x, width):
            return F.normalize(x[:, :width], dim=1)

        losses = [clip_loss(prefix(image, width), prefix(text, width), logit_scale) for width in widths]
        return sum(weight * loss for weight, loss in zip(weights, losses))

    The loss is never negative if the weights are not, and can be differentiated once. Its dtype is float32, or float64 for
    float64 inputs.

    Prefixes are normalized in float32. With half-precision inputs, or under autocast, each normalized prefix is rounded once
    before the matmul, and gradients are float32 until the gradients of all prefixes are added.

    Columns beyond the largest prefix get no gradient. So `widths` should include D, unless embeddings are always truncated.

    Examples:
        ```python
        widths = [64, 128, image.shape[1]]
        loss = mb.matryoshka_clip_loss(image, text, logit_scale, widths=widths, weights=[0.25, 0.5, 1.0])
        ```

    Args:
        image: (N, D) embeddings. They need not have unit length, because every prefix is normalized.
        text: (N, D) embeddings. Row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        widths: the numbers of columns of the prefixes, all different and at most D. D should be one of them.
        weights: one number for each prefix (default: all 1).
        symmetric: whether the loss is the mean of both directions, as in `clip_loss`. If False, it has only the direction from
            image to text, as in `info_nce_loss`.
        ids: see `clip_loss`.
        reduction: "mean", "sum" or "none". See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    checks.embeddings(image, text, ("image", "text"), same_rows=True)
    checks.number(logit_scale, "logit_scale", image)
    weighted = _weights_by_width(widths, weights, image)
    options: dict[str, Any] = {"ids": ids, "reduction": reduction, "group": group, "backend": backend}
    scale = number(logit_scale, "logit_scale", image, shared=True)
    # The embeddings are cast once, so that the gradients of all prefixes are added in float32.
    images, texts = (side.to(torch.promote_types(side.dtype, torch.float32)) for side in (image, text))
    zero = _agree_on_weights(list(weighted.values()), image, text, group)
    losses = []
    with _matmuls_in_dtype_of(image):
        for width, weight in weighted.items():
            x, y = (F.normalize(side[:, :width], dim=1) for side in (images, texts))
            loss = clip_loss(x, y, scale, **options) if symmetric else info_nce_loss(x, y, scale=scale, **options)
            losses.append(weight * to_exact(loss))
    return (torch.stack(losses).sum(0) + zero).to(loss.dtype)


def _agree_on_weights(weights: list[float], image: Tensor, text: Tensor, group: Group) -> Tensor:  # ()
    """Returns 0 after all ranks have compared their weights. The losses of the prefixes compare everything else."""
    zero = torch.zeros((), dtype=exact_dtype(image.device), device=image.device)
    if group is None:
        return zero
    loss = describe_loss(group, "matryoshka_clip_loss", weights=weights)
    return sum_over_ranks(zero.reshape(1), execution(image, text, group=group, loss=loss))[0]


def _matmuls_in_dtype_of(image: Tensor) -> Any:
    """Makes the matmuls of float32 prefixes run in the dtype of the embeddings if that is half precision."""
    if image.dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(autocast_device(image), image.dtype)
    return nullcontext()


def _weights_by_width(widths: Any, weights: Any, x: Tensor) -> dict[int, float]:
    """Checks the arguments and returns the weight of each width, sorted by width."""
    if not _is_list_of(Integral, widths):
        raise TypeError(f"widths must be a sequence of integers, got {widths!r}")
    D, sizes = x.shape[1], [int(width) for width in widths]
    if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1 or max(sizes) > D:
        raise ValueError(f"widths must be different integers from 1 to {D}, the embedding dimension, got {sizes}")
    if weights is None:
        return dict.fromkeys(sorted(sizes), 1.0)
    if not _is_list_of(Real, weights):
        raise TypeError(f"weights must be None or a sequence of numbers, got {weights!r}")
    if len(weights) != len(sizes):
        raise ValueError(f"weights must be {len(sizes)} numbers, one for each width, got {len(weights)}")
    return dict(sorted(zip(sizes, map(float, weights), strict=True)))


def _is_list_of(kind: type, value: Any) -> bool:
    """Returns whether the value is a list, tuple or array of numbers of this kind, including NumPy's. Booleans do not count."""
    if isinstance(value, (str, Tensor)) or not isinstance(value, Collection):
        return False
    return all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value)
