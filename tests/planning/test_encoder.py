"""What a tower takes: by hand, and as published for a model that everybody knows."""

import json
import socket

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch_train.planning import gpus, models, step
from megabatch_train.planning.models import ModelSide, nowhere, without_data


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 128, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def side():
    with torch.device("meta"):
        module = Two()
    with nowhere():
        without_data(module)
    return ModelSide("image", module, lambda n: {"x": torch.zeros(n, 64)})


def test_two_layers_by_hand():
    found = models.measure(side(), 64, None)
    assert (found.width, found.embedding_bytes, found.input_bytes, found.casts) == (128, 4, 4 * 64, 0)
    assert (found.forward_operations, found.backward_operations) == (2 * 256 * 192, 2 * 256 * 192 + 2 * 256 * 128)
    assert (found.saved.fixed, found.saved.each) == (0, 4 * (256 + 128))  # what relu returned, and the embeddings
    # Embeddings and their gradient, the hidden layer and its gradient, and that of the second weights before it is added.
    assert found.backward.at(64) == 64 * 4 * (2 * 128 + 2 * 256) + 4 * 256 * 128


def test_half_precision_by_hand():
    found = models.measure(side(), 64, torch.bfloat16)
    assert found.casts == 2 * 256 * (64 + 128)
    assert found.embedding_bytes == 2
    assert found.saved.each == 2 * (64 + 256 + 128)  # the inputs are cast and saved, too


@pytest.mark.thorough
def test_one_size_tells_of_others():
    with torch.device("meta"):
        module = models.StandIn(3 * 12 * 128**2, 20, 128)
    with nowhere():
        without_data(module)
    tower = ModelSide("first", module, lambda n: {"tokens": torch.zeros(n, 20, 128)})
    small, large = (models.measure(tower, n, torch.bfloat16) for n in (32, 128))
    assert small.casts == large.casts
    for line in ("saved", "backward"):
        assert getattr(small, line).at(128) == pytest.approx(getattr(large, line).at(128), rel=0.01)


@pytest.mark.thorough
def test_vit_b_32_as_open_clip_publishes_it():
    model = models.model("open_clip:ViT-B-32")
    assert model.parameters == 151_277_313
    assert not model.is_one_tower
    towers = [models.measure(side, 4, torch.bfloat16) for side in model.sides]
    # open_clip's docs/model_profile.csv: 8.82 and 5.96 GFLOP.
    assert [tower.forward_operations / 1e9 for tower in towers] == [
        pytest.approx(8.82, abs=0.01),
        pytest.approx(5.96, abs=0.01),
    ]
    assert [tower.width for tower in towers] == [512, 512]
    assert [tower.input_bytes for tower in towers] == [4 * 3 * 224**2, 8 * 77]


def test_image_size_and_length():
    model = models.model("open_clip:ViT-B-32", image_size=256, length=32)
    image, text = (side.inputs(2) for side in model.sides)
    assert (image["image"].shape, text["text"].shape) == ((2, 3, 256, 256), (2, 32))
    assert model.sides[0].module.model.visual.positional_embedding.shape[0] == 8 * 8 + 1
    assert model.sides[0].module.model.positional_embedding.shape[0] == 32


def test_small_towers():
    model = models.model("small")
    real = sum(p.numel() for tower in _loaded() for p in tower.module.parameters())
    assert model.parameters == real
    assert [models.measure(side, 4, None).width for side in model.sides] == [256, 256]


def _loaded():
    from megabatch_train import towers

    return towers.load("small").towers


def test_parameter_counts():
    model = models.model("7M:16x256,3.1M:8x256")
    assert model.parameters == pytest.approx(7e6 + 3.1e6, rel=0.1)
    assert [side.inputs(2)["tokens"].shape for side in model.sides] == [(2, 16, 256), (2, 8, 256)]


def test_any_width_can_be_shared_out_among_heads():
    for width, heads in ((200, 2), (768, 12), (67, 1), (10, 1)):
        block = models.model(f"{12 * width**2}:4x{width}").sides[0].module.blocks[0]
        assert block.attention.num_heads == heads


def test_a_config_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, '
        '"vocab_size": 500, "max_position_embeddings": 40}'
    )
    model = models.model(f"hf-config:{tmp_path}")
    assert model.is_one_tower
    found = models.measure(model.sides[0], 4, torch.bfloat16)
    assert found.width == 64
    assert found.input_bytes == 2 * 8 * 38  # two positions less than the table has
    layer = 2 * (4 * 64 * 64 + 2 * 64 * 128) * 38 + 2 * (2 * 38 * 38 * 64)
    assert found.forward_operations == 2 * layer + 2 * 64 * 64  # and the pooler


