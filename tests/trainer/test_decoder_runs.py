"""Runs of decoders: adapters in checkpoints and saved models, activation checkpointing, and what cannot be combined."""

import dataclasses
import json

import pytest
import torch

import decoders
from megabatch.cached.second_pass import list_tensors, measure_graph
from megabatch.world import World
from megabatch_train import settings, towers
from megabatch_train.data import load as data
from megabatch_train.trainer import build, step
from megabatch_train.trainer import config as configs
from megabatch_train.trainer.checkpoints import read_weights
from megabatch_train.trainer.config import MemoryConfig
from megabatch_train.trainer.loop import Trainer
from megabatch_train.trainer.run import load_newest
from megabatch_train.trainer.step import Pace, choose_fit, pair_seconds

pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')


@pytest.fixture
def base(tmp_path):
    """A decoder with weights, and words for a tokenizer of its own."""
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModel, PreTrainedTokenizerFast, Qwen3Config

    words = {word: i for i, word in enumerate(["<end>", "<unknown>", *(f"w{i}" for i in range(40))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unknown>").save_pretrained(tmp_path / "base")
    AutoModel.from_config(Qwen3Config(**decoders.SIZES)).save_pretrained(tmp_path / "base")
    lines = [{"query": f"w{i}", "document": f"w{i} w{i + 1}", "negative": f"w{i + 2}"} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def trainer(folder, name, world=None, **changes):
    given = {
        "data": str(folder / "pairs.jsonl"),
        "model": f"hf:{folder / 'base'}",
        "batch_size": 10,
        "chunk_size": 4,
        "steps": 4,
        "loss": {"name": "info_nce"},
        "optimizer": {"lr": 1e-2},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "lora": {"rank": 2},
        "checkpoint": {"every": 2},
        "memory": {"graphs": 0.0, "checkpointing": "on"},
    }
    config = configs.resolve(settings.merge(given, changes))
    torch.manual_seed(0)
    dataset = data.load(config.data)
    pair = towers.load(config.model, dataset.sides, lora=config.lora, **config.model_options)
    return Trainer(config, pair, dataset, folder / name, world=world)


def weights(made):
    found = {name: p.detach() for name, p in made.pair.first.module.named_parameters()}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in found.items()}


@pytest.mark.thorough
def test_checkpoints_and_models_of_adapters_hold_what_is_trained(base):
    whole = trainer(base, "whole")
    before = weights(whole)
    whole.fit()
    after = weights(whole)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if "lora_" in name}
    stored, _ = read_weights(base / "whole" / "checkpoints" / "step_00000004")
    learned = {f"first.{name}" for name in changed} | {"loss.log_scale"}
    assert set(stored) == learned
    trainer(base, "half", steps=2).fit()
    resumed = trainer(base, "half")
    assert resumed.resume()
    resumed.fit()
    (base / "half" / "model.safetensors").rename(base / "half" / "aside")
    (saved, _), (checkpointed, step) = load_newest(base / "whole"), load_newest(base / "half")
    assert step == 4  # of the checkpoint
    for read in (resumed.pair, saved, checkpointed):
        found = dict(read.first.module.named_parameters())
        for name, value in after.items():
            assert torch.equal(found[name], value), name
    assert (base / "half" / "first" / "adapter_model.safetensors").is_file()


def on_rank(group, rank, folder, how, precision):
    """Two steps, with sharded weights in host memory, and two more after a resumption."""
    changes = {"parallel": how, "memory": {"offload": how == "fsdp"}, "precision": precision}
    world = World(torch.device("cpu"), group)
    trainer(folder, "ranks", world, steps=2, **changes).fit()
    made = trainer(folder, "ranks", world, **changes)
    assert made.resume()
    made.fit()
    return weights(made)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "precision", "stored", "tolerance"),
    [
        ("ddp", "fp32", torch.float32, 2e-4),
        ("fsdp", "fp32", torch.float32, 2e-4),
        # Four steps of 0.01 in either direction: AdamW's first steps are as long for a gradient that is zero but for rounding.
        ("fsdp", "bf16", torch.bfloat16, 2 * 4 * 1e-2),
    ],
)
def test_adapters_over_ranks_are_trained_saved_and_resumed(base, pool, how, precision, stored, tolerance):
    whole = trainer(base, "whole", precision=precision)
    whole.fit()
    for found in pool.run(on_rank, 3, base, how, precision):
        for name, value in weights(whole).items():
            assert found[name].dtype == (torch.float32 if "lora_" in name else stored)
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
    read = dict(towers.load_saved(base / "ranks").first.module.named_parameters())
    for name, value in found.items():
        assert torch.equal(read[name].to(value), value), name


