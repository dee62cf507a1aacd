"""What losses take, against what was measured on a GPU, against tensors counted one by one, and against the paper."""

import json
from pathlib import Path

import pytest
import torch

from helpers import dense_clip
from megabatch_train.planning import gpus
from megabatch_train.planning.costs import INF_CL, LOCAL, MEGABATCH, VANILLA, Shape, loss_bytes, loss_seconds
from megabatch_train.planning.models import Meter, count_tensors, nowhere

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDS = [
    json.loads(path.read_text()) for path in (RESULTS / "loss_gpu.json", Path(__file__).parent / "loss_gpu_second_run.json")
]
STEPS = json.loads((RESULTS / "plan_validation.json").read_text())
WIDTHS = {"ViT-B/32": 512, "ViT-B/16": 512, "ViT-L/14": 768}
NAMES = {"megabatch": MEGABATCH, "open_clip": LOCAL, "inf_cl": INF_CL}


def alone(B, D, embedding_bytes=2, half=True):
    return Shape(B, 1, 1, D, embedding_bytes, half)


def measured(system, key):
    """(B, D, the mean over two runs on two GPUs): from 64k pairs up, our times differ by up to 3 %."""
    found = {}
    for r in (r for record in RECORDS for r in record["results"]):
        if r["loss_name"] == "clip" and r["system"] == system and key in r:
            found.setdefault((r["B"], r["D"]), []).append(r[key])
    assert found
    return [(B, D, sum(values) / len(values)) for (B, D), values in found.items()]


@pytest.mark.parametrize(("system", "tolerance"), [("megabatch", 0.005), ("open_clip", 0.001), ("inf_cl", 0.005)])
def test_memory_is_that_measured_on_an_h200(system, tolerance):
    for B, D, peak in measured(system, "peak_bytes"):
        assert loss_bytes(NAMES[system], alone(B, D)) == pytest.approx(peak, rel=tolerance)


def test_millions_of_pairs():
    assert len(RECORDS[0]["large"]) == 2
    for large in RECORDS[0]["large"]:
        shape = alone(large["B"], large["D"])
        assert loss_bytes(MEGABATCH, shape) == pytest.approx(large["peak_bytes"], rel=0.005)
        assert loss_seconds(MEGABATCH, shape, gpus.find("H200"), "bf16") == pytest.approx(large["seconds"], rel=0.05)


@pytest.mark.parametrize(("system", "tolerance"), [("megabatch", 0.05), ("open_clip", 0.1), ("inf_cl", 0.1)])
def test_time_is_that_measured_on_an_h200(system, tolerance):
    # Ours alone waits for the host below 64k pairs, which a step does not; the dense formula is for more than a cache holds.
    large = 65536 if system == "megabatch" else 32768
    for B, D, ms in measured(system, "ms"):
        if large <= B:
            found = 1000 * loss_seconds(NAMES[system], alone(B, D), gpus.find("H200"), "bf16")
            assert found == pytest.approx(ms, rel=tolerance), (B, D)


def test_time_is_that_measured_inside_a_step():
    cases = [r for r in STEPS["results"] if r["status"] == "ok"]
    assert {r["B"] for r in cases} == {4096, 65536, 1048576}
    for r in cases:
        found = loss_seconds(MEGABATCH, alone(r["B"], WIDTHS[r["model"]]), gpus.find("H200"), "bf16")
        if r["B"] >= 65536:
            assert found == pytest.approx(r["loss_seconds"], rel=0.1), r
        else:
            assert found == pytest.approx(r["loss_seconds"], abs=0.5e-3), r  # of a step of seconds


@pytest.mark.parametrize(
    ("dtype", "half"), [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
)
def test_a_dense_loss_is_its_tensors(dtype, half):
    B, D = 4096, 128
    meter = Meter()
    with nowhere():
        x, y = (torch.empty(B, D, dtype=dtype, requires_grad=True) for _ in range(2))
        scale = torch.ones((), requires_grad=True)
        meter.ignore([x, y, scale])
        with count_tensors(meter, half):
            loss = dense_clip(x, y, scale)
            with torch.autocast("cpu", enabled=False):
                loss.backward()
    assert loss_bytes(VANILLA, alone(B, D, dtype.itemsize, half is not None)) == pytest.approx(meter.peak, rel=0.001)


@pytest.mark.parametrize(
    ("system", "batch", "paper", "tolerance"),
    [
        (VANILLA, 32, 16.67, 0.02),
        (VANILLA, 64, 66.11, 0.02),
        (LOCAL, 32, 2.27, 0.06),
        (LOCAL, 64, 8.63, 0.02),
        (LOCAL, 128, 33.64, 0.01),
        (INF_CL, 32, 0.18, 0.04),
        (INF_CL, 64, 0.36, 0.04),
        (INF_CL, 128, 0.72, 0.04),
        (INF_CL, 256, 1.45, 0.04),
    ],
)
def test_the_papers_loss_memory(system, batch, paper, tolerance):
    """Table 2 of arXiv 2410.17243: ViT-L/14, eight A800; docs/plan_accuracy.md explains what is left."""
    assert loss_bytes(system, Shape(batch * 1024, 8, 1, 768, 4, True)) / GIB == pytest.approx(paper, rel=tolerance)


def test_ranks_share_the_work_but_not_that_of_the_vanilla_loss():
    gpu = gpus.find("A800")
    for system in (LOCAL, INF_CL, MEGABATCH):
        one, eight = (loss_seconds(system, Shape(2**18, ranks, 1, 512, 2, True), gpu, "bf16") for ranks in (1, 8))
        assert one == pytest.approx(8 * eight, rel=0.05)
    one, eight = (loss_seconds(VANILLA, Shape(2**18, ranks, 1, 512, 2, True), gpu, "bf16") for ranks in (1, 8))
    assert one == eight


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_our_memory_is_linear_in_the_pairs_of_a_rank(ranks):
    small, large = (loss_bytes(MEGABATCH, Shape(2**i * ranks, ranks, -(-ranks // 8), 512, 4, True)) for i in (20, 22))
    assert 3.5 < large / small <= 4
