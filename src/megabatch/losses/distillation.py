"""Distillation: a student's similarities follow those of a teacher, which are formed again tile by tile and never stored."""

from torch import Tensor

from megabatch import validation
from megabatch.arguments import Backend, Group, execution, number
from megabatch.losses.clip import ClipLoss, clip_loss
from megabatch.losses.sums import Reduction, pairs, reduced, soft_cross_entropy


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
    """The symmetric cross-entropy of CLIP with soft targets, those of a teacher, and without either matrix of logits.

    Same value and gradients as

        logits = logit_scale * image @ text.T
        targets = teacher_scale * teacher_image @ teacher_text.T
        rows = F.cross_entropy(logits, targets.softmax(1))
        columns = F.cross_entropy(logits.T, targets.T.softmax(1))
        return (rows + columns) / 2

    Never below the entropy of the targets, differentiable once, float32 (float64 for float64 inputs). The teacher gets no
    gradient. On a GPU kernels finish the tiles that libraries form: none forms two similarities at once.

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        teacher_image: (N, E) the teacher's embeddings of the same images, of any width and dtype.
        teacher_text: (N, E) the teacher's embeddings of the same texts.
        teacher_scale: the teacher's inverse temperature.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: process group to share the batch over, as in `clip_loss`.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    run = pairs(image, text, ("image", "text"), group=group, reduction=reduction, backend=backend)
    names = ("teacher_image", "teacher_text")
    teacher_run = execution(teacher_image, teacher_text, names, same_rows=True, backend=backend)
    validation.same_rows(teacher_image, names[0], image, "image")
    validation.without_gradient((teacher_image, teacher_text), names)
    scale, target_scale = number(logit_scale, "logit_scale", image), number(teacher_scale, "teacher_scale", image)
    if isinstance(teacher_scale, Tensor):
        validation.without_gradient([teacher_scale], ["teacher_scale"])
    teacher = teacher_image, teacher_text, target_scale
    row, col, share = soft_cross_entropy((image, text, scale), teacher, (run, teacher_run))
    return reduced((row, col), share, reduction)


class DistillClipLoss(ClipLoss):
    """`clip_loss` and `soft_clip_loss` with the constructor and the call of `open_clip.DistillClipLoss`."""

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
        """The two losses, or {"contrastive_loss": …, "distill_loss": …}. What has to be frozen, the teacher, is detached."""
        group = validation.default_group(self.rank, self.world_size)
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
