"""The sigmoid loss of SigLIP: every pair, matching or not, is a binary classification of its own."""

from torch import Tensor

from megabatch.dispatch import Backend, Group, Reduction
from megabatch.primitives import number, pairs, sigmoid_loss


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
    """The sigmoid loss of SigLIP, without the N×N matrix of logits.

    Same value and gradients as

        logits = logit_scale * image @ text.T + logit_bias
        signs = 2 * torch.eye(len(logits)) - 1
        return -F.logsigmoid(signs * logits).sum() / len(logits)

    Never negative, differentiable once, float32 (float64 for float64 inputs). See `pairwise_logsumexp` for the precision.
    If a gradient is needed, it is computed in the forward pass, which then takes three quarters of the whole time. With
    `reduction="none"` backward is a second pass.

    Example:
        loss = mb.siglip_loss(F.normalize(image, dim=1), F.normalize(text, dim=1), log_scale.exp(), bias)

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        logit_bias: a float, or a tensor of one element.
        ids: (N,) integers; pairs with equal ids (a caption that occurs twice) are not each other's negatives. Or (N, 2), such
            as the number of the image and the number of the text; pairs that agree in one of the two columns are then not each
            other's negatives.
        ids_are_positives: pairs with equal ids are positives of each other, with the sign +1 in the lines above, instead of
            being left out.
        reduction: "mean", "sum", or "none" for the row sums of the lines above, (N,). See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    if ids_are_positives and ids is None:
        raise ValueError("ids must be given where ids_are_positives is True, got None")
    run = pairs(image, text, ("image", "text"), ids=ids, reduction=reduction, group=group, backend=backend)
    scale, bias = number(logit_scale, "logit_scale", image), number(logit_bias, "logit_bias", image)
    return sigmoid_loss(image, text, scale, bias, run, ids=ids, ids_are_positives=ids_are_positives, reduction=reduction)
