"""Reading shards over HTTP beside local files: samples a second, in the order of a training run.

A server process sends byte ranges of the same files, at once or after a pause, as an object store does. Shards are read over it
with an empty cache, which the tables of contents fill; with tables of contents alone; and with both. The checksum of all
samples must be that of the local files. Each measurement is a fresh process with readers in threads, without decoding.

    python benchmarks/remote_reading.py --samples 500 --rounds 1 --output demo        for a quick look
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import reports
from record import Record, arguments
from train_speed_data import make

from megabatch.bench.processes import fresh_process
from megabatch.commands.arguments.options import whole
from megabatch.data.order import Order
from megabatch.data.shards import Shards
from megabatch.display.tables import Table

SIDE = 192  # pixels of the noise: files of about 40 KB
PAUSES = [0.0, 0.05]  # seconds before an answer; an object store has the second
LOCAL, FIRST, FETCHED, CACHED = "local files", "HTTP, first start", "HTTP, blocks not in the cache", "HTTP, blocks in the cache"


class Handler(BaseHTTPRequestHandler):
    """Byte ranges of the files of a folder; the connection stays open."""

    protocol_version = "HTTP/1.1"
    folder, pause = Path(), 0.0

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        """Size and version."""
        self._head(200, (self.folder / self.path.lstrip("/")).stat().st_size)

    def do_GET(self) -> None:
        """A range."""
        time.sleep(self.pause)
        with (self.folder / self.path.lstrip("/")).open("rb") as file:
            start, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())  # type: ignore[union-attr]
            self._head(206, end + 1 - start)
            while start <= end:
                start += os.sendfile(self.wfile.fileno(), file.fileno(), start, end + 1 - start)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"1"')
        self.end_headers()


def serve(folder: Path, pause: float, connection: Connection, port: int = 0) -> None:
    """Runs in a process of its own."""
    Handler.folder, Handler.pause = folder, pause
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    connection.send(server.server_address[1])
    server.serve_forever()


def read(shards: list[str], cache: str, readers: int) -> tuple[float, float, float, str]:
    """Seconds for tables of contents and for an epoch of samples, its CPU time, and a checksum. A process of its own."""
    os.environ["MEGABATCH_CACHE"] = cache
    started = time.perf_counter()
    data = Shards(shards)
    order, listed, before = Order(data.groups, 1).epoch(0).tolist(), time.perf_counter(), time.process_time()

    def digest(index: int) -> bytes:
        return hashlib.sha256(data.stored(index, 0).data + data.stored(index, 1).encode()).digest()

    with ThreadPoolExecutor(readers) as threads:
        found = b"".join(threads.map(digest, order))
    seconds, busy = time.perf_counter() - listed, time.process_time() - before
    return listed - started, seconds, busy, hashlib.sha256(found).hexdigest()


def measure(folder: Path, samples: int, readers: int, pause: float) -> list[dict[str, Any]]:
    names = sorted(path.name for path in folder.glob("*.tar"))
    ours, theirs = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=serve, args=(folder, pause, theirs), daemon=True)
    server.start()
    address = f"http://127.0.0.1:{ours.recv()}"
    remote = [f"{address}/{name}" for name in names]
    results, right = [], None
    with tempfile.TemporaryDirectory() as cache:
        for place in (LOCAL, FIRST, FETCHED, CACHED):
            if place == FETCHED:
                shutil.rmtree(Path(cache) / "remote")
            shards = [str(folder / name) for name in names] if place == LOCAL else remote
            listed, seconds, busy, found = fresh_process(read, shards, cache, readers)
            right = right or found
            if found != right:
                sys.exit(f"{place} has other samples than local files")
            told = {"place": place, "readers": readers, "pause": pause, "contents": listed}
            results.append(told | {"rate": samples / seconds, "cpu": busy / samples})
    server.terminate()
    server.join()
    return results


def table(record: dict[str, Any]) -> Table:
    rows = []
    for result in record["results"]:
        pause = "" if result["place"] == LOCAL else f", {1000 * result['pause']:.0f} ms to an answer"
        rate, cpu = result["rate"], result["cpu"]
        figures = f"{result['contents']:.2f}", f"{rate:,.0f}", f"{rate * record['bytes'] / 1e6:,.0f}", f"{1e6 * cpu:,.0f}"
        rows.append([result["place"] + pause, result["readers"], *figures])
    title = f"{record['samples']:,} samples of {record['bytes'] / 1e3:.0f} KB in {record['shards']} shards"
    return Table(["", "readers", "tables of contents, s", "samples/s", "MB/s", "CPU, µs a sample"], rows, title)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=whole, default=3000, help="samples in all (3000)")
    parser.add_argument("--readers", type=whole, nargs="+", default=[1, 8], help="threads (1 and 8)")
    parser.add_argument("--pauses", type=float, nargs="+", default=PAUSES, help="seconds before an answer (0 and 0.05)")
    parser.add_argument("--rounds", type=whole, default=2, help="measurements of each number, the best counts (2)")
    arguments(parser, "remote_reading")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        make(Path(made), args.samples, 4, None, SIDE)
        size = sum(path.stat().st_size for path in Path(made).glob("*.tar")) / args.samples
        record = Record("remote_reading", args, samples=args.samples, shards=4, bytes=size)
        for readers in args.readers:
            for pause in args.pauses:
                record.say(f"{readers} readers, {1000 * pause:.0f} ms to an answer")
                rounds = [measure(Path(made), args.samples, readers, pause) for _ in range(args.rounds)]
                best = [max(one, key=lambda result: result["rate"]) for one in zip(*rounds, strict=True)]
                record["results"].extend(best if pause == args.pauses[0] else best[1:])
                record.save()
    reports.write(record.path, lambda found: table(found).markdown())
    print(table(record.contents).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
