"""The tokens of image towers: which patches a training step keeps (patch dropout, arXiv 2212.00794).

A step encodes each sample twice, in chunks of any size, on any rank. Both passes must drop the same patches, so patches are not
chosen by the generators of PyTorch. They follow from the seed of the run, the epoch and the index of the sample, as the
augmentation does. A tower gets the kept patches as an input. Without this input, as in an evaluation, it keeps all patches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.cached.replay import sample_seed
from megabatch.cached.sources import Source, Span
from megabatch.cached.streaming import close_at_the_end
from megabatch_train.data.resident import random_bits

INPUT = "kept_patches"  # argument of image towers: (n, kept) int64, the numbers of the kept patches
_STREAM = 2  # sides 0 and 1 have the seeds of augmentations, so patches of side s have the seed of 2 + s

# Vision transformers of transformers whose embedding layer returns leading tokens, then all patches, with their positions.
# Models with relative or rotary positions are excluded, because their later layers need the place of each patch.
_LEADING = {"clip_vision_model": 1, "siglip_vision_model": 0, "vit": 1, "vit_msn": 1, "deit": 2, "dinov2": 1}
_LEADING["dinov2_with_registers"] = 1


class PatchSelection:
    """Removes patches from the output of a layer, in calls inside of `keep`.

    Args:
        layer: the layer that returns the tokens of an image with their positions, (n, leading + patches, H).
        leading: the number of tokens before the patches, which are always kept.
        size: height and width of a patch in pixels.
    """

    def __init__(self, layer: nn.Module, leading: int, size: Any) -> None:
        self._size: tuple[int, int] = (size, size) if isinstance(size, int) else tuple(size)
        self._leading = leading
        self._kept: Tensor | None = None
        layer.register_forward_hook(self._select)

    def count(self, size: tuple[int, int]) -> int:
        """Returns the number of patches of an image with this height and width."""
        return (size[0] // self._size[0]) * (size[1] // self._size[1])

    @contextmanager
    def keep(self, kept: Tensor | None) -> Iterator[None]:  # (n, kept) int64
        """Keeps only these patches of each image within the context; None keeps all."""
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None

    def _select(self, layer: nn.Module, inputs: Any, tokens: Tensor) -> Tensor | None:  # (n, T, H) -> (n, kept, H)
        if self._kept is None:
            return None
        leading, patches = tokens[:, : self._leading], tokens[:, self._leading :]
        places = self._kept[:, :, None].expand(-1, -1, tokens.shape[2])
        return torch.cat([leading, patches.gather(1, places)], 1)


def select_open_clip(model: Any) -> PatchSelection | None:
    """Returns the patch selection of an open_clip model, or None if its image tower has no patches that can be dropped."""
    visual = model.visual
    if hasattr(visual, "patch_dropout") and hasattr(visual, "positional_embedding"):  # open_clip's vision transformer
        return PatchSelection(visual.patch_dropout, 1, visual.patch_size)
    trunk: Any = getattr(visual, "trunk", None)  # a model of timm
    if isinstance(getattr(trunk, "patch_drop", None), nn.Identity) and hasattr(trunk, "num_prefix_tokens"):
        return PatchSelection(trunk.patch_drop, trunk.num_prefix_tokens, trunk.patch_embed.patch_size)
    return None


def take_dropout(visual: Any) -> float:
    """Removes open_clip's own patch dropout, which draws other patches for other chunk sizes, and returns its fraction."""
    dropout = float(getattr(getattr(visual, "patch_dropout", None), "prob", 0.0))
    if dropout:
        visual.patch_dropout = nn.Identity()
    return dropout


def select_huggingface(model: Any) -> PatchSelection | None:
    """Returns the patch selection of a transformers model, or None if it has no patches that can be dropped."""
    config = model.config
    layers = [part for name, part in model.named_modules() if name.rpartition(".")[2] == "embeddings"]
    if config.model_type not in _LEADING or len(layers) != 1:
        return None
    return PatchSelection(layers[0], _LEADING[config.model_type] + getattr(config, "num_register_tokens", 0), config.patch_size)


def check_dropout(fraction: Any, patches: int, model: str) -> float:
    """Returns the fraction if the model can drop so many of its patches, or else raises an error."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ValueError(f"model_options.patch_dropout must be at least 0 and less than 1, got {fraction!r}")
    if fraction and not patches:
        raise ValueError(
            f"model_options.patch_dropout must be left out for {model!r}, because its image tower has no patches that can be "
            f"dropped, got {fraction}; vision transformers of open_clip and transformers have such patches"
        )
    return float(fraction)


def count_kept(patches: int, dropout: float) -> int:
    """Returns the number of kept patches, as open_clip does: the rest is dropped, but one patch always stays."""
    return max(1, int(patches * (1 - dropout)))


def drop_patches(
    source: Source, patches: int, dropout: float, indices: Sequence[int], *, seed: int, epoch: int, side: int
) -> Source:
    """Returns the source of images with the kept patches of each image, or the source itself if all are kept.

    Args:
        source: the images, as keyword arguments of the tower.
        patches: the number of patches of an image; 0 for a tower whose patches cannot be dropped.
        dropout: the fraction of the patches that is dropped.
        indices: the index of each sample in the dataset.
        seed: the seed of the run.
        epoch: the number of the epoch, because each epoch drops other patches.
        side: the side of the images.
    """
    if not patches or not dropout:
        return source
    return KeptPatches(
        source, indices, patches, count_kept(patches, dropout), sample_seed(sample_seed(seed, epoch), _STREAM + side)
    )


class KeptPatches(Source):
    """The images of another source, with the numbers of the patches that each image keeps (`drop_patches`)."""

    def __init__(self, source: Source, indices: Sequence[int], patches: int, kept: int, seed: int) -> None:
        self._source, self._indices = source, torch.as_tensor(indices, dtype=torch.int64)
        self._patches, self._kept, self._seed = patches, kept, seed
        self.reuses_memory = source.reuses_memory

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._source)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Yields the inputs with the kept patches of each image in ascending order."""
        indices = self._indices if device is None else self._indices.to(device)
        chunks = self._source.chunks(spans, device)
        with close_at_the_end(chunks):
            for (start, stop), inputs in zip(spans, chunks, strict=True):
                # Numbers of 63 bits have no ties, so the order is the same on every device and for every number of rows.
                order = random_bits(self._seed, indices[start:stop], self._patches).argsort(1)
                yield {**inputs, INPUT: order[:, : self._kept].sort(1).values}

    def placeholder(self, device: torch.device | None) -> Any:
        """Returns the dummy sample of the source with its first patches."""
        inputs = self._source.placeholder(device)
        return None if inputs is None else {**inputs, INPUT: torch.arange(self._kept, device=device)[None]}
