"""`megabatch plan` against a GPU: memory and time of cached steps that were planned before they are run.

For each model, chunk and batch a whole step of `cached_backward` is run, AdamW included, and its peak is compared with the
plan's. All embeddings and the whole loss are in place. Of the chunks only the first and the last few are encoded; for those
between, the towers return made-up embeddings with a gradient, so that a batch of a million takes seconds. What encoding takes
is timed on whole chunks and multiplied. The last case of ViT-L/14 reads its images by replay.

Writes a JSON file after every case; at the end a table and a plot (`plan_validation_report.py` makes them again).
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from plan_validation_report import report, table
from replayed_images import Normalised, replay
from torch import Tensor, nn

import megabatch as mb
from megabatch import machine
from megabatch.bench.measure import peak_memory
from megabatch.bench.towers import CONTEXT, SIZES, VOCABULARY, Size, SyntheticImages, towers
from megabatch.planning import gpus, step
from megabatch.planning.losses import MEGABATCH, loss_bytes, loss_seconds
from megabatch.planning.meter import nowhere, without_data
from megabatch.planning.models import Model, Side

REAL = 2  # chunks that are encoded at the beginning, and at the end
CASES = [  # model, chunk, batch, where images come from
    ("ViT-L/14", 256, 4096, "made"),
    ("ViT-L/14", 128, 65536, "made"),
    ("ViT-L/14", 256, 65536, "made"),
    ("ViT-L/14", 256, 1048576, "replay"),
    ("ViT-B/32", 1024, 4096, "made"),
    ("ViT-B/32", 512, 65536, "made"),
    ("ViT-B/32", 1024, 65536, "made"),
    ("ViT-B/32", 1024, 1048576, "made"),
    ("ViT-B/16", 512, 4096, "made"),
    ("ViT-B/16", 256, 65536, "made"),
    ("ViT-B/16", 512, 65536, "made"),
    ("ViT-B/16", 512, 1048576, "made"),
]
SMOKE = [("tiny", 16, 64, "made"), ("tiny", 16, 256, "replay")]


class Tokens(mb.Source):
    """Random words made where they are needed; the last is the largest id, which CLIP takes for the end of the text."""

    def __init__(self, rows: int, device: str) -> None:
        self.rows, self.device = rows, device

    def __len__(self) -> int:
        """Texts."""
        return self.rows

    def chunks(self, spans: Sequence[tuple[int, int]], device: torch.device | None) -> Iterator[Tensor]:
        """(n, CONTEXT), the same for the same span."""
        for start, stop in spans:
            generator = torch.Generator(self.device).manual_seed(start)
            made = torch.randint(1, VOCABULARY - 2, (stop - start, CONTEXT), generator=generator, device=self.device)
            made[:, -1] = VOCABULARY - 1
            yield made


class Truncated(mb.Source):
    """The first and last chunks of a source; between them a number for each sample, which `MadeUp` understands."""

    def __init__(self, source: mb.Source, chunk: int) -> None:
        self.source, self.chunk, self.reuses_memory = source, chunk, source.reuses_memory

    def __len__(self) -> int:
        """Samples, all of them."""
        return len(self.source)

    def chunks(self, spans: Sequence[tuple[int, int]], device: torch.device | None) -> Iterator[Tensor]:
        """(n, …), or (n, 1) on the host."""
        whole = [span for span in spans if self._is_real(span)]
        with closing(iter(self.source.chunks(whole, device))) as real:
            for span in spans:
                yield next(real) if self._is_real(span) else torch.full((span[1] - span[0], 1), span[0])

    def _is_real(self, span: tuple[int, int]) -> bool:
        return span[0] < REAL * self.chunk or span[0] >= len(self) - REAL * self.chunk


class MadeUp(nn.Module):
    """A tower that encodes real chunks, and for others returns unit vectors that depend on a parameter."""

    def __init__(self, tower: nn.Module, width: int, device: str) -> None:
        super().__init__()
        self.tower, self.width, self.device = tower, width, device
        self.one = nn.Parameter(torch.ones(width, device=device))
        self.dtype = torch.float32  # of the real embeddings, which come first
        self.after_loss: Any = None  # told once, when the second pass begins

    def forward(self, x: Tensor) -> Tensor:
        """(n, D)."""
        if self.after_loss is not None:
            self.after_loss()
        if x.shape[-1] != 1:
            embeddings: Tensor = self.tower(x)
            self.dtype = embeddings.dtype
            return embeddings
        generator = torch.Generator(self.device).manual_seed(int(x[0, 0]))
        made = torch.randn(len(x), self.width, generator=generator, device=self.device)
        return (F.normalize(made, dim=1) * self.one).to(self.dtype)


class Clock:
    """Seconds between two moments on the device."""

    def __init__(self, device: str) -> None:
        self.device, self.moments = device, []

    def mark(self) -> None:
        """Now, as the device sees it."""
        if self.device == "cuda":
            self.moments.append(torch.cuda.Event(enable_timing=True))
            self.moments[-1].record()
        else:
            self.moments.append(time.perf_counter())

    def seconds(self) -> float:
        """Between the last two."""
        first, second = self.moments[-2:]
        if self.device == "cuda":
            second.synchronize()
            return float(first.elapsed_time(second)) / 1000
        return float(second - first)


@dataclass
class Subject:
    """A model on the device with its optimizer, and the same model without data."""

    name: str
    size: Size
    image: nn.Module
    text: nn.Module
    library: str
    log_scale: nn.Parameter
    optimizer: torch.optim.Optimizer
    planned: Model

    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        return [*self.image.parameters(), *self.text.parameters(), self.log_scale]


def subject(name: str, device: str) -> Subject:
    size = SIZES[name]
    with torch.device(device):
        image, text, library = towers(size, device)
    with torch.device("meta"):
        empty = towers(size, "meta")[:2]
    with nowhere():
        for module in empty:
            without_data(module)
    images = partial(_inputs, (3, size.pixels, size.pixels), torch.float32, "x")
    texts = partial(_inputs, (CONTEXT,), torch.int64, "x")
    planned = Model(name, (Side("image", empty[0], images), Side("text", empty[1], texts)))
    log_scale = nn.Parameter(torch.tensor(2.66, device=device))
    parameters = [*image.parameters(), *text.parameters(), log_scale]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=device == "cuda")
    return Subject(name, size, image, text, library, log_scale, optimizer, planned)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, name: str, n: int) -> dict[str, Tensor]:
    return {name: torch.zeros(n, *shape, dtype=dtype)}


def chunk_seconds(s: Subject, chunk: int, device: str) -> tuple[float, float]:
    """(encoding a chunk of pairs without a graph, encoding it with one and going back)."""
    images = next(SyntheticImages(chunk, s.size, device).chunks([(0, chunk)], None))
    texts = next(Tokens(chunk, device).chunks([(0, chunk)], None))

    def forward() -> list[Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16):
            return [tower(x) for tower, x in ((s.image, images), (s.text, texts))]

    def without() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        for tower, x in ((s.image, images), (s.text, texts)):
            with torch.autocast(device, dtype=torch.bfloat16):
                embeddings = tower(x)
            embeddings.backward(torch.full_like(embeddings, 1e-3))
            del embeddings

    found = []
    for work in (without, both):
        work()
        clock = Clock(device)
        clock.mark()
        for _ in range(2):
            work()
        clock.mark()
        found.append(clock.seconds() / 2)
    return found[0], found[1]


def run_case(s: Subject, plan: step.Plan, batch: int, source: str, args: argparse.Namespace) -> dict[str, Any]:
    """One step, measured and planned."""
    device, chunk = args.device, plan.chunk
    result: dict[str, Any] = {"model": s.name, "chunk": chunk, "B": batch, "source": source, "status": "ok"}
    width = s.size.embedding
    tower = Normalised(s.image) if source == "replay" else s.image
    image, text = (MadeUp(module, width, device) for module in (tower, s.text))
    images = replay(batch, s.size, args.workers, seed=batch) if source == "replay" else SyntheticImages(batch, s.size, device)
    sides = [(image, Truncated(images, chunk)), (text, Truncated(Tokens(batch, device), chunk))]
    clock = Clock(device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        def second_pass() -> None:
            clock.mark()
            image.after_loss = text.after_loss = None

        image.after_loss = text.after_loss = second_pass
        clock.mark()
        return mb.clip_loss(x, y, s.log_scale.exp(), backend=args.backend)

    def whole_step() -> float:
        with torch.autocast(device, dtype=torch.bfloat16):
            value = mb.cached_backward(loss, sides, chunk_size=chunk)
        s.optimizer.step()
        for p in (*image.parameters(), *text.parameters(), s.log_scale):
            if p.grad is not None:
                p.grad.zero_()
        return value.item()

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
    else:
        held = 0
    for _ in range(1 if batch > 2**18 else 2):  # the second of small ones has everything compiled
        value, peak = peak_memory(whole_step, device)
    result |= {"loss": value, "peak_bytes": peak + held, "loss_seconds": clock.seconds()}
    memory = plan.cached(batch, MEGABATCH, step.REPLAY)
    return result | {
        "planned_bytes": memory.total,
        "planned_parts": vars(memory),
        "planned_loss_bytes": loss_bytes(MEGABATCH, plan.shape(batch)),
        "planned_loss_seconds": loss_seconds(MEGABATCH, plan.shape(batch), plan.setup.gpu, "bf16"),
    }


def plans(s: Subject, gpu: gpus.Gpu, chunk: int) -> step.Plan:
    return step.make(s.planned, step.Setup(gpu, 1), chunk)


def validate(record: dict[str, Any], args: argparse.Namespace) -> None:
    started = time.perf_counter()
    gpu = gpus.find("H200")
    if args.device == "cuda":
        gpu = _this_gpu(gpu)
    record["planned_for"] = gpu.name
    known: dict[str, Subject] = {}
    made: dict[tuple[str, int], tuple[step.Plan, tuple[float, float]]] = {}
    for name, chunk, batch, source in args.cases:
        passed = time.perf_counter() - started
        expected = 10 + 3 * 8 * batch**2 * SIZES[name].embedding / gpu.rate("bf16") + 0.004 * batch / chunk
        case = {"model": name, "chunk": chunk, "B": batch, "source": source}
        if passed + expected > args.seconds:
            record["results"].append(case | {"status": "no time left"})
            continue
        print(f"[{passed:4.0f} s] {name}, chunks of {chunk}, {batch} pairs, {source}", flush=True)
        if name not in known:
            known.clear()  # one model on the device at a time
            gc.collect()
            known[name] = subject(name, args.device)
            prepare(known[name], args)
        s = known[name]
        try:
            if (name, chunk) not in made:
                made[name, chunk] = plans(s, gpu, chunk), chunk_seconds(s, chunk, args.device)
            plan, times = made[name, chunk]
            result = run_case(s, plan, batch, source, args) | encoding(plan, times, batch, gpu)
        except torch.OutOfMemoryError as error:
            result = case | {"status": f"out of memory: {str(error).splitlines()[0]}"}
        result["towers"] = s.library
        record["results"].append(result)
        if result["status"] == "ok":
            print(f"         {table({'results': [result]}).splitlines()[2]}", flush=True)
        save(record, args)


def prepare(s: Subject, args: argparse.Namespace) -> None:
    """Gradients and the optimizer's numbers exist, as after a first step; kernels of the loss are compiled."""
    for p in s.parameters():
        p.grad = torch.zeros_like(p)
    s.optimizer.step()
    x, y = (torch.randn(1024, s.size.embedding, device=args.device, requires_grad=True) for _ in range(2))
    with torch.autocast(args.device, dtype=torch.bfloat16):
        mb.clip_loss(x, y, 10.0, backend=args.backend).backward()


