"""Distillation: a student's similarities follow a teacher's, which are computed again tile by tile and never stored."""

from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Group, Reduction
from megabatch.losses.formulas import reduce_losses
from megabatch.primitives import describe_loss, execution, number, pairs, soft_cross_entropy


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
    """The symmetric cross-entropy of CLIP with a teacher's softmax as soft targets, without either matrix of logits.

    Same value and gradients as

        logits = logit_scale * image @ text.T
        targets = teacher_scale * teacher_image @ teacher_text.T
        rows = F.cross_entropy(logits, targets.softmax(1))
        columns = F.cross_entropy(logits.T, targets.T.softmax(1))
        return (rows + columns) / 2

    Never below the entropy of the targets, differentiable once, float32 (float64 for float64 inputs). The teacher gets no
    gradient. On a GPU, library products form both similarities in memory, tile by tile, and kernels read them.

    Example:
        loss = mb.soft_clip_loss(image, text, log_scale.exp(), teacher_image, teacher_text, 100.0)

    Args:
        image: (N, D) embeddings, usually of unit length.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        teacher_image: (N, E) the teacher's embeddings of the same images, of any width and dtype.
        teacher_text: (N, E) the teacher's embeddings of the same texts.
        teacher_scale: the teacher's inverse temperature.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
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
