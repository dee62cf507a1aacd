"""The number of tokens of a tower: dropped patches of images (patch dropout), and other sizes of images and texts.

A step encodes each sample twice, in chunks of any size, on any rank. Both passes must drop the same patches, so patches are not
chosen by the generators of PyTorch. They follow from the seed of the run, the epoch and the index of the sample, as the
augmentation does. A tower gets the kept patches as an input. Without this input, as in an evaluation, it keeps all patches.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.cached.replay import sample_seed
from megabatch.cached.sources import Source, Span
from megabatch.cached.streaming import close_at_the_end
from megabatch_train.data.resident import random_bits

# ----------------------------------------------------------------------------------------------------------------------
# The patches of an image tower. A call can keep a part of them, and it can encode images of another size.
#
# The positions of images of another size are interpolated in the call. So the parameters of a model have the same shapes in all
# stages of a run. Interpolation is a product with a constant matrix, whose gradient is deterministic on every device.

INPUT = "kept_patches"  # argument of image towers: (n, kept) int64, the numbers of the kept patches

# Vision transformers of transformers whose embedding layer returns leading tokens, then all patches, with their positions.
# Models with relative or rotary positions are excluded, because their later layers need the place of each patch.
_LEADING = {"clip_vision_model": 1, "siglip_vision_model": 0, "vit": 1, "vit_msn": 1, "deit": 2, "dinov2": 1}
_LEADING["dinov2_with_registers"] = 1

Size = tuple[int, int]  # height and width


class ImageTokens:
    """The patches of an image tower.

    Args:
        layer: the layer that returns the tokens of an image with their positions, (n, leading + patches, H).
        leading: the number of tokens before the patches, which are always kept.
        size: the size of the images of the model, in pixels.
        patch: the size of a patch, in pixels.
        positions: the module and the name of a table of positions, which this class interpolates (default: the model does so).
    """

    def __init__(
        self, layer: nn.Module, leading: int, size: Any, patch: Any, positions: tuple[nn.Module, str] | None = None
    ) -> None:
        self.size, self.patch = pair_of(size), pair_of(patch)
        self._leading, self._positions = leading, positions
        self._kept: Tensor | None = None
        self._weights: dict[Any, Tensor] = {}
        layer.register_forward_hook(self._select)

    def count(self, size: Size) -> int:
        """Returns the number of patches of an image of a size."""
        rows, columns = self.grid(size)
        return rows * columns

    def grid(self, size: Size) -> Size:
        """Returns the number of rows and columns of the patches of an image of a size."""
        return size[0] // self.patch[0], size[1] // self.patch[1]

    @contextmanager
    def use(self, images: Tensor, kept: Tensor | None) -> Iterator[None]:  # (n, 3, height, width), (n, kept) int64
        """Within the context, the model encodes these images, and keeps only these patches of each image. None keeps all."""
        self._kept, size = kept, pair_of(images.shape[2:])
        # An attribute of the instance takes precedence over a parameter of the same name, which stays registered.
        shadowed = None if size == self.size or self._positions is None else self._positions
        if shadowed is not None:
            module, name = shadowed
            vars(module)[name] = self._interpolate(getattr(module, name), size)
        try:
            yield
        finally:
            self._kept = None
            if shadowed is not None:
                del vars(shadowed[0])[shadowed[1]]

    def _select(self, layer: nn.Module, inputs: Any, tokens: Tensor) -> Tensor | None:  # (n, T, H) -> (n, kept, H)
        if self._kept is None:
            return None
        leading, patches = tokens[:, : self._leading], tokens[:, self._leading :]
        places = self._kept[:, :, None].expand(-1, -1, tokens.shape[2])
        return torch.cat([leading, patches.gather(1, places)], 1)

    def _interpolate(self, table: Tensor, size: Size) -> Tensor:  # (…, leading + patches, H)
        key = size, table.device, table.dtype
        if key not in self._weights:
            patches = torch.eye(self.count(self.size), device=table.device, dtype=table.dtype)
            self._weights[key] = resize_grid(patches, self.grid(self.size), self.grid(size))
        weights = self._weights[key]  # (other patches, patches)
        count = weights.shape[1]
        with torch.autocast(table.device.type, enabled=False):
            return torch.cat([table[..., :-count, :], weights @ table[..., -count:, :]], -2)


def pair_of(size: Any) -> Size:
    """Returns height and width. One number is both."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


