"""Describes the machine: processor, GPU, memory and versions, without names of hosts or users."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from megabatch.world import World

VERSIONS_OF = ("megabatch", "torch", "triton", "open_clip_torch")
PEERS = ("transformers", "sentence-transformers", "pytorch-metric-learning", "info-nce-pytorch", "lightly")

# PyTorch raises a plain RuntimeError if an allocation on the CPU fails. Its message contains one of these words.
ALLOCATION_FAILED = ("DefaultCPUAllocator", "bad_alloc")

# Environment variables that set how OpenMP threads wait. If the user has set one of them, megabatch changes nothing.
WAIT_POLICY = "OMP_WAIT_POLICY"
WAIT_VARIABLES = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Device files of the GPU drivers of NVIDIA, of AMD, and of the Windows Subsystem for Linux.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class Rates(NamedTuple):
    """Peak rates of a GPU for dense matrices in TFLOP/s, as published by its vendor."""

    half: float  # bfloat16 or float16 with float32 accumulation
    tf32: float
    single: float  # float32 without tensor cores


# Keys are model names. If a model has several forms, these are the rates of the SXM module. Sources: `planning/gpus.py`.
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
OTHER_FORMS = ("PCIE", "NVL", "LAPTOP", "RTX4090D")  # forms of these models with lower rates


def peak_rates(gpu: str) -> Rates | None:
    """Returns the peak rates of a GPU, given the name that its driver reports ("NVIDIA H100 80GB HBM3"), or None if unknown."""
    name = gpu.upper().replace(" ", "")
    if any(form in name for form in OTHER_FORMS):
        return None
    return next((rates for model, rates in PEAKS.items() if model in name), None)


def describe(*packages: str) -> dict[str, str | int | None]:
    """Returns the processor, GPU, memory and versions. A value that is not available is None.

    The result contains no names of hosts or users, and no paths.

    Args:
        packages: further packages whose versions are included.
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
    """Returns the devices of all ranks as text, such as "CPU, 2 threads" or "8 ranks, each NVIDIA H200"."""
    import torch

    name_device = getattr(getattr(torch, world.device.type), "get_device_name", None)
    if name_device is not None:
        name = str(name_device(world.device))
    else:
        name = f"{world.device.type.upper()}, {torch.get_num_threads()} threads"
    return name if world.size == 1 else f"{world.size} ranks, each {name}"


def summary(machine: dict[str, str | int | None]) -> str:
    """Returns the result of `describe()` in one line."""

    def gibibytes(key: str) -> str:
        size = machine[key]
        return f"{size / 2**30:.0f} GiB" if isinstance(size, int) else "memory unknown"

    parts = [f"{machine['cpu']} ({machine['cpu_instructions']}), {machine['cores']} cores, {gibibytes('memory_bytes')}"]
    if machine["gpu"] is not None:
        parts.append(f"{machine['gpus']} × {machine['gpu']}, {gibibytes('gpu_memory_bytes')}")
    parts.append(f"{machine['platform']}, Python {machine['python']}")
    versions = (name for name in (*VERSIONS_OF, *PEERS) if machine.get(name) is not None)
    parts += [f"{name} {machine[name]}" for name in versions]
    return "; ".join(parts)


def let_threads_sleep() -> None:
    """Lets OpenMP threads of this process sleep while they wait, on a machine without a GPU. Call it before importing torch.

    By default, a waiting OpenMP thread spins. If other programs use the cores, spinning threads take time from working threads,
    and PyTorch is several times slower. OpenMP reads the environment variable when torch is imported.
    """
    user_has_chosen = any(name in os.environ for name in WAIT_VARIABLES)
    if not user_has_chosen and "torch" not in sys.modules and not any(os.path.exists(path) for path in GPU_DRIVERS):
        os.environ[WAIT_POLICY] = "passive"


class StartClock:
    """Measures the phases of a start, which follow each other. The first phase begins when the object is created.

    Args:
        clock: function that returns seconds. Tests replace it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}  # by the name of the phase
        self._clock, self._last = clock, clock()

    def end_phase(self, name: str) -> None:
        """Counts the time since the end of the previous phase for this phase."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def describe(self) -> str:
        """Returns the total time, and the phases of at least a tenth of a second."""
        phases = ", ".join(
            f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in self.seconds.items() if seconds >= 0.1
        )
        return f"{sum(self.seconds.values()):.1f} s to the end of the first step" + (f": {phases}" if phases else "")


class OtherPrograms:
    """Measures the CPU load of other programs since the object was created. Child processes of this program do not count."""

    def __init__(self) -> None:
        self._start = _processor_seconds()

    def share(self) -> float | None:
        """Returns the fraction of all cores that other programs have used so far, or None if the system does not report it."""
        now = _processor_seconds()
        if self._start is None or now is None:
            return None
        total, used, own = (after - before for before, after in zip(self._start, now, strict=True))
        return max(0.0, used - own) / total if total > 0 else 0.0


def _processor_seconds() -> tuple[float, float, float] | None:
    """Returns the CPU seconds of all cores since boot (total, used), and the CPU seconds of this program."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    total, idle = sum(fields), sum(fields[3:5])  # idle time and time of waiting for disks
    tick = os.sysconf("SC_CLK_TCK")
    return total / tick, (total - idle) / tick, sum(os.times()[:4])


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that an allocation failed, on any device."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in ALLOCATION_FAILED)


def peak_bytes(device: "torch.device") -> int:
    """Returns the peak memory so far: bytes of tensors on a CUDA device, or else resident bytes of this process."""
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
    """Returns the version of a package, or None if it is not installed."""
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
        answer = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return answer.stdout.strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
