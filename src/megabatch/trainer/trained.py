"""The trained parts of a run, on their device: towers, loss, optimizer, averaged weights and gradient scaler."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from megabatch.cached import randomness
from megabatch.towers.lora import store_frozen
from megabatch.towers.tower import SIDES, Pair
from megabatch.trainer import compiling, locked_side, optim, parallel
from megabatch.trainer.config import TrainConfig
from megabatch.trainer.ema import Average
from megabatch.trainer.flops import Utilisation
from megabatch.trainer.objective import Objective
from megabatch.trainer.precision import AUTOCAST_TYPES, grad_scaler
from megabatch.world import World

SAMPLES_SHOWN = 2  # to towers, to find their used parameters
SAMPLES_COUNTED = 64  # whose operations are counted


@dataclasses.dataclass
class Trained:
    """Towers, loss and optimizer of a run."""

    pair: Pair  # the towers; their modules are unwrapped
    called: list[nn.Module]  # modules of the two sides, wrapped in DDP or FSDP2 on several ranks
    by_name: dict[str, nn.Module]  # modules of towers and loss, unwrapped, each once
    objective: Objective
    optimizer: torch.optim.Optimizer
    average: Average | None  # exponential moving average of the weights, if config.ema is set
    scaler: torch.amp.GradScaler | None  # for fp16
    compiled: bool
    utilisation: Utilisation

    def averaged(self) -> AbstractContextManager[None]:
        """Swaps the averaged weights into the modules, if there are any."""
        return nullcontext() if self.average is None else self.average.in_place()

    def learned(self) -> Pair:
        """The towers with the learned scale and bias."""
        numbers = self.objective.numbers()
        bias = numbers.get("bias", self.pair.logit_bias)
        return dataclasses.replace(self.pair, logit_scale=numbers["scale"], logit_bias=bias)


def build(config: TrainConfig, pair: Pair, samples: Callable[[int, int], Any], encoded: Sequence[int], world: World) -> Trained:
    """Moves the towers to the device, locks, compiles and wraps them, and builds loss and optimizer.

    Args:
        config: of the run.
        pair: the towers. Changed in place.
        samples: (side, count) → inputs of that many samples.
        encoded: sides that are encoded in each step.
        world: the ranks.
    """
    if pair.lora is not None:
        store_frozen(pair.modules, AUTOCAST_TYPES.get(config.precision, torch.float32))
    modules = [module.to(world.device) for module in pair.modules]
    shown = [samples(side, SAMPLES_SHOWN) for side in (0, 1)]
    if config.lock != "none":
        with randomness.untouched([world.device]):
            locked_side.lock(pair, SIDES.index(config.lock), shown)
    counted = [partial(samples, side, SAMPLES_COUNTED) for side in encoded]
    utilisation = Utilisation([pair.towers[side] for side in encoded], counted, config.precision, world)
    compiled = config.compile == "on" and compiling.compile_towers(modules, world)
    with randomness.untouched([world.device]), compiling.plain(modules):
        called = parallel.wrapped(modules, shown, world, config.parallel, offload=config.memory.offload)
    dtype = torch.float64 if next(modules[0].parameters()).dtype == torch.float64 else torch.float32
    objective = Objective(config.loss, pair.logit_scale, pair.logit_bias, dtype).to(world.device)
    groups = optim.parameter_groups(parallel.distinct(modules), objective, config.optimizer.weight_decay)
    optimizer = optim.build(config.optimizer, groups)
    by_name = dict(zip(SIDES, parallel.distinct(modules), strict=False)) | {"loss": objective}
    average = Average(by_name, config.ema) if config.ema else None
    scaler = grad_scaler(config.precision, world.device)
    return Trained(pair, called, by_name, objective, optimizer, average, scaler, compiled, utilisation)
