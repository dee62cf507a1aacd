"""open_clip 4: its tasks with our losses, and the cached step for models of audio and of NaFlex' patches."""

import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch

import clips
import megabatch as mb
from megabatch.integrations import open_clip as host

open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')


@pytest.fixture
def tasks(monkeypatch):
    """The stand-in as the module `open_clip.task`, and a sigmoid loss that takes `chunk_size`."""
    module = types.ModuleType("open_clip.task")
    module.__spec__ = importlib.machinery.ModuleSpec("open_clip.task", None)
    source = Path(__file__).with_name("tasks_of_open_clip_4.py")
    exec(compile(source.read_text(), str(source), "exec"), vars(module))

    class SigLipLoss(open_clip.loss.SigLipLoss):
        def __init__(self, cache_labels=False, rank=0, world_size=1, dist_impl=None, chunk_size=None):
            super().__init__(cache_labels, rank, world_size, dist_impl)

    monkeypatch.setitem(sys.modules, "open_clip.task", module)
    for place in (open_clip.loss, open_clip.factory):
        monkeypatch.setattr(place, "SigLipLoss", SigLipLoss)
    return module


def batch(model, rows):
    if isinstance(model, open_clip.CLIP):
        return dict(zip(("image", "text"), clips.batch(rows), strict=True))
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(rows, 5, 6, generator=generator, dtype=torch.float64)
    valid = torch.arange(5) < torch.randint(1, 6, (rows, 1), generator=generator)
    texts = torch.randint(0, 20, (rows, 4), generator=generator)
    return {model.first: {"patches": patches, "patch_valid": valid, "seq_len": 5}, "text": texts}


def test_tasks_take_our_losses_and_give_them_back(tasks):
    theirs = open_clip.loss.ClipLoss, open_clip.loss.SigLipLoss, open_clip.factory.ClipLoss
    with host.install() as installed:
        assert "open_clip.create_loss and open_clip's tasks now build megabatch's" in str(installed)
        clip, siglip = tasks.CLIPTask(clips.model()), tasks.SigLIPTask(clips.model(bias=-3.0), chunk_size=4)
        assert (type(clip.loss), type(siglip.loss)) == (mb.ClipLoss, mb.SigLipLoss)
        assert siglip.loss.chunk_size == 4
    assert theirs == (open_clip.loss.ClipLoss, open_clip.loss.SigLipLoss, open_clip.factory.ClipLoss)
    for ours, kind, bias in ((clip, tasks.CLIPTask, None), (siglip, tasks.SigLIPTask, -3.0)):
        wanted = kind(clips.model(bias=bias))
        assert type(wanted.loss) in theirs
        for task in (ours, wanted):
            task(batch(task.trainable_module, 6))["loss"].backward()
        found, expected = (clips.gradients(task.trainable_module) for task in (ours, wanted))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("parts", [2, 3])
def test_its_accumulation_is_refused(tasks, parts):
    with host.install():
        task = tasks.SigLIPTask(clips.model(bias=-3.0))
    everything = batch(task.trainable_module, 6)
    batches = [{key: value.chunk(parts)[part] for key, value in everything.items()} for part in range(parts)]
    with torch.no_grad():
        cached = [task.trainable_module(**part) for part in batches]
    output = task.trainable_module(**batches[0])
    numbers = {name: output.pop(name) for name in ("logit_scale", "logit_bias")}
    inputs = {name: torch.cat([fresh, *(one[name] for one in cached[1:])]) for name, fresh in output.items()}
    with pytest.raises(ValueError, match=rf"--accum-freq must be 1 .*got features of {parts} parts"):
        task.compute_accum_loss(inputs, numbers, batches)


@pytest.mark.parametrize(("first", "bias"), [("audio", None), ("audio", -3.0), ("image", None)])
def test_the_cached_step_of_audio_and_of_patches(tasks, first, bias):
    kind = tasks.SigLIPTask if bias is not None else tasks.CLAPTask
    with host.install():
        task = kind(tasks.TwoSides(first, bias))
    task.first = first
    given = batch(task.trainable_module, 7)
    wanted = task(given)["loss"]
    wanted.backward()
    expected = clips.gradients(task)
    task.zero_grad()
    found = host.cached_backward(task.trainable_module, given[first], given["text"], task.loss, chunk_size=3)
    torch.testing.assert_close(found["loss"], wanted.detach())
    torch.testing.assert_close(clips.gradients(task), expected, rtol=1e-9, atol=1e-11)
