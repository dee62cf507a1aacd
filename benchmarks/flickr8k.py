"""open_clip models trained on Flickr8k with our loss and with open_clip's own dense one, side by side from the same weights.

Both learners make the cached step, on the same batches in the same chunks; they differ in the loss function alone. They take
turns, step by step. Reported are both curves and their difference, the error of each loss against float64 on the embeddings
that it was given, pairs a second, the peak of a step and of the loss alone, and recall over images that were held out. In the
first run a third learner has open_clip's loss and chunks of half the size: how far rounding alone takes two curves apart.

Flickr8k has 8,091 images with five captions each, so larger batches have an image several times. Equal images stay each other's
negatives here (no ids), because open_clip's loss knows nothing else. Images are decoded once and not augmented: what is
measured is the step. Before that, both gradients are compared in float32 on a small batch.

Writes a JSON file after every step; `flickr8k_report.py` makes the table and the plot of it, on any machine.
"""

import argparse
import copy
import gc
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flickr8k_data import HELD_OUT, Data, Images, invented, read
from flickr8k_report import markdown, report
from record import Record, arguments, device_of
from timing import milliseconds
from torch import Tensor, nn

import megabatch as mb
from megabatch import towers
from megabatch.bench.accuracy import clip_truth
from megabatch.bench.loss_systems import open_clip_losses
from megabatch.bench.measure import peak_memory
from megabatch.data.order import Order
from megabatch.evaluation.embedding import evaluating
from megabatch.evaluation.retrieval import retrieval
from megabatch.trainer import optim
from megabatch.trainer.optim import ScheduleConfig, learning_rate

OURS, THEIRS, AGAIN = "megabatch", "open_clip", "open_clip, half chunks"
RUNS = ["ViT-B-32:4096:40", "ViT-B-16:4096:12", "ViT-B-32:32768:4"]
CHUNKS = {"ViT-B-32": 512, "ViT-B-16": 256}  # small enough that the loss can be seen in the peak of a step
TINY_RUNS, TINY_MODEL = ["tiny-clip:64:3", "tiny-clip:128:2"], "tiny-clip"
TINY_CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
# With 5e-4 after four steps the loss rose from 8.4 to 8.5 and 9.9 before it fell: too much for a ViT without any training.
OPTIMIZER, SCHEDULE = optim.OptimizerConfig(lr=1e-4), ScheduleConfig(name="constant", warm_up_steps=10)
LARGEST_SCALE = math.log(100)
CHECK, CHECK_CHUNK, TOLERANCE = 64, 16, 1e-3  # float32 against float32, by the length of all gradients


def loss_function(system: str, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if system != OURS:
        dense: Callable[[Tensor, Tensor, Tensor], Tensor] = open_clip_losses().ClipLoss()
        return dense
    backend = "triton" if device == "cuda" else "auto"
    return lambda image, text, scale: mb.clip_loss(image, text, scale, backend=backend)


class Scale(nn.Module):
    """The learned scale, by its logarithm."""

    def __init__(self, beginning: float) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.tensor(math.log(beginning)))


