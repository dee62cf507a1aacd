"""The harness of `megabatch bench` and of the scripts in benchmarks/.

It measures the time and the peak memory of a function, in this process or in fresh processes, and writes the record.
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
# Peak memory, time and gradients of a function, and the possible statuses of a measurement.

OK, WRONG, MEMORY, MISSING, LATE = "ok", "WRONG", "out of memory", "not installed", "no time left"
FAILED = "failed"  # a status begins with this word, then a colon and the reason
T = TypeVar("T")


def peak_memory(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int]:
    """Returns the result of `work()`, and its peak memory in bytes minus the memory in use before the call.

    On CUDA this is the memory of tensors on `device`. On a CPU it is the resident memory of the process. On systems other than
    Linux it is a lower bound, because only an increase of the largest peak so far can be measured.
    """
    importlib.import_module("torch._dynamo")  # takes 120 MiB, which the first call of an operator would load otherwise
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
    """Waits until the device has finished its work, and returns the time in seconds."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: torch.device | str) -> float:
    """Returns the seconds that `work()` takes on the device."""
    start = now(device)
    work()
    return now(device) - start


def milliseconds(work: Callable[[], object], device: torch.device | str, seconds: float) -> float:
    """Returns the milliseconds of one call. Several calls are in flight as in training, which hides the work of the host.

    Increases the number of calls until they take about `seconds` in total, or until it is 64.
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
    """Returns the median milliseconds of each function over the rounds. A function that takes over a second is timed once."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name, work in works.items():
            if turn == 0 or times[name][0] < 1000:
                times[name].append(_time_or_retry(work, device, seconds))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def _time_or_retry(work: Callable[[], object], device: torch.device | str, seconds: float) -> float:
    """Returns the milliseconds of a call. If it runs out of memory, empties the fragmented cache and tries again."""
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
    """Frees the memory of deleted tensors."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def failure(error: BaseException) -> str:
    """Returns the status of a system that raised this error."""
    if isinstance(error, ImportError):
        return f"{MISSING} ({error.name or error})"
    if ran_out_of_memory(error):
        return MEMORY
    return f"fails ({type(error).__name__}: {str(error).splitlines()[0][:100]})" if str(error) else "fails"


def with_gradients(loss: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the loss and its gradients. A leaf that the loss does not use has a gradient of zeros."""
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)


def take_gradients(model: torch.nn.Module) -> list[Tensor]:
    """Returns all gradients of a model, and clears them."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def relative_error(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the norm of the difference between two lists of gradients, relative to the norm of the expected gradients."""
    differences = torch.stack([(a - b).norm() for a, b in zip(gradients, expected, strict=True)])
    return float(differences.norm() / torch.stack([b.norm() for b in expected]).norm())


