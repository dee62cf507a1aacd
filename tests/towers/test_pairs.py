"""Models of transformers for images and texts: loaded, saved, continued, trained and exported as the same model."""

import dataclasses
import json
import math

import pytest
import torch

import pairs
from megabatch_train import towers
from megabatch_train.evaluation import encode
from megabatch_train.export import export
from pairs import FAMILIES, TEXTS

pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')


def embeddings(pair):
    return encode(pair.first, pairs.images()), encode(pair.second, TEXTS)


def same(found, wanted, bound=1e-6):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_is_the_librarys_before_and_after_saving_and_export(tmp_path, family):
    from transformers import AutoModel

    model = pairs.write_pair(tmp_path / "model", family)
    pair = towers.load(f"hf:{tmp_path / 'model'}")
    same(embeddings(pair), pairs.features(model, tmp_path / "model"))
    if family != "Align":
        assert math.isclose(pair.logit_scale, math.exp(1.5), rel_tol=1e-6)
    assert pair.logit_bias == (-2.5 if family.startswith("Siglip") else None)
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    trained = embeddings(pair)
    towers.save(dataclasses.replace(pair, logit_scale=20.0, logit_bias=pair.logit_bias and -7.0), tmp_path / "run")
    saved = towers.load_saved(tmp_path / "run")
    export(saved, "hf", tmp_path / "export")
    for name in ("run", "export"):
        other = AutoModel.from_pretrained(tmp_path / name).eval()
        assert type(other) is type(model)
        same(trained, pairs.features(other, tmp_path / name))
        continued = towers.load(f"hf:{tmp_path / name}")
        same(embeddings(continued), trained)
        for one in (saved, continued):
            assert math.isclose(one.logit_scale, 20.0, rel_tol=1e-6)
            assert one.logit_bias == (-7.0 if family.startswith("Siglip") else None)


def loss(first, second):
    import megabatch as mb

    return mb.clip_loss(first, second, logit_scale=torch.tensor(5.0, dtype=torch.float64))


@pytest.mark.parametrize("family", ["CLIP", "Siglip", "Siglip2"])
def test_cached_gradients_of_training_images_are_the_librarys(tmp_path, family):
    """In float64, with chunks of two pairs. The library's model gets the whole batch, as its image processor prepares it."""
    import megabatch as mb

    model = pairs.write_pair(tmp_path, family).double()
    pair = towers.load(f"hf:{tmp_path}")
    encoder = pair.first.module.double().eval()
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    texts = pair.second.collate(["a cat", "sun dog", "sea", "red red sky", "run cat sun"])
    inputs = pair.first.training_images.normalize(pixels.float())
    inputs = {key: value.double() for key, value in inputs.items()}
    mb.cached_backward(loss, [(encoder, inputs), (encoder, texts)], chunk_size=2)
    from megabatch_train.data.media.images import to_pillow

    prepared = pairs.processor(family)(images=[to_pillow(image) for image in pixels], return_tensors="pt")
    prepared = {key: value.double() if key == "pixel_values" else value for key, value in prepared.items()}
    found = model.get_image_features(**prepared), model.get_text_features(**texts)
    embedded = [torch.nn.functional.normalize(getattr(one, "pooler_output", one), dim=-1) for one in found]
    logits = 5.0 * embedded[0] @ embedded[1].T
    labels = torch.arange(5)
    ((torch.nn.functional.cross_entropy(logits, labels) + torch.nn.functional.cross_entropy(logits.T, labels)) / 2).backward()
    wanted = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    ours = {name: value.grad for name, value in encoder.model.named_parameters() if value.grad is not None}
    assert ours.keys() == wanted.keys()
    assert not encoder.model.logit_scale.requires_grad
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=2e-7, msg=name)  # processors compute in float32


