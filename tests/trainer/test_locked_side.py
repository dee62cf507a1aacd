"""LiT: a frozen side that is encoded once, or every time, trains the other side alike."""

import dataclasses
import io
import json
import tarfile

import pytest
import torch

import runs
from megabatch_train import towers
from megabatch_train.data.dataset import Part
from megabatch_train.data.shards import Shards
from megabatch_train.data.tables import Table
from megabatch_train.trainer import build, loss

LIT = {"freeze": "first", "augment": False}


def trained(folder, changes, **options):
    made = runs.trainer(folder, changes, **options)
    made.fit()
    return made


def test_kept_embeddings_train_as_embeddings_made_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "ROWS", 16)  # several blocks
    wanted = trained(tmp_path / "encoded", {**LIT, "keep_frozen": False}, pair=runs.tiny(0.3))
    data = runs.Numbers()
    made = trained(tmp_path / "kept", LIT, pair=runs.tiny(0.3), data=data)
    for name, value in runs.weights(wanted).items():
        torch.testing.assert_close(runs.weights(made)[name], value, rtol=1e-10, atol=1e-10)
    start = runs.tiny(0.3)
    assert runs.same_bits(made.pair.first.module.state_dict(), start.first.module.state_dict()) == []
    changed = runs.same_bits(made.pair.second.module.state_dict(), start.second.module.state_dict())
    assert len(changed) == len(list(start.second.module.parameters()))
    assert not made.pair.first.module.dropout.training
    assert len(list((tmp_path / "kept" / "frozen").iterdir())) == 3
    firsts = 40 + 2 + 1  # each once, and what the tower is shown before
    seconds = 2 + 1 + 7 * 12  # once a step
    assert data.reads == firsts + seconds


def test_kept_embeddings_are_read_again_by_a_run_that_continues(tmp_path):
    trained(tmp_path, {**LIT, "steps": 4})
    data = runs.Numbers()
    made = runs.trainer(tmp_path, {**LIT, "steps": 4}, data=data)
    assert made.resume()
    reads = data.reads
    made.fit()
    assert data.reads == reads
    (block,) = (tmp_path / "frozen").iterdir()
    block.write_bytes(block.read_bytes()[:50])
    made = runs.trainer(tmp_path, {**LIT, "steps": 4}, data=data)
    reads = data.reads
    made.resume()
    made.fit()
    assert data.reads == reads + 40  # the damaged block is made again


def test_kept_embeddings_know_what_could_not_be_read(tmp_path):
    changes = {**LIT, "steps": 3}
    wanted = trained(tmp_path / "encoded", {**changes, "keep_frozen": False}, data=runs.Numbers((2, 9, 31)))
    trained(tmp_path / "kept", changes, data=runs.Numbers((2, 9, 31)))
    data = runs.Numbers()  # they can be read now, but the embeddings that were kept are of blanks
    made = trained(tmp_path / "kept", {**changes, "checkpoint": {"every": 100}}, data=data)
    assert set(data.failures) == {2, 9, 31}
    for name, value in runs.weights(wanted).items():
        torch.testing.assert_close(runs.weights(made)[name], value, rtol=1e-10, atol=1e-10)


