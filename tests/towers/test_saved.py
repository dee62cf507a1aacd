"""Models that are saved come back: same embeddings, same scale, and for open_clip models in open_clip too."""

import dataclasses
import json

import pytest
import torch

from megabatch_train import towers
from megabatch_train.data.media.images import Augmentation
from megabatch_train.evaluation import encode
from megabatch_train.towers import huggingface
from megabatch_train.towers.models import WEIGHTS, anchor
from megabatch_train.towers.tower import LoraConfig

TINY = {"width": 16, "image_size": 16, "channels": (8, 16), "blocks": 1, "buckets": 512}
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 32, "vocab_size": 99, "max_position_embeddings": 12}
VIT = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 32, "image_size": 16, "patch_size": 8}
TEXTS = ["a red square", "square"]
CONVNEXT = {"model_type": "convnext", "hidden_sizes": [8, 8, 8, 12], "depths": [1, 1, 1, 1], "image_size": 32}


def image(seed=0, size=(3, 20, 24)):
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def samples(kind):
    return [image(0), image(1)] if kind == "image" else ["a red square", ""]


def embeddings(pair):
    return [encode(tower, samples(tower.kind)) for tower in pair.towers]


def configs(tmp_path, **named):
    for name, config in named.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return "hf-config:" + "+".join(str(tmp_path / name) for name in named)


def tokenizer(folder):
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nred\nsquare\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


@pytest.mark.parametrize("kinds", [("image", "text"), ("text", "text")])
def test_small_towers_come_back(tmp_path, kinds):
    torch.manual_seed(0)
    pair = towers.load("small", kinds, **TINY, augmentation=Augmentation(turn=30.0))
    path = towers.save(dataclasses.replace(pair, logit_scale=23.5, logit_bias=-7.0), tmp_path / "run")
    assert path == tmp_path / "run" / WEIGHTS
    torch.manual_seed(1)
    again = towers.load_saved(tmp_path / "run")
    for expected, found in zip(embeddings(pair), embeddings(again), strict=True):
        assert torch.equal(found, expected)
    assert (again.logit_scale, again.logit_bias, again.name) == (23.5, -7.0, "small")
    assert (again.first is again.second) == (kinds[0] == "text")
    assert not again.first.module.training
    sample, generator = samples(kinds[0])[0], torch.Generator()
    prepared = [pair.first.prepare(sample, generator.manual_seed(5)) for pair in (pair, again)]
    inputs = [pair.first.collate([one]) for pair, one in zip((pair, again), prepared, strict=True)]
    torch.testing.assert_close(inputs[1], inputs[0], rtol=0, atol=0)  # the augmentation, too
    assert towers.save(again, tmp_path / "again").read_bytes() == towers.save(again, tmp_path / "run").read_bytes()


def test_an_open_clip_model_comes_back_here_and_in_open_clip(tmp_path):
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    torch.manual_seed(0)
    pair = towers.load("open_clip:ViT-S-32-alt")
    path = towers.save(dataclasses.replace(pair, logit_scale=50.0), tmp_path)
    again = towers.load_saved(tmp_path)
    assert again.logit_scale == 50.0
    for expected, found in zip(embeddings(pair), embeddings(again), strict=True):
        assert torch.equal(found, expected)
    by_folder = open_clip.create_model(f"local-dir:{tmp_path}")
    by_file = open_clip.create_model("ViT-S-32-alt", pretrained=str(path))
    for model in (by_folder, by_file):
        assert model.logit_scale.exp().item() == pytest.approx(50.0, rel=1e-6)
        expected = pair.first.module.model.state_dict()
        for name, value in model.state_dict().items():
            assert name == "logit_scale" or torch.equal(value, expected[name]), name


def test_a_transformers_encoder_comes_back_without_its_first_folder(tmp_path):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    pair = towers.load(configs(tmp_path, bert=BERT), ("text", "text"))
    towers.save(pair, tmp_path / "run")
    (tmp_path / "bert" / "config.json").unlink()
    again = towers.load_saved(tmp_path / "run")
    assert again.first is again.second
    assert torch.equal(embeddings(again)[0], embeddings(pair)[0])
    assert not (tmp_path / "run" / "modules.json").exists()  # hashed words are nobody else's


