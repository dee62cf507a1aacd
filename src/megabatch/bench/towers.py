"""Towers and images for benchmarks of a step: CLIP's sizes with random weights, and synthetic images that need no storage.

The towers are `transformers`' if it is installed, or the same sizes in plain PyTorch; the record says which.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb

VOCABULARY, CONTEXT = 49408, 77


@dataclass(frozen=True)
class Size:
    """A CLIP model: (width, layers, heads) of both towers."""

    pixels: int
    patch: int
    vision: tuple[int, int, int]
    text: tuple[int, int, int]
    embedding: int
    chunk: int  # samples encoded at once: a few GiB of activations


SIZES = {
    "ViT-B/32": Size(224, 32, (768, 12, 12), (512, 12, 8), 512, 1024),
    "ViT-B/16": Size(224, 16, (768, 12, 12), (512, 12, 8), 512, 512),
    "ViT-L/14": Size(224, 14, (1024, 24, 16), (768, 12, 12), 768, 256),
    "tiny": Size(32, 8, (64, 2, 2), (32, 2, 2), 32, 16),
}


class PlainTower(nn.Module):
    """A pre-norm transformer over patches or tokens, mean over positions, projection, unit length."""

    def __init__(self, size: Size, *, image: bool) -> None:
        super().__init__()
        width, layers, heads = size.vision if image else size.text
        positions = (size.pixels // size.patch) ** 2 if image else CONTEXT
        self.embed: nn.Module = nn.Conv2d(3, width, size.patch, size.patch) if image else nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(positions, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.project = nn.Linear(width, size.embedding, bias=False)
        self.image = image

    def forward(self, x: Tensor) -> Tensor:
        """(n, D)."""
        h = self.embed(x).flatten(2).transpose(1, 2) if self.image else self.embed(x)
        return F.normalize(self.project(self.blocks(h + self.position).mean(1)), dim=1)


class TransformersTower(nn.Module):
    """One half of a `transformers` CLIPModel."""

    def __init__(self, encoder: nn.Module, project: nn.Module) -> None:
        super().__init__()
        self.encoder, self.project = encoder, project

    def forward(self, x: Tensor) -> Tensor:
        """(n, D)."""
        return F.normalize(self.project(self.encoder(x).pooler_output), dim=1)


def towers(size: Size, device: str) -> tuple[nn.Module, nn.Module, str]:
    """(image tower, text tower, name of the library that built them)."""
    torch.manual_seed(0)
    with torch.device(device):  # drawing random weights is much faster on the GPU
        if importlib.util.find_spec("transformers") is None or size is SIZES["tiny"]:
            return PlainTower(size, image=True), PlainTower(size, image=False), "plain PyTorch"
        return *_transformers_towers(size), "transformers"


def _transformers_towers(size: Size) -> tuple[nn.Module, nn.Module]:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    def config(kind: Any, shape: tuple[int, int, int], **more: Any) -> dict[str, Any]:
        width, layers, heads = shape
        made = kind(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads, **more)
        return made.to_dict()  # type: ignore[no-any-return]

    model = CLIPModel(
        CLIPConfig(
            text_config=config(CLIPTextConfig, size.text, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT),
            vision_config=config(CLIPVisionConfig, size.vision, image_size=size.pixels, patch_size=size.patch),
            projection_dim=size.embedding,
        )
    )
    image = TransformersTower(model.vision_model, model.visual_projection)
    return image, TransformersTower(model.text_model, model.text_projection)


class SyntheticImages(mb.Source):
    """Images computed on the device from their index: a batch of any size needs no storage."""

    block = 64  # images made together; a span that starts inside a block makes the whole block

    def __init__(self, rows: int, size: Size, device: str) -> None:
        self.rows, self.shape, self.device = rows, (3, size.pixels, size.pixels), device

    def __len__(self) -> int:
        """Images."""
        return self.rows

    def chunks(self, spans: Sequence[tuple[int, int]], device: torch.device | None) -> Iterator[Tensor]:
        """(n, 3, pixels, pixels), the same for the same span."""
        for start, stop in spans:
            first = start // self.block
            parts = [self._block(i) for i in range(first, (stop - 1) // self.block + 1)]
            yield torch.cat(parts)[start - first * self.block : stop - first * self.block]

    def _block(self, i: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(i)
        return torch.randn(self.block, *self.shape, generator=generator, device=self.device)

    def all(self) -> Tensor:
        """The whole batch as one tensor, for a plain step."""
        whole = torch.empty(self.rows, *self.shape, device=self.device)
        for start in range(0, self.rows, self.block):
            whole[start : start + self.block] = self._block(start // self.block)[: self.rows - start]
        return whole


def tokens(rows: int, device: str) -> Tensor:  # (rows, CONTEXT)
    """Random words; the last is the largest id, which CLIP takes for the end of the text."""
    generator = torch.Generator(device).manual_seed(1)
    made = torch.randint(1, VOCABULARY - 2, (rows, CONTEXT), generator=generator, device=device)
    made[:, -1] = VOCABULARY - 1
    return made
