"""The harness of all benchmarks: time and peak memory of a piece of work, in this process or in new ones, and the record.

`megabatch bench` and the scripts in benchmarks/ use it.
"""

import argparse
import contextlib
import ctypes
import datetime
import gc
import importlib
import json
import math
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from megabatch_train import machine
from megabatch_train.display import plots
from megabatch_train.machine import ran_out_of_memory

# ----------------------------------------------------------------------------------------------------------------------
# Peak memory of a piece of work, its time, its gradients, and the possible outcomes of a measurement.

OK, WRONG, MEMORY, MISSING, LATE = "ok", "WRONG", "out of memory", "not installed", "no time left"
FAILED = "failed"  # followed by a colon and the reason
T = TypeVar("T")


def peak_memory(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int]:
    """The result of `work()`, and the bytes in use at its peak beyond those in use before.

    On a CPU these are resident bytes of the whole process (elsewhere than on Linux a lower bound: only a growth of the
    largest peak so far is seen); on CUDA the bytes of tensors on `device`.
    """
    importlib.import_module("torch._dynamo")  # 120 MiB, which the first call of an operator would load
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if not _forget_peak():
        before = machine.peak_bytes(torch.device("cpu"))
        result = work()
        return result, machine.peak_bytes(torch.device("cpu")) - before
    before = process_status("VmRSS")
    result = work()
    return result, max(0, process_status("VmHWM") - before)


def now(device: torch.device | str) -> float:
    """Seconds, when the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: torch.device | str) -> float:
    """Seconds that `work()` takes on the device."""
    begun = now(device)
    work()
    return now(device) - begun


def milliseconds(work: Callable[[], object], device: torch.device | str, seconds: float) -> float:
    """Milliseconds of one call, with several calls in flight as in training, so that the device hides the host's work.

    Makes as many calls as take about `seconds` together, and at least one.
    """
    calls = 1
    while True:
        elapsed = _measure_milliseconds(work, calls, device)
        if elapsed >= 1000 * seconds or calls >= 64:
            return elapsed / calls
        calls = min(64, max(calls + 1, math.ceil(calls * 1000 * seconds / max(elapsed, 0.1))))


def take_turns(
    works: dict[str, Callable[[], Any]], device: torch.device | str, rounds: int, seconds: float
) -> dict[str, float]:
    """Milliseconds of each, the median of the rounds; one round for work that takes more than a second."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name, work in works.items():
            if turn == 0 or times[name][0] < 1000:
                times[name].append(_time_or_retry(work, device, seconds))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def _time_or_retry(work: Callable[[], object], device: torch.device | str, seconds: float) -> float:
    """Milliseconds. Out of memory is retried after emptying the cache, which is fragmented by the system before."""
    try:
        return milliseconds(work, device, seconds)
    except torch.OutOfMemoryError:
        pass
    clear(device)
    return milliseconds(work, device, seconds)


def _measure_milliseconds(work: Callable[[], object], calls: int, device: torch.device | str) -> float:
    def repeat() -> None:
        for _ in range(calls):
            work()

    if torch.device(device).type != "cuda":
        return 1000 * seconds_of(repeat, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    repeat()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def clear(device: torch.device | str) -> None:
    """Frees the memory of the last system."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def failure(error: BaseException) -> str:
    """The status of a system that cannot be run."""
    if isinstance(error, ImportError):
        return f"{MISSING} ({error.name or error})"
    if ran_out_of_memory(error):
        return MEMORY
    return f"fails ({type(error).__name__}: {str(error).splitlines()[0][:100]})" if str(error) else "fails"


def with_gradients(loss: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The loss and its gradients, forward and backward; zeros for a leaf that the loss does not use."""
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)


def take_gradients(model: torch.nn.Module) -> list[Tensor]:
    """All gradients of a model, which are then cleared."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The norm of the difference of two lists of gradients, relative to the norm of the wanted ones."""
    off = torch.stack([(a - b).norm() for a, b in zip(found, wanted, strict=True)])
    return float(off.norm() / torch.stack([b.norm() for b in wanted]).norm())


def process_status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _forget_peak() -> bool:
    """Resets the peak to the present resident memory; False if the system cannot."""
    # Freed pages that still belong to the process would be used again, uncounted. Only the GNU C library has the call.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# A function in fresh processes: one process with a memory limit, or the ranks of a gloo process group.
