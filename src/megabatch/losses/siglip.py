"""The sigmoid loss of SigLIP: every pair, matching or not, is a yes-or-no question of its own."""

from typing import Literal, overload

from torch import Tensor, nn

from megabatch import validation
from megabatch.arguments import Backend, Group, number
from megabatch.losses.sums import Reduction, pairs, sigmoid_loss


def siglip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    *,
    ids: Tensor | None = None,  # (N,)
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
    Where a gradient will be wanted it is computed in the forward pass, which then takes three quarters of the whole time.

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        logit_bias: a float, or a tensor of one element.
        ids: one integer for each pair; pairs with the same id (a caption that occurs twice) are not each other's negatives.
        ids_are_positives: pairs with the same id are all positives of each other, with the sign +1 in the lines above, instead
            of being left out.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: process group to share the batch over, as in `clip_loss`.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    if ids_are_positives and ids is None:
        raise ValueError("ids must be given where ids_are_positives is True, got None")
    run = pairs(image, text, ("image", "text"), ids=ids, group=group, reduction=reduction, backend=backend)
    scale, bias = number(logit_scale, "logit_scale", image), number(logit_bias, "logit_bias", image)
    return sigmoid_loss(image, text, scale, bias, run, ids=ids, ids_are_positives=ids_are_positives, reduction=reduction)


class SigLipLoss(nn.Module):
    """`siglip_loss` with the constructor and the call of `open_clip.SigLipLoss`.

    `dist_impl` chooses how open_clip moves the texts between ranks, and `cache_labels` is not used there either: they are
    accepted and change nothing.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
    ) -> None:
        super().__init__()
        validation.dist_impl(dist_impl)
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        *,
        output_dict: Literal[True],
    ) -> dict[str, Tensor]: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]: ...

    def forward(
        self,
        image_features: Tensor,  # (N, D)
        text_features: Tensor,  # (N, D)
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or {"contrastive_loss": loss}."""
        bias = 0.0 if logit_bias is None else logit_bias
        group = validation.default_group(self.rank, self.world_size)
        loss = siglip_loss(image_features, text_features, logit_scale, bias, group=group)
        return {"contrastive_loss": loss} if output_dict else loss
