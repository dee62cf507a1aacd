"""Builds towers, loss and optimizer of a run, with frozen sides, autocast, DDP, FSDP2 and averaged weights. Counts FLOPs."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from megabatch.cached import second_pass
from megabatch.cached.second_pass import parameters_in
from megabatch.cached.sources import width_of
from megabatch.cached.streaming import count_rows, map_rows
from megabatch.cached.tower import as_encoded, call, find_distributed_modules
from megabatch.world import World, local
from megabatch_train import names
from megabatch_train.machine import peak_rates
from megabatch_train.towers.late_interaction import token_dim
from megabatch_train.towers.layers.lora import store_frozen
from megabatch_train.towers.tower import (
    SIDES,
    FlopCounter,
    Pair,
    Tower,
    compile_towers,
    layers,
    use_evaluation_mode,
    without_compiler,
)
from megabatch_train.trainer.config import OptimizerConfig, TrainConfig, scale_rate
from megabatch_train.trainer.loss import Objective

# ----------------------------------------------------------------------------------------------------------------------
# Locked-image tuning (LiT): one side of a trained model is frozen, and the other side learns to match it.

LOG = logging.getLogger("megabatch")


def freeze(pair: Pair, side: int, samples: Sequence[Any]) -> None:
    """Freezes one side, and sets it to evaluation mode.

    Args:
        pair: the towers. Both can be the same module, which then has parts for each side.
        side: 0 or 1.
        samples: inputs of a few samples of each side. They show which parts of a common module each side uses.
    """
    tower, other = pair.towers[side], pair.towers[1 - side]
    if tower.module is other.module:
        frozen_ids, other_ids = (_find_used(tower.module, samples[number]) for number in (side, 1 - side))
        if frozen_ids & other_ids:
            raise ValueError(
                f'freeze must be "none" for {pair.name or "this model"}, because its two sides share parameters, got '
                f"{SIDES[side]!r}"
            )
    else:
        frozen_ids = {id(parameter) for parameter in tower.module.parameters()}
    for parameter in tower.module.parameters():
        if id(parameter) in frozen_ids:
            parameter.requires_grad_(False)
    _set_evaluation_mode(tower.module)


def warn_of_random_weights(pair: Pair, side: int) -> None:
    """Logs a warning if the frozen side has random weights, because the other side can only learn noise from it."""
    if not pair.name or names.has_weights(pair.name) or pair.name.startswith(names.PYTHON):
        return
    LOG.warning(
        "freeze = %r freezes a tower with random weights, because %s has no trained weights. This tower never learns, so "
        'recall stays low. Name weights, as in open_clip:ViT-B-32@laion2b_s34b_b79k or hf:IMAGES+TEXTS, or set freeze = "none"',
        SIDES[side],
        pair.name,
    )


def _find_used(module: nn.Module, inputs: Any) -> set[int]:
    device = next(module.parameters()).device
    with torch.enable_grad(), second_pass.keep_running_statistics(second_pass.list_batch_norms([module])):
        used_ids = parameters_in([call(module, map_rows(lambda tensor: tensor.to(device), inputs))])
    if used_ids is None:
        raise ValueError(
            "freeze does not work with reentrant activation checkpointing, which hides the parameters of a side. Use "
            'checkpointing with use_reentrant=False, or set freeze = "none"'
        )
    return used_ids


def _set_evaluation_mode(module: nn.Module) -> None:
    """Sets every part that has parameters, but only frozen ones, to evaluation mode."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        module.eval()
        return
    for part in module.children():
        _set_evaluation_mode(part)