#
# A measurement needs a fresh process because the allocator often keeps memory that an earlier measurement freed, which
# would hide the next peak. Memory is limited so that a loss that does not fit fails by itself, before the system kills
# other programs.


class ProcessError(RuntimeError):
    """A process failed or was killed before it had a result."""


def fresh_process(function: Callable[..., T], *args: Any, memory_limit: int | None = None) -> T:
    """`function(*args)`, computed in a fresh process.

    An exception is raised here again. A failed allocation is a `MemoryError`, a killed process a `ProcessError`.

    Args:
        function: a function at the top of a module, so that the other process can import it.
        args: its arguments; like the result, anything that can be pickled.
        memory_limit: bytes that may be allocated beyond those in use after the start; Linux only.
    """
    if memory_limit is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_limit must be None on {sys.platform}: only Linux limits the memory of one process")
    call = pickle.dumps((function, args))  # not left to multiprocessing, which would put tensors in shared memory
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            result: T = pickle.loads(pool.submit(_run, call, memory_limit).result())
        except BrokenProcessPool:
            reason = "was killed, perhaps because the system ran out of memory"
            raise ProcessError(f"the process of {function.__name__} {reason}") from None
        except Exception as error:
            if ran_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise
    return result


def _run(call: bytes, memory_limit: int | None) -> bytes:
    if memory_limit is not None:
        import resource

        # RLIMIT_DATA counts private writable pages. RLIMIT_AS would also count libraries that PyTorch maps and never touches.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = process_status("VmData") + memory_limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    function, args = pickle.loads(call)
    return pickle.dumps(function(*args))


def on_ranks(function: Callable[..., T], world: int, *args: Any, seconds: float = 900.0) -> list[T]:
    """`function(rank, world, *args)` of each of `world` ranks, in processes that have a default group and share the cores.

    If a rank fails, or takes longer than `seconds`, all processes are ended and a `ProcessError` says why.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        given = (function, world, args, folder, seconds)
        ranks: Any = spawn(_rank, given, world, join=False)  # type: ignore[no-untyped-call]
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise ProcessError(f"a rank took longer than {seconds:.0f} s")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise ProcessError(str(error).strip()) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world)]


def _rank(rank: int, function: Callable[..., Any], world: int, args: tuple[Any, ...], folder: str, seconds: float) -> None:
    join(rank, world, f"file://{folder}/store", seconds)
    (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(function(rank, world, *args)))
    dist.barrier()  # a rank that exits early would look dead to the others
    os._exit(0)


def join(rank: int, world: int, address: str, seconds: float) -> None:
    """Makes this process a rank of the default group; ranks share the cores evenly."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)


# ----------------------------------------------------------------------------------------------------------------------
# The record of a benchmark and its report.
#
# A record is a JSON file with the command, the machine, the versions of all packages and the results. It is saved after every
# measurement. A script defines `markdown(record)`, and `draw(record)` if it has a plot; `write_report` writes both beside the
# record, and `benchmarks/report.py` rebuilds them on any machine.


PATHS = ("--data", "--shards", "--peers")  # "FOLDER" in the recorded command
RESULTS = Path("benchmarks/results")
Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser, name: str, seconds: float | None = None) -> None:
    """Adds the arguments that all benchmarks share; with a time limit in seconds, also the arguments of GPU benchmarks."""
    if seconds is not None:
        told = f"time limit; measurements beyond it are skipped ({seconds:.0f})"
        parser.add_argument("--seconds", type=float, default=seconds, help=told)
        parser.add_argument("--tiny", action="store_true", help="the same code at small sizes: less than a minute on a CPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--name", default=name, help=f"name of the files ({name})")


def device_of(args: argparse.Namespace) -> str:
    """The GPU, or the CPU for a tiny run; exits with a message otherwise."""
    if torch.cuda.is_available():
        return "cuda"
    if not args.tiny:
        sys.exit("This benchmark needs a CUDA device; --tiny runs anywhere.")
    return "cpu"


