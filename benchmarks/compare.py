"""Is one version of the library slower, or larger in memory, than another? Two source trees take turns on the same device.

    git worktree add ../before v0.1.0
    python benchmarks/compare.py --before ../before/src                    on a GPU, bf16
    python benchmarks/compare.py --before ../before/src --only nt_xent

Each tree has a process of its own, because both have the same package name. The processes take turns, so that a change of the
clock affects both. The values and gradients of both versions are compared before their times are measured.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEFORE, AFTER = "before", "after"
VERSIONS = (BEFORE, AFTER)
SIZES = {  # rows of x and y, embedding dimension
    "clip_loss": ["1024x512", "8192x512", "16384x512", "32768x512", "65536x512", "65536x1024", "131072x512", "262144x512"],
    "siglip_loss": ["16384x512", "65536x512", "131072x512"],
    "info_nce_loss": ["16384x512", "65536x512"],
    "nt_xent_loss": ["8192x512", "16384x512", "32768x512"],
    "sup_con_loss": ["8192x512", "16384x512", "32768x512", "65536x512"],
    "dcl_loss": ["16384x512"],
    "clip_loss, none": ["16384x512"],
    "late_interaction_loss": ["1024x128"],
    "pairwise_topk": ["131072x512"],
}
LARGE = {"clip_loss": ["1048576x512"]}  # only the memory is measured
TINY = {"clip_loss": ["64x16"], "nt_xent_loss": ["32x16"]}


# ----------------------------------------------------------------------------------------------------------------------
# A process of one version. It reads a job per line from stdin, and writes an answer per line to stdout.


def serve(device: str) -> None:
    """Answers jobs until stdin ends."""
    steps: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        job = json.loads(line)
        name = job["case"]
        try:
            if job["what"] == "prepare":
                steps.clear()
                gc.collect()
                steps[name] = build(name, device)
                answer = prepare(steps[name], device, is_large=job["is_large"])
            else:
                answer = clock(steps[name], device, job["seconds"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), flush=True)


def build(case: str, device: str) -> Callable[[], Any]:
    """Returns a function that runs a case forward and backward, and returns its results."""
    import torch
    import torch.nn.functional as F

    import megabatch as mb

    name, size = case.rsplit(" ", 1)
    N, D = map(int, size.split("x"))
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def embed(*shape: int) -> torch.Tensor:
        return F.normalize(torch.randn(*shape, device=device, generator=generator), dim=-1).to(dtype).requires_grad_()

    scale = torch.tensor(20.0, device=device, requires_grad=True)
    bias = torch.tensor(-10.0, device=device, requires_grad=True)
    if name == "late_interaction_loss":
        query, document = embed(N, 32, D), embed(N, 128, D)
        inputs = [query, document, scale]
        loss = lambda: mb.late_interaction_loss(query, document, scale=scale)  # noqa: E731
    else:
        x, y = embed(N, D), embed(N, D)
        inputs = [x, y, scale]
        labels = torch.arange(N, device=device) % max(1, N // 8)
        loss = {
            "clip_loss": lambda: mb.clip_loss(x, y, scale),
            "clip_loss, none": lambda: mb.clip_loss(x, y, scale, reduction="none").mean(),
            "siglip_loss": lambda: mb.siglip_loss(x, y, scale, bias),
            "info_nce_loss": lambda: mb.info_nce_loss(x, y, scale=scale),
            "dcl_loss": lambda: mb.dcl_loss(x, y, scale=scale),
            "hcl_loss": lambda: mb.hcl_loss(x, y, scale=scale),
            "nt_xent_loss": lambda: mb.nt_xent_loss(x, y, scale),
            "sup_con_loss": lambda: mb.sup_con_loss(x, labels, scale),
            "pairwise_topk": lambda: mb.pairwise_topk(x.detach()[:16384], y.detach(), 16),
        }[name]
        if name == "sup_con_loss":
            inputs = [x, scale]
    if name == "pairwise_topk":
        return loss

    def step() -> tuple[torch.Tensor, ...]:
        value = loss()
        return value, *torch.autograd.grad(value, inputs)

    return step


def prepare(step: Callable[[], Any], device: str, *, is_large: bool) -> dict[str, Any]:
    """Compiles the kernels. Returns numbers that describe the results, and the peak memory of a step."""
    import torch

    def numbers(results: Any) -> list[float]:
        return [float(tensor.double().norm()) for tensor in results]

    found = None if is_large else numbers(step())
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = step()
        torch.cuda.synchronize()
        return {"results": found or numbers(results), "peak_bytes": torch.cuda.max_memory_allocated() - before}
    return {"results": found, "peak_bytes": 0}


def clock(step: Callable[[], Any], device: str, seconds: float) -> dict[str, float]:
    """Returns the milliseconds of a step, and the milliseconds until the host has queued it."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    calls = max(1, min(50, int(seconds / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(calls):
        step()
    queued = time.perf_counter() - start
    wait()
    return {"ms": 1e3 * (time.perf_counter() - start) / calls, "host_ms": 1e3 * queued / calls}


