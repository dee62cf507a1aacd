"""The softmax loss of CLIP: each image finds its text among all texts, each text its image among all images."""

from torch import Tensor

from megabatch.dispatch import Backend, Group, Reduction
from megabatch.losses.formulas import check_smoothing, cross_entropy, reduce_losses
from megabatch.primitives import (
    SEPARATE,
    cross_entropy_loss,
    describe_loss,
    logsumexp,
    mean_similarity,
    number,
    pairs,
    widen_float16,
)


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
    """The symmetric cross-entropy of CLIP, without the N×N matrix of logits.

    Same value and gradients as

        logits = logit_scale * image @ text.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    Never negative, differentiable once, float32 (float64 for float64 inputs). See `pairwise_logsumexp` for the precision.

    Example:
        loss = mb.clip_loss(F.normalize(image, dim=1), F.normalize(text, dim=1), log_scale.exp())

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        ids: (N,) integers; pairs with equal ids (a caption that occurs twice) are not each other's negatives. Or (N, 2), such
            as the number of the image and the number of the text; pairs that agree in one of the two columns are then not each
            other's negatives.
        label_smoothing: the part of the target that is spread evenly over the batch, as in `F.cross_entropy`. Not with ids.
        reduction: "mean", "sum", or "none" for one value per pair, (N,), the mean of its two directions.
        group: process group to share the batch over (default: this process only), or a `DeviceMesh` of one dimension. Each rank
            passes its own pairs, and all ranks must run backward. "mean" returns the rank's share: the mean over ranks is the
            loss of the whole batch, and DDP's mean of the gradients is its gradient. "sum" and "none" return the losses of the
            rank's own pairs. See docs/ring.md.
        backend: "auto", "eager" (PyTorch operations) or "triton" (kernels). It changes the speed, never the result.
    """
    label_smoothing = check_smoothing(label_smoothing, ids=ids)
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
        means = mean_similarity(image, [(text, None)], scale, run), mean_similarity(text, [(image, None)], scale, run)
        losses = [loss + label_smoothing * (match - mean) for loss, mean in zip(losses, means, strict=True)]
    return reduce_losses(losses, mean_weight, reduction, image)
