"""A process of `train_speed.py`: a trainer run as `python -m` runs it, or the towers alone.

python benchmarks/train_speed_child.py MODULE ARGUMENTS…
python benchmarks/train_speed_child.py towers JSON

Prints the peak of the memory at the end, also if it is terminated; open_clip's trainer does not tell it. TRAIN_SPEED_MODEL
names a file with a model's config that open_clip is to know.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megabatch_train.machine import peak_bytes

PEAK, TOWERS, OPEN_CLIP = "peak bytes:", "towers", "open_clip_train.main"


def main() -> None:
    what, *arguments = sys.argv[1:]
    if "TRAIN_SPEED_MODEL" in os.environ:
        import open_clip

        open_clip.add_model_config(Path(os.environ["TRAIN_SPEED_MODEL"]))
    if what == TOWERS:
        print(json.dumps(towers_alone(**json.loads(arguments[0]))), flush=True)
        return
    if what == OPEN_CLIP:
        signal.signal(signal.SIGTERM, lambda number, frame: (tell_peak(), os._exit(0)))
    sys.argv = [what, *arguments]
    try:
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    finally:
        tell_peak()


def tell_peak() -> None:
    print(PEAK, peak_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu")), flush=True)


def towers_alone(*, model: str, data: str, chunk: int, batch: int, steps: int, compiled: bool) -> dict[str, dict[str, Any]]:
    """Steps over chunks that lie on the device, with an optimizer but no data and no loss.

    Each chunk is encoded twice, without a graph and then with one, as a cached step does that keeps no graphs; and in further
    steps once. With `compiled`, captions are cut after the longest of the chunk, where a tower allows it, and on a GPU the
    towers are compiled.

    Returns:
        A row for each, by "encoded twice" and "encoded once".
    """
    from megabatch.cached.streaming import map_rows
    from megabatch.cached.tower import call
    from megabatch.world import World
    from megabatch_train import towers
    from megabatch_train.data import load
    from megabatch_train.towers.tower import compile_towers, compiler_settings
    from megabatch_train.trainer.build import autocast, build_optimizer, fast_products, parameter_groups
    from megabatch_train.trainer.config import TrainConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, pair, dataset = TrainConfig().on(device), towers.load(model), load.load(data)
    chunk = min(chunk, batch, len(dataset))
    inputs = []
    for side, tower in enumerate(pair.towers):
        tower.module.to(device)
        one = next(iter(dataset.source(range(chunk), side, tower, augment=False).chunks([(0, chunk)], None)))
        lengths = getattr(tower, "lengths", None) if compiled else None
        used = None if lengths is None else lengths(one)
        if used is not None:
            longest = int(used.max())
            one = map_rows(lambda tensor, longest=longest: tensor[:, :longest], one)
        inputs.append(map_rows(lambda tensor: tensor.to(device), one))
    modules = [tower.module for tower in pair.towers]
    optimizer = build_optimizer(config.optimizer, parameter_groups(modules[:1], torch.nn.Identity(), 0.2))
    cast = autocast(config.precision, device)
    compiler = contextlib.nullcontext()
    if compiled and config.compile == "on" and compile_towers(modules, World(device)):
        compiler = compiler_settings()

    def step(passes: int) -> float:
        began = time.perf_counter()
        if passes == 2:
            with torch.no_grad(), cast:
                for _ in range(batch // chunk):
                    for module, one in zip(modules, inputs, strict=True):
                        call(module, one)
        for _ in range(batch // chunk):
            for module, one in zip(modules, inputs, strict=True):
                with cast:
                    embeddings = call(module, one)
                embeddings.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    tokens = [int(tensor.shape[1]) for tensor in inputs[1].values()] if isinstance(inputs[1], dict) else []
    rows = {}
    with fast_products(config.precision, device), compiler:
        for name, passes in (("encoded twice", 2), ("encoded once", 1)):
            step(passes)  # compiles
            seconds = sum(step(passes) for _ in range(steps))
            rate = batch // chunk * chunk * steps / seconds
            rows[name] = {"rate": rate, "steps": steps, "peak_bytes": peak_bytes(device), "tokens": max(tokens, default=0)}
    return rows


if __name__ == "__main__":
    main()