@torch.no_grad()
def resize_grid(table: Tensor, before: Size, after: Size) -> Tensor:  # (h · w, H) -> (h' · w', H)
    """Interpolates a row of numbers for each patch, as open_clip does when it loads weights for another image size."""
    grid = table.view(*before, -1).movedim(2, 0)[None]  # (1, H, h, w)
    resized = F.interpolate(grid, after, mode="bicubic", antialias=True, align_corners=False)
    return resized[0].flatten(1).T.contiguous()


@torch.no_grad()
def resize_line(table: Tensor, count: int) -> Tensor:  # (T, H) -> (count, H)
    """Interpolates a row of numbers for each token of a text, as open_clip does."""
    return F.interpolate(table.T[None], count, mode="linear", align_corners=False)[0].T.contiguous()


def tokens_of_open_clip(model: Any) -> ImageTokens | None:
    """Returns the patches of an open_clip model, or None if its image tower has no patches that can be dropped."""
    visual = model.visual
    if hasattr(visual, "patch_dropout") and hasattr(visual, "positional_embedding"):  # open_clip's vision transformer
        positions = (visual, "positional_embedding")
        return ImageTokens(visual.patch_dropout, 1, visual.image_size, visual.patch_size, positions)
    trunk: Any = getattr(visual, "trunk", None)  # a model of timm
    if not (isinstance(getattr(trunk, "patch_drop", None), nn.Identity) and hasattr(trunk, "num_prefix_tokens")):
        return None
    embedding = trunk.patch_embed
    own = None if trunk.dynamic_img_size else (trunk, "pos_embed")
    if own is not None:  # timm does not interpolate them itself
        embedding.strict_img_size = False
    return ImageTokens(trunk.patch_drop, trunk.num_prefix_tokens, embedding.img_size, embedding.patch_size, own)


def take_dropout(visual: Any) -> float:
    """Removes open_clip's own patch dropout, which draws other patches for other chunk sizes, and returns its fraction."""
    dropout = float(getattr(getattr(visual, "patch_dropout", None), "prob", 0.0))
    if dropout:
        visual.patch_dropout = nn.Identity()
    return dropout


def tokens_of_huggingface(model: Any) -> ImageTokens | None:
    """Returns the patches of a transformers model, or None if it has no patches that can be dropped."""
    config = model.config
    layers = [part for name, part in model.named_modules() if name.rpartition(".")[2] == "embeddings"]
    if config.model_type not in _LEADING or len(layers) != 1:
        return None
    leading = _LEADING[config.model_type] + getattr(config, "num_register_tokens", 0)
    return ImageTokens(layers[0], leading, config.image_size, config.patch_size)


# ----------------------------------------------------------------------------------------------------------------------
# Patch dropout (arXiv 2212.00794).

_STREAM = 2  # sides 0 and 1 have the seeds of augmentations, so patches of side s have the seed of 2 + s


