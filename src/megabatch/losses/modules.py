"""The losses as modules that have the constructors and call signatures of open_clip."""

from typing import Any, Literal, overload

from torch import Tensor, distributed, nn

from megabatch import checks
from megabatch.losses.clip import clip_loss, siglip_loss, soft_clip_loss

_DIST_IMPLS = ("bidir", "shift", "reduce", "gather")


class ClipLoss(nn.Module):
    """`clip_loss` with the constructor and the call signature of `open_clip.ClipLoss`.

    In open_clip, `local_loss`, `gather_with_grad` and `cache_labels` choose how ranks split and approximate the loss. Here they
    are accepted but have no effect, because the gradients are always exact and there are no labels to cache.
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
            raise ValueError("use_horovod must be False, because Horovod is not supported; use torch.distributed")
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
        """Returns the loss, or {"contrastive_loss": loss}. A bias cancels in a softmax, so its gradient is zero."""
        group = _default_group(self.rank, self.world_size)
        if logit_bias is not None:
            checks.number(logit_bias, "logit_bias", image_features)
        loss = clip_loss(image_features, text_features, logit_scale, group=group)
        if isinstance(logit_bias, Tensor):
            loss = loss + 0.0 * logit_bias.nan_to_num(0.0, 0.0, 0.0).to(loss.dtype).sum()
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """`siglip_loss` with the constructor and the call signature of `open_clip.SigLipLoss`.

    In open_clip, `dist_impl` chooses how texts move between ranks, and `chunk_size` (open_clip 4) chooses how many texts are
    compared at once. open_clip does not use `cache_labels`. All three are accepted but have no effect.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        if dist_impl is not None and dist_impl not in _DIST_IMPLS:
            names = ", ".join(map(repr, _DIST_IMPLS))
            raise ValueError(f"dist_impl must be None or one of {names}, got {dist_impl!r}")
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl
        self.chunk_size = chunk_size

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
        """Returns the loss, or {"contrastive_loss": loss}."""
        bias = 0.0 if logit_bias is None else logit_bias
        group = _default_group(self.rank, self.world_size)
        loss = siglip_loss(image_features, text_features, logit_scale, bias, group=group)
        return {"contrastive_loss": loss} if output_dict else loss


class DistillClipLoss(ClipLoss):
    """`clip_loss` and `soft_clip_loss` with the constructor and the call signature of `open_clip.DistillClipLoss`."""

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,  # (N, D)
        text_features: Tensor,  # (N, D)
        logit_scale: float | Tensor,
        dist_image_features: Tensor,  # (N, E)
        dist_text_features: Tensor,  # (N, E)
        dist_logit_scale: float | Tensor,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Returns the two losses, or {"contrastive_loss": …, "distill_loss": …}. The teacher is detached."""
        group = _default_group(self.rank, self.world_size)
        contrastive = clip_loss(image_features, text_features, logit_scale, group=group)
        distill = soft_clip_loss(
            image_features,
            text_features,
            logit_scale,
            dist_image_features.detach(),
            dist_text_features.detach(),
            dist_logit_scale.detach() if isinstance(dist_logit_scale, Tensor) else dist_logit_scale,
            group=group,
        )
        return {"contrastive_loss": contrastive, "distill_loss": distill} if output_dict else (contrastive, distill)


def _default_group(rank: int, world_size: int) -> Any:
    """Returns the process group for the `rank` and `world_size` of a constructor."""
    if world_size == 1:
        return None
    if not distributed.is_initialized():
        raise ValueError(
            f"world_size must be 1 unless torch.distributed has been initialized, got {world_size}; call init_process_group"
        )
    if (rank, world_size) != (distributed.get_rank(), distributed.get_world_size()):
        raise ValueError(
            f"rank and world_size must match the default process group, {distributed.get_rank()} and "
            f"{distributed.get_world_size()}, got {rank} and {world_size}"
        )
    return distributed.group.WORLD
