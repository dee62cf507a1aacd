"""One run of `image_study.py`, in a process that makes one run after another."""

import dataclasses
import gc
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from flickr8k_data import FIT, TEST, TRAIN, VALIDATION, Captioned, Pictures, invented, read
from image_study_convolutions import register_convolutions
from image_study_settings import SIGLIP, TRIAL, Setting, Sizes
from torch import Tensor

from megabatch import machine, towers
from megabatch.bench.loss_systems import DENSE, INF_CL, loss_of, open_clip_losses
from megabatch.data.crops import RandomCrop
from megabatch.data.resident import Resident
from megabatch.evaluation import results
from megabatch.towers.tower import Pair
from megabatch.trainer import config as configs
from megabatch.trainer.loop import Trainer
from megabatch.trainer.observers import METRICS, MetricsFile
from megabatch.world import World

CHUNK = 1024  # pairs encoded at once. One size for all batches but the smallest, so the towers are compiled once
GRAPHS = 0.6  # of the free memory, for graphs of all runs together
WEIGHT_DECAY, WARM_UP = 0.2, 0.2


class Worker:
    """A process that makes one run after another; the data stay on the device between them."""

    def __init__(self, folder: Path | None, sizes: Sizes, beside: int, compiled: str) -> None:
        for name in (None, "megabatch"):  # open_clip warns of weights that are not pretrained
            logging.getLogger(name).setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self.sizes, self.beside, self.compiled = sizes, beside, compiled
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.pictures = pictures(folder)
        self._data: tuple[Any, list[Resident]] = (None, [])

    def pair(self, wanted: Setting) -> Pair:
        """New towers, with the weights of the run's seed."""
        name = add_model(wanted.tower, self.sizes)
        torch.manual_seed(wanted.seed)
        made = towers.load(f"open_clip:{name}")
        training = made.first.training_images
        assert training is not None
        crop = RandomCrop(training.crop.size, area=(wanted.area, 1.0), flip=wanted.flip)
        first = dataclasses.replace(made.first, training_images=dataclasses.replace(training, crop=crop))
        return dataclasses.replace(made, first=first)

    def data(self, wanted: Setting, pair: Pair) -> list[Resident]:
        """Training and test data on the device; kept for the next run of the same tower. Trials never see the test images."""
        parts = (FIT, VALIDATION) if wanted.seed == TRIAL else (TRAIN, TEST)
        key = wanted.tower, wanted.area, wanted.flip, parts
        if self._data[0] != key:
            self._data = (None, [])  # the memory of the data before
            both = [Captioned(self.pictures, self.sizes.held_out, part) for part in parts]
            kept = [Resident(one, pair.towers, self.device, augment=i == 0) for i, one in enumerate(both)]
            self._data = (key, kept)
        return self._data[1]

    def run(self, wanted: Setting, folder: Path, *, compiled: bool) -> dict[str, Any]:
        """Trains and tests; the model stays in the folder."""
        pair = self.pair(wanted)
        train, test = self.data(wanted, pair)
        trainer = Trainer(
            self.config(wanted, compiled=compiled),
            pair,
            train,
            folder,
            validation=test,
            observers=[MetricsFile()],
            world=World(self.device),
        )
        if wanted.loss in (DENSE, INF_CL):
            trainer.objective.forward = other_loss(wanted.loss, trainer.objective, self.device.type)  # type: ignore[method-assign]
        began = time.perf_counter()
        found = trainer.fit()
        assert found is not None
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {**found, **summary(results.read(folder / METRICS)), "seconds": time.perf_counter() - began}

    def config(self, wanted: Setting, *, compiled: bool) -> Any:
        """The settings of `megabatch train`."""
        return configs.resolved(
            {
                "data": "Flickr8k",
                "model": f"open_clip:{add_model(wanted.tower, self.sizes)}",
                "batch_size": wanted.batch_size,
                "chunk_size": min(CHUNK, wanted.batch_size),
                "steps": wanted.steps,
                "seed": wanted.seed,
                "workers": 0,
                "compile": self.compiled if compiled and wanted.batch_size >= CHUNK else "off",
                "loss": {"name": "siglip" if wanted.loss == SIGLIP else "clip", "ids": wanted.ids},
                "optimizer": {
                    "lr": wanted.lr,
                    "scaling": wanted.rule,
                    "reference_batch": self.sizes.base,
                    "weight_decay": WEIGHT_DECAY,
                },
                "schedule": {"name": "cosine", "warm_up_fraction": WARM_UP},
                "memory": {"graphs": GRAPHS / self.beside},
                "checkpoint": {"every": wanted.steps, "minutes": 0.0, "keep": 1},
            }
        )


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Losses, the scale, time by phase, and the rate of the second half, from the metrics of a run."""
    steps = [record for record in records if "loss" in record]
    half = steps[len(steps) // 2 :]
    phases: dict[str, float] = {}
    for record in steps:
        for name, seconds in record["phases"].items():
            phases[name] = phases.get(name, 0.0) + seconds
    return {
        "losses": [round(record["loss"], 5) for record in steps[:: max(1, len(steps) // 64)]],
        "scale": steps[-1]["scale"],
        "pairs_per_second": sorted(record["pairs_per_second"] for record in half)[len(half) // 2],
        "memory_bytes": max(record["memory_bytes"] for record in steps),
        "phases": phases,
    }


def other_loss(name: str, objective: Any, device: str) -> Callable[..., Tensor]:
    """The loss of another project in place of the trainer's, with the trainer's learned scale."""
    loss: Any = open_clip_losses().ClipLoss() if name == DENSE else loss_of(name, device)

    def forward(first: Tensor, second: Tensor, *rest: Any) -> Tensor:
        scale = objective.log_scale.exp()
        if name == INF_CL:  # its kernels know no autocast
            first, second = first.bfloat16(), second.bfloat16()
        found: Tensor = loss(first, second, scale)
        return found

    return forward


def add_model(tower: str, sizes: Sizes) -> str:
    """Makes open_clip know a model of this resolution and these blocks or patches, and returns its name."""
    import open_clip

    name = f"flickr-{tower.replace('/', '-').replace('@', '-')}-{sizes.width}"
    about = {
        "embed_dim": sizes.width,
        "vision_cfg": _vision(tower, sizes),
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 49408,
            "width": sizes.width,
            "heads": sizes.width // 32,
            "layers": sizes.layers[1],
        },
    }
    if name not in open_clip.list_models():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / f"{name}.json"
            place.write_text(json.dumps(about))
            open_clip.add_model_config(place)
    return name


def _vision(tower: str, sizes: Sizes) -> dict[str, Any]:
    """The image tower as open_clip describes it: "conv1@64" has one block in each stage, "64/8" is a transformer."""
    if tower.startswith("conv"):
        blocks, pixels = map(int, tower.removeprefix("conv").split("@"))
        about = {"timm_model_name": register_convolutions(blocks), "timm_pool": "", "timm_proj": "linear"}
        return {"image_size": pixels, **about}
    pixels, patch = map(int, tower.split("/"))
    return {"image_size": pixels, "layers": sizes.layers[0], "width": sizes.width, "patch_size": patch, "head_width": 32}


def pictures(folder: Path | None) -> Pictures:
    return invented(48) if folder is None else read(folder)


WORKER: Worker | None = None  # of this process


def start_worker(folder: Path | None, sizes: Sizes, beside: int, compiled: str, compiler_threads: int | None) -> None:
    global WORKER
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # processes share the memory
    if compiler_threads is not None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compiler_threads))
    WORKER = Worker(folder, sizes, beside, compiled)


def make_run(wanted: Setting, folder: Path, compiled: bool) -> dict[str, Any]:
    assert WORKER is not None
    try:
        return WORKER.run(wanted, folder, compiled=compiled)
    except ImportError as error:
        return {"missing": str(error)}
    except FloatingPointError as error:  # the loss is not finite any more
        return {"failed": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not machine.ran_out_of_memory(error):
            raise
        return {"missing": "no memory beside the other runs; a later call with fewer of them (--beside) may have it"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
