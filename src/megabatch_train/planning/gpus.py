"""GPUs and their rates, and the options of a plan. Imports nothing large, so that `megabatch plan --help` is fast."""

import math
import re
from dataclasses import dataclass, replace

from megabatch_train.machine import PEAKS

# ----------------------------------------------------------------------------------------------------------------------
# Options and defaults of a plan.

PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
OPTIMIZERS = {"adamw": 2, "muon": 1.25, "lion": 1, "sgd": 1, "none": 0}  # float32 states per parameter
SHARDINGS = ("none", "optimizer", "fsdp")
HOST_MEMORY = 2 * 2**40  # bytes per node, assumed
STAND_IN = "PARAMETERS:TOKENSxWIDTH for each tower, such as 304M:257x1024,124M:77x768"


def number(text: str) -> int:
    """Parses "304M", "1.2B", "64k" or "1,048,576". The units k, M and B are thousands, millions and billions."""
    units = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
    bare = text.replace(",", "").replace("_", "").strip()
    try:
        value = float(bare[:-1]) * units[bare[-1]] if bare[-1:] in units else float(bare)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"must be a number of 1 or more, such as 304M, got {text!r}")
    return round(value)


# ----------------------------------------------------------------------------------------------------------------------
# GPUs: numbers of their vendors, and assumptions for everything else.
#
# Every number in `CATALOGUE` is from the document in `source`, and is valid for dense matrices and one direction of a link.
# Numbers with 2:4 sparsity, or for both directions together, are halved. All other numbers are the named constants below, which
# are assumed or measured.


GIB = 2**30

# Fraction of the memory that PyTorch can allocate, assumed for all GPUs. The gigabytes of the datasheet are counted as GiB,
# minus error correction. An H200 reports 139.8 of 141 (benchmarks/results/loss_gpu.json). Contexts, libraries and fragmentation
# take the rest.
USABLE = 0.94

# Fraction of a link's bandwidth for a message of several megabytes, assumed.
LINK_EFFICIENCY = 0.8

LATENCY_INSIDE, LATENCY_BETWEEN = 10e-6, 25e-6  # seconds per message, assumed

# Fraction of the dense bfloat16 rate that encoders reach under autocast, assumed. It is between two measurements of ViT-L/14:
# 0.32 to 0.33 on an H200 (benchmarks/results/plan_validation.md), and 0.37 to 0.39 from the paper's times on eight A800.
# Smaller towers reach less on the H200: 0.25 to 0.26 for ViT-B/16, and 0.20 to 0.22 for ViT-B/32.
ENCODER_EFFICIENCY = 0.35

# Fraction of the same rate that megabatch's loss reaches with 8·B²·D operations, assumed for all GPUs. On an H200 with at least
# 64k pairs, the loss without encoders reaches 0.630 to 0.661 (benchmarks/results/loss_gpu.md and
# tests/planning/loss_gpu_second_run.json). In a step, after encoders, it reaches 0.660 to 0.730 (plan_validation.md). 0.67 is
# within 5 % of the first range (mean of two runs) and within 10 % of the second.
LOSS_EFFICIENCY = 0.67

# Fraction of the same rate for inf_cl, which reaches 16 to 19 TFLOP/s on an H200 (benchmarks/results/loss_gpu.md). Here, 8·B²·D
# operations are counted, although inf_cl needs 20·B²·D.
INF_CL_EFFICIENCY = 0.0175

# Bytes of memory traffic per pair of a dense loss under autocast, in addition to the matmuls. They are measured: 92 to 107
# (benchmarks/results/loss_gpu.md).
DENSE_TRAFFIC = 95


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory_gb: float  # GB in the datasheet
    half: float  # dense TFLOP/s in bfloat16 or float16 with float32 sums
    tf32: float
    single: float  # TFLOP/s in float32 without tensor cores
    bandwidth: float  # GB/s of its memory
    inside: float  # GB/s in one direction to all other GPUs of its node together
    between: float  # GB/s in one direction of a link to other nodes, assumed
    rail_each: bool  # whether each GPU of a node has such a link (otherwise all GPUs share one link), assumed
    source: str
    to_one: float | None = None  # GB/s in one direction to one other GPU; None if it is equal to `inside`
    correction_gb: float = 0  # GB that error correction takes

    @property
    def usable(self) -> float:
        """Bytes that PyTorch can allocate."""
        return (self.memory_gb - self.correction_gb) * GIB * USABLE

    def rate(self, precision: str) -> float:
        """Returns the peak operations per second for "bf16", "fp16", "tf32" or "fp32"."""
        return 1e12 * {"bf16": self.half, "fp16": self.half, "tf32": self.tf32, "fp32": self.single}[precision]