class Named(runs.Numbers):
    """Samples whose names and values depend on a folder."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def read(self, index, side):
        sample = super().read(index, side)
        return sample + 1 if self.folder == "b" else sample

    def name(self, index):
        return f"{self.folder}/{index}"


def test_kept_embeddings_belong_to_their_samples(tmp_path):
    changes = {**LIT, "steps": 2, "checkpoint": {"every": 100}}
    wanted = runs.weights(trained(tmp_path / "alone", changes, data=Named("b")))
    trained(tmp_path / "both", changes, data=Named("a"))
    made = trained(tmp_path / "both", changes, data=Named("b"))
    assert runs.same_bits(runs.weights(made), wanted) == []
    assert len(list((tmp_path / "both" / "frozen").iterdir())) == 2


def fingerprints(pair, *datasets, side=1):
    return {loss._fingerprint(pair, side, dataset) for dataset in datasets}


def test_the_fingerprint_of_data_contains_texts_paths_and_options(tmp_path):
    def table(name, rows):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return Table(tmp_path / name / "t.jsonl")

    rows = [{"image": f"{i}.png", "text": f"text {i}"} for i in range(4)]
    one, other = table("one", rows), table("other", [*rows[:3], {**rows[3], "text": "text 4"}])
    pair = runs.tiny()
    assert len(fingerprints(pair, one, other, side=0)) == 2  # the same names in other folders
    assert len(fingerprints(pair, one, other, side=1)) == 2
    assert len(fingerprints(pair, one, one.part(range(4)), Part(one, range(4)))) == 1
    assert len(fingerprints(pair, Part(one, [0, 1]), Part(one, [1, 2]), Part(one, [0, 1]))) == 2
    assert fingerprints(dataclasses.replace(pair, options={"document_prompt": "a "}), one) != fingerprints(pair, one)


def test_the_fingerprint_of_shards_reads_no_sample(tmp_path, monkeypatch):
    found = []
    for name, caption in (("one", "a dog"), ("other", "a cat!")):
        (tmp_path / name).mkdir()
        with tarfile.open(tmp_path / name / "0.tar", "w") as archive:
            for member, data in (("k.jpg", b"1"), ("k.txt", caption.encode())):
                about = tarfile.TarInfo(member)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
        shards = Shards([tmp_path / name / "0.tar"], cache_folder=tmp_path / "cache")
        monkeypatch.setattr(shards, "read_stored", None)
        found.append(shards.key(0, 1))
        assert len(fingerprints(runs.tiny(), shards)) == 1
    assert found[0] != found[1]


def test_two_ranks_share_the_encoding(pool, tmp_path):
    wanted = runs.weights(trained(tmp_path / "one", LIT))
    for found in pool.run(runs.on_rank, 2, tmp_path / "two", LIT, {}):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def test_augmentation_is_said_to_be_off(tmp_path, caplog):
    caplog.set_level("INFO")
    trained(tmp_path, {"freeze": "first", "steps": 1})
    assert "the frozen side is not augmented" in caplog.text


@pytest.mark.parametrize(
    ("name", "warns"),
    [
        ("small", True),
        ("open_clip:ViT-B-32", True),
        ("hf-config:folder+other", True),
        ("open_clip:ViT-B-32@openai", False),
        ("hf:images+texts", False),
    ],
)
def test_a_frozen_side_with_random_weights_is_warned_of(tmp_path, caplog, name, warns):
    runs.trainer(tmp_path, LIT, pair=dataclasses.replace(runs.tiny(), name=name))
    told = f"freeze = 'first' freezes a tower with random weights, because {name} has no trained weights"
    assert (told in caplog.text) == warns


def test_a_model_that_is_one_module_locks_the_parts_of_one_side(tmp_path):
    pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    pair = towers.load("open_clip:ViT-S-32-alt")
    image = torch.zeros(1, 3, pair.first.module.model.visual.image_size[0], pair.first.module.model.visual.image_size[1])
    samples = [{"image": image}, pair.second.collate([pair.second.prepare("a text", None)])]
    build.freeze(pair, 0, samples)
    model = pair.first.module.model
    assert not any(p.requires_grad for p in model.visual.parameters())
    assert not model.visual.training
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {
        name for name, _ in model.named_parameters() if not name.startswith("visual.") and name != "logit_scale"
    }
    assert model.transformer.training


def test_one_encoder_for_both_sides_cannot_be_locked(tmp_path):
    pair = towers.load("small", ("text", "text"), width=8, buckets=64)
    with pytest.raises(ValueError, match='freeze must be "none" for small, because its two sides share parameters'):
        build.freeze(pair, 0, [pair.first.collate([pair.first.prepare("a", None)])] * 2)
