"""The examples on tiny data: they run, are short, and print what they promise."""

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))  # Python does so for a script; the examples import toy.py


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(name, arguments, capsys):
    load(name).main(arguments.split())
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?", capsys.readouterr().out)]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 100


def test_optimal_transport_costs_what_pot_says(capsys):
    pytest.importorskip("ot")
    error, cost, dense = printed("optimal_transport", "--points 60 --width 3 --tolerance 1e-8", capsys)
    assert error < 1e-8
    assert abs(cost - dense) < 2e-6, "both have six digits after the point"


def test_the_plan_of_optimal_transport_is_pots():
    ot = pytest.importorskip("ot")
    x, y = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plan = load("optimal_transport").Plan(x, y[:30], 0.5)
    for _ in range(300):
        plan.improve()
    costs = torch.cdist(x, y[:30]).square() / 2
    found = ((plan.f[:, None] + plan.g - costs) / 0.5).exp() / (40 * 30)
    wanted = ot.sinkhorn([], [], costs.numpy(), 0.5, method="sinkhorn_log", numItermax=10000, stopThr=1e-12)
    torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-6, atol=1e-12)


@pytest.mark.thorough
def test_two_towers_gain_by_the_correction(capsys):
    without, corrected = printed("two_towers", "--users 60 --items 120 --steps 40 --batch 512", capsys)
    assert corrected > without + 0.05


@pytest.mark.thorough
def test_a_decoder_finds_words_by_their_definitions(capsys, tmp_path):
    pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    pytest.importorskip("wn", reason='pip install "megabatch[wordnet]"')
    *_, before, after = printed("decoder_lora", f"--pairs 60 --steps 25 --output {tmp_path}", capsys)
    assert before < 0.2
    assert after > 0.8
    assert (tmp_path / "first" / "adapter_model.safetensors").is_file()


def test_series_find_their_texts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (recall,) = printed("series_to_text", f"--curves 256 --epochs 4 --output {tmp_path}", capsys)[-1:]
    assert recall > 0.15, "chance is 1 of 18"


def test_density_and_uniformity(capsys):
    density = load("density")
    z = torch.nn.functional.normalize(
        torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1
    )
    pairs = torch.pdist(z).square()
    torch.testing.assert_close(density.uniformity(z), (-2 * pairs).exp().mean().log())
    kernels = torch.distributions.Normal(z[None], 0.3).log_prob(z[:7, None]).sum(2)
    torch.testing.assert_close(density.log_density(z[:7], z, 0.3), kernels.logsumexp(1) - math.log(50))
    numbers = printed("density", "--points 400", capsys)
    assert numbers[0] < numbers[2], "points all over the sphere are more uniform than a heap"


def test_neighbors(capsys):
    numbers = printed("neighbors", "--points 2000 --width 16 --queries 50 --pairs 300", capsys)
    columns, bytes_, forth, back = numbers[-4:]
    assert 0.01 < columns < bytes_ <= 1
    assert min(forth, back) > 0.5


def test_recall_of_neighbors():
    found, exact = torch.tensor([[1, 2], [5, 3]]), torch.tensor([[2, 7], [3, 5]])
    assert load("neighbors").recall(found, exact) == 0.75


def test_every_example_is_in_the_list():
    """examples/README.md has a row for each file."""
    named = set(re.findall(r"\]\(([\w.]+)\)", (FOLDER / "README.md").read_text("utf-8")))
    assert named >= {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentence_pairs(tmp_path, monkeypatch, capsys):
    for package in ("sentence_transformers", "datasets", "accelerate"):
        pytest.importorskip(package)
    import sentences

    monkeypatch.chdir(tmp_path)
    sentences.tiny_model(tmp_path / "encoder").float().save(str(tmp_path / "model"))
    columns = sentences.columns(200)
    (tmp_path / "pairs.csv").write_text("\n".join(",".join(row) for row in zip(*columns.values(), strict=True)))
    arguments = "--model model --data pairs.csv --batch 64 --mini-batch 32 --epochs 5 --lr 1e-3"
    load("sentence_pairs").main(arguments.split())
    last = capsys.readouterr().out.splitlines()[-1]
    before, after, scale = map(
        float, re.fullmatch(r"recall@1 .*: ([\d.]+) before, ([\d.]+) after; scale ([\d.]+)", last).groups()
    )
    assert 0 <= before <= 1
    assert 0 <= after <= 1
    assert scale != 20
    assert (tmp_path / "runs/sentences/model.safetensors").exists()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_trainer(tmp_path, monkeypatch, capsys):
    for package in ("transformers", "sentence_transformers", "accelerate"):
        pytest.importorskip(package)
    from transformers import AutoModel

    import sentences

    monkeypatch.chdir(tmp_path)
    sentences.tiny_model(tmp_path / "encoder").float().save(str(tmp_path / "model"))
    columns = sentences.columns(200)
    (tmp_path / "pairs.csv").write_text("\n".join(",".join(row) for row in zip(*columns.values(), strict=True)))
    arguments = "--model model --data pairs.csv --batch 64 --chunk 24 --steps 12 --lr 1e-2 --output run"
    first, last = printed("transformers_trainer", arguments, capsys)[-2:]
    assert last < first - 0.2
    AutoModel.from_pretrained("run")
