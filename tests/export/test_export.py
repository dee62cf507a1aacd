"""Exported models give the same embeddings in transformers, sentence-transformers, open_clip and onnxruntime."""

import argparse
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from megabatch_train import towers
from megabatch_train.commands import find_command
from megabatch_train.data.media.images import to_pillow
from megabatch_train.evaluation import encode
from megabatch_train.towers import models

TINY = {"width": 16, "image_size": 16, "channels": (8, 16), "blocks": 1, "buckets": 512}
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 32, "vocab_size": 99, "max_position_embeddings": 12}
VIT = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 32, "image_size": 16, "patch_size": 8}
CLIP = {
    "embed_dim": 8,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 16, "layers": 2, "head_width": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "layers": 2, "heads": 2},
}
TEXTS = ["a red square", "square", "red red a"]
IMAGES = [torch.randint(0, 256, (3, 20, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
ONNX = ("onnx", "onnxscript", "onnxruntime")


def needed(*packages):
    return [pytest.importorskip(name, reason="a package of the extras huggingface, open_clip or onnx") for name in packages]


def call(*words):
    parser = argparse.ArgumentParser()
    command = find_command("export")
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


def encoder(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if config is BERT:
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nred\nsquare\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


def made(name, tmp_path, monkeypatch):
    """A model with random weights, saved as a run."""
    torch.manual_seed(0)
    if name == "open_clip":
        (open_clip,) = needed("open_clip")
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", CLIP)
        pair = towers.load("open_clip:tiny")
    elif name == "small":
        pair = towers.load("small", **TINY)
    else:
        needed("transformers")
        texts = encoder(tmp_path / "texts", BERT)
        spec = {"one": f"hf-config:{texts}", "two": f"hf-config:{tmp_path / 'images'}+{texts}"}[name]
        if name == "two":
            encoder(tmp_path / "images", VIT)
        pair = towers.load(spec, ("image" if name == "two" else "text", "text"), query_prompt="a ", document_prompt="red ")
    for tower in pair.towers:
        tower.module.eval()
    towers.save(pair, tmp_path / "run")
    return pair


def expected(pair):
    return [encode(tower, IMAGES if tower.kind == "image" else TEXTS) for tower in pair.towers]


def code_of(folder):
    """The program of a card."""
    return (folder / "README.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0]


def close(found, wanted):
    torch.testing.assert_close(torch.as_tensor(found), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_clip_model_in_open_clip_and_in_transformers(tmp_path, monkeypatch):
    open_clip, transformers = needed("open_clip", "transformers")
    pair = made("open_clip", tmp_path, monkeypatch)
    images, texts = expected(pair)
    call(tmp_path / "run", "--to", "open_clip", tmp_path / "clip")
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'clip'}")
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'clip'}")(TEXTS)
    model.eval()
    with torch.no_grad():
        close(model.encode_text(tokens, normalize=True), texts)
        close(model.encode_image(torch.stack([transform(to_pillow(image)) for image in IMAGES]), normalize=True), images)

    call(tmp_path / "run", "--to", "hf", tmp_path / "hf")
    model = transformers.CLIPModel.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tmp_path / "hf")
    processor = transformers.CLIPImageProcessor.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        out = model(
            **tokenizer(TEXTS, padding=True, return_tensors="pt"),
            **processor(images=[to_pillow(image) for image in IMAGES], return_tensors="pt"),
        )
    close(out.text_embeds, texts)
    names = {}
    exec((tmp_path / "hf" / "README.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0], names)
    wanted = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'clip'}")(["a dog’s tail"])
    assert names["tokens"]["input_ids"].tolist() == [wanted[wanted > 0].tolist()]
    # Pillow and torchvision resize with slightly different rounding.
    torch.testing.assert_close(out.image_embeds, images, rtol=0, atol=0.05)
    assert model.logit_scale.exp().item() == pytest.approx(pair.logit_scale)
    with pytest.raises(ValueError, match="FOLDER must be empty"):
        call(tmp_path / "run", "--to", "hf", tmp_path / "hf")


def test_a_model_that_is_no_plain_clip_is_refused_by_transformers(tmp_path, monkeypatch):
    open_clip, _ = needed("open_clip", "transformers")
    for config, message in (
        ({**CLIP, "vision_cfg": {**CLIP["vision_cfg"], "ls_init_value": 0.1}}, "must have a CLIP model with a vision"),
        ({**CLIP, "vision_cfg": {**CLIP["vision_cfg"], "final_ln_after_pool": True, "pool_type": "avg"}}, "a difference of"),
    ):
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "other", config)
        with pytest.raises(ValueError, match=message):
            call("open_clip:other", "--to", "hf", tmp_path / "hf")
    with pytest.raises(ValueError, match="--to must be onnx for a model 'small', got open_clip"):
        call("small", "--to", "open_clip", tmp_path / "hf")


@pytest.mark.thorough
def test_one_encoder_in_sentence_transformers(tmp_path, monkeypatch):
    (library,) = needed("sentence_transformers")
    pair = made("one", tmp_path, monkeypatch)
    call(tmp_path / "run", "--to", "hf", tmp_path / "hf")
    model = library.SentenceTransformer(str(tmp_path / "hf"), device="cpu", local_files_only=True)
    for found, wanted in zip((model.encode_query(TEXTS), model.encode_document(TEXTS)), expected(pair), strict=True):
        close(found, wanted)
    assert "SentenceTransformer(" in (tmp_path / "hf" / "README.md").read_text()


def test_two_encoders_in_transformers_by_the_code_of_the_card(tmp_path, monkeypatch):
    needed("transformers", "sentence_transformers")
    pair = made("two", tmp_path, monkeypatch)
    call(tmp_path / "run", "--to", "hf", tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    names = {}
    exec(card.partition("```python\n")[2].partition("```")[0], names)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, 256, 256).contiguous()
    close(names["image_embeddings"].detach(), encode(pair.first, [red]))
    close(names["texts"].encode_document(TEXTS), encode(pair.second, TEXTS))
    assert 'begin with "red "' in card


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["small", "open_clip", "one", "two"])
def test_onnxruntime_by_the_code_of_the_card(tmp_path, monkeypatch, name):
    needed(*ONNX)
    pair = made(name, tmp_path, monkeypatch)
    call(tmp_path / "run", "--to", "onnx", tmp_path / "onnx")
    names = {}
    exec(code_of(tmp_path / "onnx"), names)  # as it stands: it defines every name it uses
    for count in (1, 3):
        close(names["embed_texts"](TEXTS[:count]), encode(pair.second, TEXTS[:count]))
        if name == "one":
            close(names["embed_texts"](TEXTS[:count], prompt="a "), encode(pair.first, TEXTS[:count]))
        else:
            images = [to_pillow(image) for image in IMAGES[:count]]
            close(names["embed_images"](images), encode(pair.first, IMAGES[:count]))


@pytest.mark.parametrize("name", ["small", "open_clip", "one", "two"])
def test_the_preprocessing_of_an_onnx_card_gives_the_inputs_of_the_towers(tmp_path, monkeypatch, name):
    """Without the ONNX files: the modules of the towers are in the place of their sessions."""
    runtime = types.ModuleType("onnxruntime")
    pair = made(name, tmp_path, monkeypatch)
    modules = {tower.kind: tower.module for tower in pair.towers}

    class Session:
        def __init__(self, path, providers):
            self.module = modules[Path(path).stem]

        def run(self, outputs, inputs):
            with torch.no_grad():
                return [self.module(**{key: torch.from_numpy(value) for key, value in inputs.items()}).numpy()]

    runtime.InferenceSession = Session
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setattr("megabatch_train.export.export_onnx", lambda pair, folder: models.keep(pair, folder))
    call(tmp_path / "run", "--to", "onnx", tmp_path / "onnx")
    names = {}
    exec(code_of(tmp_path / "onnx"), names)
    close(names["embed_texts"](TEXTS), encode(pair.second, TEXTS))
    if name == "one":
        close(names["query_embeds"], encode(pair.first, ["what do cats eat?"]))
    else:
        close(names["embed_images"]([to_pillow(image) for image in IMAGES]), encode(pair.first, IMAGES))


def test_the_card_tells_the_run_and_push_uploads_it(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    made("small", tmp_path, monkeypatch)
    monkeypatch.setattr("megabatch_train.export.export_onnx", lambda pair, folder: None)
    (tmp_path / "run" / "config.toml").write_text("data = 'emoji'\nbatch_size = 2048\n")
    steps = [{"step": step, "loss": 3.0 - step, "pairs": 8} for step in (1, 2)]
    steps[1]["problem"] = "the embeddings have collapsed"
    lines = [*steps, {"step": 2, "evaluation": {"text_to_image_R@1": 0.375, "image_to_text_R@1": 0.25, "num_samples": 8}}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="--push needs a token"):
        call(tmp_path / "run", "--to", "onnx", tmp_path / "b", "--push", "me/emoji")
    assert not (tmp_path / "b").exists()
    called = []
    api = types.SimpleNamespace(
        create_repo=lambda name, **options: (
            called.append((name, options)) or huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")
        ),
        upload_folder=lambda **options: called.append(options),
    )
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    call(tmp_path / "run", "--to", "onnx", tmp_path / "b", "--push", "me/emoji")
    assert "pushed to https://huggingface.co/me/emoji" in capsys.readouterr().out
    (name, options), upload = called
    assert (name, options["private"], upload["repo_id"], upload["folder_path"]) == (
        "me/emoji",
        True,
        "me/emoji",
        str(tmp_path / "b"),
    )
    card = (tmp_path / "b" / "README.md").read_text()
    assert "- the embeddings have collapsed" in card
    for part in (
        "library_name: onnx",
        "# emoji",
        'snapshot_download("me/emoji")',
        "`emoji`, in batches of 2,048 pairs",
        "37.5%",
        "OpenMoji",
    ):
        assert part in card, part
    assert "batch_size = 2048" in card
    assert (tmp_path / "b" / "curve_1.png").is_file()