def process_status(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _forget_peak() -> bool:
    """Resets the peak to the current resident memory. Returns False if the system does not support it."""
    # Freed pages that the process still holds would be reused without being counted. Only the GNU C library has malloc_trim.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Fresh processes: one process with a memory limit, or the ranks of a gloo process group.
#
# A measurement needs a fresh process because the allocator often keeps freed memory of an earlier measurement, which would hide
# the next peak. The memory limit lets a loss that does not fit fail before the system kills other programs.


class ProcessError(RuntimeError):
    """A process failed or was killed before it returned a result."""


def fresh_process(function: Callable[..., T], *args: Any, memory_limit: int | None = None) -> T:
    """Returns `function(*args)`, computed in a fresh process.

    An exception of the function is raised again in this process. A failed allocation raises a `MemoryError`, and a killed
    process raises a `ProcessError`.

    Args:
        function: function at the top level of a module, so that the other process can import it.
        args: arguments of the function. Arguments and result must be picklable.
        memory_limit: bytes that the process can allocate after its start. Only Linux supports a limit.
    """
    if memory_limit is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_limit must be None on {sys.platform}, because only Linux can limit the memory of one process")
    call = pickle.dumps((function, args))  # multiprocessing would put tensors in shared memory
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

        # RLIMIT_DATA limits private writable pages. RLIMIT_AS would also count libraries that PyTorch maps but does not use.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = process_status("VmData") + memory_limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    function, args = pickle.loads(call)
    return pickle.dumps(function(*args))


def on_ranks(function: Callable[..., T], world: int, *args: Any, seconds: float = 900.0) -> list[T]:
    """Calls `function(rank, world, *args)` on each of `world` ranks, and returns the results in the order of the ranks.

    The ranks are processes with a default process group, and they share the cores. If a rank fails or takes longer than
    `seconds`, all processes are ended, and a `ProcessError` gives the reason.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        arguments = (function, world, args, folder, seconds)
        ranks: Any = spawn(_rank, arguments, world, join=False)  # type: ignore[no-untyped-call]
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
    dist.barrier()  # waits for all ranks, because the others would raise an error if one exited early
    os._exit(0)


def join(rank: int, world: int, address: str, seconds: float) -> None:
    """Makes this process a rank of the default process group. The ranks share the cores evenly."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)


# ----------------------------------------------------------------------------------------------------------------------
# The record of a benchmark and its report.
#
# A record is a JSON file with the command, the machine, the versions of packages and the results. It is saved after every
# measurement. A script defines `markdown(record)`, and `draw(record)` if it has a plot. `write_report` writes the Markdown and
# the plot into the folder of the record, and `benchmarks/report.py` rebuilds them on any machine.


PATHS = ("--data", "--shards", "--peers")  # options whose value is "FOLDER" in the recorded command
RESULTS = Path("benchmarks/results")
ROUNDS_OPTION = 3, "number of turns of each system; the median counts"  # for `number_options`
Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser, name: str, seconds: float | None = None) -> None:
    """Adds the arguments of all benchmarks. With a time limit in seconds, it also adds the arguments of GPU benchmarks."""
    if seconds is not None:
        limit_help = f"time limit in seconds; later measurements are skipped (default: {seconds:.0f})"
        parser.add_argument("--seconds", type=float, default=seconds, help=limit_help)
        parser.add_argument(
            "--tiny", action="store_true", help="run the same code with small sizes (less than a minute on a CPU)"
        )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    parser.add_argument("--name", default=name, help="name of the files (default: %(default)s)")


def number_options(parser: argparse.ArgumentParser, **options: tuple[Any, str]) -> None:
    """Adds options for whole numbers: `sizes=([64, 256], "batch sizes")`. With a list as default, an option takes several."""
    for name, (default, text) in options.items():
        is_list = isinstance(default, list | tuple)
        shown = " ".join(map(str, default)) if is_list else default
        ending = "" if shown in ("", None) else f" (default: {shown})"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, nargs="*" if is_list else None, default=default, metavar="N", help=text + ending)


def device_of(args: argparse.Namespace) -> str:
    """Returns "cuda", or "cpu" for a tiny run without a GPU. Otherwise exits with a message."""
    if torch.cuda.is_available():
        return "cuda"
    if not args.tiny:
        sys.exit("This benchmark needs a CUDA device. Only --tiny runs on a CPU.")
    return "cpu"


