"""The catalogue: what can be checked of figures without the chips, and how it is asked."""

import pytest

from megabatch_train.planning import gpus


@pytest.mark.parametrize("gpu", gpus.CATALOGUE, ids=lambda gpu: gpu.name)
def test_figures_are_of_the_right_kind(gpu):
    assert gpu.name.endswith(f"-{gpu.memory_gb:g}GB")
    assert gpu.source
    assert gpu.single <= gpu.tf32 <= gpu.half
    assert gpu.half == pytest.approx(2 * gpu.tf32, rel=0.03)  # a matrix engine does halves twice as fast
    assert 800 <= gpu.bandwidth <= 10_000
    assert 0 < gpu.between <= 100
    assert 32 <= gpu.inside <= 1000
    assert gpu.to_one is None or gpu.to_one < gpu.inside
    assert 0.85 < gpu.usable / (gpu.memory_gb * 2**30) < 0.95
    assert gpu.rate("bf16") == gpu.rate("fp16") == 1e12 * gpu.half


# What drivers report of boards in use, MiB; no plan may count on more.
REPORTED = {"A100-40GB": 40441, "H200-141GB": 143160, "B200-180GB": 182630, "L40S-48GB": 46068}


@pytest.mark.parametrize(("name", "mebibytes"), REPORTED.items())
def test_usable_memory_is_there(name, mebibytes):
    assert gpus.find(name).usable < mebibytes * 2**20


def test_all_that_were_asked_for_are_there():
    assert len({gpu.name for gpu in gpus.CATALOGUE}) == len(gpus.CATALOGUE)
    for name in ("A100", "A800", "H100", "H200", "B200", "L40S", "RTX4090", "MI300X"):
        assert any(gpu.name.startswith(name) for gpu in gpus.CATALOGUE)


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xA800-80GB", 8, "A800-80GB"),
        ("8×a800", 8, "A800-80GB"),
        ("H200", 1, "H200-141GB"),
        ("4 x NVIDIA H100-80GB", 4, "H100-80GB"),
        ("2xRTX 4090", 2, "RTX4090-24GB"),
        ("100xA100-40GB", 100, "A100-40GB"),
    ],
)
def test_names(text, count, name):
    found, gpu = gpus.parse(text)
    assert (found, gpu.name) == (count, name)


def test_a_gpu_of_ones_own():
    count, gpu = gpus.parse("2x64GB@156TFLOPS")
    assert (count, gpu.memory_gb, gpu.half, gpu.tf32) == (2, 64, 156, 78)
    assert "as given" in gpu.source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xA100", "got 'A100', which could be A100-40GB or A100-80GB"),
        ("8xVoodoo2", "gpus must name one of A100-40GB, .* got 'Voodoo2'$"),
        ("0xH200", "gpus must be 1 or more, got '0xH200'"),
        ("", "gpus must be like 8xA800-80GB"),
        ("8x80GB@0TFLOPS", "gpus must have memory and a rate above 0, got '8x80GB@0TFLOPS'"),
        ("8x8.0.1GB@312TFLOPS", "gpus must name one of"),
    ],
)
def test_names_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        gpus.parse(text)