def test_transformers_and_sentence_transformers_load_a_run(tmp_path):
    transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    library = pytest.importorskip("sentence_transformers", reason='pip install "megabatch[sentence-transformers]"')
    torch.manual_seed(0)
    spec = configs(tmp_path, bert=BERT)
    tokenizer(tmp_path / "bert")
    options = {"query_prompt": "a ", "document_prompt": "red ", "max_length": 6}
    pair = towers.load(spec, ("text", "text"), **options)
    towers.save(pair, tmp_path / "run")
    texts = ["a red square", "square", "", "red " * 20]
    model = library.SentenceTransformer(str(tmp_path / "run"), device="cpu", local_files_only=True)
    for side, found in zip(pair.towers, (model.encode_query(texts), model.encode_document(texts)), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), encode(side, texts), rtol=1e-5, atol=1e-6)
    plain, missing = transformers.AutoModel.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not any(missing[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in pair.first.module.model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    again = towers.load_saved(tmp_path / "run")
    assert torch.equal(encode(again.second, texts), encode(pair.second, texts))


@pytest.mark.parametrize("images", [VIT, CONVNEXT], ids=["vit", "convnext"])
def test_images_and_texts_by_two_transformers_encoders(tmp_path, images):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    torch.manual_seed(0)
    pair = towers.load(configs(tmp_path, images=images, texts=BERT))
    assert (pair.first.kind, pair.second.kind) == ("image", "text")
    pictures, texts = embeddings(pair)
    assert pictures.shape == texts.shape == (2, huggingface.PAIR_DIM)
    torch.testing.assert_close(pictures.norm(dim=1), torch.ones(2))
    assert not torch.allclose(pictures[0], pictures[1])
    for tower in pair.towers:  # every parameter that asks for a gradient gets one: DDP waits for all of them
        module = tower.module.train()
        module(**tower.collate([tower.prepare(sample, None) for sample in samples(tower.kind)])).sum().backward()
        assert all((p.grad is not None) == p.requires_grad for p in module.parameters())
    training = pair.first.training_images
    read = [training.read(image(), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    crops = training.inputs(read, None)["pixel_values"]
    assert torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])
    towers.save(pair, tmp_path / "run")
    for expected, found in zip((pictures, texts), embeddings(towers.load_saved(tmp_path / "run")), strict=True):
        assert torch.equal(found, expected)


def test_an_image_processor_and_a_tokenizer_are_used_and_kept(tmp_path):
    transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    spec = configs(tmp_path, images=VIT, texts=BERT)
    tokenizer(tmp_path / "texts")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.1] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path / "images")
    pair = towers.load(spec)
    white = torch.full((3, 30, 18), 255, dtype=torch.uint8)
    assert pair.first.prepare(white, None).flatten()[0].item() == pytest.approx(0.9 / 0.2, rel=1e-3)
    assert pair.first.prepare(white, torch.Generator())[0, 8, 8].item() == pytest.approx(0.9 / 0.2, rel=1e-3)
    towers.save(pair, tmp_path / "run")
    again = towers.load_saved(tmp_path / "run")
    tokens = again.second.collate(["a red square"])["input_ids"].tolist()
    assert tokens == pair.second.collate(["a red square"])["input_ids"].tolist() == [[2, 5, 6, 7, 3]]
    for expected, found in zip(embeddings(pair), embeddings(again), strict=True):
        assert torch.equal(found, expected)


def test_adapters_find_their_base_from_any_directory(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    for name in ("project", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained("base")
    tokenizer(tmp_path / "project" / "base")
    pair = towers.load("hf:base", ("text", "text"), lora=LoraConfig(rank=2))
    towers.save(pair, "runs/one")
    assert json.loads((tmp_path / "project/runs/one/first/adapter_config.json").read_text())["base_model_name_or_path"] == (
        str(tmp_path / "project" / "base")
    )
    expected = encode(pair.first, TEXTS)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.equal(encode(towers.load_saved("../project/runs/one").first, TEXTS), expected)
    (tmp_path / "project").rename(tmp_path / "moved")
    assert torch.equal(encode(towers.load_saved("../moved/runs/one").first, TEXTS), expected)
    (tmp_path / "moved" / "base").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"/project/base must be a folder .*, got no such folder"):
        towers.load_saved("../moved/runs/one")


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("hf:base", "hf:{0}/base"),
        ("hf-config:base+org/name", "hf-config:{0}/base+org/name"),
        ("open_clip:tiny.json@w.pt", "open_clip:{0}/tiny.json@{0}/w.pt"),
        ("open_clip:ViT-B-32@openai", "open_clip:ViT-B-32@openai"),
        ("base", "{0}/base"),
        ("small", "small"),
    ],
)
def test_paths_of_another_working_directory(tmp_path, spec, wanted):
    (tmp_path / "base").mkdir()
    (tmp_path / "tiny.json").touch()
    (tmp_path / "w.pt").touch()
    assert anchor(spec, tmp_path) == wanted.format(tmp_path)


def _saved_by_ranks(group, rank, folder):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    pair = towers.load("small", **TINY)
    expected = [{name: value.clone() for name, value in tower.module.state_dict().items()} for tower in pair.towers]
    for tower in pair.towers:
        fully_shard(tower.module, mesh=DeviceMesh.from_group(group, "cpu"))
    towers.save(pair, folder)
    return expected


def test_weights_that_ranks_share_are_saved_whole(pool, tmp_path):
    expected = pool.run(_saved_by_ranks, 2, tmp_path)[0]
    for weights, tower in zip(expected, towers.load_saved(tmp_path).towers, strict=True):
        found = tower.module.state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_messages(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must have a model.safetensors, got none"):
        towers.load_saved(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"must be a complete safetensors file"):
        towers.load_saved(tmp_path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="a model that megabatch saved in format 1, got a header of None"):
        towers.load_saved(tmp_path)
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    spec = configs(tmp_path, texts=BERT, images=VIT)  # the wrong way round
    with pytest.raises(ValueError, match=r"an encoder of images in this place .*got BertModel"):
        towers.load(spec)
    with pytest.raises(ValueError, match=r'two with "\+" between them .*got \'a\+\''):
        towers.load("hf-config:a+")