# ----------------------------------------------------------------------------------------------------------------------
# Precision of a run: autocast, the gradient scaler for fp16, and TF32 for matmuls that stay in float32.

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Returns autocast for "bf16" and "fp16", and an empty context for "fp32". Parameters keep their dtype."""
    if precision not in AUTOCAST_TYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_TYPES[precision])


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Returns a gradient scaler for fp16, whose range is too small for gradients, and None for other precisions."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def allow_tf32(precision: str, device: torch.device) -> Iterator[None]:
    """Lets CUDA use TF32 for matmuls that autocast leaves in float32, and restores PyTorch's setting afterwards.

    With "fp32" this function changes nothing, and PyTorch's setting decides whether towers and loss use TF32. Under autocast,
    the matmuls of the loss have the dtype of autocast.
    """
    before = None
    if device.type == "cuda" and precision in AUTOCAST_TYPES:
        with suppress(RuntimeError):  # raised if the program uses PyTorch's newer settings, which are then not changed
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)


# ----------------------------------------------------------------------------------------------------------------------
# Towers on several ranks: DDP replicates them, and FSDP2 shards them.


FSDP = "fsdp"


def unique_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns each module once, because both sides of a model can share a module."""
    return list({id(module): module for module in modules}.values())


def wrap(
    modules: Sequence[nn.Module], samples: Sequence[Any], world: World, parallel: str, *, offload: bool = False
) -> list[nn.Module]:
    """Returns the modules wrapped for training, in the same order.

    Args:
        modules: the modules of the two sides, on their device. FSDP2 changes them in place, and DDP makes a wrapper.
        samples: inputs of a few samples of each side, to find unused parameters.
        world: the ranks. One rank needs no wrapper.
        parallel: "ddp" or "fsdp".
        offload: whether FSDP2 keeps weights and gradients, and therefore the optimizer state, in host memory.
    """
    if offload and (parallel != FSDP or world.size == 1):
        setting = f"one rank with parallel = {parallel!r}" if world.size == 1 else f"parallel = {parallel!r}"
        raise ValueError(f'memory.offload needs parallel = "fsdp" on several ranks (torchrun), got {setting}')
    replacements: dict[int, nn.Module] = {}  # by the id of the module
    for module in unique_modules(modules):
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        if world.size == 1 or not is_trained:  # a frozen module has no gradients to reduce
            replacements[id(module)] = module
        elif parallel == FSDP:
            replacements[id(module)] = _shard(module, world, offload)
        else:
            inputs = [sample for side, sample in zip(modules, samples, strict=True) if side is module]
            replacements[id(module)] = DistributedDataParallel(
                module,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                process_group=world.group,
                find_unused_parameters=_has_unused(module, inputs, world.device),
            )
    return [replacements[id(module)] for module in modules]


def _shard(module: nn.Module, world: World, offload: bool) -> nn.Module:
    """Shards a module in place. Each layer of a `ModuleList` is sharded separately, so that one layer is gathered at a time."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    options: Any = {
        "mesh": DeviceMesh.from_group(world.group, world.device.type),
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy(),
        # FSDP2 does not shard scalars. The frozen scale of a CLIP model is the same on all ranks.
        "ignored_params": {part for part in module.parameters() if part.dim() == 0 and not part.requires_grad},
    }
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                if any(True for _ in layer.parameters()) and not isinstance(layer, nn.ModuleList):
                    fully_shard(layer, **options)
    fully_shard(module, **options)
    return module


def _has_unused(module: nn.Module, inputs: Sequence[Any], device: torch.device) -> bool:
    """Returns whether a parameter never gets a gradient, such as the weight of an unused pooler. DDP would wait for it."""
    with torch.enable_grad(), second_pass.keep_running_statistics(second_pass.list_batch_norms([module])):
        outputs = [call(module, map_rows(lambda tensor: tensor.to(device), chunk)) for chunk in inputs]
    used_ids = parameters_in([as_encoded(output, type(module).__name__).embeddings for output in outputs])
    return used_ids is None or any(p.requires_grad and id(p) not in used_ids for p in module.parameters())


@contextmanager
def gather_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gathers sharded parameters on every rank, so that ranks can encode different numbers of chunks."""
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
            # This is the default of FSDP2: a root stays gathered between its forward and its backward pass.
            part.set_reshard_after_forward(part not in roots, recurse=False)


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers and their parameter groups.

