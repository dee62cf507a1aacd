"""The code blocks of README.md and the guides, and what each file's blocks may take as given, in tiny sizes."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import megabatch as mb

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PAIRS, WIDTH = 10, 512


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of its first line in the file


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = FENCE.finditer(text)
    return [Block(m[2], textwrap.dedent(m[3]), text.count("\n", 0, m.start(3)) + 1) for m in found]


def files_with(language: str) -> list[Path]:
    return [path for path in FILES if any(block.language == language for block in blocks(path))]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(48, WIDTH), nn.Linear(24, WIDTH)

    def encode_image(self, image):
        return F.normalize(self.image(image), dim=-1)

    def encode_text(self, text):
        return F.normalize(self.text(text), dim=-1)


def unit(*shape):
    return F.normalize(torch.randn(*shape), dim=-1).requires_grad_()


def given() -> dict[str, object]:
    """Names that a page uses as its reader's own."""
    torch.manual_seed(0)
    clip = Towers()
    log_scale = nn.Parameter(torch.tensor(14.3).log())
    return {
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "F": F,
        "mb": mb,
        "DDP": nn.parallel.DistributedDataParallel,
        "clip": clip,
        "image_tower": clip.encode_image,
        "text_tower": clip.encode_text,
        "query_tower": clip.encode_text,
        "key_tower": clip.encode_text,
        "images": torch.randn(PAIRS, 48),
        "tokens": torch.randn(PAIRS, 24),
        "queries": torch.randn(PAIRS, 24),
        "keys": torch.randn(PAIRS, 24),
        "log_scale": log_scale,
        "optimizer": torch.optim.AdamW([*clip.parameters(), log_scale]),
        "loss_fn": lambda image, text: mb.clip_loss(image, text, log_scale.exp()),
        "loss_of": lambda image, text: mb.clip_loss(image, text, log_scale.exp()),
        "image": unit(PAIRS, WIDTH),
        "text": unit(PAIRS, WIDTH),
        "query": unit(PAIRS, WIDTH),
        "key": unit(PAIRS, WIDTH),
        "z": unit(PAIRS, WIDTH),
        "z1": unit(PAIRS, WIDTH),
        "z2": unit(PAIRS, WIDTH),
        "teacher_image": unit(PAIRS, 8).detach(),
        "teacher_text": unit(PAIRS, 8).detach(),
        "teacher_scale": 20.0,
        "logit_scale": torch.tensor(14.3, requires_grad=True),
        "logit_bias": torch.tensor(-10.0, requires_grad=True),
        "caption_id": torch.arange(PAIRS) // 2,
        "image_id": torch.arange(PAIRS) // 3,
        "concept": torch.arange(PAIRS) // 2,
        "labels": torch.arange(PAIRS) // 2,
        "query_vectors": unit(PAIRS, 4, 8),
        "document_vectors": unit(PAIRS, 6, 8),
        "document_mask": torch.ones(PAIRS, 6, dtype=torch.bool),
        "packed": unit(3 * PAIRS, 8),
        "lengths": torch.full((PAIRS,), 3),
        "candidates": unit(PAIRS, 2, 5, 8),
        "teacher_scores": torch.randn(PAIRS, 2),
        "step": 0,
        "paths": [f"{i}.png" for i in range(PAIRS)],
        "decode": lambda path: torch.zeros(3, 256, 256),
    }
