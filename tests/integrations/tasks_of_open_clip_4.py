"""A stand-in for the parts of open_clip 4 that the adapter meets.

Tasks take their loss from `open_clip.loss` when they are built; models encode audio, or NaFlex' patches.
"""

import torch
import torch.nn.functional as F
from torch import nn


class CLIPTask(nn.Module):
    """A model with its loss."""

    first, loss_name = "image", "ClipLoss"

    def __init__(self, model, *, loss=None, **options):
        super().__init__()
        import open_clip.loss

        self.trainable_module = model
        self.loss = getattr(open_clip.loss, self.loss_name)(**options) if loss is None else loss

    def inputs_of_the_loss(self, output):
        return {{f"{self.first}_features": "image_features"}.get(key, key): value for key, value in output.items()}

    def forward(self, batch):
        losses = self.loss(**self.inputs_of_the_loss(self.trainable_module(**batch)), output_dict=True)
        return losses | {"loss": sum(losses.values())}

    def compute_accum_loss(self, inputs, inputs_no_accum, accum_batches):
        return self.loss(**self.inputs_of_the_loss(inputs), **inputs_no_accum, output_dict=True)


class SigLIPTask(CLIPTask):
    """The same with a sigmoid loss."""

    loss_name = "SigLipLoss"


class CLAPTask(CLIPTask):
    """Audio and texts."""

    first = "audio"


class TwoSides(nn.Module):
    """Audio, or NaFlex' patches, as a dict, and texts."""

    def __init__(self, first, bias=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.words = first, nn.Linear(6, 8).double(), nn.Embedding(20, 8).double()
        self.logit_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias, dtype=torch.float64))
        setattr(self, f"encode_{first}", self.encode)

    def encode(self, inputs):
        weights = inputs["patch_valid"][..., None].double()
        assert inputs["seq_len"] == inputs["patches"].shape[1]
        return F.normalize((self.inner(inputs["patches"]) * weights).sum(1), dim=-1)

    def forward(self, text=None, **inputs):
        found = {
            f"{self.first}_features": self.encode(inputs[self.first]) if self.first in inputs else None,
            "text_features": None if text is None else F.normalize(self.words(text).mean(1), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }
        return found if self.logit_bias is None else found | {"logit_bias": self.logit_bias}