class Learner:
    """A model, its optimizer and its loss."""

    def __init__(self, system: str, model: nn.Module, scale: float, chunk: int, bench: "Bench") -> None:
        self.system, self.model, self.bench = system, copy.deepcopy(model).to(bench.device), bench
        self.chunk = chunk // 2 if system == AGAIN else chunk
        self.scale = Scale(scale).to(bench.device)
        self.loss = loss_function(system, bench.device)
        groups = optim.parameter_groups([self.model], self.scale, OPTIMIZER.weight_decay)
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer = optim.build(OPTIMIZER, groups)
        self.seen: tuple[Tensor, Tensor, float] = torch.empty(0), torch.empty(0), 0.0  # the loss's last inputs

    def backward(self, pairs: Tensor, chunk: int, autocast: bool) -> Tensor:
        """Gradients of a batch, by the cached step."""

        def loss(image: Tensor, text: Tensor) -> Tensor:
            scale = self.scale.logarithm.exp()
            self.seen = image.detach(), text.detach(), scale.item()
            return self.loss(image, text, scale)

        bench = self.bench
        roles = [(self.model, bench.images(pairs)), (self.model, {"text": bench.data.tokens[pairs]})]
        with bench.autocast(autocast):
            return mb.cached_backward(loss, roles, chunk_size=chunk)

    def step(self, pairs: Tensor, number: int) -> dict[str, Any]:
        """One step of training, timed."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(SCHEDULE, OPTIMIZER.lr, number, number + 1)

        def work() -> tuple[float, float]:
            begun = time.perf_counter()
            value = self.backward(pairs, self.chunk, autocast=True).item()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
            with torch.no_grad():
                self.scale.logarithm.clamp_(max=LARGEST_SCALE)
            if self.bench.device == "cuda":
                torch.cuda.synchronize()
            return value, time.perf_counter() - begun

        (value, seconds), peak = peak_memory(work, self.bench.device)
        return {"step": number + 1, "loss": value, "seconds": seconds, "peak_bytes": peak, "error": value - self.truth()}

    def truth(self) -> float:
        """The last loss in float64, of embeddings rounded as products see them."""
        image, text, scale = self.seen
        if self.bench.device == "cuda":
            image, text = image.bfloat16(), text.bfloat16()
        return clip_truth(image, text, scale, torch.arange(1)).loss

    def loss_alone(self) -> dict[str, float]:
        """Milliseconds and bytes of the loss, forward and backward, of the last embeddings."""
        image, text, scale = self.seen
        leaves = image.clone().requires_grad_(), text.clone().requires_grad_()
        number = torch.tensor(scale, device=image.device, requires_grad=True)

        def work() -> None:
            with self.bench.autocast(True):
                value = self.loss(*leaves, number)
            torch.autograd.grad(value, (*leaves, number))

        work()
        _, peak = peak_memory(work, self.bench.device)
        return {"loss_ms": milliseconds(work, self.bench.device, 0.05), "loss_peak_bytes": peak}

    @torch.no_grad()
    def recall(self) -> dict[str, float]:
        """Both ways, over the held-out images."""
        data, chunk = self.bench.data, self.chunk
        owners = data.owners[data.trained :]
        first = int(owners[0])
        pictures = torch.arange(first, len(data.pixels), device=owners.device)
        with evaluating(self.model), self.bench.autocast(True):
            spans = [(i, min(i + chunk, len(pictures))) for i in range(0, len(pictures), chunk)]
            images = torch.cat([self.model(**x).float() for x in self.bench.source(pictures).chunks(spans, None)])
            texts = torch.cat([self.model(text=x).float() for x in data.tokens[data.trained :].split(chunk)])
        return retrieval(images, texts, owners - first)


class Bench:
    """The state that all runs share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.record = Record("flickr8k", args, args.seconds, runs=[], checks=[])
        self.models: dict[str, towers.Pair] = {}
        self.data, self.size = self._data(), 0
        self.mean = self.deviation = torch.empty(0)
        gc.freeze()  # collecting before every step need not look at libraries

    def _data(self) -> Data:
        tiny = self.args.tiny
        pictures = invented(96) if self.args.data is None else read(self.args.data, 96 if tiny else None)
        self.record.contents["data"] = "invented" if self.args.data is None else "Flickr8k, 128 pixels"
        self.record.say(f"{len(pictures.captions)} images read")
        tower = self.pair(self.args.runs[0].split(":")[0]).second

        def tokens(texts: list[str]) -> Tensor:
            return tower.collate([tower.prepare(text, None) for text in texts])["text"]

        data = Data.of(pictures, tokens, self.device, 24 if tiny else HELD_OUT)
        self.record.say(f"{data.trained} pairs to train on")
        return data

    def pair(self, name: str) -> towers.Pair:
        """The towers by the library's own loader, with the same first weights every time."""
        if name not in self.models:
            torch.manual_seed(0)
            self.models[name] = towers.load(f"open_clip:{name}")
        return self.models[name]

    def prepare(self, name: str) -> towers.Pair:
        """The towers of a run; images are from now on made for them."""
        pair = self.pair(name)
        visual: Any = pair.first.module.model.visual
        side = visual.image_size
        self.size = side if isinstance(side, int) else side[0]
        known = (getattr(visual, part) for part in ("image_mean", "image_std"))
        self.mean, self.deviation = (torch.tensor(numbers, device=self.device)[:, None, None] for numbers in known)
        return pair

    def images(self, pairs: Tensor) -> Images:
        """The inputs of some pairs."""
        return self.source(self.data.owners[pairs])

    def source(self, pictures: Tensor) -> Images:
        """Images by number."""
        return Images(self.data, pictures, self.size, self.mean, self.deviation)

    def autocast(self, wanted: bool) -> Any:
        """bf16 on a GPU."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=wanted and self.device == "cuda")

    def check(self, name: str, learners: list[Learner]) -> bool:
        """Whether both have the same gradients on a small batch."""
        pairs = torch.arange(CHECK, device=self.device)
        values = [learner.backward(pairs, CHECK_CHUNK, autocast=False).item() for learner in learners]
        found = [[p.grad for p in learner.parameters if p.grad is not None] for learner in learners]
        off = torch.stack([(a - b).norm() for a, b in zip(*found, strict=True)]).norm()
        error = (off / torch.stack([b.norm() for b in found[1]]).norm()).item()
        result = {"model": name, "losses": values, "gradient_error": error, "ok": error <= TOLERANCE}
        self.record["checks"].append(result)
        self.record.say(f"{name}: gradients of both losses differ by {error:.1e}")
        for learner in learners:
            learner.optimizer.zero_grad(set_to_none=False)
        return bool(result["ok"])

    def run(self, text: str, until: float) -> None:
        """One model at one batch: both learners step by step while there is time."""
        name, batch, steps = text.split(":")[0], *map(int, text.split(":")[1:])
        pair, chunk = self.prepare(name), self.args.chunk or CHUNKS.get(name, 16)
        systems = (OURS, THEIRS) if self.record["runs"] else (OURS, THEIRS, AGAIN)
        learners = [Learner(system, pair.first.module, pair.logit_scale, chunk, self) for system in systems]
        result: dict[str, Any] = {"model": name, "batch": batch, "chunk": chunk, "systems": {system: [] for system in systems}}
        self.record["runs"].append(result)
        if not self.check(name, learners[:2]):
            result["status"] = "WRONG"
            return
        order = Order(self.data.trained, batch, seed=0)
        for part in itertools.islice(order.batches(), steps):
            begun = time.perf_counter()
            pairs = part.indices.to(self.device)
            result["repeated"] = batch - len(torch.unique(self.data.owners[pairs]))
            for learner in learners:
                result["systems"][learner.system].append(learner.step(pairs, part.number))
            self.record.save()
            last = [result["systems"][system][-1] for system in systems]
            self.record.say(f"{name} B = {batch} step {part.number + 1}: " + ", ".join(f"{x['loss']:.6f}" for x in last))
            if part.number >= 1 and 2 * time.perf_counter() - begun > until:
                break
        result["alone"] = {learner.system: learner.loss_alone() for learner in learners}
        result["recall"] = {learner.system: learner.recall() for learner in learners}
        self.record.save()
        del learners
        gc.collect()


def add_tiny_model() -> None:
    """Makes open_clip know a model that a CPU trains in seconds."""
    import open_clip

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{TINY_MODEL}.json"
        path.write_text(json.dumps(TINY_CONFIG))
        open_clip.add_model_config(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with Flickr8k's .bin and .json; left out, a tiny run invents some")
    parser.add_argument("--runs", nargs="*", default=RUNS, metavar="MODEL:BATCH:STEPS", help=f"({' '.join(RUNS)})")
    parser.add_argument("--chunk", type=int, default=0, help="pairs encoded at once (default: by model)")
    arguments(parser, "flickr8k", 300)
    args = parser.parse_args()
    if args.tiny:
        args.runs = TINY_RUNS
        add_tiny_model()
    elif args.data is None:
        parser.error("--data is needed: the folder with Flickr8k's .bin and .json")
    return args


def main() -> int:
    bench = Bench(parse())
    for i, text in enumerate(bench.args.runs):
        share = bench.record.left() / (len(bench.args.runs) - i)
        bench.run(text, time.perf_counter() + share)
    bench.record.save()
    report(bench.record.path)
    print(markdown(bench.record.contents))
    return 0


if __name__ == "__main__":
    sys.exit(main())
