"""LoRA adapters of models for images and texts: of open_clip, and of transformers."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megabatch as mb
import pairs
from megabatch.world import World
from megabatch_train import towers
from megabatch_train.evaluation import encode
from megabatch_train.export import export
from megabatch_train.towers import tower
from megabatch_train.towers.layers import lora
from megabatch_train.towers.tower import LoraConfig
from megabatch_train.trainer import build

pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')

PLAIN = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "layers": 2, "heads": 2},
}
RESNET = {**PLAIN, "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}}
ATTENTION = nn.MultiheadAttention


@pytest.fixture
def open_clip_config(tmp_path):
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    return write_open_clip(tmp_path)


def write_open_clip(folder, config=PLAIN):
    (folder / "tiny.json").write_text(json.dumps(config))
    return f"open_clip:{folder / 'tiny.json'}"


def adapted(spec, config=LoraConfig(3), **options):  # noqa: B008
    """The pair with adapters that change its embeddings."""
    torch.manual_seed(0)
    pair = towers.load(spec, lora=config, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in pair.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    for module in pair.modules:
        module.eval()
    return pair


def embeddings(pair):
    return encode(pair.first, pairs.images()), encode(pair.second, pairs.TEXTS)


def same(found, wanted, bound=2e-6):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", [None, "causal", "boolean", "heads"])
@pytest.mark.parametrize("inputs", ["self", "cross", "three"])
def test_projected_attention_is_pytorchs(batch_first, bias, mask, inputs):
    torch.manual_seed(0)
    plain = ATTENTION(12, 3, bias=bias, batch_first=batch_first, dtype=torch.float64)
    module = nn.Sequential(plain)
    queries, keys = (4, 4) if inputs == "self" else (4, 6)
    query = torch.randn(*((2, queries) if batch_first else (queries, 2)), 12, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(*((2, keys) if batch_first else (keys, 2)), 12, dtype=torch.float64) for _ in range(2))
    key, value = {"self": (query, query), "cross": (key, key), "three": (key, value)}[inputs]
    masks = {"causal": torch.full((queries, keys), -torch.inf).triu(1).double(), "boolean": torch.rand(queries, keys) > 0.7}
    masks |= {"heads": torch.randn(6, queries, keys, dtype=torch.float64), None: None}
    masks["boolean"][:, 0] = False
    wanted = plain(query, key, value, need_weights=False, attn_mask=masks[mask])[0]
    weights = list(plain.parameters())
    gradients = torch.autograd.grad(wanted.square().sum(), [query, *weights])
    lora.replace_attention(module)
    assert isinstance(module[0], lora.ProjectedAttention)
    assert {id(weight) for weight in weights} == {id(parameter) for parameter in module.parameters()}
    found = module[0](query, key, value, need_weights=False, attn_mask=masks[mask])[0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(found.square().sum(), [query, *weights]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_attention_that_other_layers_read_stays():
    layer = nn.TransformerEncoderLayer(8, 2)
    other = nn.Sequential(ATTENTION(8, 2, kdim=4), ATTENTION(8, 2, add_bias_kv=True), layer)
    lora.replace_attention(other)
    assert [type(part) for part in other] == [ATTENTION, ATTENTION, nn.TransformerEncoderLayer]
    assert type(layer.self_attn) is ATTENTION


@pytest.mark.parametrize("merge", [False, True])
def test_open_clip_adapters_are_saved_as_peft_and_open_clip_read_them(open_clip_config, tmp_path, merge):
    import open_clip
    from peft import PeftModel

    plain = towers.load(open_clip_config)
    frozen = {name: value.clone() for name, value in plain.first.module.model.state_dict().items()}
    pair = adapted(open_clip_config, LoraConfig(3, merge=merge))
    trained = [name for name, parameter in pair.first.module.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 4 * 2  # matrices, blocks, layers, sides
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    wanted = embeddings(pair)
    towers.save(pair, tmp_path / "run")
    again = towers.load_saved(tmp_path / "run")
    same(embeddings(again), wanted)
    assert (again.lora is None) == merge
    towers.save(again, tmp_path / "twice")
    same(embeddings(towers.load_saved(tmp_path / "twice")), wanted)
    export(again, "open_clip", tmp_path / "export")
    for folder in ("export", "run") if merge else ("export",):
        model = open_clip.create_model(f"local-dir:{tmp_path / folder}").eval()
        assert model.state_dict().keys() == frozen.keys()
        compare_with_open_clip(model, pair, wanted)
    if not merge:
        base = open_clip.create_model(f"local-dir:{tmp_path / 'export'}").eval()
        base.load_state_dict({**original(pair), "logit_scale": base.logit_scale})
        lora.replace_attention(base)
        read = PeftModel.from_pretrained(base, tmp_path / "run" / "first").eval()
        compare_with_open_clip(read.base_model.model, pair, wanted)


def original(pair):
    """The frozen weights by the names of open_clip."""
    weights = {key: value for key, value in pair.first.module.model.state_dict().items() if "lora_" not in key}
    return {key.replace(".base_layer.", ".").replace("in_proj.", "in_proj_"): value for key, value in weights.items()}


@torch.no_grad()
def compare_with_open_clip(model, pair, wanted):
    pixels = pair.first.collate([pair.first.prepare(image, None) for image in pairs.images()])["image"]
    texts = pair.second.collate([pair.second.prepare(text, None) for text in pairs.TEXTS])["text"]
    same((F.normalize(model.encode_image(pixels), dim=-1), F.normalize(model.encode_text(texts), dim=-1)), wanted)


def test_open_clip_adapters_become_a_clip_model_of_transformers(open_clip_config, tmp_path):
    pair = adapted(open_clip_config)
    wanted = embeddings(pair)
    export(pair, "hf", tmp_path / "export")
    converted = towers.load(f"hf:{tmp_path / 'export'}")
    same(embeddings(converted)[1:], wanted[1:])
    pixels = pair.first.collate([pair.first.prepare(image, None) for image in pairs.images()])["image"]
    with torch.no_grad():
        same([converted.first.module.eval()(pixel_values=pixels)], wanted[:1])


def test_layers_that_are_never_called_are_not_trained(tmp_path):
    """The attention pool of a ResNet reads the weights of its layers, so adapters of these layers have no effect."""
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    pair = adapted(write_open_clip(tmp_path, RESNET))
    trained = [name for name, parameter in pair.first.module.named_parameters() if parameter.requires_grad]
    assert trained
    assert not any("attnpool" in name for name in trained)
    towers.save(pair, tmp_path / "run")
    same(embeddings(towers.load_saved(tmp_path / "run")), embeddings(pair))


@pytest.mark.parametrize("family", ["CLIP", "Siglip", "Siglip2", "AltCLIP"])
def test_adapters_of_transformers_pairs(tmp_path, family):
    from peft import PeftModel
    from transformers import AutoModel

    base = pairs.write_pair(tmp_path / "model", family)
    spec = f"hf:{tmp_path / 'model'}"
    pair = adapted(spec)
    wanted = embeddings(pair)
    assert (wanted[0] - embeddings(towers.load(spec))[0]).abs().max() > 1e-2
    towers.save(pair, tmp_path / "run")
    again = towers.load_saved(tmp_path / "run")
    same(embeddings(again), wanted)
    lora.replace_attention(base)
    read = PeftModel.from_pretrained(base, tmp_path / "run" / "first").eval()
    same(pairs.features(read.base_model.model, tmp_path / "run" / "first"), wanted)
    export(again, "hf", tmp_path / "export")
    merged = AutoModel.from_pretrained(tmp_path / "export").eval()
    same(pairs.features(merged, tmp_path / "export"), wanted)
    assert merged.state_dict().keys() == AutoModel.from_pretrained(tmp_path / "model").state_dict().keys()
    random = adapted(f"hf-config:{tmp_path / 'model'}", LoraConfig(2, merge=True))
    towers.save(random, tmp_path / "random")
    same(embeddings(towers.load(f"hf:{tmp_path / 'random'}")), embeddings(random))


@pytest.mark.parametrize("budget", [None, "all"])
@pytest.mark.parametrize("kind", ["open_clip", "Siglip"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_cached_gradients_of_adapters_are_plain_ones(tmp_path, kind, dropout, budget):
    """In float64. With dropout, both passes draw the same numbers, so the gradients are those of finite differences."""
    if kind == "open_clip":
        pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
        spec = write_open_clip(tmp_path)
    else:
        pairs.write_pair(tmp_path, kind)
        spec = f"hf:{tmp_path}"
    pair = adapted(spec, LoraConfig(3, dropout=dropout))
    encoder = pair.first.module.double().train()
    images, texts = inputs_of(pair)
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]

    def cached():
        torch.manual_seed(5)
        encoder.zero_grad()
        parts = [(encoder, images), (encoder, texts)]
        value = mb.cached_backward(lambda x, y: mb.clip_loss(x, y, 5.0), parts, chunk_size=2, budget=budget)
        return value.item(), [parameter.grad.clone() for parameter in parameters]

    _, found = cached()
    if not dropout:
        encoder.zero_grad()
        mb.clip_loss(encoder(**images), encoder(**texts), 5.0).backward()
        for ours, parameter in zip(found, parameters, strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-11)
        return
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter += step * direction
        values.append(cached()[0])
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter -= step * direction
    slope = sum((gradient * direction).sum() for gradient, direction in zip(found, directions, strict=True)).item()
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)


def inputs_of(pair):
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images = {key: value.double() for key, value in pair.first.training_images.normalize(pixels.float()).items()}
    words = ["a cat", "sun dog", "sea", "red red sky", "run cat sun"]
    return images, pair.second.collate([pair.second.prepare(text, None) for text in words])


@pytest.mark.thorough
def test_compiled_layers_with_adapters(open_clip_config, monkeypatch):
    monkeypatch.setattr(tower, "COMPILER_OPTIONS", {"backend": "aot_eager"})
    pair, plain = adapted(open_clip_config), adapted(open_clip_config)
    found = []
    for one, compiled in ((pair, True), (plain, False)):
        encoder = one.first.module.double()
        images, texts = inputs_of(one)
        if compiled:
            assert tower.compile_towers([encoder, encoder], World.of(None, torch.device("cpu")))
        with tower.compiler_settings(strict=True):
            mb.cached_backward(lambda x, y: mb.clip_loss(x, y, 5.0), [(encoder, images), (encoder, texts)], chunk_size=2)
        found.append([parameter.grad for parameter in encoder.parameters() if parameter.requires_grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def on_rank(group, rank, spec, parallel):
    """The gradients of adapters for a batch of five pairs, of which the first rank has three."""
    pair = adapted(spec)
    encoder = pair.first.module.double()
    inputs = inputs_of(pair)
    rows = slice(None) if group is None else slice(0, 3) if rank == 0 else slice(3, 5)
    own = [{key: value[rows] for key, value in side.items()} for side in inputs]
    wrapped = build.wrap([encoder, encoder], inputs, World(torch.device("cpu"), group), parallel)
    mb.cached_backward(lambda x, y: mb.clip_loss(x, y, 5.0, group=group), list(zip(wrapped, own, strict=True)), chunk_size=2)
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in gradients.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["open_clip", "CLIP"])
def test_two_ranks_are_one(pool, tmp_path, kind, parallel):
    if kind == "open_clip":
        pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
        spec = write_open_clip(tmp_path)
    else:
        pairs.write_pair(tmp_path, kind)
        spec = f"hf:{tmp_path}"
    wanted = on_rank(None, 0, spec, parallel)
    for found in pool.run(on_rank, 2, spec, parallel):
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["open_clip", "Siglip"])
def test_a_run_with_adapters_resumes_and_exports(tmp_path, kind):
    from PIL import Image

    if kind == "open_clip":
        pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
        spec, form = write_open_clip(tmp_path), "open_clip"
    else:
        pairs.write_pair(tmp_path / "model", kind)
        spec, form = f"hf:{tmp_path / 'model'}", "hf"
    (tmp_path / "data").mkdir()
    for number in range(16):
        Image.new("RGB", (24 + number, 30), (16 * number, 255 - 16 * number, 99)).save(tmp_path / "data" / f"{number}.png")
        (tmp_path / "data" / f"{number}.txt").write_text(" ".join(pairs.WORDS[: number % 7 + 1]))
    shared = ["--batch-size", 8, "--chunk-size", 4, "--compile", "off", "--precision", "bf16", "--no-report", "--lora", 2]
    shared += ["--data", tmp_path / "data", "--model", spec, "--steps", 4, "--lr", 1e-2]
    run("train", *shared, "--output", tmp_path / "run")
    first = min((tmp_path / "run" / "checkpoints").iterdir())
    run("train", *shared, "--output", tmp_path / "resumed", "--resume", first)
    trained, resumed = (towers.load_saved(tmp_path / name) for name in ("run", "resumed"))
    assert (trained.lora, trained.logit_scale) == (LoraConfig(2), resumed.logit_scale)
    same(embeddings(trained), embeddings(resumed), 0)
    assert any(p.abs().max() > 0 for name, p in trained.first.module.named_parameters() if "lora_B" in name)
    run("eval", tmp_path / "run", "--data", tmp_path / "data", "--device", "cpu")
    run("eval", first, "--data", tmp_path / "data", "--device", "cpu")
    run("export", tmp_path / "run", tmp_path / "export", "--to", form)
    file = tmp_path / "export" / "open_clip_model.safetensors"
    exported = towers.load(f"{spec}@{file}" if kind == "open_clip" else f"hf:{tmp_path / 'export'}")
    same(embeddings(exported), embeddings(trained), 2e-2)  # merged weights are rounded to bf16
    assert exported.logit_scale == pytest.approx(trained.logit_scale, rel=1e-6)


def run(*words):
    from megabatch_train.cli import main

    assert main([str(word) for word in words]) in (0, None)


def test_plans_and_errors(open_clip_config, tmp_path):
    from megabatch_train.planning import models

    pair = towers.load(open_clip_config, lora=LoraConfig(3))
    model = models.model(open_clip_config, lora=3)
    assert model.trained_parameters == sum(p.numel() for p in pair.parameters() if p.requires_grad)
    assert model.parameters == sum(p.numel() for p in pair.parameters())
    pairs.write_pair(tmp_path / "siglip", "Siglip")
    pair, model = (
        towers.load(f"hf:{tmp_path / 'siglip'}", lora=LoraConfig(3)),
        models.model(f"hf:{tmp_path / 'siglip'}", lora=3),
    )
    assert model.trained_parameters == sum(p.numel() for p in pair.parameters() if p.requires_grad)
    one = towers.load(open_clip_config, lora=LoraConfig(3, targets=("in_proj",)))
    trained = [name for name, parameter in one.first.module.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(".in_proj.lora_" in name for name in trained)
    with pytest.raises(ValueError, match=r"endings of names of linear layers, here c_fc, c_proj, in_proj, out_proj; got"):
        towers.load(open_clip_config, lora=LoraConfig(3, targets=("query",)))
    with pytest.raises(ValueError, match=r'lora.quantize must be "none" for open_clip models, got .nf4.'):
        towers.load(open_clip_config, lora=LoraConfig(3, quantize="nf4"))
    with pytest.raises(ValueError, match=r'lora.rank must be 0 for "small", which has no trained weights to adapt, got 3'):
        towers.load("small", lora=LoraConfig(3))
