"""Decides how a call runs: which engine computes it, and on which path. No other module makes these decisions.

An engine computes the tiles: PyTorch operations on every device, or Triton kernels on NVIDIA GPUs. A path is the order of the
work, from the whole matrix of logits at once to two passes over its tiles. `RULES` contains the decision as data: the first
rule that applies to a call decides. `Limits` contains the sizes in the rules. `megabatch info` prints the rules.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megabatch.tiles.block import EAGER, FLOAT64, TRITON

Backend = Literal["auto", "eager", "triton"]
Group = ProcessGroup | DeviceMesh | None
Reduction = Literal["mean", "sum", "none"]
Function = TypeVar("Function", bound=Callable[..., Any])


class Execution(NamedTuple):
    """How a call runs. Operators take the three strings, in this order."""

    precision: str  # the precision of the matmuls
    backend: str  # "eager" or "triton"
    group: str  # the key of the process group (`ring.ranks.address`); empty for one process


# ----------------------------------------------------------------------------------------------------------------------
# The context of a call: `torch.compile` and `torch.func`. Nothing here imports the compiler, because its import is slow.


def constant(function: Function) -> Function:
    """Makes the compiler call the function while it traces, and treat its result as a constant.

    It has the same effect as `torch.compiler.assume_constant_result`, but it does not import the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def transforms_are_active() -> bool:
    """Returns whether a transform of `torch.func`, or a level of dual numbers, surrounds the call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# ----------------------------------------------------------------------------------------------------------------------
# Engines


def _find_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:
        return False


HAS_TRITON = _find_triton()  # searched once at import, because the compiler cannot trace the search
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # tests use this mode, in which kernels run slowly on the CPU
_AMPERE = (8, 0)  # the lowest supported compute capability; Ampere is the first generation with bfloat16 and TF32


def why_not_triton(precision: str, device: torch.device) -> str | None:
    """Returns the reason why the kernels cannot serve inputs of this precision on this device, or None if they can."""
    if not HAS_TRITON:
        return "the package triton is not installed; `pip install triton` installs it"
    if precision == FLOAT64:
        return "its kernels compute in float32 at most, and the inputs are float64"
    if INTERPRETED:
        return None
    if device.type == "cuda" and torch.version.hip is not None:
        return f"its kernels are tuned and tested only on NVIDIA GPUs, and {device} is an AMD GPU (ROCm)"
    if device.type != "cuda":
        return f"its kernels run on NVIDIA GPUs, and the inputs are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _AMPERE:
        return "its kernels need compute capability {}.{} or newer, and {} has {}.{}".format(*_AMPERE, device, *capability)
    return None


@constant
def default_engine(precision: str, device: torch.device) -> str:
    """Returns the engine of `backend="auto"`: the kernels on GPUs that they support, PyTorch operations elsewhere."""
    return TRITON if device.type == "cuda" and _kernels_serve(precision, device) else EAGER


@cache  # reading the capability of a device takes the CPU as long as an allocation
def _kernels_serve(precision: str, device: torch.device) -> bool:
    return why_not_triton(precision, device) is None


# ----------------------------------------------------------------------------------------------------------------------
# Paths

DENSE: Final = "dense"  # the whole matrix of logits in memory; the gradients are computed with the loss
FUSED: Final = "fused"  # tiles or strips of the matrix; the gradients are computed with the loss
TWO_PASS: Final = "two-pass"  # sums over the tiles in the forward pass, and the gradients in the backward pass

# Kinds of losses.
BOTH: Final = "softmax, both directions"  # clip_loss, info_nce_loss(symmetric=True)
ROWS: Final = "softmax, one direction"  # info_nce_loss
VIEWS: Final = "two views"  # nt_xent_loss: the rows are both views of every sample
LABELS: Final = "labels"  # sup_con_loss(form="out")
SIGMOID: Final = "sigmoid"  # siglip_loss
KINDS: Final = (BOTH, ROWS, VIEWS, LABELS, SIGMOID)


@dataclass(frozen=True)
class Limits:
    """The largest sizes for which a path is used. Rows of the logits are pairs, or the views of all samples."""

    # 2,048 rows need two matrices of 16 MiB in float32. Two cores, fp32, D = 256, 2,048 pairs: `clip_loss` takes 50 to 57 ms on
    # the dense path and 81 to 89 ms over tiles, `info_nce_loss` 44 to 45 and 58 to 66 ms, `sup_con_loss` 69 to 77 and 68 to 72.
    dense_cpu: int = 2048
    # 4,096 rows need one matrix of 64 MiB. The limit is higher, because a loss of one direction has three matmuls on the dense
    # path and four over tiles. With the same setup and 4,096 pairs, `info_nce_loss` takes 199 to 325 ms on the dense path and
    # 340 to 395 ms over tiles. With 4,096 pairs, losses of both directions are not faster on the dense path.
    dense_cpu_one_direction: int = 4096
    # 8,192 rows need 256 MiB for logits in float32 and 128 MiB for weights in half precision, which is within the 512 MiB limit
    # of a workspace. H200, bf16, D = 512: 8,192 pairs take 0.6 to 0.8 ms on the dense path. Over tiles they take 1.4 to 1.8 ms,
    # because they are launch-bound. 16,384 pairs take 2.2 ms and 1.5 GiB on the dense path, and 1.6 ms over tiles.
    dense_triton: int = 8192
    # Up to 32,768 rows, a step is launch-bound, and `operators.one_gpu` saves several milliseconds because it has few launches.
    # With 65,536 rows, a step is not launch-bound. The module is faster because it does not set the sums of dy to 0 first, and
    # because its strips are larger. H200, bf16, 65,536 rows, D = 512 / 768 / 1024, ms: `clip_loss` 27.2 / 40.8 / 54.5, and with
    # the smaller strips of the operator 27.7 / 41.7 / 55.4. `siglip_loss` 23.0 / 32.1 / 41.5, and 23.9 / 33.4 / 43.0. The
    # module needs 0.3 GiB more memory.
    one_gpu: int = 65536
    # A step with more views is not launch-bound. H200, bf16, D = 512, 65,536 views: 16.4 ms by the operator.
    one_gpu_views: int = 32768
    # With labels, `one_gpu` computes all logits, and the operator only half of them (`tiles.symmetric`). H200, bf16, D = 512:
    # 16,384 rows take 2.9 ms, and 6.4 ms in two passes. 32,768 rows take 10.1 ms, and 9.2 ms in two passes.
    one_gpu_labels: int = 16384
    # Late interaction. Up to 1,024 pairs, a step over strips is launch-bound or nearly so, and all scores take 4 MiB.
    late_triton: int = 1024
    late_indices: int = 2**26  # argmax indices: 128 MiB in int16, and 256 MiB for the lists of backward
    # Largest rows × D for which the float32 sums of dx, and later these sums plus the gradients, fit the workspace limits.
    one_gpu_elements: int = 2**27


class Rule(NamedTuple):
    """A path, and the calls that take it unless an earlier rule applies."""

    path: str
    module: str  # the module of `megabatch.operators` that computes the loss with its gradients; empty for two passes
    kinds: tuple[str, ...]
    engine: str = ""  # empty for both
    rows: str = ""  # the field of `Limits` with the largest number of rows; empty for any number
    cpu_only: bool = False
    plain: bool = False  # requires one process, at least two rows, and no torch.compile, torch.func or fake tensors
    standard: bool = True  # requires a mean or a sum, and none of the options that `choose_module` lists


RULES: Final = (
    Rule(DENSE, "dense", (BOTH, VIEWS, LABELS, SIGMOID), EAGER, "dense_cpu", cpu_only=True, plain=True),
    Rule(DENSE, "dense", (ROWS,), EAGER, "dense_cpu_one_direction", cpu_only=True, plain=True),
    Rule(DENSE, "dense", KINDS, TRITON, "dense_triton", plain=True),
    Rule(FUSED, "one_gpu", (BOTH, ROWS, SIGMOID), TRITON, "one_gpu", plain=True),
    Rule(FUSED, "one_gpu", (VIEWS,), TRITON, "one_gpu_views", plain=True),
    Rule(FUSED, "one_gpu", (LABELS,), TRITON, "one_gpu_labels", plain=True),
    Rule(FUSED, "fused", KINDS),
    Rule(TWO_PASS, "", KINDS, standard=False),
)

_limits = Limits()


def limits() -> Limits:
    """Returns the current limits."""
    return _limits


@contextmanager
def override(**changes: int) -> Iterator[Limits]:
    """Changes fields of `Limits` inside a `with` block, such as `override(dense_triton=0)`, for tests and benchmarks."""
    global _limits
    previous = _limits
    _limits = dataclasses.replace(previous, **changes)
    _first_rule.cache_clear()
    try:
        yield _limits
    finally:
        _limits = previous
        _first_rule.cache_clear()


def choose_module(
    kind: str,
    x: Tensor,  # (N, D)
    engine: str,
    group: str,
    reduction: Reduction,
    *,
    standard: bool = True,
) -> str:
    """Returns the module of `megabatch.operators` that computes a loss with its gradients; empty if the call takes two passes.

    Args:
        kind: one of `KINDS`.
        x: the embeddings of one side, or of one view.
        engine: "eager" or "triton".
        group: the name of the process group; empty for one process.
        reduction: the reduction of the loss. With "none", a call takes two passes, because each row has its own upstream
            gradient. So does a sum over ranks, because each rank has its own upstream gradient.
        standard: False if the loss has label smoothing, further negatives, a margin or a guide. Such a call takes two passes.
    """
    if reduction == "none" or not standard or (group and reduction == "sum"):
        return ""
    if group or torch.compiler.is_compiling() or transforms_are_active() or isinstance(x, FakeTensor):
        return _module_anywhere(kind, engine)
    return find_rule(kind, x.shape[0] * (2 if kind == VIEWS else 1), x.shape[1], engine, on_cpu=x.is_cpu).module


def find_rule(kind: str, rows: int, D: int, engine: str, *, on_cpu: bool = False) -> Rule:
    """Returns the rule of a standard loss with this many rows in one process, outside of torch.compile and torch.func."""
    return _first_rule(kind, engine, rows, D, on_cpu)


def late_loss_is_dense(x: Tensor, pairs: int, indices: int, run: Execution, reduction: Reduction) -> bool:  # (T, D)
    """Returns whether a loss of late interaction without further negatives stores all scores and argmax indices at once.

    Args:
        x: the vectors of all queries.
        pairs: the number of pairs.
        indices: the number of argmax indices.
        run: how the call runs.
        reduction: the reduction of the loss.
    """
    if run.backend != TRITON or run.group or reduction == "none":
        return False
    if not 1 <= pairs <= _limits.late_triton or indices > _limits.late_indices:
        return False
    return not (torch.compiler.is_compiling() or transforms_are_active() or isinstance(x, FakeTensor))


@constant
def _module_anywhere(kind: str, engine: str) -> str:
    return next(rule.module for rule in RULES if _serves(rule, kind, engine) and not rule.plain)


@cache  # a search through the rules takes 5 µs, and a small step on a CPU takes 300 µs
def _first_rule(kind: str, engine: str, rows: int, D: int, on_cpu: bool) -> Rule:
    return next(rule for rule in RULES if _serves(rule, kind, engine) and _admits(rule, rows, D, on_cpu))


def _serves(rule: Rule, kind: str, engine: str) -> bool:
    return kind in rule.kinds and rule.engine in ("", engine)


def _admits(rule: Rule, rows: int, D: int, on_cpu: bool) -> bool:
    if (rule.cpu_only and not on_cpu) or (rule.plain and rows < 2):
        return False
    if rule.rows and rows > getattr(_limits, rule.rows):
        return False
    return rule.module != "one_gpu" or rows * D <= _limits.one_gpu_elements


RULE_COLUMNS: Final = ("path", "losses", "engine", "size", "where")


def describe_rules() -> list[tuple[str, str, str, str, str]]:
    """Returns the rules as rows of a table with the columns `RULE_COLUMNS`."""
    return [
        (
            rule.path,
            ("all" if rule.kinds == KINDS else "; ".join(rule.kinds)) + ("" if rule.standard else ", with the options below"),
            {EAGER: "PyTorch", TRITON: "Triton"}.get(rule.engine, "both") + (", CPU" if rule.cpu_only else ""),
            _describe_size(rule),
            "one process" if rule.plain else "anywhere",
        )
        for rule in RULES
    ]


def _describe_size(rule: Rule) -> str:
    if not rule.rows:
        return "any"
    size = f"{getattr(_limits, rule.rows):,} rows"
    return f"{size}, rows × D up to {_limits.one_gpu_elements / 1e6:.0f}M" if rule.module == "one_gpu" else size
