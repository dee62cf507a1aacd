"""GPUs and their rates, and the choices of a plan. Imports nothing large, so that `megabatch plan --help` answers at once."""

import math
import re
from dataclasses import dataclass, replace

from megabatch_train.machine import PEAKS

# ----------------------------------------------------------------------------------------------------------------------
# Choices and defaults of a plan. Imports nothing large, so that the help of `megabatch plan` appears at once.

PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
OPTIMIZERS = {"adamw": 2, "lion": 1, "sgd": 1, "none": 0}  # float32 states per parameter
SHARDINGS = ("none", "optimizer", "fsdp")
HOST_MEMORY = 2 * 2**40  # bytes of a node; assumed
STAND_IN = "PARAMETERS:TOKENSxWIDTH for each tower, such as 304M:257x1024,124M:77x768"


def number(text: str) -> int:
    """ "304M", "1.2B", "64k" or "1,048,576" as a number; k, M and B are thousands, millions and billions."""
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
# GPUs: figures of their vendors, and assumptions beyond them.
#
# Every figure in `CATALOGUE` is printed in the document that `source` names, for dense matrices and one direction of a
# link. Figures with 2:4 sparsity, or for both directions together, are halved. All other numbers are named constants below:
# assumptions or measurements.


GIB = 2**30

# Share of the memory that PyTorch can allocate: of the datasheet's gigabytes, read as GiB, less error correction. An H200
# reports 139.8 of 141 (benchmarks/results/loss_gpu.json); contexts, libraries and fragmentation take the rest. Assumed for all.
USABLE = 0.94

# Share of a link's bandwidth that a message of megabytes gets. Assumed.
LINK_EFFICIENCY = 0.8

LATENCY_INSIDE, LATENCY_BETWEEN = 10e-6, 25e-6  # seconds of a message; assumed

# Share of the dense bfloat16 rate that encoders reach under autocast. An assumption, between two measurements of ViT-L/14: 0.32
# to 0.33 on an H200 (benchmarks/results/plan_validation.md), 0.37 to 0.39 by the paper's times on eight A800. Smaller towers
# reach less: ViT-B/16 0.25 to 0.26 there, ViT-B/32 0.20 to 0.22.
ENCODER_EFFICIENCY = 0.35

# Share of the same rate that megabatch's loss reaches, counting 8·B²·D operations, on an H200 from 64k pairs on: alone and
# repeated, 0.630 to 0.661 (benchmarks/results/loss_gpu.md and tests/planning/loss_gpu_second_run.json); in a step, after
# encoders, 0.660 to 0.730 (plan_validation.md). 0.67 is within 5 % of the first (mean of two runs) and 10 % of the second.
# Assumed elsewhere.
LOSS_EFFICIENCY = 0.67

# The rate of inf_cl: 16 to 19 TFLOP/s measured on an H200 (the same file), where 8·B²·D operations are counted though it
# does 20.
INF_CL_EFFICIENCY = 0.0175

# Bytes of memory traffic for each pair of a dense loss under autocast, beside the products: 92 to 107 measured there.
DENSE_TRAFFIC = 95


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory_gb: float  # of the datasheet
    half: float  # TFLOP/s, bfloat16 or float16, dense, float32 sums
    tf32: float
    single: float  # float32 without the matrix engine
    bandwidth: float  # GB/s of its memory
    inside: float  # GB/s in one direction to the other GPUs of its node, all together
    between: float  # GB/s in one direction of a link to other nodes; assumed
    rail_each: bool  # whether each GPU of a node is assumed to have such a link, or all share one
    source: str
    to_one: float | None = None  # part of `inside` that reaches any one other GPU; None for all of it
    correction_gb: float = 0  # memory that error correction takes

    @property
    def usable(self) -> float:
        """Bytes that PyTorch can allocate."""
        return (self.memory_gb - self.correction_gb) * GIB * USABLE

    def rate(self, precision: str) -> float:
        """Operations a second at most: "bf16", "fp16", "tf32" or "fp32"."""
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
    # Its driver reports 46,068 MiB, because error-correcting codes take one sixteenth of the memory.
    Gpu(
        "L40S-48GB", 48, *PEAKS["L40S"], 864, 32, _NIC_100, False,
        "NVIDIA L40S datasheet, PCIe Gen4 x16", correction_gb=3,
    ),
    Gpu(
        "RTX4090-24GB", 24, *PEAKS["RTX4090"], 1008, 32, _NIC_100, False,
        "NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 4090, PCIe Gen4 x16",
    ),
    # No switch: a link of its own to each of seven others.
    Gpu(
        "MI300X-192GB", 192, *PEAKS["MI300X"], 5300, 448, _NIC_400, True,
        "AMD Instinct MI300X accelerator data sheet, seven Infinity Fabric links of 128 GB/s, both ways together", to_one=64,
    ),
]  # fmt: skip


def find(name: str) -> Gpu:
    """A GPU of the catalogue: "A800-80GB", or "a800" if only one has that name."""
    wanted = _plain(name)
    exact = [gpu for gpu in CATALOGUE if _plain(gpu.name) == wanted]
    near = exact or [gpu for gpu in CATALOGUE if wanted and _plain(gpu.name).startswith(wanted)]
    if len(near) == 1:
        return near[0]
    names = ", ".join(gpu.name for gpu in CATALOGUE)
    raise ValueError(
        f"gpus must name one of {names}, or give memory and rate as in 8x80GB@312TFLOPS, got {name!r}"
        + (f", which could be {' or '.join(gpu.name for gpu in near)}" if near else "")
    )


_OWN = re.compile(r"(?P<memory>\d+(\.\d*)?)GB@(?P<rate>\d+(\.\d*)?)TFLOPS", re.IGNORECASE)


def parse(text: str) -> tuple[int, Gpu]:
    """(how many, which): "8xA800-80GB", "H200", or with memory and dense half-precision rate "8x80GB@312TFLOPS".

    The links of a GPU given by memory and rate are the A100's; its other rates are the A100's in proportion.
    """
    counted = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.+?)\s*", text)
    if counted is None:
        raise ValueError(f"gpus must be like 8xA800-80GB or 8x80GB@312TFLOPS, got {text!r}")
    count, name = int(counted[1] or 1), counted[2]
    if count < 1:
        raise ValueError(f"gpus must be 1 or more, got {text!r}")
    own = _OWN.fullmatch(name)
    if own is None:
        return count, find(name)
    base, memory, rate = find("A100-80GB"), float(own["memory"]), float(own["rate"])
    if not (memory > 0 and rate > 0):
        raise ValueError(f"gpus must have memory and a rate above 0, got {text!r}")
    ratio = rate / base.half
    made = replace(
        base,
        name=name,
        memory_gb=memory,
        half=rate,
        tf32=base.tf32 * ratio,
        single=base.single * ratio,
        bandwidth=base.bandwidth * ratio,
        source="memory and rate as given; everything else as an A100's, in proportion to the rate",
    )
    return count, made


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("amd", ""))
