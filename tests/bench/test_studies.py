"""The studies of images and of mining in benchmarks/."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from helpers import PATIENCE

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_images_are_those_of_their_captions():
    from flickr8k_data import Data, Images, invented

    pictures = invented(9)
    numbers = {text: i for i, texts in enumerate(pictures.captions) for text in texts}
    data = Data.of(pictures, lambda texts: torch.tensor([[numbers[text]] for text in texts]), "cpu", held_out=3)
    assert data.trained == 30
    assert (data.pixels[data.owners] == pictures.pixels[data.tokens[:, 0]]).all()
    assert not set(data.owners[:30].tolist()) & set(data.owners[30:].tolist())
    chosen = torch.tensor([4, 4, 1])
    (found,) = Images(data, chosen, 128, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)).chunks([(1, 3)], None)
    torch.testing.assert_close(found["image"], data.pixels[[4, 1]] / 255)
    (larger,) = Images(data, chosen, 200, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)).chunks([(0, 3)], None)
    assert larger["image"].shape == (3, 3, 200, 200)
    assert (
        F.avg_pool2d(larger["image"], 200).sub(data.pixels[chosen].float().mean((2, 3), keepdim=True) / 255).abs().max() < 0.01
    )


def test_settings_are_chosen_on_other_photographs_than_those_of_the_study():
    from flickr8k_data import FIT, TEST, TRAIN, VALIDATION, Captioned, invented

    pictures = invented(48)
    train, test, fit, validation = (
        set(Captioned(pictures, 12, part).items().tolist()) for part in (TRAIN, TEST, FIT, VALIDATION)
    )
    assert (len(fit), len(validation), len(test)) == (24, 12, 12)
    assert fit | validation == train
    assert not train & test
    assert not fit & validation


def image_study_line(setting, recall):
    from image_study_report import METRICS

    figures = {"pairs_per_second": 100.0, "beside": 2, "machine": "here", "losses": [2.0, 1.0], "scale": 20.0}
    return setting._asdict() | dict.fromkeys(METRICS, recall) | figures


def test_runs_of_the_image_study_follow_from_those_before(tmp_path):
    """Of made-up results: 96 pixels are better, 2e-3 is the best rate and 5e-4 nearly as good, 4,096 the best batch."""
    pytest.importorskip("matplotlib")
    import image_study_report
    import image_study_settings

    from megabatch.evaluation import results

    sizes, options = image_study_settings.Sizes(), mock.Mock(lr=None, seeds=[0, 1], sizes=None)
    with pytest.raises(SystemExit, match="rate needs the results of choose"):
        image_study_settings.wanted("rate", [], sizes, options)
    lines = [
        image_study_line(one, 0.3 if one.tower == "conv1@96" and one.flip else 0.2)
        for one in image_study_settings.wanted("choose", [], sizes, options)
    ]
    with pytest.raises(SystemExit, match="study needs the results of rate, or --lr"):
        image_study_settings.wanted("study", lines, sizes, options)
    by_rate = {2.5e-4: 0.25, 5e-4: 0.395, 1e-3: 0.3, 2e-3: 0.4, 4e-3: 0.1}
    rates = image_study_settings.wanted("rate", lines, sizes, options)
    lines += [
        image_study_line(one, by_rate[one.lr]) for one in rates if one.lr != image_study_settings.FIRST_RATE
    ]  # it is known
    study = image_study_settings.wanted("study", lines, sizes, options)
    assert {(one.tower, one.flip, one.lr) for one in study} == {("conv1@96", True, 5e-4)}
    assert len(study) == len(set(study)) == 2 * (5 * 3 + 1)
    samples = 14 * 32768  # 2.25 times the operations of the smaller tower, which sees 32 · 32,768
    assert {one.batch_size * one.steps for one in study} == {samples}
    assert {one.batch_size for one in study[:6]} == {256}  # they have most steps
    assert {one.seed for one in study[6 : 6 + 13]} == {0}  # then each seed after the other
    lines += [
        image_study_line(one, 0.4 + 0.05 * (one.batch_size == 4096) + 0.02 * (one.rule == "linear") + 0.002 * one.seed)
        for one in study
    ]
    longer = image_study_settings.wanted("steps", lines, sizes, options)
    assert {(one.batch_size, one.rule, one.steps) for one in longer} == {
        (size, "linear", samples // 4096) for size in (8192, 16384, 32768)
    }
    lines += [image_study_line(one, 0.6) for one in longer]
    losses = image_study_settings.wanted("losses", lines, sizes, options)
    assert [(one.loss, one.ids) for one in losses[:3]] == [("megabatch", False), ("open_clip", False), ("inf_cl", False)]
    lines += [image_study_line(one, {"inf_cl": 0.1}.get(one.loss, 0.4) + 0.002 * one.seed) for one in losses]
    siglip = image_study_settings.wanted("siglip", lines, sizes, options)
    assert [(one.batch_size, one.loss) for one in siglip[:2]] == [(1024, "siglip"), (8192, "siglip")]
    lines += [image_study_line(one, 0.4) for one in siglip]
    for line in lines:
        results.append(tmp_path / "image_study.jsonl", line)
    image_study_report.report(tmp_path / "image_study.jsonl")
    text = (tmp_path / "image_study.md").read_text()
    for words in (
        "the best mean recall is 47.1 ± 0.1 % with 4,096 pairs in a batch (rate: linear).",
        "With 32,768 pairs, and so 14 steps, it is 42.1 ± 0.1 %.",
        "8,192 pairs with 112 steps reach 60.0 ± 0.0 %, more than the best at equal samples.",
        "with the loss of open_clip reaches 40.1 ± 0.1 %, which is within seed noise of ours",
        "with the loss of inf_cl reaches 10.1 ± 0.1 %, which differs from ours",
        "| 4,096 | 112 | 45.1 ± 0.1 | 45.1 ± 0.1 | 47.1 ± 0.1 | 200 |",
        "| 1,024 | SigLIP |",
    ):
        assert words in text, words
    assert (tmp_path / "image_study.png").read_bytes().startswith(b"\x89PNG")


def test_a_mined_table_with_a_text_of_its_own_is_refused(tmp_path):
    from mining_study import FLICKR, SIZES, Prepared, counted

    given = Prepared(FLICKR, SIZES[FLICKR, "tiny"], tmp_path, tmp_path / "train.jsonl", tmp_path, "", None)
    pairs = [("images/1.png", "a cat"), ("images/1.png", "a pet"), ("images/2.png", "a dog")]

    def table(name, rows):
        keys = ("image", "caption", "negative_1", "negative_2")
        (tmp_path / name).write_text("".join(json.dumps(dict(zip(keys, row, strict=False))) + "\n" for row in rows))
        return tmp_path / name

    table("train.jsonl", pairs)
    good = [(f"/data/{image}", text, "a pet" if "2" in image else "a dog", None) for image, text in pairs]
    assert counted(given, table("mined.jsonl", good)) == {"found": 3, "missing": 3}
    wrong = {
        "text of its own": [good[0], (*good[1][:2], "a cat", None), good[2]],
        "must have 3 lines": good[:2],
        "in their order": [good[1], good[0], good[2]],
        "must have negatives": [(*row[:2], None, None) for row in good],
    }
    for message, rows in wrong.items():
        with pytest.raises(AssertionError, match=message):
            counted(given, table("mined.jsonl", rows))


@pytest.mark.thorough
def test_a_tiny_study_of_images_continues_where_it_was_stopped(tmp_path):
    """Tower and rate are known from lines; a batch size and two losses are missing."""
    pytest.importorskip("open_clip")
    import image_study_settings

    from megabatch.evaluation import results

    sizes, options = image_study_settings.TINY, mock.Mock(lr=None, seeds=[0], sizes=None)
    lines = [image_study_line(one, 0.3) for one in image_study_settings.wanted("choose", [], sizes, options)]
    rates = image_study_settings.wanted("rate", lines, sizes, options)
    for line in [*lines, *(image_study_line(one, 0.2) for one in rates if one.lr != image_study_settings.FIRST_RATE)]:
        results.append(tmp_path / "image_study.jsonl", line)
    call = [sys.executable, str(FOLDER / "image_study.py"), "--tiny", "--beside", "1", "--seeds", "0"]
    call += ["--parts", "choose", "study", "losses", "--output", str(tmp_path), "--best", str(tmp_path / "best")]
    done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert "choose: 0 runs to do, 4 known" in done.stdout
    lines = results.read(tmp_path / "image_study.jsonl")
    assert len(lines) == 5 + 4 + 2
    ours, theirs = (line for line in lines if not line["ids"])
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-3)
    assert (tmp_path / "image_study_gallery.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in (tmp_path / "image_study.md").read_text()


@pytest.mark.thorough
def test_a_tiny_study_of_mining_continues_where_it_was_stopped(tmp_path):
    for package in ("open_clip", "transformers", "wn"):
        pytest.importorskip(package)
    from mining_study_report import ARMS

    from megabatch.evaluation import results

    call = [sys.executable, str(FOLDER / "mining_study.py"), "--tiny", "--seeds", "0"]
    call += ["--output", str(tmp_path), "--work", str(tmp_path / "work")]
    subprocess.run(call, check=True, capture_output=True, timeout=PATIENCE)
    file = tmp_path / "mining_study.jsonl"
    lines = results.read(file)
    assert [(line["data"], line["arm"]) for line in lines] == [(name, arm) for name in ("wordnet", "flickr8k") for arm in ARMS]
    for control, mined, unfiltered in (lines[1:4], lines[5:8]):
        assert control["first_loss"] < mined["first_loss"] <= unfiltered["first_loss"]  # filtered negatives are less similar
        assert unfiltered["missing"] == 0
    assert lines[0]["query_to_text_R@10"] > 0.2  # 0.1 by chance
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert [line.split()[3] for line in done.stdout.splitlines() if "seed 0" in line] == ["unfiltered"]
    again = results.read(file)
    assert len(again) == len(lines)
    assert again[-1]["first_loss"] == lines[-1]["first_loss"]
    text = (tmp_path / "mining_study.md").read_text()
    assert "### WordNet" in text
    assert "### Flickr8k" in text
    assert str(tmp_path) not in text
    assert (tmp_path / "mining_study.png").read_bytes().startswith(b"\x89PNG")
