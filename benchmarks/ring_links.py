"""Two levels against a flat ring over slow links between nodes: measured on emulated links, and predicted by the cost model.

A node is a network namespace, a link is a veth pair whose rate `tc tbf` limits in both directions; inside a node messages go
over its loopback device. A node has one link for all its ranks, or one for each. Needs root, `ip` and `tc` on Linux. The inputs
of the model (bandwidths, the time of a visit and of an empty step) are measured in the same run, apart from the predictions.
The result is compared with one process before any time is reported.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import megabatch
from megabatch import machine, ring
from megabatch.bench.processes import join
from megabatch.display.numbers import cell
from megabatch.display.tables import Table
from megabatch.planning.ring import Cluster, Link, Pass, clip_passes, predict
from megabatch.ring import lap

SCALE, REPEATS = 20.0, 3
HEADINGS = ["links of a node", "schedule", "overlap", "forward s", "predicted", "backward s", "predicted", "error"]
HEADINGS += ["MiB between nodes"]
NOTES = (
    "MiB between nodes: sent by a node in both passes. Predicted by `megabatch.planning.ring` from links and work that were "
    "measured apart. Error: of the sum of both passes."
)
CASES = [("ring", True), ("ring", False), ("two_level", True), ("two_level", False), ("gather", True)]


def sh(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def why_not() -> str | None:
    """The reason why this machine cannot emulate links."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found"
    try:
        with network(1, 1, 100.0):
            return None
    except RuntimeError as error:
        return str(error)


@contextmanager
def network(nodes: int, rails: int, megabits: float) -> Iterator[None]:
    """Namespaces mb-node0 … with interfaces rail0 …; rail l of node n has the address 10.77.n.(l + 1)."""
    shape = f"root tbf rate {megabits}mbit burst 32kb latency 400ms"
    try:
        for n in range(nodes):
            sh(f"ip netns add mb-node{n}")
            sh(f"ip netns exec mb-node{n} ip link set lo up")
        for rail in range(rails):
            sh(f"ip link add mb-rail{rail} type bridge")
            sh(f"ip link set mb-rail{rail} up")
            for n in range(nodes):
                inside, outside = f"rail{rail}", f"mb{n}x{rail}"
                sh(f"ip link add {outside} type veth peer name {inside} netns mb-node{n}")
                sh(f"ip link set {outside} master mb-rail{rail} up")
                sh(f"ip netns exec mb-node{n} ip addr add 10.77.{n}.{rail + 1}/32 dev {inside}")
                sh(f"ip netns exec mb-node{n} ip link set {inside} up")
                for m in set(range(nodes)) - {n}:
                    way = f"dev {inside} src 10.77.{n}.{rail + 1}"
                    sh(f"ip netns exec mb-node{n} ip route add 10.77.{m}.{rail + 1}/32 {way}")
                sh(f"tc qdisc add dev {outside} {shape}")
                sh(f"ip netns exec mb-node{n} tc qdisc add dev {inside} {shape}")
        yield
    finally:
        ends = [f"link del mb{n}x{rail}" for n in range(nodes) for rail in range(rails)]
        ends += [f"link del mb-rail{rail}" for rail in range(rails)] + [f"netns del mb-node{n}" for n in range(nodes)]
        for end in ends:
            subprocess.run(["ip", *end.split()], capture_output=True, check=False)


