"""The description of the logits that a pass computes (`Block`), and the precision of their matmuls."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.tiles.sums import Best, LogSum, SoftSum, to_exact

# ----------------------------------------------------------------------------------------------------------------------
# The precision of the matmuls: inputs are rounded to it once, and everything after that is exact or fp32.
#
# | inputs                     | inputs of the matmuls     | sums             |
# |----------------------------|---------------------------|------------------|
# | float64                    | float64                   | float64          |
# | float32                    | float32, IEEE ("highest") | float32          |
# | float32, "high", "medium"  | TF32, rounded to nearest  | float32          |
# | float32 under autocast     | the autocast type         | float32          |
# | bfloat16, float16          | the inputs as they are    | float32          |
#
# "highest", "high" and "medium" are values of `torch.get_float32_matmul_precision()`. Inputs are rounded explicitly, so that
# every device multiplies the same numbers. IEEE and TF32 units compute the same products of TF32 values.

FLOAT64 = "float64"
FLOAT32 = "float32"
TF32 = "tf32"
BFLOAT16 = "bfloat16"
FLOAT16 = "float16"
BY_SETTING = "by setting"  # float32 or TF32, decided when the operator runs

_OF_DTYPE = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_OF_MATMUL = {"highest": FLOAT32, "high": TF32, "medium": TF32}
HALF_DTYPE = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}

SUPPORTED_DTYPES = tuple(_OF_DTYPE)


def autocast_device(x: Tensor) -> str:
    """Returns the device type whose autocast applies to x. The meta device has no autocast, so it uses the CPU's."""
    return "cpu" if x.is_cpu or x.is_meta else x.device.type


def compute_precision(x: Tensor) -> str:
    """Returns the precision of matmuls of inputs like x, under the current autocast state and matmul setting.

    torch.compile cannot trace an access to the setting, so a compiled call reads it when it runs (`by_matmul_setting`).
    """
    dtype, device_type = x.dtype, autocast_device(x)
    if dtype != torch.float32:
        return _OF_DTYPE[dtype]
    if torch.is_autocast_enabled(device_type):
        return _OF_DTYPE[torch.get_autocast_dtype(device_type)]
    return BY_SETTING if torch.compiler.is_compiling() else by_matmul_setting(BY_SETTING, device_type)


def widen_float16(x: Tensor) -> Tensor:
    """Casts float16 embeddings that several operators use to float32. Other embeddings are returned unchanged.

    The gradients of all operators are then added in float32 and rounded once. The largest float16 is 65,504, so a gradient that
    is rounded before it is added may be infinite, and inf − inf is NaN. bfloat16 has the range of float32 and needs no cast.
    `Execution` still has the precision of the original embeddings for the matmuls.
    """
    return x.float() if x.dtype == torch.float16 else x


def by_matmul_setting(precision: str, device_type: str) -> str:
    """Replaces `BY_SETTING` by PyTorch's current setting for float32 matmuls on this device type."""
    if precision != BY_SETTING:
        return precision
    try:
        return _OF_MATMUL[torch.get_float32_matmul_precision()]
    except RuntimeError:  # raised if the program has used the newer settings, one for each device type
        backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        return FLOAT32 if backend.matmul.fp32_precision in ("ieee", "none") else TF32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of statistics, losses and gradient sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_dtype(precision: str, device_type: str) -> torch.dtype:
    """Returns the dtype of the rounded inputs of a matmul.

    CUDA multiplies half-precision inputs into an fp32 result. Other devices would round the result to the dtype of the inputs,
    so the rounded inputs are converted to fp32 first. This does not change their values.
    """
    if precision == FLOAT64:
        return torch.float64
    if device_type == "cuda" and precision in HALF_DTYPE:
        return HALF_DTYPE[precision]
    return torch.float32


def round_to_precision(values: Tensor, precision: str) -> Tensor:
    """Rounds `values` once to `precision`. The result has the dtype `matmul_dtype`."""
    if precision == FLOAT32:
        return values
    if precision == TF32:
        return round_to_tf32(values)
    for dtype in (HALF_DTYPE.get(precision), matmul_dtype(precision, values.device.type)):
        if dtype is not None and values.dtype != dtype:  # a conversion to the same dtype takes 2 µs of host time
            values = values.to(dtype)
    return values


