"""Distillation: a student's similarities follow those of a teacher, which are formed again tile by tile and never stored."""

from typing import Any

import torch
from torch import Tensor

from megabatch import operators, validation
from megabatch.arguments import number
from megabatch.losses.clip import ClipLoss, clip_loss
from megabatch.pairwise import part_of_mean
from megabatch.tiles.backends import EAGER, TRITON


def soft_clip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    teacher_image: Tensor,  # (N, E)
    teacher_text: Tensor,  # (N, E)
    teacher_scale: float | Tensor,
    *,
    group: Any = None,
    backend: str = "auto",
) -> Tensor:  # ()
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
        group: the processes that share the batch, a process group or a mesh of one dimension; None for this one alone. Each
            passes its own pairs and gets its share of the loss: the mean over ranks is the loss of the whole batch, and after
            DDP's mean so is every gradient. All of them have to run backward. See docs/ring.md.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    precision = validation.embeddings(image, text, ("image", "text"), same_rows=True)
    names = ("teacher_image", "teacher_text")
    teacher_precision = validation.embeddings(teacher_image, teacher_text, names, same_rows=True)
    validation.same_rows(teacher_image, names[0], image, "image")
    validation.without_gradient((teacher_image, teacher_text), names)
    settled = {validation.backend(backend, each, image.device) for each in (precision, teacher_precision)}
    route = validation.group(group)
    if not route:  # over a group one rank may have none; that all have none is found out together
        validation.at_least_one_pair(image, "image")
    scale, target_scale = number(logit_scale, "logit_scale", image), number(teacher_scale, "teacher_scale", image)
    if isinstance(teacher_scale, Tensor):
        validation.without_gradient([teacher_scale], ["teacher_scale"])
    teacher = teacher_image, teacher_text, target_scale
    how = precision, teacher_precision, TRITON if settled == {TRITON} else EAGER, route
    row, col, share, *_ = operators.apply(operators.soft_cross_entropy, image, text, scale, *teacher, *how)
    return part_of_mean(torch.stack((row, col)), share / 2)


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