_AMPERE = "NVIDIA A100 Tensor Core GPU datasheet"
_NIC_400, _NIC_100 = 50.0, 12.5  # GB/s: 400 and 100 Gbit/s

CATALOGUE = [
    Gpu("A100-40GB", 40, *PEAKS["A100"], 1555, 300, _NIC_400, True, f"{_AMPERE}, SXM 40 GB"),
    Gpu("A100-80GB", 80, *PEAKS["A100"], 2039, 300, _NIC_400, True, f"{_AMPERE}, SXM 80 GB"),
    Gpu(
        "A800-80GB", 80, *PEAKS["A800"], 2039, 200, _NIC_400, True,
        f"{_AMPERE}, SXM 80 GB; NVIDIA A800 datasheet: NVLink of 400 GB/s, both ways together",
    ),
    Gpu("H100-80GB", 80, *PEAKS["H100"], 3350, 450, _NIC_400, True, "NVIDIA H100 Tensor Core GPU datasheet, SXM"),
    Gpu("H200-141GB", 141, *PEAKS["H200"], 4800, 450, _NIC_400, True, "NVIDIA H200 Tensor Core GPU datasheet, SXM"),
    Gpu("B200-180GB", 180, *PEAKS["B200"], 7700, 900, _NIC_400, True, "NVIDIA Blackwell datasheet, HGX B200"),
    # The driver of the L40S reports 46,068 MiB, because error-correcting codes take one sixteenth of the memory.
    Gpu(
        "L40S-48GB", 48, *PEAKS["L40S"], 864, 32, _NIC_100, False,
        "NVIDIA L40S datasheet, PCIe Gen4 x16", correction_gb=3,
    ),
    Gpu(
        "RTX4090-24GB", 24, *PEAKS["RTX4090"], 1008, 32, _NIC_100, False,
        "NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 4090, PCIe Gen4 x16",
    ),
    # It has no switch, but a separate link to each of the seven other GPUs.
    Gpu(
        "MI300X-192GB", 192, *PEAKS["MI300X"], 5300, 448, _NIC_400, True,
        "AMD Instinct MI300X accelerator data sheet, seven Infinity Fabric links of 128 GB/s, both ways together", to_one=64,
    ),
]  # fmt: skip


def find(name: str) -> Gpu:
    """Returns a GPU of the catalogue by its name, "A800-80GB", or by the beginning of its name, "a800", if it is unique."""
    plain = _plain(name)
    exact = [gpu for gpu in CATALOGUE if _plain(gpu.name) == plain]
    near = exact or [gpu for gpu in CATALOGUE if plain and _plain(gpu.name).startswith(plain)]
    if len(near) == 1:
        return near[0]
    names = ", ".join(gpu.name for gpu in CATALOGUE)
    raise ValueError(
        f"gpus must name one of {names}, or give memory and rate as in 8x80GB@312TFLOPS, got {name!r}"
        + (f", which could be {' or '.join(gpu.name for gpu in near)}" if near else "")
    )


_OWN = re.compile(r"(?P<memory>\d+(\.\d*)?)GB@(?P<rate>\d+(\.\d*)?)TFLOPS", re.IGNORECASE)


def parse(text: str) -> tuple[int, Gpu]:
    """Parses "8xA800-80GB", "H200", or memory and dense half-precision rate, "8x80GB@312TFLOPS". Returns count and GPU.

    A GPU that is given by memory and rate has the links of the A100. Its other rates are proportional to the A100's rates.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.+?)\s*", text)
    if match is None:
        raise ValueError(f"gpus must be like 8xA800-80GB or 8x80GB@312TFLOPS, got {text!r}")
    count, name = int(match[1] or 1), match[2]
    if count < 1:
        raise ValueError(f"gpus must be 1 or more, got {text!r}")
    own = _OWN.fullmatch(name)
    if own is None:
        return count, find(name)
    base, memory, rate = find("A100-80GB"), float(own["memory"]), float(own["rate"])
    if not (memory > 0 and rate > 0):
        raise ValueError(f"gpus must have memory and a rate above 0, got {text!r}")
    ratio = rate / base.half
    gpu = replace(
        base,
        name=name,
        memory_gb=memory,
        half=rate,
        tf32=base.tf32 * ratio,
        single=base.single * ratio,
        bandwidth=base.bandwidth * ratio,
        source="memory and rate as given; links of an A100; other rates in proportion to the A100",
    )
    return count, gpu


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("amd", ""))
