"""Zero-shot classification: an image is assigned to the class whose text embedding is most similar."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.evaluation.ranks import ranks_of_best
from megabatch.world import World

TEMPLATES = (
    "{}",
    "a photo of a {}.",
    "a drawing of a {}.",
    "a picture of the {}.",
)  # general prompts; many datasets have their own
TOPS = (1, 5)


@torch.no_grad()
def classifier(
    encode: Callable[[list[str]], Tensor], names: Sequence[str], templates: Sequence[str] = TEMPLATES, *, at_once: int = 64
) -> Tensor:  # (C, D)
    """One unit vector per class: the mean over templates of the text embeddings of its name.

    Args:
        encode: texts to embeddings, (n,) -> (n, D).
        names: of the classes.
        templates: texts with "{}" where the name goes.
        at_once: classes whose texts are encoded together.
    """
    if not names or not templates:
        raise ValueError(f"names and templates must not be empty, got {len(names)} and {len(templates)}")
    for template in templates:
        try:
            has_name = template.format("name") != template
        except (ValueError, LookupError, AttributeError):  # {name}, {0} {1}, {.x}, or a brace alone
            has_name = False
        if not has_name:
            raise ValueError(f'templates must have a "{{}}" where the name goes, and no other braces, got {template!r}')
    found = []
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        texts = encode([template.format(name) for name in part for template in templates])  # (n·templates, D)
        found.append(F.normalize(F.normalize(texts, dim=-1).view(len(part), len(templates), -1).mean(1), dim=-1))
    return torch.cat(found)


def zero_shot(image: Tensor, labels: Tensor, classes: Tensor, *, name: str = "imagenet", group: Any = None) -> dict[str, float]:
    """Top-1 and top-5 accuracy, as `{name}-zeroshot-val-top1`.

    Args:
        image: (N, D) embeddings.
        labels: (N,) int64 class numbers.
        classes: (C, D) from `classifier`, the same on all ranks.
        name: of the dataset.
        group: process group the images are sharded over (default: no sharding). All ranks get the same result.
    """
    rows = torch.arange(len(image), device=image.device)
    ranks = World.of(group, image.device).gather_rows(ranks_of_best(image, classes.to(image), rows, labels))
    if not len(ranks):
        raise ValueError("image must have at least one row, got none")
    return {f"{name}-zeroshot-val-top{k}": (ranks < k).double().mean().item() for k in TOPS}
