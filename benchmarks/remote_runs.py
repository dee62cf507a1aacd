"""A training run from shards on a disk, over HTTP and from S3: the same weights, bit for bit, and pairs a second beside them.

Samples are read twice in each step. A remote run has an empty cache, then a filled one. A third run has none
(MEGABATCH_CACHE_GIB=0), so that every sample is fetched, and a server that is killed in the middle and started again on its
port. S3 is moto's server, if `moto[server]` and `s3fs` are installed. Other weights than those of the run from local files end
the program.

    python benchmarks/remote_runs.py --samples 256 --steps 8 --output demo        for a quick look
"""

import argparse
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import reports
from record import Record, arguments
from remote_reading import serve
from train_speed_data import make

from megabatch import extras
from megabatch.commands.arguments.options import whole
from megabatch.display.tables import Table

SHARD, BATCH = 32, 128  # samples
MODEL = ["width=32", "image_size=16", "channels=[8,16]", "blocks=1", "buckets=512"]  # little work: the rate shows the reading
AWAY = 2.0  # seconds without a server
KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine", "AWS_DEFAULT_REGION": "us-east-1"}


def serve_s3(folder: Path, port: int, connection: Any) -> None:
    """Runs in a process of its own. moto keeps objects in memory: they are there before the server answers."""
    backends, moto = (importlib.import_module(f"moto.{name}") for name in ("s3.models", "server"))
    backend = backends.s3_backends["123456789012"]["aws"]  # moto's account
    backend.create_bucket("bucket", "us-east-1")
    for path in folder.glob("*.tar"):
        backend.put_object("bucket", path.name, path.read_bytes())
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(port=port, verbose=False)
    server.start()
    connection.send(server.get_host_and_port()[1])
    threading.Event().wait()


def serve_http(folder: Path, port: int, connection: Any) -> None:
    """Runs in a process of its own."""
    serve(folder, 0.0, connection, port)


SERVERS = {"HTTP": serve_http, "S3": serve_s3}


class Server:
    """A server process that can be killed and started again on its port."""

    def __init__(self, target: Callable[..., None], folder: Path) -> None:
        self._target, self._folder, self.port = target, folder, 0
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Returns when it answers."""
        ours, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=self._target, args=(self._folder, self.port, theirs), daemon=True)
        self._process.start()
        self.port = ours.recv()

    def kill(self) -> None:
        """By SIGKILL."""
        assert self._process is not None, "started before"
        self._process.kill()
        self._process.join()


def train(data: str, folder: Path, steps: int, environment: dict[str, str], server: Server | None = None) -> dict[str, Any]:
    """Pairs a second after the first step, and a checksum of the weights. A server that is given is killed in the middle."""
    options = [f"model_options.{option}" for option in MODEL] + ["memory.inputs=0.0", "memory.graphs=0.0"]
    words = ["--data", data, "--batch-size", str(BATCH), "--steps", str(steps), "--output", str(folder), "--no-report"]
    command = [sys.executable, "-m", "megabatch", "train", *words, *(word for option in options for word in ("--set", option))]
    log, metrics = folder.with_suffix(".log"), folder / "metrics.jsonl"
    began = time.perf_counter()
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment) as process:
        while server is not None and process.poll() is None:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= steps // 4:
                server.kill()
                time.sleep(AWAY)
                server.start()
                if process.poll() is not None:
                    sys.exit("the run ended before its server was back; give it more --steps")
                break
            time.sleep(0.01)
    whole_seconds = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"the run from {data} failed:\n{log.read_text()}")
    seconds = [json.loads(line)["seconds"] for line in metrics.read_text().splitlines()]  # since the run began
    repeated = log.read_text().count(" follows in ")
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {
        "rate": (steps - 1) * BATCH / (seconds[-1] - seconds[0]),
        "seconds": whole_seconds,
        "repeated": repeated,
        "weights": weights,
    }


def table(record: dict[str, Any]) -> Table:
    rows = [
        [result["place"], f"{result['rate']:,.0f}", f"{result['seconds']:.0f}", result["repeated"], result["weights"][:16]]
        for result in record["results"]
    ]
    title = f"{record['steps']} steps of {BATCH} pairs, {record['samples']} samples of {record['bytes'] / 1e3:.0f} KB"
    return Table(["", "pairs/s", "seconds of the command", "repeated requests", "SHA-256 of the weights"], rows, title)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [place for place in SERVERS if place != "S3" or (extras.installed("moto") and extras.installed("s3fs"))]
    parser.add_argument("--places", nargs="+", choices=known, default=known, help="beside local files (all that are installed)")
    parser.add_argument("--samples", type=whole, default=2048, help="samples in all (2048)")
    parser.add_argument("--steps", type=whole, default=16, help="steps of each run (16)")
    arguments(parser, "remote_runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        shards, runs = Path(made) / "shards", Path(made) / "runs"
        runs.mkdir()
        names = Path(make(shards, args.samples, args.samples // SHARD, None, 192)).name
        size = sum(path.stat().st_size for path in shards.glob("*.tar")) / args.samples
        record = Record("remote_runs", args, steps=args.steps, samples=args.samples, bytes=size)

        def measure(place: str, data: str, environment: dict[str, str], server: Server | None = None) -> None:
            record.say(place)
            result = train(data, runs / str(len(record["results"])), args.steps, environment, server)
            record["results"].append({"place": place, **result})
            record.save()
            if result["weights"] != record["results"][0]["weights"]:
                sys.exit(f"the run from {place} has other weights than the run from local files")

        cache = {"MEGABATCH_CACHE": str(Path(made) / "cache")}
        measure("local files", str(shards / names), cache)
        for place in args.places:
            server = Server(SERVERS[place], shards)
            server.start()
            address = f"http://127.0.0.1:{server.port}"
            data = f"s3://bucket/{names}" if place == "S3" else f"{address}/{names}"
            environment = cache | KEYS | {"AWS_ENDPOINT_URL": address}
            measure(f"{place}, empty cache", data, environment)
            measure(f"{place}, filled cache", data, environment)
            without = {"MEGABATCH_CACHE": str(Path(made) / "no cache"), "MEGABATCH_CACHE_GIB": "0"}
            measure(f"{place}, no cache, server killed", data, environment | without, server)
            server.kill()
    reports.write(record.path, lambda found: table(found).markdown())
    print(table(record.contents).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
