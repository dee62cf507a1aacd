"""The machine: processor, GPU, memory and versions, without names of hosts or users."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from megabatch.world import World

VERSIONS_OF = ("megabatch", "torch", "triton", "open_clip_torch")
PEERS = ("transformers", "sentence-transformers", "pytorch-metric-learning", "info-nce-pytorch", "lightly")

# A failed allocation on a CPU is a plain RuntimeError with one of these in its message.
ALLOCATION_FAILED = ("DefaultCPUAllocator", "bad_alloc")

# How threads of OpenMP wait. Each of these variables is a choice of the user.
WAIT_POLICY = "OMP_WAIT_POLICY"
WAITING = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Devices of GPU drivers: NVIDIA, AMD, and the Windows Subsystem for Linux.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class Rates(NamedTuple):
    """Peak rates of a GPU in TFLOP/s, for dense matrices, as its vendor prints them."""

    half: float  # bfloat16 or float16, float32 sums
    tf32: float
    single: float  # float32 without the matrix engine


# By the model's name. SXM modules, where a model has several forms; `planning/gpus.py` names the documents.
PEAKS = {
    "A100": Rates(312, 156, 19.5),
    "A800": Rates(312, 156, 19.5),
    "H100": Rates(989.5, 494.5, 67),
    "H200": Rates(989.5, 494.5, 67),
    "B200": Rates(2250, 1100, 75),
    "L40S": Rates(362.05, 183, 91.6),
    "RTX4090": Rates(165.2, 82.6, 82.6),
    "MI300X": Rates(1307.4, 653.7, 163.4),
}
OTHER_FORMS = ("PCIE", "NVL", "LAPTOP", "RTX4090D")  # of these models, with lower rates


def peak_rates(gpu: str) -> Rates | None:
    """Peak rates of a GPU by the name its driver reports, such as "NVIDIA H100 80GB HBM3"; None if they are not known."""
    name = gpu.upper().replace(" ", "")
    if any(form in name for form in OTHER_FORMS):
        return None
    return next((rates for model, rates in PEAKS.items() if model in name), None)


def describe(*packages: str) -> dict[str, str | int | None]:
    """Processor, GPU, memory and versions; None if not available. Contains no names of hosts or users, and no paths.

    Args:
        packages: whose versions are added.
    """
    import torch

    return {
        "cpu": _cpu_name(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: version(name) for name in (*VERSIONS_OF, *packages)},
    }


def describe_device(world: "World") -> str:
    """The devices of all ranks, for people: "CPU, 2 threads" or "8 ranks, each NVIDIA H200"."""
    import torch

    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
    else:
        name = f"{world.device.type.upper()}, {torch.get_num_threads()} threads"
    return name if world.size == 1 else f"{world.size} ranks, each {name}"


def summary(machine: dict[str, str | int | None]) -> str:
    """`describe()` in one line, for people."""

    def gibibytes(key: str) -> str:
        size = machine[key]
        return f"{size / 2**30:.0f} GiB" if isinstance(size, int) else "memory unknown"

    parts = [f"{machine['cpu']} ({machine['cpu_instructions']}), {machine['cores']} cores, {gibibytes('memory_bytes')}"]
    if machine["gpu"] is not None:
        parts.append(f"{machine['gpus']} × {machine['gpu']}, {gibibytes('gpu_memory_bytes')}")
    parts.append(f"{machine['platform']}, Python {machine['python']}")
    known = (name for name in (*VERSIONS_OF, *PEERS) if machine.get(name) is not None)
    parts += [f"{name} {machine[name]}" for name in known]
    return "; ".join(parts)


def let_threads_sleep() -> None:
    """Makes waiting OpenMP threads of this process sleep, on a machine without a GPU. Call it before torch is imported.

    A waiting thread of OpenMP spins by default. If other programs use the cores, it takes the time that working threads need,
    and PyTorch is several times slower. OpenMP reads the variable when it is loaded, which is when torch is imported.
    """
    chosen = any(name in os.environ for name in WAITING)
    if not chosen and "torch" not in sys.modules and not any(os.path.exists(path) for path in GPU_DRIVERS):
        os.environ[WAIT_POLICY] = "passive"


class Others:
    """CPU load of other programs since this object was created; child processes of this program do not count."""

    def __init__(self) -> None:
        self._begin_in_thread = _processor_seconds()

    def share(self) -> float | None:
        """Fraction of all cores that other programs have used so far; None if the system does not say."""
        now = _processor_seconds()
        if self._begin_in_thread is None or now is None:
            return None
        possible, used, own = (after - before for before, after in zip(self._begin_in_thread, now, strict=True))
        return max(0.0, used - own) / possible if possible > 0 else 0.0


def _processor_seconds() -> tuple[float, float, float] | None:
    """CPU seconds of all cores since boot: available, used, and used by this program."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    whole, idle = sum(fields), sum(fields[3:5])  # idle, and waiting for disks
    tick = os.sysconf("SC_CLK_TCK")
    return whole / tick, (whole - idle) / tick, sum(os.times()[:4])


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in ALLOCATION_FAILED)


def peak_bytes(device: "torch.device") -> int:
    """Peak memory so far: bytes of tensors on a CUDA device, else resident bytes of this process."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def version(distribution: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    if platform.system() == "Darwin":
        ask = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if ask.returncode == 0:
            return ask.stdout.strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
