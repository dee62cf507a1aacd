"""Patch dropout: which patches stay, that all passes agree on them, and what a tower computes without the others."""

import copy

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
import pictures
from megabatch_train import towers
from megabatch_train.towers import tokens, tower
from megabatch_train.towers.open_clip import Sides
from steps import assert_same, gradients

MODELS = {**{name: name for name in pictures.VISION}, "open_clip": pictures.OPEN_CLIP, "timm": pictures.TIMM}


@pytest.fixture
def model(request, tmp_path):
    pytest.importorskip("transformers")
    chosen = MODELS[request.param]
    if isinstance(chosen, dict):
        pytest.importorskip("open_clip")
        if "timm_model_name" in chosen["vision_cfg"]:
            pytest.importorskip("timm")
    return pictures.pair(pictures.spec(tmp_path, chosen))


def images_of(pair, indices, dropout, *, seed=0, epoch=0):
    source = pictures.Pictures().source(indices, 0, pair.first, augment=False)
    return tokens.drop_patches(source, pair.first.patches, dropout, indices, seed=seed, epoch=epoch, side=0)


def kept_of(source, *spans):
    return torch.cat([inputs[tokens.INPUT] for inputs in source.chunks(list(spans), None)])


def test_kept_patches_follow_from_seed_epoch_and_sample(tmp_path):
    pytest.importorskip("transformers")
    pair = pictures.pair(pictures.spec(tmp_path, "vit"))
    assert pair.first.patches == pictures.PATCHES
    indices = [3, 8, 1, 0, 9]
    whole = kept_of(images_of(pair, indices, 0.75), (0, 5))
    assert whole.shape == (5, pictures.PATCHES // 4)
    assert torch.equal(whole, whole.sort(1).values)
    assert all(len(set(row)) == len(row) and 0 <= min(row) <= max(row) < pictures.PATCHES for row in whole.tolist())
    assert torch.equal(kept_of(images_of(pair, indices, 0.75), (0, 2), (2, 3), (3, 5)), whole)  # other chunks
    assert torch.equal(kept_of(images_of(pair, [1, 9, 3], 0.75), (0, 3)), whole[[2, 4, 0]])  # another rank
    others = [images_of(pair, indices, 0.75, seed=1), images_of(pair, indices, 0.75, epoch=1)]
    assert not any(torch.equal(kept_of(other, (0, 5)), whole) for other in others)
    # With less dropout, the same patches stay, and more of them.
    half = kept_of(images_of(pair, indices, 0.5), (0, 5))
    assert all(set(few) < set(many) for few, many in zip(whole.tolist(), half.tolist(), strict=True))
    assert kept_of(images_of(pair, indices, 0.99), (0, 5)).shape == (5, 1)
    assert not isinstance(images_of(pair, indices, 0.0), tokens.KeptPatches)


def test_each_patch_is_kept_equally_often():
    kept = tokens.random_bits(7, torch.arange(4000), 9).argsort(1)[:, :3]
    counts = torch.bincount(kept.flatten(), minlength=9)
    assert (counts - 4000 / 3).abs().max() < 5 * (4000 * 2 / 9) ** 0.5  # five standard deviations


def tokens_by_hand(pair, model, inputs, kept):
    """The embeddings of a tower that gets its tokens one image after another."""
    pixels = next(iter(inputs.values()))
    module = pair.first.module
    rows = []
    for image, places in zip(pixels, kept.tolist(), strict=True):
        if isinstance(module, Sides):
            visual = module.model.visual
            trunk = getattr(visual, "trunk", None)
            embedded = visual._embeds(image[None]) if trunk is None else trunk._pos_embed(trunk.patch_embed(image[None]))
            leading = embedded.shape[1] - pair.first.patches
            chosen = embedded[:, [*range(leading), *(leading + place for place in places)]]
            if trunk is None:
                rows.append(visual._pool(visual.transformer(chosen))[0] @ visual.proj)
            else:
                rows.append(visual.head(trunk.forward_head(trunk.norm(trunk.blocks(trunk.norm_pre(chosen))))))
            continue
        encoder = module.model
        embedded = encoder.embeddings(image[None])
        leading = embedded.shape[1] - pair.first.patches
        chosen = embedded[:, [*range(leading), *(leading + place for place in places)]]
        before = getattr(encoder, "pre_layrnorm", None)
        layers = encoder.encoder if hasattr(encoder, "encoder") else encoder
        states = chosen if before is None else before(chosen)
        for layer in next(part for part in layers.modules() if isinstance(part, torch.nn.ModuleList)):
            states = layer(states) if model != "clip" and model != "siglip" else layer(states, None)
            states = states[0] if isinstance(states, tuple) else states
        after = {"vit": "layernorm", "deit": "layernorm", "dinov2": "layernorm", "registers": "layernorm"}
        after |= {"siglip": "post_layernorm"}
        states = getattr(encoder, after[model])(states) if model in after else states
        rows.append(module.head(states.mean(1)))
    return F.normalize(torch.cat(rows), dim=-1)


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_an_image_tower_computes_only_the_kept_patches(model, request):
    name = request.node.callspec.params["model"]
    model.first.module.eval()
    (inputs,) = images_of(model, range(3), 0.6).chunks([(0, 3)], None)
    kept = inputs.pop(tokens.INPUT)
    with torch.no_grad():
        found = model.first.module(**inputs, kept_patches=kept)
        wanted = tokens_by_hand(model, name, inputs, kept)
        whole = model.first.module(**inputs)
        everything = torch.arange(model.first.patches).expand(3, -1)
        torch.testing.assert_close(model.first.module(**inputs, kept_patches=everything), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert (found - whole).norm() > 1e-3


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("chunk_size", [1, 3, 10])
def test_gradients_in_chunks_are_those_of_one_step_with_the_same_patches(model, chunk_size):
    check_chunks(model, chunk_size)


def check_chunks(pair, chunk_size):
    """Compares a cached step in chunks with a plain step that drops the same patches."""
    indices = [4, 0, 7, 2, 9, 5, 1]
    modules = list(dict.fromkeys(pair.modules))
    texts = pictures.Pictures().source(indices, 1, pair.second)
    (words,) = texts.chunks([(0, 7)], None)
    (inputs,) = images_of(pair, indices, 0.5).chunks([(0, 7)], None)
    plain = copy.deepcopy(modules)
    loss = mb.clip_loss(plain[0](**inputs), plain[-1](**words), 5.0)
    loss.backward()
    wanted = [loss.detach(), *gradients(*plain)]
    sources = [(modules[0], images_of(pair, indices, 0.5)), (modules[-1], texts)]
    for budget in (None, "all"):
        found = mb.cached_backward(lambda x, y: mb.clip_loss(x, y, 5.0), sources, chunk_size=chunk_size, budget=budget)
        assert_same([found, *gradients(*modules)], wanted, 1e-9)


@pytest.mark.parametrize("model", ["open_clip", "siglip"], indirect=True)
def test_checkpointed_blocks_drop_the_same_patches(model):
    tower.set_checkpointing([model.first.module], True)
    check_chunks(model, 3)


@pytest.mark.parametrize("model", ["open_clip", "siglip"], indirect=True)
def test_compiled_blocks_drop_the_same_patches(model, monkeypatch):
    monkeypatch.setattr(tower, "COMPILER_OPTIONS", {"backend": "aot_eager"})
    plain = copy.deepcopy(model.first.module)
    indices = [4, 0, 7, 2, 9]
    (inputs,) = images_of(model, indices, 0.5).chunks([(0, 5)], None)
    embeddings = plain(**inputs)
    loss = mb.clip_loss(embeddings, embeddings.roll(1, 0), 5.0)
    loss.backward()
    wanted = [loss.detach(), *gradients(plain)]
    source = images_of(model, indices, 0.5)
    try:
        tower.compile_layers(model.first.module)
        with tower.compiler_settings(strict=True):
            found = mb.cached_backward(
                lambda x: mb.clip_loss(x, x.roll(1, 0), 5.0), [(model.first.module, source)], chunk_size=2
            )
    finally:
        torch._dynamo.reset()
    assert_same([found, *gradients(model.first.module)], wanted, 1e-9)


def test_the_option_is_checked_and_saved(tmp_path):
    pytest.importorskip("transformers")
    name = pictures.spec(tmp_path, "vit")
    for value in (1.0, -0.1, "half", True):
        with pytest.raises(ValueError, match=r"model_options.patch_dropout must be at least 0 and less than 1, got"):
            towers.load(name, patch_dropout=value)
    with pytest.raises(ValueError, match=r"patch_dropout must not be set for 'small', because its image tower has no patches"):
        towers.load("small", patch_dropout=0.5)
    with pytest.raises(ValueError, match=r"patch_dropout must not be set for 'hf-config:.*texts'"):
        towers.load(f"hf-config:{tmp_path / 'texts'}", ("text", "text"), patch_dropout=0.5)
    pair = towers.load(name, patch_dropout=0.5)
    towers.save(pair, tmp_path / "run")
    assert towers.load_saved(tmp_path / "run").options["patch_dropout"] == 0.5


def test_dropout_in_a_config_of_open_clip_becomes_the_option(tmp_path):
    pytest.importorskip("open_clip")
    config = {**pictures.OPEN_CLIP, "vision_cfg": {**pictures.OPEN_CLIP["vision_cfg"], "patch_dropout": 0.25}}
    name = pictures.spec(tmp_path, config)
    pair = towers.load(name)
    assert pair.options["patch_dropout"] == 0.25
    assert towers.load(name, patch_dropout=0.0).options["patch_dropout"] == 0.0
    (inputs,) = pictures.Pictures().source(range(3), 0, pair.first).chunks([(0, 3)], None)
    assert pair.first.module.training
    torch.testing.assert_close(pair.first.module(**inputs), pair.first.module(**inputs), rtol=0, atol=0)  # keeps all patches
