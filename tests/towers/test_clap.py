"""CLAP models of transformers: equality with the library, training, resuming, search and export."""

import json
import math

import pytest
import torch

import megabatch as mb
import recordings
from megabatch_train import towers
from megabatch_train.cli import main
from megabatch_train.data.dataset import Audio
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import embed, evaluate
from megabatch_train.export import export
from megabatch_train.planning import models as planning
from recordings import RATE, tone

pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')

TEXTS = ["a low tone", "high", "a highest tone a tone"]


def samples():
    lengths = ((300, 0.3, RATE), (800, 1.0, RATE), (1500, 1.0, 2 * RATE))  # the last one has another rate
    return [Audio(tone(frequency, seconds, rate)[:, 0].float(), rate) for frequency, seconds, rate in lengths]


@torch.no_grad()
def output_of(folder):
    """The output of ClapModel, computed with the processor of the folder."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    assert type(model) is transformers.ClapModel
    read = transformers.AutoFeatureExtractor.from_pretrained(folder)
    waves = [sample.samples if sample.rate == RATE else tone(1500)[:, 0].float() for sample in samples()[:2]]
    features = read([wave.numpy() for wave in waves], sampling_rate=RATE, return_tensors="pt")["input_features"].float()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    return model(
        input_features=features,
        is_longer=torch.zeros(len(features), 1, dtype=torch.bool),
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
    )


@torch.no_grad()
def assert_equal_to_library(pair, folder):
    expected = output_of(folder)
    encoded = []
    for tower, inputs in zip(pair.towers, (samples()[:2], TEXTS), strict=True):
        tower.module.eval()
        encoded.append(tower.module(**tower.collate([tower.prepare(sample, None) for sample in inputs])))
    torch.testing.assert_close(encoded[0], expected.audio_embeds, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoded[1], expected.text_embeds, rtol=0, atol=1e-6)
    logits = pair.logit_scale * encoded[0] @ encoded[1].T
    torch.testing.assert_close(logits, expected.logits_per_audio, rtol=1e-6, atol=1e-6 * pair.logit_scale)
    torch.testing.assert_close(logits.T, expected.logits_per_text, rtol=1e-6, atol=1e-6 * pair.logit_scale)


@pytest.mark.parametrize("fusion", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_run_is_the_librarys_before_and_after_training_and_export(tmp_path, fusion, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recordings.write_clap(tmp_path / "clap", fusion=fusion)
    pair = towers.load("hf:clap", ("audio", "text"))
    assert pair.logit_scale == pytest.approx(math.exp(1.5))
    assert_equal_to_library(pair, tmp_path / "clap")
    towers.save(pair, tmp_path / "saved")
    assert_equal_to_library(towers.load_saved(tmp_path / "saved"), tmp_path / "saved")

    table = recordings.write_tones(tmp_path / "tones", 48)
    words = ["--model", "hf:clap", "--data", table, "--validation", table, "--batch-size", 12, "--chunk-size", 12]
    words += [
        "--set",
        "checkpoint.every=24",
        "--set",
        "checkpoint.best=none",
        "--lr",
        "1e-3",
        "--set",
        "schedule.warmup_steps=2",
    ]
    words = [*map(str, words), "--compile", "off", "--no-report", "--set", "device=cpu"]
    assert main(["train", *words, "--steps", "48", "--output", "run"]) in (0, None)
    before, after = (evaluate(one, Table(table))["clip_val_loss"] for one in (pair, towers.load_saved(tmp_path / "run")))
    assert after < before - 0.5
    assert_equal_to_library(towers.load_saved(tmp_path / "run"), tmp_path / "run")

    assert main(["train", "--resume", "run/checkpoints/step_00000024", "--output", "again", "--no-report"]) in (0, None)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "again"))
    assert first == second

    export(towers.load_saved(tmp_path / "run"), "hf", tmp_path / "exported")
    assert_equal_to_library(towers.load_saved(tmp_path / "run"), tmp_path / "exported")
    assert_equal_to_library(towers.load("hf:exported", ("audio", "text")), tmp_path / "exported")

    capsys.readouterr()
    assert main(["search", "run", "a low tone", "tones/1.wav", "--json", "-k", "2"]) in (0, None)
    of_text, of_audio = json.loads(capsys.readouterr().out)
    assert all(match["path"].endswith(".wav") for match in of_text["matches"])
    assert {match["text"] for match in of_audio["matches"]} <= {f"a {name} tone" for name in recordings.TONES}
    assert main(["embed", "run", "--output", "tones.npy"]) in (0, None)
    assert main(["search", "run", "a low tone", "--embeddings", "tones.npy", "--json", "-k", "2"]) in (0, None)
    (again,) = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert [match["path"] for match in again["matches"]] == [match["path"] for match in of_text["matches"]]
    assert main(["eval", "run"]) in (0, None)
    assert "audio → text" in capsys.readouterr().out


def test_a_plan_counts_the_parameters_of_the_model(tmp_path):
    recordings.write_clap(tmp_path)
    model = planning.model(f"hf:{tmp_path}")
    assert model.parameters == sum(parameter.numel() for parameter in towers.load(f"hf:{tmp_path}", None).parameters())
    with pytest.raises(ValueError, match="image_size must not be set"):
        planning.model(f"hf:{tmp_path}", image_size=32)


def test_cached_gradients_are_the_plain_gradients(tmp_path):
    """The batch normalization of the spectrogram uses its stored statistics, so chunks do not change the gradients."""
    recordings.write_clap(tmp_path)
    pair = towers.load(f"hf:{tmp_path}", ("audio", "text"))
    encoder = pair.first.module.double().train()
    audio = pair.first.collate([pair.first.prepare(sample, None) for sample in samples()])
    audio["input_features"] = audio["input_features"].double()
    texts = pair.second.collate(TEXTS)
    loss = mb.clip_loss(encoder(**audio), encoder(**texts), pair.logit_scale)
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(loss, parameters)
    mb.cached_backward(lambda x, y: mb.clip_loss(x, y, pair.logit_scale), [(encoder, audio), (encoder, texts)], chunk_size=1)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_crops_of_training_follow_the_generator(tmp_path):
    recordings.write_clap(tmp_path)
    tower = towers.load(f"hf:{tmp_path}", ("audio", "text")).first
    sweep = Audio(torch.sin(torch.linspace(0, 300, 4 * RATE) ** 2 / 30), RATE)
    first, again, other = (tower.prepare(sweep, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(tower.prepare(sweep, None), tower.prepare(Audio(sweep.samples[12000:20000], RATE), None))


def test_unreadable_recordings_are_skipped(tmp_path):
    table = recordings.write_tones(tmp_path / "tones", 6)
    (table.parent / "1.wav").write_bytes(b"")
    (table.parent / "2.wav").unlink()
    (table.parent / "3.wav").write_bytes((table.parent / "4.wav").read_bytes()[:-300])
    recordings.write_clap(tmp_path / "clap")
    pair, dataset = towers.load(f"hf:{tmp_path / 'clap'}", ("audio", "text")), Table(table)
    embed(pair.first, dataset, 0)
    assert dataset.usable(range(6)).tolist() == [True, False, False, False, True, True]
    assert [dataset.failures[index].rpartition("/")[2] for index in (1, 2, 3)] == [
        "1.wav is empty",
        "2.wav cannot be read: No such file or directory",
        f"3.wav is cut off: it must have {len(dataset.read(4, 0).samples):,} samples, got fewer",
    ]


def test_configs_give_random_weights_and_need_a_feature_extractor(tmp_path):
    model = recordings.write_clap(tmp_path)
    pair = towers.load(f"hf-config:{tmp_path}", ("audio", "text"))
    names = {name for name, _ in pair.first.module.get_submodule("model").named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"must have towers for image and text, got .*, which is for audio and text"):
        towers.load(f"hf-config:{tmp_path}")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="must have the feature extractor of a model of recordings"):
        towers.load(f"hf-config:{tmp_path}", ("audio", "text"))