@torch.no_grad()
def image_embeddings_of_patches(model, pixels, kept):
    """The embeddings of a CLIP or SigLIP that gets its patches one image after another."""
    vision = model.vision_model
    leading = 1 if type(model).__name__ == "CLIPModel" else 0
    rows = []
    for image, places in zip(pixels, kept.tolist(), strict=True):
        embedded = vision.embeddings(image[None])
        states = embedded[:, [*range(leading), *(leading + place for place in places)]]
        states = vision.pre_layrnorm(states) if leading else states
        for layer in vision.encoder.layers:
            states = layer(states, None)
            states = states[0] if isinstance(states, tuple) else states
        if leading:
            rows.append(model.visual_projection(vision.post_layernorm(states[:, 0])))
        else:
            rows.append(vision.head(vision.post_layernorm(states)))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_images_with_dropped_patches_and_of_other_sizes(tmp_path, family):
    model = pairs.write_pair(tmp_path, family)
    pair = towers.load(f"hf:{tmp_path}", patch_dropout=0.5)
    assert (pair.first.patches, pair.options["patch_dropout"]) == (4, 0.5)
    towers.save(pair, tmp_path / "run")
    assert towers.load_saved(tmp_path / "run").options["patch_dropout"] == 0.5
    encoder = pair.first.module.eval()
    generator = torch.Generator().manual_seed(0)
    pixels, larger = (torch.randn(2, 3, side, side, generator=generator) for side in (16, 24))
    kept = torch.tensor([[0, 3], [1, 2]])
    with torch.no_grad():
        whole, found = encoder(pixels), encoder(pixels, kept_patches=kept)
        same([encoder(pixels, kept_patches=torch.arange(4).expand(2, -1))], [whole])
        same([found], [image_embeddings_of_patches(model, pixels, kept)])
        assert (found - whole).norm() > 1e-2
        features = model.get_image_features(pixel_values=larger, interpolate_pos_encoding=True)
        wanted = torch.nn.functional.normalize(getattr(features, "pooler_output", features), dim=-1)
        same([encoder(larger)], [wanted])


def test_sizes_and_patches_that_a_pair_does_not_support(tmp_path):
    pairs.write_pair(tmp_path / "clip", "CLIP")
    pairs.write_pair(tmp_path / "align", "Align")
    for option in ("image_size", "context_length"):
        for kind in ("hf", "hf-config"):
            with pytest.raises(
                ValueError, match=rf"{option} must not be set for .*CLIP, which does not support other sizes, got 8"
            ):
                towers.load(f"{kind}:{tmp_path / 'clip'}", **{option: 8})
    with pytest.raises(ValueError, match=r"patch_dropout must not be set for 'hf:.*align', because its image tower has no"):
        towers.load(f"hf:{tmp_path / 'align'}", patch_dropout=0.5)


RUNS = [("CLIP", []), ("Siglip", ["--loss", "siglip"]), ("Siglip2", [])]
RUNS += [("CLIP", ["--set", "model_options.patch_dropout=0.5"])]


@pytest.mark.parametrize(("family", "settings"), RUNS)
def test_a_run_evaluates_resumes_and_exports(tmp_path, family, settings):
    from PIL import Image

    pairs.write_pair(tmp_path / "model", family)
    (tmp_path / "data").mkdir()
    for number in range(16):
        colors = 16 * number, 255 - 16 * number, 99
        Image.new("RGB", (24 + number, 30), colors).save(tmp_path / "data" / f"{number}.png")
        (tmp_path / "data" / f"{number}.txt").write_text(" ".join(pairs.WORDS[: number % 7 + 1]))
    shared = ["--batch-size", 8, "--chunk-size", 4, "--compile", "off", "--lr", 1e-3, "--no-report", *settings]
    shared += ["--data", tmp_path / "data", "--model", f"hf:{tmp_path / 'model'}", "--steps", 4]
    run("train", *shared, "--output", tmp_path / "run")
    steps = sorted((tmp_path / "run" / "checkpoints").iterdir())
    run("train", *shared, "--output", tmp_path / "resumed", "--resume", steps[0])
    resumed = towers.load_saved(tmp_path / "resumed")
    trained = towers.load_saved(tmp_path / "run")
    before = towers.load(f"hf:{tmp_path / 'model'}")
    assert (embeddings(trained)[0] - embeddings(before)[0]).abs().max() > 1e-5
    assert trained.logit_scale != before.logit_scale
    same(embeddings(resumed), embeddings(trained), 1e-7)
    run("eval", tmp_path / "run", "--data", tmp_path / "data", "--device", "cpu")
    run("export", tmp_path / "run", tmp_path / "export", "--to", "hf")
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tmp_path / "export").eval()
    same(embeddings(trained), pairs.features(model, tmp_path / "export"))
    assert math.isclose(model.logit_scale.exp().item(), trained.logit_scale, rel_tol=1e-5)
    names = {}
    card = (tmp_path / "export" / "README.md").read_text()
    exec(card.partition("```python\n")[2].partition("```")[0], names)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, 256, 256).contiguous()
    wanted = encode(trained.first, [red]), encode(trained.second, ["a photo of a cat"])
    same((names["image_embeddings"].detach(), names["text_embeddings"].detach()), wanted)
    run("export", f"hf:{tmp_path / 'export'}", tmp_path / "again", "--to", "hf")
    same(embeddings(trained), pairs.features(AutoModel.from_pretrained(tmp_path / "again").eval(), tmp_path / "again"))


