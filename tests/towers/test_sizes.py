"""Other sizes of images and texts: interpolated positions, checked options, and models that come back with their sizes."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pictures
from megabatch_train import towers
from megabatch_train.evaluation import encode
from megabatch_train.export import export
from megabatch_train.towers import tokens
from megabatch_train.towers.layers.lora import LoraConfig as Lora

IMAGES = [torch.randint(0, 256, (3, 50, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
TEXTS = ["a dog " * 30, "a cat"]


def embeddings(pair):
    return [encode(tower, samples) for tower, samples in zip(pair.towers, (IMAGES, TEXTS), strict=True)]


def same(pair, other):
    return all(torch.equal(one, two) for one, two in zip(embeddings(pair), embeddings(other), strict=True))


@pytest.mark.parametrize(("before", "after"), [(4, 7), (6, 3), (3, 6)])
def test_positions_are_those_that_open_clip_loads(before, after):
    open_clip = pytest.importorskip("open_clip")
    table = torch.randn(1 + before**2, 5)
    state = {"visual.positional_embedding": table.clone(), "positional_embedding": table.clone()}
    open_clip.model.resize_pos_embed(state, SimpleNamespace(visual=SimpleNamespace(grid_size=(after, after))))
    open_clip.model.resize_text_pos_embed(state, SimpleNamespace(positional_embedding=torch.zeros(3 * after, 5)))
    found = tokens.resize_grid(table[1:], (before, before), (after, after))
    torch.testing.assert_close(found, state["visual.positional_embedding"][1:])
    torch.testing.assert_close(tokens.resize_line(table, 3 * after), state["positional_embedding"])


MODELS = {
    **{name: name for name in pictures.VISION},
    "open_clip": pictures.OPEN_CLIP,
    "timm": pictures.TIMM,
    "fixed": pictures.FIXED_TIMM,
}


@pytest.fixture
def name(request, tmp_path):
    pytest.importorskip("transformers")
    chosen = MODELS[request.param]
    if isinstance(chosen, dict):
        pytest.importorskip("open_clip")
        pytest.importorskip("timm")
    return pictures.spec(tmp_path, chosen)


@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_images_of_another_size_are_encoded_with_interpolated_positions(name, request):
    pair = pictures.pair(name)
    module, patch = pair.first.module.eval(), pair.first.tokens.patch[0]
    key = "image" if "open_clip" in name else "pixel_values"
    large, small = pair.first.tokens.size, (4 * patch, 4 * patch)
    images = torch.randn(2, 3, *small, dtype=torch.float64)
    found = module(**{key: images})
    found[:, 0].sum().backward()
    tables = {
        key: p
        for key, p in module.named_parameters()
        if "pos" in key and "embed" in key and ("visual" in key or key.startswith("model.emb"))
    }
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in tables.values())
    model = request.node.callspec.params["name"]
    tolerance = 1e-5 if model in ("dinov2", "registers", "timm") else 1e-9  # these interpolate in float32 even in float64
    antialiased = model in ("registers", "open_clip", "timm", "fixed")
    # A model whose table was resized before encodes the same.
    (table,) = tables.values()
    count = pair.first.tokens.count(large)
    rows = table.detach().reshape(-1, table.shape[-1])
    grid = rows[-count:].T.reshape(1, -1, *pair.first.tokens.grid(large))
    other = nn.functional.interpolate(grid, (4, 4), mode="bicubic", antialias=antialiased, align_corners=False)[0].flatten(1).T
    resized = pictures.pair(name, image_size=small[0])
    assert resized.first.tokens.size == small
    state = module.state_dict()
    (place,) = tables
    state[place] = torch.cat([rows[:-count], other]).view_as(resized.first.module.state_dict()[place])
    resized.first.module.load_state_dict(state)
    wanted = resized.first.module.eval()(**{key: images})
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    whole = torch.randn(2, 3, *large, dtype=torch.float64)
    assert (module(**{key: whole}) - module(**{key: whole})).abs().max() == 0  # the table is the model's own again


@pytest.mark.parametrize("name", ["vit", "siglip", "open_clip", "timm"], indirect=True)
def test_models_of_other_sizes_come_back(name, tmp_path):
    torch.manual_seed(0)
    patch = towers.load(name).first.tokens.patch[0]
    pair = towers.load(name, image_size=5 * patch, context_length=20)
    for module in pair.modules:
        module.eval()
    assert pair.first.prepare(IMAGES[0], None).shape == (3, 5 * patch, 5 * patch)
    assert pair.first.training_images.crop.size == (5 * patch, 5 * patch)
    assert pair.first.patches == 25
    texts = pair.second.collate([pair.second.prepare(text, None) for text in TEXTS])
    assert next(iter(texts.values())).shape == (2, 20)
    towers.save(pair, tmp_path / "run")
    loaded = towers.load_saved(tmp_path / "run")
    assert {key: loaded.options[key] for key in ("image_size", "context_length")} == {
        "image_size": 5 * patch,
        "context_length": 20,
    }
    assert same(loaded, pair)
    towers.save(loaded, tmp_path / "again")
    assert same(towers.load_saved(tmp_path / "again"), pair)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["open_clip"], indirect=True)
def test_an_export_has_the_sizes(name, tmp_path):
    import open_clip

    pair = towers.load(name, image_size=32, context_length=20)
    towers.save(pair, tmp_path / "run")
    export(towers.load_saved(tmp_path / "run"), "open_clip", tmp_path / "open_clip")
    model = open_clip.create_model(f"local-dir:{tmp_path / 'open_clip'}")
    assert (model.visual.image_size, model.context_length) == ((32, 32), 20)


@pytest.fixture
def pretrained(tmp_path):
    """A vision transformer and a text encoder with weights, which transformers saved."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = pictures.COMMON | {"vocab_size": 99, "max_position_embeddings": 14}
    roberta = transformers.RobertaConfig(**common, pad_token_id=1)
    for name, model in (
        ("images", transformers.ViTModel(transformers.ViTConfig(**pictures.COMMON, **pictures.IMAGES))),
        ("texts", transformers.RobertaModel(roberta)),
    ):
        model.save_pretrained(tmp_path / name)
    transformers.ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "images")
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "dog": 6}
    (tmp_path / "texts" / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "texts" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return f"hf:{tmp_path / 'images'}+{tmp_path / 'texts'}"


def test_weights_of_transformers_keep_their_values(pretrained, tmp_path):
    before = towers.load(pretrained)
    pair = towers.load(pretrained, image_size=32, context_length=21)
    assert pair.first.prepare(IMAGES[0], None).shape == (3, 32, 32)
    images, texts = before.first.module.model.state_dict(), before.second.module.model.state_dict()
    changed = {}
    for old, tower in ((images, pair.first), (texts, pair.second)):
        for key, value in tower.module.model.state_dict().items():
            if value.shape != old[key].shape:
                changed[key] = value
            else:
                assert torch.equal(value, old[key]), key
    assert {key: tuple(value.shape) for key, value in changed.items()} == {
        "embeddings.position_embeddings": (1, 65, 16),
        "embeddings.position_embeddings.weight": (23, 16),  # two of them for the padding
    }
    table = texts["embeddings.position_embeddings.weight"]
    assert torch.equal(changed["embeddings.position_embeddings.weight"][:2], table[:2])
    assert torch.equal(changed["embeddings.position_embeddings.weight"][[2, -1]], table[[2, -1]])  # the ends stay
    assert torch.equal(changed["embeddings.position_embeddings"][:, 0], images["embeddings.position_embeddings"][:, 0])
    long = pair.second.collate([pair.second.prepare(TEXTS[0], None)])
    assert long["input_ids"].shape == (1, 21)
    towers.save(pair, tmp_path / "run")
    assert same(towers.load_saved(tmp_path / "run"), pair)


@pytest.mark.thorough
def test_adapters_on_a_model_of_other_sizes_come_back(pretrained, tmp_path):
    pytest.importorskip("peft")
    pair = towers.load(pretrained, image_size=32, context_length=21, lora=Lora(2))
    towers.save(pair, tmp_path / "run")
    loaded = towers.load_saved(tmp_path / "run")
    assert loaded.first.tokens.size == (32, 32)
    assert same(loaded, pair)


def test_options_that_cannot_be(tmp_path, pretrained):
    folder = pretrained.partition(":")[2].partition("+")[0]
    for option in ("image_size", "context_length"):
        for value in (0, -3, 2.5, True, "large"):
            with pytest.raises(ValueError, match=rf"model_options.{option} must be a whole number of at least 1, got"):
                towers.load(pretrained, **{option: value})
    with pytest.raises(
        ValueError, match=r"model_options.image_size must be a multiple of the size of a patch, 4 pixels, got 30"
    ):
        towers.load(pretrained, image_size=30)
    with pytest.raises(ValueError, match=r"model_options.image_size must not be set for a model without images, got 32"):
        towers.load(f"hf:{folder.replace('images', 'texts')}", ("text", "text"), image_size=32)
    decoder = {"model_type": "qwen3", **pictures.COMMON, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 99}
    (tmp_path / "decoder").mkdir()
    (tmp_path / "decoder" / "config.json").write_text(json.dumps(decoder))
    with pytest.raises(ValueError, match=r"context_length must not be set for a transformers model of the type 'qwen3'"):
        towers.load(f"hf-config:{tmp_path / 'decoder'}", ("text", "text"), context_length=30)
    convnext = {"model_type": "convnext", "hidden_sizes": [8, 8, 8, 12], "depths": [1, 1, 1, 1]}
    (tmp_path / "decoder" / "config.json").write_text(json.dumps(convnext))
    with pytest.raises(ValueError, match=r"image_size must not be set for a transformers model of the type 'convnext', got 64"):
        towers.load(f"hf-config:{tmp_path / 'decoder'}+{folder.replace('images', 'texts')}", image_size=64)
    with pytest.raises(ValueError, match=r"model_options.depth must not be set for 'hf-config:.*'; possible are: query_prompt"):
        towers.load(f"hf-config:{folder}+{folder}", depth=3)


def test_sizes_of_open_clip_that_cannot_be(tmp_path):
    pytest.importorskip("open_clip")
    name = pictures.spec(tmp_path, pictures.OPEN_CLIP)
    with pytest.raises(
        ValueError, match=r"model_options.image_size must be a multiple of the size of a patch, 4 pixels, got 30"
    ):
        towers.load(name, image_size=30)
