"""A process of `train_speed.py`. It runs a trainer like `python -m`, or only the towers.

python benchmarks/train_speed_child.py MODULE ARGUMENTS…
python benchmarks/train_speed_child.py towers JSON

At the end it prints the peak memory, even if it is terminated, because the trainer of open_clip does not print it. The variable
TRAIN_SPEED_MODEL can name the config file of a model, which is added to open_clip.
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
    """Measures steps over chunks in device memory, with an optimizer, without reading data and without a loss.

    Each chunk is encoded twice, without a graph and then with a graph, as in gradient caching that keeps no graphs. In further
    steps it is encoded once. With `compiled`, captions are cut to the longest caption of the chunk if the tower allows it, and
    the towers are compiled on a GPU.

    Returns:
        The rows of "encoded twice" and "encoded once".
    """
    from megabatch.cached.streaming import map_rows
    from megabatch.cached.tower import call
    from megabatch.world import World
    from megabatch_train import towers
    from megabatch_train.data import load
    from megabatch_train.towers.tower import compile_towers, compiler_settings
    from megabatch_train.trainer.build import allow_tf32, autocast, build_optimizer, parameter_groups
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
        start = time.perf_counter()
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
        return time.perf_counter() - start

    tokens = [int(tensor.shape[1]) for tensor in inputs[1].values()] if isinstance(inputs[1], dict) else []
    rows = {}
    with allow_tf32(config.precision, device), compiler:
        for name, passes in (("encoded twice", 2), ("encoded once", 1)):
            step(passes)  # compiles
            seconds = sum(step(passes) for _ in range(steps))
            rate = batch // chunk * chunk * steps / seconds
            rows[name] = {"rate": rate, "steps": steps, "peak_bytes": peak_bytes(device), "tokens": max(tokens, default=0)}
    return rows


if __name__ == "__main__":
    main()