class Record:
    """One run: its results so far, and the time that is left."""

    def __init__(self, path: Path, command: str, seconds: float = math.inf, **beginning: Any) -> None:
        self.path, self.seconds, self.started = path, seconds, time.perf_counter()
        about = machine.describe(*machine.PEERS)
        self.contents: dict[str, Any] = {"command": command, "machine": about, "results": [], **beginning}

    @classmethod
    def of_script(cls, script: str, args: argparse.Namespace, seconds: float = math.inf, **beginning: Any) -> "Record":
        """The record of a script in benchmarks/, whose arguments are of `arguments`."""
        command = " ".join(["python", f"benchmarks/{script}.py", *_without_paths(sys.argv[1:])])
        return cls(args.output / f"{args.name}.json", command, seconds, **beginning)

    def __getitem__(self, key: str) -> Any:
        """A part of the record."""
        return self.contents[key]

    def say(self, text: str) -> None:
        """Prints progress, with the time."""
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def seconds_left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.perf_counter() - self.started)

    def save(self) -> None:
        """Writes the results so far."""
        self.contents["seconds"] = time.perf_counter() - self.started
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.contents, indent=1) + "\n")

    def finish(self, text: Callable[[Row], str], draw: Callable[[Row], Any] | None = None) -> None:
        """Saves, writes the report and prints the table."""
        self.save()
        write_report(self.path, text, draw)
        print(text(self.contents))


def _without_paths(words: Sequence[str]) -> list[str]:
    """The arguments of a command that anybody can repeat: no folder of this machine, and no --output."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        name = word.partition("=")[0]
        if name in (*PATHS, "--output"):
            if name == word:
                next(left, None)  # its folder
            kept += [name, "FOLDER"] if name in PATHS else []
        else:
            kept.append(word)
    return kept


def write_report(path: Path, text: Callable[[Row], str], draw: Callable[[Row], Any] | None = None) -> None:
    """Writes `.md` and `.svg` beside the record, with the machine and the command. Without matplotlib there is no plot.

    Args:
        path: of the JSON record.
        text: the Markdown of a record.
        draw: the matplotlib figure of a record; None if it would show nothing.
    """
    record = json.loads(path.read_text())
    about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand: `{record['command']}`\n"
    path.with_suffix(".md").write_text(f"{text(record)}\n\n{about}")
    if draw is None:
        return
    if not plots.available():
        print("No plot: matplotlib is not installed")
    elif (figure := draw(record)) is not None:
        plots.save(figure, path.with_suffix(".svg"))


def groups(rows: list[Row], *keys: str) -> dict[Hashable, list[Row]]:
    """{values of the keys: rows that have them}, in the order of the rows."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def chip(record: Row) -> str:
    """The GPU, or the CPU of a machine without one."""
    return str(record["machine"]["gpu"] or record["machine"]["cpu"])


def paragraphs(*parts: str) -> str:
    """Markdown paragraphs without the empty ones."""
    return "\n\n".join(part for part in parts if part)


def draw_systems(
    title: str,
    rows: list[Row],
    panels: Mapping[str, Callable[[Row], float | None]],
    colours: Mapping[str, str],
    dashed: Iterable[str] = (),
) -> Any:
    """A figure of the systems against the batch, one panel for each value.

    Args:
        title: of the figure.
        rows: results with a "system" and a batch "B".
        panels: {label of the vertical axis: the value of a row}; a row whose value is None is not drawn.
        colours: {system: colour}, in the order of the lines; systems without a colour get the next free one.
        dashed: systems that are bounds rather than alternatives.
    """
    figure, axes_of = plots.panels(title, len(panels))
    free = iter([colour for colour in plots.PALETTE if colour not in colours.values()])
    names = dict.fromkeys([*(name for name in colours), *(r["system"] for r in rows)])
    chosen = {name: colours.get(name) or next(free, plots.GREY) for name in names if any(r["system"] == name for r in rows)}
    for axes, (label, value) in zip(axes_of, panels.items(), strict=True):
        for name, colour in chosen.items():
            found = [(r["B"], value(r)) for r in rows if r["system"] == name]
            points = sorted((batch, y) for batch, y in found if y is not None)
            plots.line(axes, points, name, colour, linestyle="--" if name in dashed else "-")
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["B"] for r in rows])
        plots.log_axis(axes)
        plots.label_lines(axes)
    return figure