@pytest.fixture
def configs(tmp_path):
    """Two folders with a config.json: an encoder of images, and one of texts, both with a pooler that nothing uses."""
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    made = {
        "images": shape | {"model_type": "vit", "image_size": 48, "patch_size": 16},
        "texts": shape | {"model_type": "bert", "vocab_size": 500, "max_position_embeddings": 22},
    }
    for name, config in made.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return f"{tmp_path}/images+{tmp_path}/texts"


@pytest.mark.quick({"family": "hf"})
@pytest.mark.parametrize("family", ["hf", "hf-config"])
@pytest.mark.thorough
def test_two_encoders_of_transformers(configs, family):
    model = models.model(f"{family}:{configs}")
    assert not model.is_one_tower
    image, text = (models.measure(side, 4, torch.bfloat16) for side in model.sides)
    assert (image.name, text.name) == ("image", "text")
    assert (image.width, text.width) == (512, 512)  # a linear layer brings both to CLIP's
    assert (image.input_bytes, text.input_bytes) == (4 * 3 * 48**2, 2 * 8 * 20)
    layers = 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64)  # two of them, for each of ten places
    attention = 2 * 2 * (2 * 10 * 10 * 32)
    patches, pooler, head = 2 * 9 * 3 * 16**2 * 32, 2 * 32 * 32, 2 * 32 * 512
    assert image.forward_operations == 10 * layers + attention + patches + pooler + head


@pytest.mark.thorough
def test_two_encoders_are_trained_as_train_has_them(configs):
    from megabatch_train import towers

    model, loaded = models.model(f"hf:{configs}"), towers.load(f"hf-config:{configs}")
    parameters = [p for tower in loaded.towers for p in tower.module.parameters()]
    assert model.parameters == sum(p.numel() for p in parameters)
    assert model.trained_parameters == sum(p.numel() for p in parameters if p.requires_grad)
    assert model.parameters - model.trained_parameters == 2 * (32 * 32 + 32)  # the poolers
    states = step.make(model, step.Setup(gpus.find("H200"), 1), chunk=2).states
    assert (states.weights, states.gradients, states.optimizer) == (
        4 * model.parameters,
        4 * model.trained_parameters,
        8 * model.trained_parameters,
    )


def test_image_size_and_length_of_two_encoders(configs):
    model = models.model(f"hf:{configs}", image_size=64, length=7)
    image, text = (side.inputs(2) for side in model.sides)
    assert (image["pixel_values"].shape, text["input_ids"].shape) == ((2, 3, 64, 64), (2, 7))
    assert models.measure(model.sides[0], 4, None).input_bytes == 4 * 3 * 64**2
    with pytest.raises(ValueError, match=r"length .* 22 .* got 23"):
        models.model(f"hf:{configs}", length=23)


def test_dropped_patches_cost_nothing_after_the_embedding(configs):
    whole, half = (models.measure(models.model(f"hf:{configs}", patch_dropout=x).sides[0], 4, None) for x in (0.0, 0.5))
    layers = 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64)  # two of them, for each place
    attention = 2 * (2 * 10 * 10 * 32) - 2 * (2 * 5 * 5 * 32)
    # Of nine patches, four stay, with the class token. The pooler reads one place.
    assert whole.forward_operations - half.forward_operations == 5 * layers + 2 * attention
    assert half.saved.each < 0.7 * whole.saved.each
    _, texts = configs.split("+")
    with pytest.raises(ValueError, match=r"patch_dropout must not be set for 'hf:.*texts'"):
        models.model(f"hf:{texts}", patch_dropout=0.5)
    with pytest.raises(ValueError, match=r"patch_dropout must not be set for 'small'"):
        models.model("small", patch_dropout=0.5)


def test_two_encoders_that_are_none(configs):
    images, texts = configs.split("+")
    with pytest.raises(ValueError, match=r"model .* got BertModel"):
        models.model(f"hf:{texts}+{images}")
    with pytest.raises(ValueError, match=r'model must be one name, or two with "\+" between them'):
        models.model(f"hf:{images}+")
    # As `towers.load` says it, and without asking anybody.
    with pytest.raises(ValueError, match=r"no-such-name is not a folder with a config.json, and not in the local cache"):
        models.model(f"hf:{images}+no-such-folder/no-such-name")