def encoding(plan: step.Plan, times: tuple[float, float], batch: int, gpu: gpus.Gpu) -> dict[str, Any]:
    """Seconds of all chunks and the rate they reach; the planned seconds at that rate and at the assumed one."""
    forward, both = times
    operations = sum(2 * tower.forward_operations + tower.backward_operations for tower in plan.encoders) * plan.chunk
    efficiency = operations / (forward + both) / gpu.rate("bf16")
    seconds = plan.seconds(batch)
    return {
        "chunk_seconds": [forward, both],
        "encoder_seconds": (forward + both) * batch / plan.chunk,
        "encoder_efficiency": efficiency,
        "planned_encoder_seconds": seconds.encode + seconds.recompute + seconds.backward,
    }


def _this_gpu(default: gpus.Gpu) -> gpus.Gpu:
    """The catalogue's entry of the GPU that is here, or the default with its memory."""
    name = torch.cuda.get_device_name()
    for gpu in gpus.CATALOGUE:
        if gpu.name.split("-")[0].lower() in name.lower().replace(" ", ""):
            return gpu
    return replace(default, name=name)


def save(record: dict[str, Any], args: argparse.Namespace) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.json").write_text(json.dumps(record, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=[name for name in SIZES if name != "tiny"], help="only these")
    parser.add_argument("--seconds", type=float, default=220.0, help="cases that would not end in time are left out (220)")
    parser.add_argument("--workers", type=int, default=12, help="threads that read for replay (12)")
    parser.add_argument("--smoke", action="store_true", help="tiny towers on any machine, to test the script")
    where = Path(__file__).resolve().parent / "results"
    parser.add_argument("--output", type=Path, default=where, help="folder for the results")
    parser.add_argument("--name", default="plan_validation", help="of the files written there (plan_validation)")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.smoke:
        sys.exit("This benchmark needs a CUDA device; --smoke runs anywhere.")
    args.backend = "triton" if args.device == "cuda" else "eager"
    args.cases = SMOKE if args.smoke else [case for case in CASES if not args.models or case[0] in args.models]
    return args


def main() -> int:
    args = parse()
    said = [word for word in sys.argv[1:] if word not in ("--output", str(args.output))]
    command = " ".join(["python", "benchmarks/plan_validation.py", *said])
    record: dict[str, Any] = {"command": command, "machine": machine.describe(), "results": []}
    validate(record, args)
    save(record, args)
    report(args.output / f"{args.name}.json")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
