"""The model of a run that has not come to its end, from its checkpoints."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import runs
from megabatch_train import towers
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import encode
from megabatch_train.towers import models
from megabatch_train.towers.layers.lora import LoraConfig
from megabatch_train.trainer.health import StoppedError
from megabatch_train.trainer.run import load_checkpoint, load_newest


@pytest.fixture(autouse=True)
def tiny_by_name(monkeypatch):
    load = towers.load
    for module in (towers, models):
        monkeypatch.setattr(
            module, "load", lambda spec, *more, **options: runs.tiny() if spec == "tiny" else load(spec, *more, **options)
        )


@pytest.mark.parametrize("changes", [{}, {"ema": 0.5}, {"loss": {"name": "siglip"}}])
def test_a_checkpoint_has_the_model_that_the_run_saves(tmp_path, changes):
    made = runs.trainer(tmp_path, changes)
    made.fit()
    pair, step = load_checkpoint(tmp_path)
    assert step == 7
    stored = models._read(tmp_path / "model.safetensors")
    for side, tower in zip(("first", "second"), pair.towers, strict=True):
        assert not tower.module.training
        for name, value in tower.module.state_dict().items():
            assert torch.equal(value, stored[1][f"{side}.{name}"]), name
    assert pair.logit_scale == pytest.approx(stored[0]["logit_scale"], rel=1e-12)
    assert pair.logit_bias == stored[0]["logit_bias"]
    assert load_checkpoint(tmp_path / "checkpoints" / "step_00000006")[1] == 6


def test_a_checkpoint_keeps_the_options_of_texts(tmp_path, monkeypatch):
    """They may come from files that change after the run began."""
    seen = {}
    monkeypatch.setattr(towers, "load", lambda spec, *more, **options: seen.update(options) or runs.tiny())
    pair = dataclasses.replace(runs.tiny(), options={"document_prompt": "a ", "width": 3})
    runs.trainer(tmp_path, {"steps": 1}, pair=pair).fit()
    load_checkpoint(tmp_path)
    assert {key: value for key, value in seen.items() if key != "lora"} == {"document_prompt": "a "}


class Pictures(runs.Numbers):
    """Gray images and their numbers."""

    def read(self, index, side):
        return str(index) if side else torch.full((3, 32, 32), index, dtype=torch.uint8)


def test_a_checkpoint_of_open_clip_is_not_said_to_have_random_weights(tmp_path, caplog):
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    image = {"image_size": 32, "patch_size": 16, "width": 16, "layers": 1, "head_width": 8}
    text = {"context_length": 12, "vocab_size": 49408, "width": 16, "layers": 1, "heads": 2}
    (tmp_path / "tiny.json").write_text(json.dumps({"embed_dim": 8, "vision_cfg": image, "text_cfg": text}))
    spec, warning = f"open_clip:{tmp_path / 'tiny.json'}", "No pretrained weights loaded"
    pair = towers.load(spec)
    assert warning in caplog.text
    runs.trainer(tmp_path / "run", {"model": spec, "steps": 1, "batch_size": 4}, pair=pair, data=Pictures()).fit()
    caplog.clear()
    load_checkpoint(tmp_path / "run")
    assert warning not in caplog.text
    towers.load(spec)
    assert warning in caplog.text


@pytest.mark.parametrize("rank", [0, 2])
def test_a_checkpoint_of_a_moved_project_finds_its_base_model(tmp_path, monkeypatch, rank):
    transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained("base")
    Path("base/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n")
    Path("base/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    rows = [{"query": query, "document": f"{query} {query}"} for query in ("a", "b", "c", "a b")]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = {"model": "hf:base", "batch_size": 2, "steps": 2, "lora": {"rank": rank}}
    pair = towers.load("hf:base", ("text", "text"), lora=LoraConfig(rank=rank))
    made = runs.trainer("runs/one", changes, pair=pair, data=Table("pairs.jsonl"))
    made.fit()
    expected = encode(made.pair.first, ["a b"])
    (tmp_path / "project").rename(tmp_path / "moved")
    (tmp_path / "base").mkdir()  # another folder of this name
    monkeypatch.chdir(tmp_path)
    for checkpoint in ("moved/runs/one", "moved/runs/one/checkpoints/step_00000002"):
        pair, step = load_checkpoint(Path(checkpoint))
        assert step == 2
        torch.testing.assert_close(encode(pair.first, ["a b"]), expected)


def test_a_checkpoint_in_parts_too(pool, tmp_path):
    found = pool.run(runs.on_rank, 2, tmp_path, {"parallel": "fsdp"}, {})[0]
    pair, _ = load_checkpoint(tmp_path)
    for side, tower in enumerate(pair.towers):
        for name, value in tower.module.state_dict().items():
            assert torch.equal(value, found[f"{side}.{name}"]), name


def test_a_run_that_has_saved_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors and no intact checkpoint: the run has saved"):
        load_checkpoint(tmp_path)


def test_the_newer_of_model_and_checkpoint_counts(tmp_path):
    runs.trainer(tmp_path, {"steps": 2}).fit()
    assert load_newest(tmp_path)[1] is None  # both of step 2: the model
    data = runs.Numbers()
    data.signalled_at = 60
    made = runs.trainer(tmp_path, {"steps": 9}, data=data)
    assert made.resume()
    with pytest.raises(StoppedError):
        made.fit()
    pair, step = load_newest(tmp_path)
    assert step == made.step > 2
    assert torch.equal(pair.first.module.head.weight, made.pair.first.module.head.weight)
    (tmp_path / "checkpoints" / f"step_{step:08d}" / "state.pt").write_bytes(b"damaged")
    for other in (tmp_path / "checkpoints").glob("step_*"):
        if not other.name.endswith(str(step)):
            (other / "state.pt").write_bytes(b"damaged")
    pair, step = load_newest(tmp_path)
    assert step is None
    assert not torch.equal(pair.first.module.head.weight, made.pair.first.module.head.weight)


def test_a_model_of_a_later_step_is_set_aside_with_the_checkpoints(tmp_path):
    runs.trainer(tmp_path).fit()
    made = runs.trainer(tmp_path)
    assert made.resume(tmp_path / "checkpoints" / "step_00000006")
    assert (tmp_path / "abandoned_model.safetensors").is_file()
    assert load_newest(tmp_path)[1] == 6