def test_an_encoder_of_both_is_none_of_texts(tmp_path):
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ValueError, match=r"got LlavaModel"):
        models.model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet", "No such model: resnet. Possible are: small .*; or PARAMETERS:TOKENSxWIDTH"),
        ("open_clip:ViT-B-33", "open_clip has no model ViT-B-33; did you mean ViT-B-32"),
        ("12M", "model must be PARAMETERS:TOKENSxWIDTH for each tower, .* got '12M'"),
        ("12M:3x4,5M:3x4,6M:3x4", "model must be PARAMETERS:TOKENSxWIDTH"),
        ("12M:0x128", "model must be PARAMETERS:TOKENSxWIDTH"),
        ("12M:16x0", "model must be PARAMETERS:TOKENSxWIDTH"),
        ("12M:16x1", "got '12M:16x1': 12,000,000 parameters of width 1 are 1,000,000 layers, more than 1,000"),
        ("12X:16x128", "got '12X:16x128': must be a number of 1 or more, such as 304M, got '12X'"),
        ("hf-config:/no/such/folder", "model must be a folder with a config.json, got '/no/such/folder'"),
    ],
)
def test_models_that_are_none(spec, message):
    with pytest.raises(ValueError, match=message):
        models.model(spec)


def test_a_chunk_of_one_tells_nothing():
    with pytest.raises(ValueError, match="chunk must be 2 or more, got 1"):
        models.measure(side(), 1, None)


def test_numbers():
    assert [models.number(text) for text in ("304M", "1.5B", "64k", "1,048,576")] == [304_000_000, 1_500_000_000, 64_000, 2**20]
    for wrong in ("", "many", "-3", "inf"):
        with pytest.raises(ValueError):  # noqa: PT011
            models.number(wrong)


def test_normalised_embeddings_are_float32_under_autocast():
    with torch.device("meta"):
        module = nn.Sequential()
        module.layer = nn.Linear(8, 8)
        module.forward = lambda x: F.normalize(module.layer(x), dim=-1)
    with nowhere():
        without_data(module)
    assert models.measure(ModelSide("a", module, lambda n: {"x": torch.zeros(n, 8)}), 4, torch.bfloat16).embedding_bytes == 4


@pytest.mark.parametrize("name", ["hf:no-such/model", "open_clip:roberta-ViT-B-32"])
def test_a_plan_asks_nobody(name, monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants", reason='pip install "megabatch[huggingface]"')
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: pytest.fail("asked for an address"))
    with pytest.raises(ValueError, match=r"not in the local cache of the Hugging Face hub.* A plan downloads nothing"):
        models.model(name)
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.thorough
def test_a_decoder_with_adapters(tmp_path):
    """Frozen weights in half precision, trained ones in float32 with their gradients and moments; no products for the rest."""
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    spec, setup = f"hf-config:{tmp_path}", step.Setup(gpus.find("H200"), 1)
    whole = step.make(models.model(spec, length=32), setup, 8)
    adapters = step.make(models.model(spec, length=32, lora=2, frozen=torch.bfloat16), setup, 8)
    layer = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    trained = 4 * 2 * sum(i + o for i, o in layer)
    assert adapters.model.trained_parameters == trained
    assert adapters.model.parameters == whole.model.parameters + trained
    assert adapters.states.weights == 2 * whole.model.parameters + 4 * trained
    assert (adapters.states.gradients, adapters.states.optimizer) == (4 * trained, 8 * trained)
    assert adapters.encoders[0].backward_operations < 0.7 * whole.encoders[0].backward_operations
    again = step.make(models.model(spec, length=32), setup, 8, checkpointing=True)
    assert again.encoders[0].saved.each < 0.3 * whole.encoders[0].saved.each
    assert again.encoders[0].backward.at(64) < 0.6 * whole.encoders[0].backward.at(64)
    more = again.encoders[0].backward_operations - whole.encoders[0].backward_operations
    assert 0.7 < more / whole.encoders[0].forward_operations <= 1  # the last product of a block is not needed again
    assert whole.checkpointed_chunk == 1024  # chunks of 8 are small
    assert again.checkpointed_chunk == 0
    with pytest.raises(ValueError, match=r'lora must not be set for models other than "hf:"'):
        models.model("small", lora=2)
