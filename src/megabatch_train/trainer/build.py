"""Builds what a run trains: frozen sides, precision, DDP and FSDP2, averaged weights, loss and optimizer. Counts FLOPs."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from megabatch import extras
from megabatch.cached import batchnorm, randomness
from megabatch.cached.memory import local, parameters_in
from megabatch.cached.sharding import find_distributed_modules
from megabatch.cached.sources import width_of
from megabatch.cached.streaming import count_rows, map_rows
from megabatch.cached.tower import as_encoded, call
from megabatch.world import World
from megabatch_train import names
from megabatch_train.evaluation.embedding import use_evaluation_mode
from megabatch_train.machine import peak_rates
from megabatch_train.towers.lora import store_frozen
from megabatch_train.towers.tower import SIDES, FlopCounter, Pair, Tower, compile_towers, without_compiler
from megabatch_train.trainer.config import OptimizerConfig, TrainConfig, scale_rate
from megabatch_train.trainer.loss import Objective

# ----------------------------------------------------------------------------------------------------------------------
# Locked-image tuning (LiT): one side of a trained model is frozen, and the other learns to match it.

LOG = logging.getLogger("megabatch")


def freeze(pair: Pair, side: int, samples: Sequence[Any]) -> None:
    """Freezes one side, and puts it into evaluation mode.

    Args:
        pair: the towers, which may be one module with parts for each side.
        side: 0 or 1.
        samples: inputs of a few samples of each side; they show which parts of a common module each side uses.
    """
    tower, other = pair.towers[side], pair.towers[1 - side]
    if tower.module is other.module:
        mine, theirs = (_find_used(tower.module, samples[number]) for number in (side, 1 - side))
        if mine & theirs:
            raise ValueError(
                f'freeze must be "none" for {pair.name or "this model"}, because its two sides share parameters, got '
                f"{SIDES[side]!r}"
            )
    else:
        mine = {id(parameter) for parameter in tower.module.parameters()}
    for parameter in tower.module.parameters():
        if id(parameter) in mine:
            parameter.requires_grad_(False)
    _set_evaluation_mode(tower.module)


def warn_of_random_weights(pair: Pair, side: int) -> None:
    """Logs a warning if the side that is frozen has random weights, because the other side can only learn noise from it."""
    if not pair.name or names.has_weights(pair.name):
        return
    LOG.warning(
        "freeze = %r keeps a tower with random weights, which never learns, so recall stays low: %s has no trained weights. "
        'Name weights, as in open_clip:ViT-B-32@laion2b_s34b_b79k or hf:IMAGES+TEXTS, or set freeze = "none"',
        SIDES[side],
        pair.name,
    )


def _find_used(module: nn.Module, inputs: Any) -> set[int]:
    device = next(module.parameters()).device
    with torch.enable_grad(), batchnorm.keep_running_statistics(batchnorm.layers([module])):
        found = parameters_in([call(module, map_rows(lambda tensor: tensor.to(device), inputs))])
    if found is None:
        raise ValueError("freeze does not work with reentrant activation checkpointing, which hides the parameters of a side")
    return found


def _set_evaluation_mode(module: nn.Module) -> None:
    """Puts every part without trained parameters into evaluation mode."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        module.eval()
        return
    for part in module.children():
        _set_evaluation_mode(part)


# ----------------------------------------------------------------------------------------------------------------------
# Numeric types of a run: autocast, the gradient scaler of fp16, and TF32 for products that stay in float32.

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast for "bf16" and "fp16"; nothing for "fp32". Parameters keep their dtype."""
    if precision not in AUTOCAST_TYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_TYPES[precision])


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """A scaler for fp16, whose range is too small for gradients; None for other types."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def fast_products(precision: str, device: torch.device) -> Iterator[None]:
    """Lets CUDA compute products that autocast leaves in float32 in TF32, and restores the setting afterwards.

    With "fp32" nothing changes: towers and loss are float32 as PyTorch is set. The loss under autocast has autocast's type.
    """
    before = None
    if device.type == "cuda" and precision in AUTOCAST_TYPES:
        with suppress(RuntimeError):  # raised once PyTorch's newer settings are in use, which are then left as they are
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)


# ----------------------------------------------------------------------------------------------------------------------
# Towers on several ranks: DDP replicates them, FSDP2 shards them.


FSDP = "fsdp"