def run(*words):
    from megabatch_train.cli import main

    assert main([str(word) for word in words]) in (0, None)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["CLIP", "Siglip", "ChineseCLIP"])
def test_onnx(tmp_path, family):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    pairs.write_pair(tmp_path / "model", family)
    run("export", f"hf:{tmp_path / 'model'}", tmp_path / "onnx", "--to", "onnx")
    names = {}
    exec((tmp_path / "onnx" / "README.md").read_text().partition("```python\n")[2].partition("```")[0], names)
    pair = towers.load(f"hf:{tmp_path / 'model'}")
    same([torch.as_tensor(names["embed_texts"](TEXTS))], embeddings(pair)[1:], 1e-5)
    from megabatch_train.data.media.images import to_pillow

    found = names["embed_images"]([to_pillow(image) for image in pairs.images()])
    same([torch.as_tensor(found)], embeddings(pair)[:1], 1e-5)


def test_configs_give_random_weights_and_plans(tmp_path):
    from megabatch_train.planning import models

    pairs.write_pair(tmp_path, "CLIP")
    pair = towers.load(f"hf-config:{tmp_path}")
    assert not torch.allclose(embeddings(pair)[0], embeddings(towers.load(f"hf:{tmp_path}"))[0], atol=1e-2)
    towers.save(pair, tmp_path / "run")
    same(embeddings(towers.load_saved(tmp_path / "run")), embeddings(pair), 0)
    model = models.model(f"hf:{tmp_path}")
    assert model.parameters == sum(parameter.numel() for parameter in pair.parameters())
    assert model.trained_parameters == sum(parameter.numel() for parameter in pair.parameters() if parameter.requires_grad)
    assert not model.is_one_tower


def test_lengths_and_errors(tmp_path):
    pairs.write_pair(tmp_path / "clip", "CLIP")
    pairs.write_pair(tmp_path / "siglip", "Siglip")
    for name, expected in (("clip", (1, 5)), ("siglip", (1, 5))):
        pair = towers.load(f"hf:{tmp_path / name}", max_length=5)
        assert pair.second.collate(["cat " * 20])["input_ids"].shape == expected
    assert towers.load(f"hf:{tmp_path / 'siglip'}").second.collate(["cat"])["input_ids"].shape == (1, pairs.LENGTH)
    assert towers.load(f"hf:{tmp_path / 'clip'}").second.collate(["cat"])["input_ids"].shape == (1, 3)
    with pytest.raises(ValueError, match=r"max_length must be from 1 to 12 tokens, got 13"):
        towers.load(f"hf:{tmp_path / 'clip'}", max_length=13)
    with pytest.raises(ValueError, match=r"model_options.pooling must not be set .* its own pooling, got 'cls'"):
        towers.load(f"hf:{tmp_path / 'clip'}", pooling="cls")
    with pytest.raises(ValueError, match=r"must have towers for text and text, got 'hf:.*clip', which is for image and text"):
        towers.load(f"hf:{tmp_path / 'clip'}", ("text", "text"))
    with pytest.raises(ValueError, match=r"got CLIPModel in .*, which takes images and texts"):
        towers.load(f"hf:{tmp_path / 'clip'}+{tmp_path / 'clip'}")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "clip" / file).unlink()
    with pytest.raises(ValueError, match=r"must have a tokenizer, .* copy tokenizer.json"):
        towers.load(f"hf-config:{tmp_path / 'clip'}")
    (tmp_path / "siglip" / "config.json").write_text(json.dumps({"model_type": "flava"}))
    with pytest.raises(ValueError, match=r"must have get_image_features and get_text_features that take pixel_values"):
        towers.load(f"hf-config:{tmp_path / 'siglip'}")
