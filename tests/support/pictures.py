"""Images with captions, and tiny models with patches in float64; importable by processes of their own."""

import dataclasses
import json
import os
import signal
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

import runs
from megabatch.world import World
from megabatch_train import towers
from megabatch_train.data.dataset import Dataset
from megabatch_train.data.media.images import TrainingImages
from megabatch_train.trainer.loop import Trainer

SIZE = 24  # pixels of an image
PATCH = 4  # pixels, so an image has 36 patches
PATCHES = (SIZE // PATCH) ** 2
COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
COMMON |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {"image_size": SIZE, "patch_size": PATCH}
BERT = {"model_type": "bert", **COMMON, "vocab_size": 99, "max_position_embeddings": 12}
VISION = {
    "clip": {"model_type": "clip_vision_model", **COMMON, **IMAGES},
    "siglip": {"model_type": "siglip_vision_model", **COMMON, **IMAGES},
    "vit": {"model_type": "vit", **COMMON, **IMAGES},
    "deit": {"model_type": "deit", **COMMON, **IMAGES},
    "dinov2": {"model_type": "dinov2", **COMMON, **IMAGES},
    "registers": {"model_type": "dinov2_with_registers", **COMMON, **IMAGES, "num_register_tokens": 3},
}
OPEN_CLIP = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": SIZE, "patch_size": PATCH, "width": 16, "layers": 2, "head_width": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "layers": 2, "heads": 2},
}
TIMM = {
    **OPEN_CLIP,
    "vision_cfg": {
        "timm_model_name": "test_vit",
        "timm_model_pretrained": False,
        "timm_pool": "",
        "timm_proj": "linear",
        "image_size": 160,
    },
}
# Unlike the model above, this one does not interpolate positions itself.
FIXED_TIMM = {**TIMM, "vision_cfg": {**TIMM["vision_cfg"], "timm_model_name": "vit_tiny_patch16_224", "image_size": 224}}


class Pictures(Dataset):
    """Noise, each with a caption of its own."""

    def __init__(self, samples=10, killed_at=0):
        super().__init__()
        self.samples, self.reads, self.killed_at = samples, 0, killed_at

    def __len__(self):
        return self.samples

    def read(self, index, side):
        if side == 1:
            return f"picture {index}"
        self.reads += 1
        if self.reads == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randint(0, 256, (3, 30, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))

    def name(self, index):
        return f"picture {index}"


def spec(folder, model):
    """The name of a model: a vision transformer of `VISION` with a BERT, or a config of open_clip."""
    folder = Path(folder)
    if isinstance(model, dict):
        (folder / "model.json").write_text(json.dumps(model))
        return f"open_clip:{folder / 'model.json'}"
    for name, config in (("images", VISION[model]), ("texts", BERT)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return f"hf-config:{folder / 'images'}+{folder / 'texts'}"


class Float64Images(TrainingImages):
    """Random crops in float64."""

    def normalize(self, pixels):
        return {key: value.double() for key, value in super().normalize(pixels).items()}


def pair(name, dtype=torch.float64, *, crops=False, **options):
    """The towers of a model, with inputs of this dtype. `crops` takes random crops, in float64."""
    torch.manual_seed(3)
    loaded = towers.load(name, **options)
    for module in loaded.modules:
        module.to(dtype)

    def converted(tower):
        def collate(samples):
            inputs = tower.collate(samples)
            return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}

        images = tower.training_images if crops else None
        images = (
            None if images is None else Float64Images(*(getattr(images, field.name) for field in dataclasses.fields(images)))
        )
        return dataclasses.replace(tower, collate=collate, training_images=images)

    return dataclasses.replace(loaded, first=converted(loaded.first), second=converted(loaded.second))


def trainer(folder, name, changes, world=None, killed_at=0, **options):
    """A run with these settings. `options` are those of the model."""
    settings = {"batch_size": 6, "chunk_size": 4, "steps": 0 if "stage" in changes else 5, **changes}
    data = Pictures(killed_at=killed_at)
    return Trainer(runs.config(**settings), pair(name, **options), data, Path(folder), world=world)


def train(folder, name, changes, options):
    """A whole run in a process of its own."""
    torch.set_num_threads(1)
    trainer(folder, name, changes, **options).fit()


@contextmanager
def exact_muon():
    """Muon in float64. Its own bfloat16 amplifies rounding errors, so other numbers of ranks differ by percents."""
    from timm.optim import muon

    before = muon.zeropower_via_newtonschulz
    muon.zeropower_via_newtonschulz = partial(before, dtype=torch.float64)
    try:
        yield
    finally:
        muon.zeropower_via_newtonschulz = before


def on_rank(group, rank, folder, name, changes, options):
    """A whole run as one rank of a group; ends with what it has learned."""
    made = trainer(folder, name, changes, World(torch.device("cpu"), group), **options)
    with exact_muon() if made.config.optimizer.name == "muon" else nullcontext():
        made.fit()
    return runs.weights(made)