def distinct(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Each module once: both sides of a model may share one."""
    return list({id(module): module for module in modules}.values())


def wrap(
    modules: Sequence[nn.Module], samples: Sequence[Any], world: World, how: str, *, offload: bool = False
) -> list[nn.Module]:
    """The modules wrapped for training, in the same order.

    Args:
        modules: of the two sides, on their device. FSDP2 changes them in place, DDP makes a wrapper.
        samples: inputs of a few samples of each side, to find unused parameters.
        world: the ranks; one rank needs no wrapper.
        how: "ddp" or "fsdp".
        offload: whether FSDP2 keeps weights, gradients and so the optimizer's state in host memory.
    """
    if offload and (how != FSDP or world.size == 1):
        got = f"one rank with parallel = {how!r}" if world.size == 1 else f"parallel = {how!r}"
        raise ValueError(f'memory.offload needs parallel = "fsdp" on several ranks (torchrun), got {got}')
    made: dict[int, nn.Module] = {}
    for module in distinct(modules):
        learns = any(parameter.requires_grad for parameter in module.parameters())
        if world.size == 1 or not learns:  # frozen: no gradients to reduce
            made[id(module)] = module
        elif how == FSDP:
            made[id(module)] = _shard(module, world, offload)
        else:
            inputs = [sample for side, sample in zip(modules, samples, strict=True) if side is module]
            made[id(module)] = DistributedDataParallel(
                module,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                process_group=world.group,
                find_unused_parameters=_has_unused(module, inputs, world.device),
            )
    return [made[id(module)] for module in modules]


def _shard(module: nn.Module, world: World, offload: bool) -> nn.Module:
    """Shards in place: each layer of a `ModuleList` by itself, so that one is gathered at a time, then the rest."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    how: Any = {
        "mesh": DeviceMesh.from_group(world.group, world.device.type),
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy(),
    }
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                if any(True for _ in layer.parameters()) and not isinstance(layer, nn.ModuleList):
                    fully_shard(layer, **how)
    fully_shard(module, **how)
    return module


def _has_unused(module: nn.Module, inputs: Sequence[Any], device: torch.device) -> bool:
    """Whether a parameter never gets a gradient, such as a pooler of transformers; DDP would wait for it."""
    with torch.enable_grad(), batchnorm.keep_running_statistics(batchnorm.layers([module])):
        outputs = [call(module, map_rows(lambda tensor: tensor.to(device), chunk)) for chunk in inputs]
    reached = parameters_in([as_encoded(output, type(module).__name__).embeddings for output in outputs])
    return reached is None or any(p.requires_grad and id(p) not in reached for p in module.parameters())