def test_adapters_have_their_own_learning_rate_unless_one_is_given():
    assert configs.resolve({"model": "hf:x", "lora": {"rank": 4}}).optimizer.lr == 2e-4
    assert configs.resolve({"model": "hf:x", "lora": {"rank": 4}, "optimizer": {"lr": 1.0}}).optimizer.lr == 1.0
    assert configs.resolve({"model": "hf:x"}).optimizer.lr == configs.FINE_TUNING["optimizer"]["lr"]


def test_checkpointed_layers_keep_their_inputs_alone():
    found = {}
    for checkpointing in (False, True):
        encoder = decoders.decoder(decoders.Way(checkpointing=checkpointing))
        with measure_graph(None, list_tensors([encoder])) as graph:
            output = encoder(**decoders.texts(9, 1))
        found[checkpointing] = graph.bytes, output.detach()
    assert found[True][0] < 0.3 * found[False][0]
    assert torch.equal(found[True][1], found[False][1])
    encoder = decoders.decoder(decoders.Way(checkpointing=True))
    decoders.set_checkpointing([encoder], False)
    assert not any("forward" in vars(layer) for layer in encoder.model.layers)


def test_what_is_computed_again_is_counted_by_pair():
    plain, again = Pace(1.0, 3.0, 100.0), Pace(1.0, 4.0, 10.0)
    assert pair_seconds([plain], 10, 0.0) == 4.0
    assert pair_seconds([plain], 10, 500.0) == 3.5  # half of the graphs are kept
    assert pair_seconds([again], 10, 100.0) == 4.0  # all of them
    assert pair_seconds([plain, again], 1, 0.0) == 9.0


@pytest.mark.parametrize(
    ("sizes", "paces", "wanted"),
    [
        ({False: 32, True: 64}, {}, (32, False)),  # large enough, and nothing is measured
        ({False: 2, True: 16}, {False: Pace(1.0, 3.0, 1.0), True: Pace(0.5, 2.0, 1.0)}, (16, True)),
        ({False: 2, True: 16}, {False: Pace(1.0, 3.0, 1.0), True: Pace(1.0, 4.0, 1.0)}, (2, False)),
        ({False: 0, True: 1}, {True: Pace(1.0, 4.0, 1.0)}, (1, True)),  # without it not even one sample fits
    ],
)
def test_checkpointing_is_chosen_by_measurement(sizes, paces, wanted):
    encoder = decoders.decoder()

    class Trial:
        def now(self):
            return "forward" in vars(encoder.model.layers[0])

        def __call__(self, size):
            return 1 if size <= sizes[self.now()] else None

        def pace(self, size):
            return paces[self.now()]

    found = step._choose_checkpointing([Trial()], [encoder], sizes[True] if sizes[True] < 32 else 32, 10**9, 0.0)
    assert (found[0][0], found[1]) == wanted


def test_checkpointing_and_offload_as_settings():
    encoder = decoders.decoder()
    inputs = decoders.texts(8, 1)
    world = World(torch.device("cpu"))
    for how, on in (("on", True), ("off", False), ("auto", False)):
        config = MemoryConfig(checkpointing=how)
        found = choose_fit(config, 4, [encoder, encoder], lambda side, count: decoders.part(inputs, slice(count)), 8, world)
        assert found.checkpointing == on
        assert ("forward" in vars(encoder.model.layers[0])) == on
        assert dataclasses.replace(found, chunk_sizes=(2, 2)).halve().checkpointing == on
    for how in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match=r'memory.offload needs parallel = "fsdp" on several ranks \(torchrun\), got'):
            build.wrap([encoder], [inputs], world, how, offload=True)