def round_to_tf32(values: Tensor) -> Tensor:
    """Rounds float32 `values` to the nearest TF32 values, which have 13 fewer bits in the significand. NaN stays NaN."""
    bits = values.view(torch.int32)
    nearest = (bits + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(values.isnan(), values, nearest)


def round_to_tf32_(values: Tensor, spare: Tensor) -> Tensor:
    """Rounds to TF32 in place, with a buffer of the same size, for values far from overflow. NaN stays NaN.

    A value halfway between two TF32 values may be rounded to a different neighbor than by `round_to_tf32`.
    """
    large = torch.mul(values, 2**13 + 1, out=spare)
    return torch.sub(large, torch.sub(large, values, out=values), out=values)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in float32. `torch.mm` allocates the result, which takes less host time than a separate call."""
    if a.dtype == b.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes out = a @ b, accumulated in the dtype of `out`."""
    a, b = _widen(a, b, out)
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes out += a @ b, accumulated in the dtype of `out`."""
    a, b = _widen(a, b, out)
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def _widen(a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a and b to the dtype of `out`, except on CUDA, where a matmul can have a wider output dtype."""
    return (a, b) if out.device.type == "cuda" else (a.to(out.dtype), b.to(out.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# A block of logits and its gradients: the arguments and the results of the passes over tiles.


@dataclass(frozen=True)
class Block:
    """The logits s_ij = scale·⟨x_i, y_j⟩ + row_bias_i + col_bias_j. A block describes them and does not store them.

    Some pairs are excluded from every sum:
    - pairs with equal ids, or all other pairs if `only_equal_ids` is set (kernels do not support `only_equal_ids`),
    - the main diagonal if `skip_diagonal` is set,
    - pairs whose dot product ⟨x_i, y_j⟩ is above the limit. If there is a second model, its logit is compared instead.

    If `ids_are_positives` is set, sums of softplus include pairs with equal ids, with −s_ij in place of s_ij.
    """

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    precision: str
    row_bias: Tensor | None = None  # (N,)
    col_bias: Tensor | None = None  # (M,)
    row_ids: Tensor | None = None  # (N,), or (N, 2): see `equal_ids`
    col_ids: Tensor | None = None  # (M,), or (M, 2)
    skip_diagonal: bool = False
    ids_are_positives: bool = False
    limit: Tensor | None = None  # (N,) in the dtype of the values that it is compared with
    second_model: "Block | None" = None  # the same rows and columns, as embedded by another model: a guide, or a teacher
    only_equal_ids: bool = False
    positives_within: bool = False  # the sums contain positive pairs, so the gradients of the scale nearly cancel

    @classmethod
    def of(cls, x: Tensor, y: Tensor, scale: Tensor | None, precision: str, **fields: Any) -> "Block":
        """Returns the block of an operator. Converts the scale to the dtype of logits, and reads the matmul setting.

        A scale of None means 1.
        """
        dtype = accumulator_dtype(x.dtype)
        factor = torch.ones((), dtype=dtype, device=x.device) if scale is None else scale.to(dtype)
        return cls(x, y, factor, by_matmul_setting(precision, x.device.type), **fields)

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.x.shape[0]

    @property
    def M(self) -> int:
        """Number of columns."""
        return self.y.shape[0]

    @property
    def D(self) -> int:
        """Embedding dimension."""
        return self.x.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether the block has no logits."""
        return self.N == 0 or self.M == 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and gradient sums."""
        return accumulator_dtype(self.x.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """Returns a new accumulator."""
        return torch.zeros(shape, dtype=self.dtype, device=self.x.device)


class Needs(NamedTuple):
    """The gradients that a caller needs, in the order of the first tensors of every operator."""

    dx: bool
    dy: bool
    dscale: bool
    drow_bias: bool = False
    dcol_bias: bool = False


class ColumnGradients(NamedTuple):
    """The sums over rows that a gradient pass adds to, or None if they are not needed."""

    dy: Tensor | None  # (M, D), not yet multiplied by the scale
    dcol_bias: Tensor | None  # (M,)

    def zeros(self, columns: int) -> "ColumnGradients":
        """Returns new accumulators of the same gradients for another block of columns."""
        return ColumnGradients(*(None if part is None else part.new_zeros(columns, *part.shape[1:]) for part in self))

    def tensors(self) -> list[Tensor]:
        """Returns the accumulators that are not None, which ranks send."""
        return [part for part in self if part is not None]


class RowGradients(NamedTuple):
    """Gradients of some rows, summed over all columns of the block."""

    rows: slice
    dx: Tensor | None  # (n, D), not yet multiplied by the scale
    dscale: Tensor | None  # (n,) Σ_j g_ij·⟨x_i, y_j⟩; None if the caller computes it from dx
    drow_bias: Tensor | None  # (n,)


class RankTargets(NamedTuple):
    """The entry of each row and of each column whose rank is counted. Rows and columns are numbered over the whole batch."""

    row_match: Tensor  # (N,) the logit of each row's entry
    col_match: Tensor  # (M,)
    row_target: Tensor  # (N,) int64, the column of each row's entry
    col_target: Tensor  # (M,) int64, the row of each column's entry
    row_index: Tensor  # (N,) int64, the number of each row
    col_index: Tensor  # (M,) int64


def equal_ids(row_ids: Tensor, col_ids: Tensor) -> Tensor:  # (n,) and (m,), or (n, 2) and (m, 2) -> (n, m) bool
    """Returns a mask of the pairs with equal ids. Ids in two columns are equal if they are equal in one of the columns."""
    if row_ids.dim() == 1:
        return row_ids[:, None] == col_ids
    return (row_ids[:, :1] == col_ids[:, 0]) | (row_ids[:, 1:] == col_ids[:, 1])


def windows(whole: int | slice, size: int) -> Iterator[slice]:
    """Cuts the range [0, whole), or a slice, into windows of `size`. The last window may be shorter."""
    start, stop = (0, whole) if isinstance(whole, int) else (whole.start, whole.stop)
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


def part(values: Tensor, window: slice) -> Tensor:
    """Returns values[window]. Returns `values` itself for the full window, because a view takes several µs of host time."""
    return values if window.start == 0 and window.stop == len(values) else values[window]


# ----------------------------------------------------------------------------------------------------------------------
# Logits of the matching pairs (i, i), rounded as in the tiles.


def matching_logits(block: Block, products: Tensor) -> Tensor:  # (N,)
    """Returns s_ii, given the dot products ⟨x_i, y_i⟩."""
    out = products * block.scale
    if block.row_bias is not None:
        out.add_(block.row_bias)
    if block.col_bias is not None:
        out.add_(block.col_bias)
    return out


def exact_matching_logits(block: Block, products: Tensor, *, by_kernels: bool) -> Tensor:  # (N,)
    """Returns s_ii in `exact_dtype` from the dot products ⟨x_i, y_i⟩. s_ii is rounded in the same way as in an engine's tiles.

    So the logits of equal dot products are equal at every scale, and their difference is 0.
    """
    if not by_kernels or block.second_model is not None:  # with a second model, kernels read tiles that PyTorch has rounded
        return to_exact(matching_logits(block, products))
    out = round_logits(products, block.scale, block.precision, by_kernels=True)
    for bias in (block.row_bias, block.col_bias):
        if bias is not None:
            out.add_(bias)
    return out


def round_logits(products: Tensor, scale: Tensor, precision: str, *, by_kernels: bool) -> Tensor:  # (K,), ()
    """Returns scale·products in `exact_dtype`, rounded in the same way as the logits of an engine's tiles.

    PyTorch operations round logits to the accumulator dtype. Kernels do not round the logits, but for half-precision inputs
    they round scale·log2 e to float32 (`kernels.operands.kernel_options`). A logit beyond the range of the accumulator dtype is
    infinite.
    """
    factor = scale.to(products.dtype)
    rounded_logits = to_exact(products * factor)
    if not by_kernels:
        return rounded_logits
    factor = factor.double()
    if precision in HALF_DTYPE:
        factor = (factor / math.log(2)).float().double() * math.log(2)
    return torch.where(rounded_logits.isfinite(), products.double() * factor, rounded_logits)


def targets_on_the_diagonal(block: Block, products: Tensor) -> RankTargets:
    """Returns the matching pairs (i, i) as targets, given the dot products ⟨x_i, y_i⟩."""
    match, index = matching_logits(block, products), torch.arange(block.N, device=block.x.device)
    return RankTargets(match, match, index, index, index, index)


# ----------------------------------------------------------------------------------------------------------------------
# The two engines behind one protocol. `dispatch` chooses one of them.

EAGER: Final = "eager"
TRITON: Final = "triton"


class Passes(Protocol):
    """The passes over the tiles of a block. The docstrings in `tiles.eager` define each of them."""

    def logsumexp_statistics(self, block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]: ...  # noqa: D102

    def logsumexp_gradients(  # noqa: D102
        self,
        block: Block,
        row: LogSum,
        col: LogSum | None,
        drow: Tensor | None,
        dcol: Tensor | None,
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]: ...

    def soft_statistics(self, block: Block) -> tuple[SoftSum, SoftSum]: ...  # noqa: D102

    def soft_gradients(  # noqa: D102
        self,
        block: Block,
        row: SoftSum,
        col: SoftSum,
        drow: Tensor,
        dcol: Tensor,
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]: ...

    def softplus_sums(self, block: Block) -> Tensor: ...  # noqa: D102

    def softplus_gradients(  # noqa: D102
        self, block: Block, dtotal: Tensor | None, sums: ColumnGradients, needs: Needs, *, total: Tensor | None = None
    ) -> Iterator[RowGradients]: ...

    def rank_counts(self, block: Block, targets: RankTargets | None = None) -> tuple[Tensor, Tensor]: ...  # noqa: D102

    def topk(self, block: Block, k: int) -> Best: ...  # noqa: D102


class RowWork(Protocol):
    """The O(N·D) work on rows, without a pass over tiles. The docstrings in `tiles.eager` define each function."""

    def matching_products(self, block: Block) -> Tensor: ...  # noqa: D102

    def finish_rows(  # noqa: D102
        self,
        sums: Tensor,
        out: Tensor | None,
        factor: Tensor,
        *,
        own: Tensor | None,
        partners: Tensor,
        dmatch: Tensor | None,
        precision: str,
    ) -> Tensor | None: ...


class Backend(Passes, RowWork, Protocol):
    """An engine: the passes over tiles, and the work on rows."""


def sums_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which an engine stores the sums of exponentials, for statistics of `dtype`."""
    return torch.float64 if backend == TRITON else dtype


def backend_for(name: str, block: Block) -> Backend:
    """Returns the engine with this name. An empty block always uses the PyTorch engine."""
    if name == EAGER or block.is_empty:
        from megabatch.tiles import eager

        return eager
    from megabatch.kernels import logsumexp as triton_backend

    return triton_backend