@contextmanager
def whole(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gathers sharded parameters on every rank, so that ranks may encode a different number of chunks."""
    roots: list[Any] = [m for m in find_distributed_modules(modules) if not isinstance(m, DistributedDataParallel)]
    if not roots:
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    parts = [part for root in roots for part in root.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            # The default of FSDP2: a root stays gathered between its forward and its backward pass.
            part.set_reshard_after_forward(part not in roots, recurse=False)


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers and their parameter groups.

MOMENTS = {"adamw": 2.0, "lion": 1.0, "adafactor": 0.5}  # bytes of an optimizer's state for each byte of a parameter, about
SHORTEST_FACTORED = 32  # AdaFactor stores the whole second moment of matrices with a shorter dimension
OLDEST_TIMM = (1, 0, 29)  # earlier versions average AdaFactor's second moment over the wrong dimension of some matrices
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


def parameter_groups(towers: Iterable[nn.Module], loss: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Three parameter groups: matrices, with weight decay; norms and biases, without; and the parameters of the loss.

    The last is a group of its own because FSDP2 shards the others and not these.
    """
    decaying: dict[int, nn.Parameter] = {}
    sparing: dict[int, nn.Parameter] = {}
    for tower in towers:
        for module in tower.modules():
            for name, parameter in module.named_parameters(recurse=False):
                spared = parameter.dim() < 2 or name.endswith("bias") or isinstance(module, _NORMS)
                if parameter.requires_grad:
                    (sparing if spared else decaying)[id(parameter)] = parameter
    of_loss = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    groups = [
        {"params": list(decaying.values()), "weight_decay": weight_decay},
        {"params": list(sparing.values()), "weight_decay": 0.0},
        {"params": of_loss, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of these groups. Its learning rate is set before every step."""
    rate = scale_rate(config, config.reference_batch)
    if config.name == "adafactor":
        return _build_adafactor(groups, rate, config.betas[0])
    if config.name == "lion":
        return _load_timm("Lion").Lion(groups, lr=rate, betas=config.betas)  # type: ignore[no-any-return]
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # One pass over the weights: 8.4 million of them take 6 ms on one core, and in PyTorch's default form 50.
    fused = devices in ({"cuda"}, {"cpu"})
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=fused or None)


def _build_adafactor(groups: list[dict[str, Any]], rate: float, momentum: float) -> torch.optim.Optimizer:
    """AdaFactor as in "Scaling Vision Transformers" (arXiv 2106.04560): the quality of Adam with a quarter of its memory.

    The second moment of a matrix is stored as the means of its rows and columns, the first moment in bfloat16. Weight decay is
    decoupled and times the learning rate, as in AdamW.
    """
    made: torch.optim.Optimizer = _load_timm("AdaFactor").AdafactorBigVision(
        groups, lr=rate, momentum=momentum or None, min_dim_size_to_factor=SHORTEST_FACTORED
    )
    return made


def _load_timm(optimizer: str) -> Any:
    """timm's optimizers."""
    optimizers = extras.load("timm.optim", purpose=f"The optimizer {optimizer}")
    found = version("timm")
    if tuple(map(int, found.split(".")[:3])) < OLDEST_TIMM:
        raise ImportError(
            f"The optimizer {optimizer} needs timm {'.'.join(map(str, OLDEST_TIMM))} or later, got {found}; "
            f"{extras.install_command('timm')} installs it"
        )
    return optimizers


# ----------------------------------------------------------------------------------------------------------------------
# Exponential moving average of the weights (EMA), which often generalises better. It is evaluated and saved in their place.


class Average:
    """Exponential moving average of parameters and running statistics.

    Args:
        modules: by name. The average of a sharded parameter is sharded in the same way.
        decay: weight of the old average in each step. In step t it is at most (1 + t) / (10 + t), so that the initial
            weights are soon forgotten.
    """

    def __init__(self, modules: dict[str, nn.Module], decay: float) -> None:
        self._live: dict[str, Tensor] = {}
        for name, module in modules.items():
            self._live |= {f"{name}.{key}": p for key, p in module.named_parameters() if p.requires_grad}
            # Running statistics are averaged too: those of the live weights belong to other activations, while the mean of a
            # linear layer's output is linear in its weights. Other buffers are constants and are not averaged.
            self._live |= {f"{name}.{key}": value for key, value in batchnorm.running_statistics(module).items()}
        self._decay = decay
        self.values: dict[str, Tensor] = {name: value.detach().clone() for name, value in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average after step `step`, counted from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        averages = [local(self.values[name]) for name in self._live]
        torch._foreach_lerp_(averages, [local(value.detach()) for value in self._live.values()], share)  # a few launches

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the averages into the modules, and restores the live values afterwards."""
        kept = {name: value.detach().clone() for name, value in self._live.items()}
        self._put(self.values)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in self._live.items():
            value.copy_(values[name])


# ----------------------------------------------------------------------------------------------------------------------
# Model FLOPs utilisation (MFU): the share of the GPU's peak rate that a step's necessary operations reach.
#
# Necessary are a forward pass and two products for each of its products in the backward pass: three forward passes of a
# trained tower, one of a frozen tower. A tower with adapters has two, because its frozen weights need no gradients. The
# second forward pass of the cached step does not count, because it only saves memory. Padding does not count either: texts
# have the mean length of a few samples. The loss, a percent of a step or less, is left out.

TRAINED, ADAPTED, FROZEN = 3, 2, 1  # forward passes


class Utilisation:
    """The share of the peak rate that a step reaches.

    Args:
        towers: of the sides that are encoded in each step, before they are compiled, wrapped or sharded.
        samples: for each of them a function that reads the inputs of a few samples.
        precision: of the towers: "bf16", "fp16" or "fp32".
        world: the ranks.
    """

    def __init__(self, towers: Sequence[Tower], samples: Sequence[Callable[[], Any]], precision: str, world: World) -> None:
        self._peak = _peak(precision, world.device) * world.size
        self._flops = 0.0  # of a pair
        if self._peak:
            for tower, read in zip(towers, samples, strict=True):
                inputs = of_mean_length(tower, read())
                self._flops += _passes(tower.module) * forward_flops(tower.module, inputs, world.device)

    def numbers(self, pairs: int, seconds: float) -> dict[str, float]:
        """{"mfu": …} of a step; empty on a CPU, and on a GPU whose peak rate is not known."""
        return {"mfu": pairs * self._flops / seconds / self._peak} if self._peak else {}


def _passes(module: nn.Module) -> int:
    """Forward passes that cost as much as the necessary operations; adapters are few beside frozen weights."""
    sizes = {True: 0, False: 0}
    for parameter in module.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    if not sizes[True]:
        return FROZEN
    return TRAINED if sizes[True] >= sizes[False] else ADAPTED


def of_mean_length(tower: Tower, inputs: Any) -> Any:
    """The inputs, texts cut to the mean of their lengths; their number of operations is the mean, nearly."""
    lengths = None if tower.lengths is None else tower.lengths(inputs)
    if lengths is None:
        return inputs
    width, mean = width_of(inputs), max(1, round(lengths.double().mean().item()))
    return map_rows(lambda tensor: tensor[:, :mean] if tensor.dim() > 1 and tensor.shape[1] == width else tensor, inputs)


def forward_flops(module: nn.Module, inputs: Any, device: torch.device) -> float:
    """Operations of a forward pass, for one sample."""
    # As plain products: the counter does not know PyTorch's one operator for a whole layer, nor every attention kernel.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    plain, counter = sdpa_kernel(SDPBackend.MATH), FlopCounter()
    try:
        with torch.no_grad(), use_evaluation_mode(module), plain, counter:
            call(module, map_rows(lambda tensor: tensor.to(device), inputs))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.total / count_rows(inputs, "inputs")


def _peak(precision: str, device: torch.device) -> float:
    """Operations a second; 0 if not known."""
    rates = peak_rates(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if rates is None:
        return 0.0
    if precision != "fp32":
        return 1e12 * rates.half
    return 1e12 * (rates.single if torch.get_float32_matmul_precision() == "highest" else rates.tf32)


# ----------------------------------------------------------------------------------------------------------------------
# The trained parts of a run, on their device: towers, loss, optimizer, averaged weights and gradient scaler.


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

    def use_average(self) -> AbstractContextManager[None]:
        """Swaps the averaged weights into the modules, if there are any."""
        return nullcontext() if self.average is None else self.average.in_place()

    def with_learned_scale(self) -> Pair:
        """The towers with the learned scale and bias."""
        numbers = self.objective.numbers()
        bias = numbers.get("bias", self.pair.logit_bias)
        return dataclasses.replace(self.pair, logit_scale=numbers["scale"], logit_bias=bias)


def build(config: TrainConfig, pair: Pair, samples: Callable[[int, int], Any], encoded: Sequence[int], world: World) -> Trained:
    """Moves the towers to the device, freezes, compiles and wraps them, and builds loss and optimizer.

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
    if config.freeze != "none":
        if world.rank == 0:
            warn_of_random_weights(pair, SIDES.index(config.freeze))
        with randomness.preserve_generators([world.device]):
            freeze(pair, SIDES.index(config.freeze), shown)
    counted = [partial(samples, side, SAMPLES_COUNTED) for side in encoded]
    utilisation = Utilisation([pair.towers[side] for side in encoded], counted, config.precision, world)
    compiled = config.compile == "on" and compile_towers(modules, world)
    with randomness.preserve_generators([world.device]), without_compiler(modules):
        called = wrap(modules, shown, world, config.parallel, offload=config.memory.offload)
    dtype = torch.float64 if next(modules[0].parameters()).dtype == torch.float64 else torch.float32
    objective = Objective(config.loss, pair.logit_scale, pair.logit_bias, dtype).to(world.device)
    groups = parameter_groups(distinct(modules), objective, config.optimizer.weight_decay)
    optimizer = build_optimizer(config.optimizer, groups)
    by_name = dict(zip(SIDES, distinct(modules), strict=False)) | {"loss": objective}
    average = Average(by_name, config.ema) if config.ema else None
    scaler = grad_scaler(config.precision, world.device)
    return Trained(pair, called, by_name, objective, optimizer, average, scaler, compiled, utilisation)