def launch(args: argparse.Namespace, rails: int) -> list[dict[str, Any]]:
    """Starts the ranks in their nodes, and returns the measurements of each."""
    world = args.nodes * args.ranks
    with network(args.nodes, rails, args.megabits), tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world):
            node, place = divmod(rank, args.ranks)
            mine = {"GROUP_RANK": str(node), "LOCAL_WORLD_SIZE": str(args.ranks), "OMP_NUM_THREADS": "1"}
            mine["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hides warnings about host names that cannot be looked up here
            mine["GLOO_SOCKET_IFNAME"] = f"rail{place * rails // args.ranks}"
            options = ["--rank", str(rank), "--answers", folder, "--rows", str(args.rows), "--width", str(args.width)]
            options += ["--nodes", str(args.nodes), "--ranks", str(args.ranks)]
            command = ["ip", "netns", "exec", f"mb-node{node}", sys.executable, __file__, *options]
            processes.append(subprocess.Popen(command, env=os.environ | mine, stdout=subprocess.DEVNULL))
        try:
            deadline = time.monotonic() + 600
            for process in processes:
                if process.wait(timeout=max(1.0, deadline - time.monotonic())):
                    raise RuntimeError("a rank failed; its traceback is above")
        finally:
            for process in processes:
                process.kill()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def rank_main(args: argparse.Namespace) -> None:
    """Runs on each rank."""
    world = args.nodes * args.ranks
    join(args.rank, world, "tcp://10.77.0.1:29555", 120.0)
    torch.set_num_threads(1)
    answer: dict[str, Any] = {"inside": probe(args, between=False), "between": probe(args, between=True)}
    image, text = inputs(world * args.rows, args.width)
    rows = slice(args.rank * args.rows, (args.rank + 1) * args.rows)
    local = [t[rows].clone().requires_grad_() for t in (image, text)]
    answer["work"] = timed_work(local, world)
    tiny = [t[:1].detach().requires_grad_() for t in local]
    with ring.using("ring"):
        answer["tiny"] = timed_passes(lambda: megabatch.clip_loss(*tiny, SCALE, group=dist.group.WORLD))
    for schedule, overlap in CASES:
        lap.OVERLAP = overlap
        with ring.using(schedule), ring.counted() as sent:
            for t in local:
                t.grad = None
            megabatch.clip_loss(*local, SCALE, group=dist.group.WORLD).backward()
            traffic = (sent.bytes, sent.crossing)
            check(local, image, text, rows, world)
            seconds = timed_passes(lambda: megabatch.clip_loss(*local, SCALE, group=dist.group.WORLD))
        answer[f"{schedule} {overlap}"] = {"seconds": seconds, "sent": traffic[0], "crossing": traffic[1]}
    (Path(args.answers) / f"{args.rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def inputs(batch: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(batch, width, generator=generator), dim=1) for _ in range(2))
    return image, text


def check(local: list[Tensor], image: Tensor, text: Tensor, rows: slice, world: int) -> None:
    """Against one process, on the last rows; a wrong result has no speed."""
    whole = [t.clone().requires_grad_() for t in (image, text)]
    megabatch.clip_loss(*whole, SCALE).backward()
    for mine, all_of_it in zip(local, whole, strict=True):
        torch.testing.assert_close(mine.grad / world, all_of_it.grad[rows], rtol=1e-4, atol=1e-7)


def timed_passes(function: Callable[[], Tensor]) -> list[list[float]]:
    """Forward and backward, all ranks beginning together; the slowest rank counts."""
    results = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        loss = function()
        forward = time.perf_counter() - start
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        results.append([forward, time.perf_counter() - start])
    return results


def timed_work(local: list[Tensor], visits: int) -> list[list[float]]:
    """One visit, forward and backward, while all ranks work: as many as a lap has, from the first to the end of the last."""
    loss = megabatch.clip_loss(*local, SCALE)
    passes = (lambda: megabatch.clip_loss(*local, SCALE), lambda: torch.autograd.grad(loss, local, retain_graph=True))
    results = []
    for _ in range(REPEATS):
        seconds = []
        for work in passes:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(visits):
                work()
            dist.barrier()
            seconds.append((time.perf_counter() - start) / visits)
        results.append(seconds)
    return results


def probe(args: argparse.Namespace, *, between: bool) -> dict[str, float]:
    """Bandwidth and latency of a message to the next rank: all ranks inside a node, one rank of each node between them."""
    node, place = divmod(args.rank, args.ranks)
    if between:
        ahead, behind = ((node + i) % args.nodes * args.ranks + place for i in (1, -1))
        active = place == 0
    else:
        ahead, behind = (node * args.ranks + (place + i) % args.ranks for i in (1, -1))
        active = True
    measured = {}
    for name, size in (("warm", 2**16), ("latency", 1), ("bandwidth", 2**20)):
        times = []
        out, back = torch.zeros(size), torch.zeros(size)
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            if active:
                messages = [dist.P2POp(dist.irecv, back, behind), dist.P2POp(dist.isend, out, ahead)]
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
            times.append(time.perf_counter() - start)
        measured[name] = statistics.median(times)
    if not active:
        return {}
    return {"latency": measured["latency"], "bandwidth": 4 * 2**20 / (measured["bandwidth"] - measured["latency"])}


def slowest(answers: list[dict[str, Any]], key: str) -> list[float]:
    """Median over repeats of the time of the slowest rank: forward, backward."""
    runs = [answer[key] if key in ("work", "tiny") else answer[key]["seconds"] for answer in answers]
    by_repeat = [[max(run[i][p] for run in runs) for i in range(REPEATS)] for p in (0, 1)]
    return [statistics.median(times) for times in by_repeat]


def predicted(args: argparse.Namespace, answers: list[dict[str, Any]], schedule: str, rails: int) -> list[float]:
    """From the bandwidths, the time of a visit while all ranks work, and that of a step in which nearly nothing is done."""
    inside, between = (
        Link(statistics.median(a[name]["bandwidth"] for a in answers if a[name])) for name in ("inside", "between")
    )
    work = zip(clip_passes(args.width, 4), slowest(answers, "work"), slowest(answers, "tiny"), strict=True)

    def seconds(lap: Pass, visit: float, tiny: float) -> float:
        rate, overhead = lap.operations * args.width * args.rows**2 / visit, tiny / (args.nodes * args.ranks)
        cluster = Cluster(args.nodes, args.ranks, inside, between, rate, rails=rails, overhead=overhead)
        return predict(schedule, cluster, args.rows * cluster.ranks, args.width, lap).seconds

    return [seconds(*given) for given in work]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="how many (2)")
    parser.add_argument("--ranks", type=int, default=4, help="of each node (4)")
    parser.add_argument("--rows", type=int, default=256, help="of each rank (256)")
    parser.add_argument("--width", type=int, default=512, help="of the embeddings (512)")
    parser.add_argument("--megabits", type=float, default=50.0, help="a second, of a link between nodes (50)")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "results", help="folder")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answers", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return 0
    rows: list[list[str]] = []
    record: dict[str, Any] = {"machine": machine.describe(), "results": [], "given": {}}
    for rails in (1, args.ranks):
        links = f"{rails} link{'s' if rails > 1 else ''}"
        print(f"{links} of {args.megabits:g} Mbit/s for a node of {args.ranks} ranks …", flush=True)
        answers = launch(args, rails)
        for schedule, overlap in CASES:
            key = f"{schedule} {overlap}"
            measured = slowest(answers, key)
            model = predicted(args, answers, schedule, rails) if overlap else [None, None]
            error = sum(model) / sum(measured) - 1 if overlap else None
            crossing = sum(answer[key]["crossing"] for answer in answers) / args.nodes
            rows.append([str(rails), schedule, "yes" if overlap else "no"])
            rows[-1] += [cell(value, ".3f") for both in zip(measured, model, strict=True) for value in both]
            rows[-1] += [cell(error, "+.0%"), f"{crossing / 2**20:.1f}"]
            found = {"links": rails, "schedule": schedule, "overlap": overlap, "measured": measured, "crossing_bytes": crossing}
            record["results"].append(found | {"predicted": model if overlap else None})
        given = {name: [a[name] for a in answers] for name in ("inside", "between")}
        record["given"][str(rails)] = given | {key: slowest(answers, key) for key in ("work", "tiny")}
    defaults = {"nodes": 2, "ranks": 4, "rows": 256, "width": 512, "megabits": 50.0}
    changed = "".join(f" --{name} {getattr(args, name):g}" for name, value in defaults.items() if getattr(args, name) != value)
    record["command"] = f"python benchmarks/ring_links.py{changed}"
    title = (
        f"CLIP loss, forward and backward, float32, {args.nodes} nodes of {args.ranks} ranks with {args.rows} pairs each, "
        f"D = {args.width}; links between nodes of {args.megabits:g} Mbit/s, emulated."
    )
    table = Table(HEADINGS, rows, title, NOTES, names=(1, 2))
    about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand, as root: `{record['command']}`\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "ring_links.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.output / "ring_links.md").write_text(f"{table.markdown()}\n\n{about}")
    table.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