def check_dropout(fraction: Any, patches: int, model: str, table: str = "model_options") -> float:
    """Returns the fraction if the model can drop so many of its patches, or else raises an error with the table's name."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ValueError(f"{table}.patch_dropout must be at least 0 and less than 1, got {fraction!r}")
    if fraction and not patches:
        raise ValueError(
            f"{table}.patch_dropout must not be set for {model!r}, because its image tower has no patches that can be "
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


# ----------------------------------------------------------------------------------------------------------------------
# Models for other sizes of images and texts than their files have. Their positions are interpolated as in open_clip.


@dataclass(frozen=True)
class TokenSizes:
    """TokenSizes that replace the sizes in the files of a model."""

    image_size: int | None = None  # side of an image in pixels
    context_length: int | None = None  # number of positions of a text

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "TokenSizes":
        """Returns the sizes among the options of a model."""
        for name in cls.__dataclass_fields__:
            value = options.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"model_options.{name} must be a whole number of at least 1, got {value!r}")
        return cls(*(options.get(name) for name in cls.__dataclass_fields__))

    def split(self, encoders: int) -> "list[TokenSizes]":
        """Returns the sizes of each encoder of a transformers model. An encoder of images comes before an encoder of texts."""
        if encoders == 2:
            return [TokenSizes(image_size=self.image_size), TokenSizes(context_length=self.context_length)]
        return [self]


AS_STORED = TokenSizes()


def check_one_model(sizes: TokenSizes, *, has_images: bool) -> None:
    """Raises an error for sizes that one transformers model for both sides does not support."""
    if not has_images and sizes.image_size is not None:
        raise ValueError(f"model_options.image_size must not be set for a model without images, got {sizes.image_size}")
    for option in TokenSizes.__dataclass_fields__ if has_images else ():
        if (value := getattr(sizes, option)) is not None:
            raise ValueError(
                f"model_options.{option} must not be set for one transformers model of images and texts, such as CLIP, "
                f"which does not support other sizes, got {value}"
            )


def check_image_size(size: int, tokens: ImageTokens | None, name: str = "model_options.image_size") -> None:
    """Raises an error if a side of an image is not a multiple of the side of a patch."""
    if tokens is not None and any(size % side for side in tokens.patch):
        raise ValueError(f"{name} must be a multiple of the size of a patch, {tokens.patch[0]} pixels, got {size}")


def resize_model(model: Any, sizes: TokenSizes, *, keep_weights: bool) -> Any:
    """Returns a transformers model for other sizes of images or texts.

    Args:
        model: a model of images or texts.
        sizes: the sizes. The size that the model does not have must be None.
        keep_weights: whether the new model has the weights of the model, or random weights.
    """
    config, before = copy.deepcopy(model.config), model.state_dict()
    tables: dict[str, Tensor] = {}  # interpolated positions by their names
    if (side := sizes.image_size) is not None:
        if config.model_type not in _LEADING:
            raise ValueError(
                f"model_options.image_size must not be set for a transformers model of the type {config.model_type!r}, "
                f"got {side}; possible are: {', '.join(_LEADING)}"
            )
        patch = pair_of(config.patch_size)
        grid, other_grid = ((h // patch[0], w // patch[1]) for h, w in (pair_of(config.image_size), (side, side)))
        for name in (name for name in before if name.endswith(("position_embeddings", "position_embedding.weight"))):
            table, count = before[name], grid[0] * grid[1]  # (…, leading + count, H)
            resized = resize_grid(table[..., -count:, :].reshape(count, -1), grid, other_grid)
            tables[name] = torch.cat([table[..., :-count, :], resized.view(*table.shape[:-2], *resized.shape)], -2)
        config.image_size = side
    if (length := sizes.context_length) is not None:
        for name, part in model.named_modules():
            is_table = isinstance(part, nn.Embedding) and name.endswith(("position_embeddings", "position_embedding"))
            if is_table and part.num_embeddings == config.max_position_embeddings:
                first = 0 if part.padding_idx is None else part.padding_idx + 1  # RoBERTa counts from the padding id on
                tables[f"{name}.weight"] = torch.cat([part.weight[:first].detach(), resize_line(part.weight[first:], length)])
        if not tables:
            raise ValueError(
                f"model_options.context_length must not be set for a transformers model of the type {config.model_type!r}, "
                f"because it has no table of positions, got {length}; model_options.max_length limits its texts"
            )
        config.max_position_embeddings = len(next(iter(tables.values())))
    resized_model = type(model)(config).to(next(model.parameters()).dtype).train(model.training)
    if keep_weights:
        resized_model.load_state_dict({**before, **tables})
    return resized_model