MOMENTS = {"adamw": 2.0, "muon": 1.25, "lion": 1.0, "adafactor": 0.5}  # approximate bytes of state per byte of a parameter
MUON = "muon"
MUON_MOMENTUM = 0.95  # as in the reference implementation of Muon
# Names of parameters before the repeated layers of a tower. Other parameters outside of these layers come after them.
_STEM = re.compile(r"emb|stem|patch|ln_pre|norm_pre|pre_layrnorm|(cls|reg)_token|(^|\.)(conv|bn)\d")
SHORTEST_FACTORED = 32  # AdaFactor stores the full second moment of a matrix with a dimension shorter than this
OLDEST_TIMM = (1, 0, 29)  # older versions average AdaFactor's second moment over the wrong dimension of some matrices
RATE_SCALE = "lr_scale"  # option of a parameter group: factor of the learning rate
_HIDDEN, _DECAYED, _EXEMPT = range(3)  # matrices for Muon, other parameters with weight decay, parameters without it
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


def parameter_groups(
    towers: Sequence[nn.Module],
    loss: nn.Module,
    weight_decay: float,
    *,
    muon: bool = False,
    scales: Sequence[Mapping[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups: matrices with weight decay, norms and biases without it, and the loss without it.

    The parameters of the loss are a separate group, because FSDP2 does not shard them.

    Args:
        towers: the modules of the towers.
        loss: the loss.
        weight_decay: the weight decay of matrices.
        muon: whether matrices of the repeated layers are separate groups. The other groups then have `use_fallback`.
        scales: factors of the learning rate by the names of the parameters, for each tower (`layer_scales`).
    """
    found: dict[int, tuple[int, float, nn.Parameter]] = {}  # kind, factor and parameter by the id of the parameter
    for number, tower in enumerate(towers):
        repeated = {id(parameter) for layer in layers(tower) for parameter in layer.parameters()}
        for path, module in tower.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                is_exempt = parameter.dim() < 2 or name.endswith("bias") or isinstance(module, _NORMS)
                is_hidden = muon and id(parameter) in repeated and not isinstance(module, nn.Embedding)
                kind = _EXEMPT if is_exempt else _HIDDEN if is_hidden else _DECAYED
                scale = 1.0 if scales is None else scales[number].get(f"{path}.{name}" if path else name, 1.0)
                if parameter.requires_grad:
                    found[id(parameter)] = kind, scale, parameter
    groups = []
    for kind, scale in sorted({(kind, scale) for kind, scale, _ in found.values()}):
        chosen = [parameter for own_kind, own_scale, parameter in found.values() if (own_kind, own_scale) == (kind, scale)]
        group: dict[str, Any] = {"params": chosen, "weight_decay": 0.0 if kind == _EXEMPT else weight_decay}
        groups.append(group | ({"use_fallback": kind != _HIDDEN} if muon else {}) | ({} if scale == 1 else {RATE_SCALE: scale}))
    if loss_parameters := [parameter for parameter in loss.parameters() if parameter.requires_grad]:
        groups.append({"params": loss_parameters, "weight_decay": 0.0} | ({"use_fallback": True} if muon else {}))
    return groups


def layer_scales(module: nn.Module, used: Sequence[set[int]], decay: float) -> dict[str, float]:
    """Returns the factor of the learning rate of each parameter by its name: `decay` to the power of the layers after it.

    Parameters after the last repeated layer have the factor 1. Parameters before the first layer have the smallest factor.

    Args:
        module: the module of a tower, before it is wrapped or sharded.
        used: for each side that the module encodes, the ids of the parameters that the side uses.
        decay: the factor from a layer to the layer before it.
    """
    blocks = layers(module)
    if blocks == [module]:
        raise ValueError(
            f"optimizer.layer_decay must be 1 for a tower without repeated layers ({type(module).__name__}), got {decay}"
        )
    scales: dict[str, float] = {}
    for ids in used:
        own = [layer for layer in blocks if any(id(parameter) in ids for parameter in layer.parameters())]
        levels = {id(parameter): level for level, layer in enumerate(own, 1) for parameter in layer.parameters()}
        for name, parameter in module.named_parameters():
            if id(parameter) in ids:
                level = levels.get(id(parameter), 0 if _STEM.search(name) else len(own) + 1)
                scales[name] = decay ** (len(own) + 1 - level)
    return scales


def build_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns the optimizer of these parameter groups. The trainer sets its learning rate before every step."""
    rate = scale_rate(config, config.reference_batch)
    if config.name == "adafactor":
        return _build_adafactor(groups, rate, config.betas[0])
    if config.name == MUON:
        return _build_muon(groups, rate, config)
    if config.name == "lion":
        return _load_timm("Lion").Lion(groups, lr=rate, betas=config.betas)  # type: ignore[no-any-return]
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # The fused optimizer passes over the weights once. For 8.4 million weights on one core it takes 6 ms, and PyTorch's
    # default implementation takes 50 ms.
    fused = devices in ({"cuda"}, {"cpu"})
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=fused or None)


def _build_muon(groups: list[dict[str, Any]], rate: float, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns Muon for hidden matrices, and AdamW for all other parameters.

    The updates of matrices are scaled to the size of AdamW's updates (arXiv 2502.16982), so both use the same learning rate.
    """
    options = {"lr": rate, "momentum": MUON_MOMENTUM, "betas": config.betas, "adjust_lr_fn": "match_rms_adamw"}
    fallback = {"nesterov": False, "eps": config.eps}  # of AdamW; with `nesterov` it would be NAdamW
    own = [group | (fallback if group.get("use_fallback", True) else {"nesterov": True}) for group in groups]
    return _load_timm("Muon").Muon(own, **options)  # type: ignore[no-any-return]


def _build_adafactor(groups: list[dict[str, Any]], rate: float, momentum: float) -> torch.optim.Optimizer:
    """Returns AdaFactor as in "Scaling Vision Transformers" (arXiv 2106.04560).

    It has the quality of Adam and a quarter of its memory. The second moment of a matrix is stored as the means of its rows
    and columns. The first moment is stored in bfloat16. Weight decay is decoupled and multiplied by the learning rate, as in
    AdamW.
    """
    optimizer: torch.optim.Optimizer = _load_timm("AdaFactor").AdafactorBigVision(
        groups, lr=rate, momentum=momentum or None, min_dim_size_to_factor=SHORTEST_FACTORED
    )
    return optimizer


def _load_timm(optimizer: str) -> Any:
    """Returns the module with timm's optimizers."""
    optimizers = extras.load("timm.optim", purpose=f"The optimizer {optimizer}")
    timm_version = version("timm")
    if tuple(map(int, timm_version.split(".")[:3])) < OLDEST_TIMM:
        raise ImportError(
            f"The optimizer {optimizer} needs timm {'.'.join(map(str, OLDEST_TIMM))} or later, got {timm_version}; "
            f"{extras.install_command('timm')} installs it"
        )
    return optimizers


# ----------------------------------------------------------------------------------------------------------------------
# Exponential moving average (EMA) of the weights, which often generalizes better than the live weights. If it is enabled, the
# averaged weights are evaluated and saved in place of the live weights.


class Average:
    """Exponential moving average of parameters and running statistics.

    Args:
        modules: the modules by name. The average of a sharded parameter is sharded in the same way.
        decay: the factor of the old average in each step. In step t it is at most (1 + t) / (10 + t), so that the influence of
            the initial weights ends soon.
    """

    def __init__(self, modules: dict[str, nn.Module], decay: float) -> None:
        self._live: dict[str, Tensor] = {}
        for name, module in modules.items():
            self._live |= {f"{name}.{key}": p for key, p in module.named_parameters() if p.requires_grad}
            # Running statistics are averaged, too. The live statistics do not fit the averaged weights, which have other
            # activations. Averaged statistics fit, because the mean of a linear layer's output is linear in its weights.
            # Other buffers are constants and are not averaged.
            self._live |= {f"{name}.{key}": value for key, value in second_pass.running_statistics(module).items()}
        self._decay = decay
        self.values: dict[str, Tensor] = {name: value.detach().clone() for name, value in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average after step `step`. The first step is step 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        averages = [local(self.values[name]) for name in self._live]
        torch._foreach_lerp_(averages, [local(value.detach()) for value in self._live.values()], share)  # few kernel launches

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Copies the averages into the modules, and restores the live values afterwards."""
        copies = {name: value.detach().clone() for name, value in self._live.items()}
        self._assign(self.values)
        try:
            yield
        finally:
            self._assign(copies)

    @torch.no_grad()
    def _assign(self, values: dict[str, Tensor]) -> None:
        for name, value in self._live.items():
            value.copy_(values[name])


# ----------------------------------------------------------------------------------------------------------------------
# Model FLOPs utilization (MFU): the share of the GPU's peak rate that the necessary operations of a step reach.
#
# The necessary operations are a forward pass and, for each of its matmuls, two matmuls in the backward pass. So a trained tower
# counts as three forward passes, and a frozen tower as one. A tower with adapters counts as two, because its frozen weights
# need no gradients. The second forward pass of gradient caching does not count, because it only saves memory. Padding does not
# count either, so texts have the mean length of a few samples. The loss is excluded, because it takes at most one percent of a
# step.

TRAINED, ADAPTED, FROZEN = 3, 2, 1  # necessary operations of a tower, counted in forward passes


class Utilization:
    """Computes the share of the peak rate that a step reaches.

    Args:
        towers: the towers that encode samples in each step, before they are compiled, wrapped or sharded.
        samples: for each tower, a function that reads the inputs of a few samples.
        precision: the precision of the towers: "bf16", "fp16" or "fp32".
        world: the ranks.
    """

    def __init__(self, towers: Sequence[Tower], samples: Sequence[Callable[[], Any]], precision: str, world: World) -> None:
        self._peak = _peak(precision, world.device) * world.size
        self._flops = 0.0  # necessary operations of one pair
        if self._peak:
            for tower, read in zip(towers, samples, strict=True):
                parts = [trim_to_mean_length(tower, read())]
                if tower.measure is not None:  # one sample at a time, because the tower excludes the padding of a whole chunk
                    rows = range(count_rows(parts[0], "inputs"))
                    parts = [map_rows(lambda tensor, i=i: tensor[i : i + 1], parts[0]) for i in rows]  # type: ignore[misc]
                flops = sum(forward_flops(tower.module, inputs, world.device) for inputs in parts) / len(parts)
                self._flops += _passes(tower.module) * flops

    def numbers(self, pairs: int, seconds: float) -> dict[str, float]:
        """Returns {"mfu": …} for a step. It is empty on a CPU, and on a GPU with an unknown peak rate."""
        return {"mfu": pairs * self._flops / seconds / self._peak} if self._peak else {}


def _passes(module: nn.Module) -> int:
    """Returns the necessary operations of a tower, counted in forward passes.

    A tower with fewer trained than frozen parameters counts as a tower with adapters.
    """
    sizes = {True: 0, False: 0}
    for parameter in module.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    if not sizes[True]:
        return FROZEN
    return TRAINED if sizes[True] >= sizes[False] else ADAPTED


def trim_to_mean_length(tower: Tower, inputs: Any) -> Any:
    """Returns the inputs, with texts trimmed to their mean length. They then need about the mean number of operations."""
    lengths = None if tower.lengths is None else tower.lengths(inputs)
    if lengths is None:
        return inputs
    width, mean = width_of(inputs), max(1, round(lengths.double().mean().item()))
    return map_rows(lambda tensor: tensor[:, :mean] if tensor.dim() > 1 and tensor.shape[1] == width else tensor, inputs)


def forward_flops(module: nn.Module, inputs: Any, device: torch.device) -> float:
    """Returns the number of operations of a forward pass for one sample."""
    # The counter knows neither PyTorch's fused operator for a whole layer nor every attention kernel, so both are disabled.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    math_attention, counter = sdpa_kernel(SDPBackend.MATH), FlopCounter()
    try:
        with torch.no_grad(), use_evaluation_mode(module), math_attention, counter:
            call(module, map_rows(lambda tensor: tensor.to(device), inputs))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.total / count_rows(inputs, "inputs")


def _peak(precision: str, device: torch.device) -> float:
    """Returns the peak rate in operations per second, or 0 if it is unknown."""
    rates = peak_rates(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if rates is None:
        return 0.0
    if precision != "fp32":
        return 1e12 * rates.half
    return 1e12 * (rates.single if torch.get_float32_matmul_precision() == "highest" else rates.tf32)


# ----------------------------------------------------------------------------------------------------------------------
# Towers, loss, optimizer, averaged weights and gradient scaler of a run, on their device.


SAMPLES_SHOWN = 2  # number of samples that towers encode to find their used parameters
SAMPLES_COUNTED = 64  # number of samples whose operations are counted


@dataclasses.dataclass
class Trained:
    """Towers, loss and optimizer of a run."""

    pair: Pair  # the towers with unwrapped modules
    wrapped: list[nn.Module]  # modules of the two sides, wrapped in DDP or FSDP2 on several ranks
    by_name: dict[str, nn.Module]  # unwrapped modules of the towers and the loss, each once
    objective: Objective
    optimizer: torch.optim.Optimizer
    average: Average | None  # exponential moving average of the weights, if config.ema is set
    scaler: torch.amp.GradScaler | None  # for fp16
    compiled: bool
    utilizations: list[Utilization]  # one for each function in the argument `samples` of `build`

    def use_average(self) -> AbstractContextManager[None]:
        """Returns a context in which the modules have the averaged weights, if there are any."""
        return nullcontext() if self.average is None else self.average.swap()

    def with_learned_scale(self) -> Pair:
        """Returns the towers with the learned scale and bias."""
        numbers = self.objective.numbers()
        bias = numbers.get("bias", self.pair.logit_bias)
        return dataclasses.replace(self.pair, logit_scale=numbers["scale"], logit_bias=bias)


def build(
    config: TrainConfig, pair: Pair, samples: Sequence[Callable[[int, int], Any]], encoded: Sequence[int], world: World
) -> Trained:
    """Moves the towers to the device, freezes, compiles and wraps them, and builds the loss and the optimizer.

    Args:
        config: the settings of the run.
        pair: the towers, which are changed in place.
        samples: for each stage of the run, a function that takes a side and a number, and returns the inputs of that many
            samples.
        encoded: the sides that are encoded in each step.
        world: the ranks.
    """
    if pair.lora is not None:
        store_frozen(pair.modules, AUTOCAST_TYPES.get(config.precision, torch.float32))
    modules = [module.to(world.device) for module in pair.modules]
    few_samples = [samples[0](side, SAMPLES_SHOWN) for side in (0, 1)]
    if config.freeze != "none":
        if world.rank == 0:
            warn_of_random_weights(pair, SIDES.index(config.freeze))
        with second_pass.preserve_generators([world.device]):
            freeze(pair, SIDES.index(config.freeze), few_samples)
    utilizations = [
        Utilization(
            [pair.towers[side] for side in encoded],
            [partial(read, side, SAMPLES_COUNTED) for side in encoded],
            config.precision,
            world,
        )
        for read in samples
    ]
    can_compile = all(tower.measure is None for tower in pair.towers)  # the number of patches differs in every chunk
    compiled = config.compile == "on" and can_compile and compile_towers(modules, world)
    unique, decay, scales = unique_modules(modules), config.optimizer.layer_decay, None
    with second_pass.preserve_generators([world.device]), without_compiler(modules):
        if decay != 1:
            used = [_find_used(module, sample) for module, sample in zip(modules, few_samples, strict=True)]
            scales = [layer_scales(own, [used[side] for side in (0, 1) if modules[side] is own], decay) for own in unique]
        wrapped = wrap(modules, few_samples, world, config.parallel, offload=config.memory.offload)
    dtype = torch.float64 if next(modules[0].parameters()).dtype == torch.float64 else torch.float32
    objective = Objective(config.loss, pair.logit_scale, pair.logit_bias, dtype, token_dim(pair)).to(world.device)
    muon = config.optimizer.name == MUON
    groups = parameter_groups(unique, objective, config.optimizer.weight_decay, muon=muon, scales=scales)
    optimizer = build_optimizer(config.optimizer, groups)
    by_name = dict(zip(SIDES, unique, strict=False)) | {"loss": objective}
    average = Average(by_name, config.ema) if config.ema else None
    scaler = grad_scaler(config.precision, world.device)
    return Trained(pair, wrapped, by_name, objective, optimizer, average, scaler, compiled, utilizations)