class Record:
    """The record of a run: its results so far, and the time that is left."""

    def __init__(self, path: Path, command: str, seconds: float = math.inf, **beginning: Any) -> None:
        self.path, self.seconds, self.started = path, seconds, time.perf_counter()
        about = machine.describe(*machine.PEERS)
        self.contents: dict[str, Any] = {"command": command, "machine": about, "results": [], **beginning}

    @classmethod
    def of_script(cls, script: str, args: argparse.Namespace, seconds: float = math.inf, **beginning: Any) -> "Record":
        """Returns the record of a script in benchmarks/. `args` are the arguments that `arguments` adds."""
        command = " ".join(["python", f"benchmarks/{script}.py", *_without_paths(sys.argv[1:])])
        return cls(args.output / f"{args.name}.json", command, seconds, **beginning)

    def __getitem__(self, key: str) -> Any:
        """Returns an entry of the record."""
        return self.contents[key]

    def say(self, text: str) -> None:
        """Prints a text with the time since the start."""
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def seconds_left(self) -> float:
        """Returns the seconds until the time limit."""
        return self.seconds - (time.perf_counter() - self.started)

    def save(self) -> None:
        """Writes the record with the results so far."""
        self.contents["seconds"] = time.perf_counter() - self.started
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.contents, indent=1) + "\n")

    def finish(self, text: Callable[[Row], str], draw: Callable[[Row], Any] | None = None) -> None:
        """Saves the record, writes the report and prints the Markdown."""
        self.save()
        write_report(self.path, text, draw)
        print(text(self.contents))


def _without_paths(words: Sequence[str]) -> list[str]:
    """Removes --output and folders of this machine from the arguments, so that everybody can repeat the command."""
    kept_words: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name = word.partition("=")[0]
        if name in (*PATHS, "--output"):
            if name == word:
                next(remaining, None)  # skips the folder
            kept_words += [name, "FOLDER"] if name in PATHS else []
        else:
            kept_words.append(word)
    return kept_words


def write_report(path: Path, text: Callable[[Row], str], draw: Callable[[Row], Any] | None = None) -> None:
    """Writes the Markdown and the plot of a record into its folder. Without matplotlib it writes no plot.

    Args:
        path: path of the JSON record.
        text: function that returns the Markdown of a record.
        draw: function that returns the matplotlib figure of a record, or None if there is nothing to show.
    """
    record = json.loads(path.read_text())
    about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand: `{record['command']}`\n"
    path.with_suffix(".md").write_text(f"{text(record)}\n\n{about}")
    if draw is None:
        return
    if not plots.available():
        print("No plot was written because matplotlib is not installed.")
    elif (figure := draw(record)) is not None:
        plots.save(figure, path.with_suffix(".svg"))


def groups(rows: list[Row], *keys: str) -> dict[Hashable, list[Row]]:
    """Groups rows by the values of the keys. Groups and rows keep their order."""
    grouped: dict[Hashable, list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row)
    return grouped


def chip(record: Row) -> str:
    """Returns the name of the GPU, or of the CPU if the machine has no GPU."""
    return str(record["machine"]["gpu"] or record["machine"]["cpu"])


def paragraphs(*parts: str) -> str:
    """Joins Markdown paragraphs, and skips empty ones."""
    return "\n\n".join(part for part in parts if part)


def draw_systems(
    title: str,
    rows: list[Row],
    panels: Mapping[str, Callable[[Row], float | None]],
    colors: Mapping[str, str],
    dashed: Iterable[str] = (),
) -> Any:
    """Returns a figure of the systems against the batch, with one panel for each value.

    Args:
        title: title of the figure.
        rows: results with a "system" and a batch "B".
        panels: functions that return the value of a row, by the label of the vertical axis. None excludes the row.
        colors: colors of systems, in the order of the lines. Other systems get unused colors.
        dashed: systems with dashed lines, because they are lower bounds and not alternatives.
    """
    figure, axes_of = plots.panels(title, len(panels))
    unused = iter([color for color in plots.PALETTE if color not in colors.values()])
    names = dict.fromkeys([*(name for name in colors), *(r["system"] for r in rows)])
    color_of = {name: colors.get(name) or next(unused, plots.GREY) for name in names if any(r["system"] == name for r in rows)}
    for axes, (label, value) in zip(axes_of, panels.items(), strict=True):
        for name, color in color_of.items():
            values = [(r["B"], value(r)) for r in rows if r["system"] == name]
            points = sorted((batch, y) for batch, y in values if y is not None)
            plots.line(axes, points, name, color, linestyle="--" if name in dashed else "-")
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["B"] for r in rows])
        plots.log_axis(axes)
        plots.label_lines(axes)
    return figure
