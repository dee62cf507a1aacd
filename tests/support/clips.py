"""Tiny open_clip models and random data for them, in float64, so that what differs by rounding stays so for many steps."""

import torch

IMAGE, LENGTH, VOCABULARY = 16, 8, 50


def model(kind="CLIP", bias=None, seed=0, nonscalar=False, length=LENGTH):
    import open_clip

    torch.manual_seed(seed)
    vision = open_clip.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=8, image_size=IMAGE)
    text = open_clip.CLIPTextCfg(context_length=length, vocab_size=VOCABULARY, width=16, heads=2, layers=1)
    made = getattr(open_clip, kind)(8, vision, text, init_logit_bias=bias, nonscalar_logit_scale=nonscalar, output_dict=True)
    return made.double()


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 3, IMAGE, IMAGE, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}