# ----------------------------------------------------------------------------------------------------------------------
# The comparison.


class Version:
    """A process with one source tree."""

    def __init__(self, source: Path, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, __file__, "--serve", device]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **job: Any) -> None:
        """Starts a job."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Waits for the answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"the process ended with status {self.process.wait()}"}

    def end(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def compare(case: str, versions: dict[str, Version], rounds: int, seconds: float = 0.15) -> dict[str, Any]:
    """Returns the time and the memory of both versions for one case. Without rounds, it measures only the memory."""
    for version in versions.values():  # both compile at the same time
        version.send(what="prepare", case=case, is_large=rounds == 0)
    prepared = {name: version.receive() for name, version in versions.items()}
    row: dict[str, Any] = {"case": case, "status": "ok"}
    if errors := {name: answer["error"] for name, answer in prepared.items() if "error" in answer}:
        return {**row, "status": "; ".join(f"{name}: {error}" for name, error in errors.items())}
    first, second = (prepared[name]["results"] for name in VERSIONS)
    row["difference"] = max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(first, second, strict=True))
    if row["difference"] > 0.01:
        return {**row, "status": f"WRONG: results differ by {row['difference']:.1e}"}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in VERSIONS}
    for _ in range(rounds):
        for name in VERSIONS:
            versions[name].send(what="time", case=case, seconds=seconds)
            times[name].append(versions[name].receive())
    for name in VERSIONS:
        for key in ("ms", "host_ms"):
            row[f"{name}_{key}"] = statistics.median(time[key] for time in times[name]) if rounds else None
        row[f"{name}_bytes"] = prepared[name]["peak_bytes"]
    return row


def markdown(record: dict[str, Any]) -> str:
    """Returns the table."""
    from megabatch_train.bench.measure import paragraphs
    from megabatch_train.display.tables import TextTable

    rows = []
    for row in record["results"]:
        if row["status"] != "ok":
            rows.append([row["case"], row["status"], *[""] * 7])
            continue
        cells: list[Any] = [row["case"]]
        for unit in ("ms", "host_ms"):
            before, after = (row[f"{name}_{unit}"] for name in VERSIONS)
            numbers = ["", "", ""] if before is None else [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"]
            cells += numbers[: 3 if unit == "ms" else 2]
        before, after = (row[f"{name}_bytes"] / 2**30 for name in VERSIONS)
        cells += [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}" if before else ""]
        rows.append(cells)
    headings = [
        "case",
        "before, ms",
        "after, ms",
        "ratio",
        "host before, ms",
        "host after, ms",
        "before, GiB",
        "after, GiB",
        "ratio",
    ]
    notes = (
        "Median of the rounds, forward and backward. host: time until a step is queued. GiB: peak in addition to the inputs."
    )
    table = TextTable(headings, rows, title="Two versions of the library", notes=notes)
    return paragraphs(table.markdown(), record.get("remarks", ""))


def main() -> None:
    """Runs the comparison."""
    from megabatch_train.bench.measure import Record, arguments, device_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--before", type=Path, default=HERE.parent / "src", help="source folder of the other version (default: this version)")
    add("--only", nargs="+", default=None, help="losses (default: all)")
    add("--rounds", type=int, default=5, help="times that each version is measured (%(default)s)")
    arguments(parser, "compare", seconds=300.0)
    args = parser.parse_args()
    device = device_of(args)
    record = Record.of_script("compare", args, args.seconds, device=device)
    sizes = TINY if args.tiny else {name: some + LARGE.get(name, []) for name, some in SIZES.items()}
    versions = {BEFORE: Version(args.before, device), AFTER: Version(HERE.parent / "src", device)}
    cases = [f"{name} {size}" for name, some in sizes.items() if not args.only or name in args.only for size in some]
    try:
        for case in sorted(cases, key=lambda case: case.endswith(LARGE["clip_loss"][0])):
            if record.seconds_left() < 20:
                print(f"no time for {case}")
                continue
            row = compare(case, versions, 0 if case.split()[-1] in LARGE["clip_loss"] else args.rounds)
            record["results"].append(row)
            record.save()
            record.say(f"{case}: {row.get('before_ms')} → {row.get('after_ms')} ms, {row['status']}")
    finally:
        for version in versions.values():
            version.end()
    record.finish(markdown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
