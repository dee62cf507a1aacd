"""Every loss takes its scale by position and by keyword, under one name in its docstring and its signature."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb

LOSSES = sorted(name for name in mb.__all__ if name.endswith("_loss"))
SCALES = ("scale", "logit_scale")


def unit(*shape, seed):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


X, Y = unit(4, 8, seed=0), unit(4, 8, seed=1)
VECTORS, DOCUMENTS = unit(4, 3, 8, seed=2), unit(4, 5, 8, seed=3)
# The arguments before the scale, those after it by position, and keywords.
ARGUMENTS = {
    "clip_loss": ((X, Y), (), {}),
    "dcl_loss": ((X, Y), (), {}),
    "hcl_loss": ((X, Y), (), {}),
    "info_nce_loss": ((X, Y), (), {}),
    "late_distillation_loss": ((VECTORS, unit(4, 2, 5, 8, seed=4), torch.arange(8.0).view(4, 2)), (), {}),
    "late_interaction_loss": ((VECTORS, DOCUMENTS), (), {}),
    "matryoshka_clip_loss": ((X, Y), (), {"widths": [4, 8]}),
    "nt_xent_loss": ((X, Y), (), {}),
    "siglip_loss": ((X, Y), (-1.0,), {}),
    "soft_clip_loss": ((X, Y), (Y, X, 2.0), {}),
    "sup_con_loss": ((X, torch.tensor([0, 1, 0, 1])), (), {}),
}


def test_every_loss_is_here():
    assert sorted(ARGUMENTS) == LOSSES


@pytest.mark.parametrize("name", LOSSES)
def test_the_scale_is_taken_by_position_and_by_keyword(name):
    loss = getattr(mb, name)
    before, after, options = ARGUMENTS[name]
    parameters = inspect.signature(loss).parameters
    scale = list(parameters)[len(before)]
    assert scale in SCALES
    assert parameters[scale].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    following = list(parameters)[len(before) + 1 :]
    value = torch.tensor(3.0)
    by_position = loss(*before, value, *after, **options)
    by_keyword = loss(*before, **{scale: value}, **dict(zip(following, after, strict=False)), **options)
    assert torch.equal(by_position, by_keyword)
    assert not torch.equal(by_position, loss(*before, 0.5 * value, *after, **options))


@pytest.mark.parametrize("name", LOSSES)
def test_options_are_keywords(name):
    parameters = inspect.signature(getattr(mb, name)).parameters
    before, after, _ = ARGUMENTS[name]
    options = list(parameters.values())[len(before) + 1 + len(after) :]
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
