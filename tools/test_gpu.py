"""Runs the tests that use a GPU, in several processes side by side: most of their time is spent on compiling kernels.

    python tools/test_gpu.py                              all of them
    python tools/test_gpu.py tests/gpu/test_cuda.py       some files
    python tools/test_gpu.py -- -k topk                   with options of pytest
    python tools/test_gpu.py --seconds 300                as many as end within five minutes; fails unless all have run

`nvidia-cuda-mps-control -d`, run before, lets the processes use the GPU at the same time instead of in turns.

Each process takes every n-th test, and the first also takes all tests with a pool of processes (`TEST_SHARD`, see
tests/conftest.py). Where there is no GPU, tests of tests/gpu skip. The others then run interpreted on the CPU, as in
`make test`.
"""

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Beside tests/gpu: tests of kernels that run on a GPU if there is one.
FILES = (
    "tests/gpu",
    "tests/losses/test_small_kernels.py",
    "tests/losses/test_pair_loss.py",
    "tests/losses/test_hostile_matches.py",
    "tests/tiles/test_triton.py",
    "tests/tiles/test_triton_late.py",
    "tests/tiles/test_row_statistics.py",
    "tests/test_topk.py",
)
MARKS = "gpu or quick or not thorough"  # whole grids of kernels, of which `make test` runs some cases
NO_TESTS, INTERRUPTED = 5, 2  # exit statuses of pytest: of a shard without tests, and of one that was stopped
GRACE = 20.0  # seconds for a stopped process to say what it has done


def main() -> int:
    """Returns 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help="files and folders of tests (default: all with GPU tests)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time (no limit)")
    own, further = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, further = own[:cut], own[cut + 1 :]
    options = parser.parse_args(own)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shards = [Shard(number, options.processes, options.files, further, Path(folder)) for number in range(options.processes)]
        for shard in shards:
            if not shard.ends_within(options.seconds - (time.monotonic() - began)):
                for running in shards:
                    running.stop()
                shard.end()
            print(
                f"[{time.monotonic() - began:4.0f} s] process {shard.number + 1} of {len(shards)}: {shard.summary()}",
                flush=True,
            )
        failed = [shard for shard in shards if shard.failed()]
        for shard in failed:
            print(f"\n== process {shard.number + 1}\n{shard.log.read_text()}")
        total = {word: sum(shard.count(word) for shard in shards) for word in ("passed", "failed", "skipped", "error")}
    stopped = sum(shard.stopped for shard in shards)
    if stopped:
        print(
            f"{stopped} of {len(shards)} processes were stopped after {options.seconds:.0f} s, before the last of their tests"
        )
    print(f"{total['passed']} passed, {total['failed'] + total['error']} failed, {total['skipped']} skipped")
    return 1 if failed or stopped else 0


class Shard:
    """One process of pytest."""

    def __init__(self, number: int, count: int, files: list[str], further: list[str], folder: Path) -> None:
        self.number, self.log, self.stopped = number, folder / f"{number}.log", False
        # With a thread for each core in every process, references on the CPU would take several times as long.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TEST_SHARD": f"{number}/{count}"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", MARKS, "-rs", *further, *files]
        with self.log.open("w") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end, so many seconds at most."""
        try:
            self._process.wait(None if math.isinf(seconds) else max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Asks it, once, to end after the test that it is at."""
        if not self.stopped and self._process.poll() is None:
            self.stopped = True
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Waits for a process that was stopped, and ends it if it takes long."""
        if not self.ends_within(GRACE):
            self._process.kill()
            self._process.wait()

    def failed(self) -> bool:
        """Whether a test failed, or the process itself."""
        ended = (0, NO_TESTS, INTERRUPTED) if self.stopped else (0, NO_TESTS)
        return self.count("failed") + self.count("error") > 0 or self._process.returncode not in ended

    def summary(self) -> str:
        """The last line of pytest."""
        lines = self.log.read_text().strip().splitlines()
        return lines[-1].strip("= ") if lines else f"exit status {self._process.returncode}"

    def count(self, word: str) -> int:
        """How many tests passed, failed or were skipped, by the last line."""
        found = re.search(rf"(\d+) {word}", self.summary())
        return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
