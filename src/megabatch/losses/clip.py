"""The softmax loss of CLIP: each image finds its text among all texts, each text its image among all images."""

from typing import Literal, overload

from torch import Tensor, nn

from megabatch import validation
from megabatch.arguments import Backend, Group, number
from megabatch.losses.sums import APART, Reduction, check_smoothing, cross_entropy, logsumexp, mean_similarity, pairs, reduced


def clip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    *,
    ids: Tensor | None = None,  # (N,)
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

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        ids: one integer for each pair; pairs with the same id (a caption that occurs twice) are not each other's negatives.
        label_smoothing: the part of the target that is spread evenly over the whole batch, as in `F.cross_entropy`. Not with
            ids.
        reduction: "mean", "sum", or "none" for one value per pair, (N,), the mean of its two directions. Over a group, "sum" and
            "none" are of this rank's pairs; gradients are of the sum over all ranks.
        group: process group, or mesh of one dimension, to share the batch over (default: this process only). Each rank passes
            its own pairs and gets its share of the loss: the mean over ranks is the loss of the whole batch, and after DDP's
            mean so is every gradient. All ranks have to run backward. See docs/ring.md.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    label_smoothing = check_smoothing(label_smoothing, ids=ids)
    run = pairs(image, text, ("image", "text"), ids=ids, group=group, reduction=reduction, backend=backend)
    scale = number(logit_scale, "logit_scale", image)
    row, col, match, share = logsumexp(image, text, scale, run, ids=(ids, ids), diagonal=APART, columns=True)
    losses = [cross_entropy(row, match), cross_entropy(col, match)]
    if label_smoothing > 0:
        means = mean_similarity(image, [(text, None)], scale, run), mean_similarity(text, [(image, None)], scale, run)
        losses = [loss + label_smoothing * (match - mean) for loss, mean in zip(losses, means, strict=True)]
    return reduced(losses, share, reduction)


class ClipLoss(nn.Module):
    """`clip_loss` with the constructor and the call of `open_clip.ClipLoss`.

    `local_loss`, `gather_with_grad` and `cache_labels` choose how open_clip splits and approximates the loss over ranks.
    Here there is one way, whose gradients are exact, and nothing to cache: they are accepted and change nothing.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod must be False: Horovod is not supported, use torch.distributed")
        self.local_loss = local_loss
        self.gather_with_grad = gather_with_grad
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        *,
        output_dict: Literal[True],
    ) -> dict[str, Tensor]: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]: ...

    def forward(
        self,
        image_features: Tensor,  # (N, D)
        text_features: Tensor,  # (N, D)
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or {"contrastive_loss": loss}. A bias cancels in a softmax: it gets a gradient, and that is zero."""
        group = validation.default_group(self.rank, self.world_size)
        if logit_bias is not None:
            validation.number(logit_bias, "logit_bias", image_features)
        loss = clip_loss(image_features, text_features, logit_scale, group=group)
        if isinstance(logit_bias, Tensor):
            loss = loss + 0.0 * logit_bias.nan_to_num(0.0, 0.0, 0.0).to(loss.dtype).sum()
        return {"contrastive_loss": loss} if output_dict else loss
