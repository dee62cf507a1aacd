"""The description of the logits that a pass computes (`Block`), and the precision of their matmuls."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.tiles.sums import Best, LogSum, SoftSum

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
# "highest", "high" and "medium" are `torch.get_float32_matmul_precision()`. Inputs are rounded explicitly, so that a call
# means the same on every device: products of TF32 values are the same on IEEE and on TF32 units.

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

# log1p(exp(s)) − s is below one rounding of s from here on, in float64 as well.
SOFTPLUS_IS_IDENTITY = 50.0


def autocast_device(x: Tensor) -> str:
    """The kind of device whose autocast applies to x. The meta device, of shapes without values, has none: there, the CPU's."""
    return "cpu" if x.is_cpu or x.is_meta else x.device.type


def compute_precision(x: Tensor) -> str:
    """The precision of products of inputs like x under the current autocast state and matmul setting.

    torch.compile cannot trace reading the setting; a compiled call reads it when it runs (`by_matmul_setting`).
    """
    dtype, device_type = x.dtype, autocast_device(x)
    if dtype != torch.float32:
        return _OF_DTYPE[dtype]
    if torch.is_autocast_enabled(device_type):
        return _OF_DTYPE[torch.get_autocast_dtype(device_type)]
    return BY_SETTING if torch.compiler.is_compiling() else by_matmul_setting(BY_SETTING, device_type)


def by_matmul_setting(precision: str, device_type: str) -> str:
    """`precision`, with `BY_SETTING` replaced by PyTorch's current setting for float32 products on this device type."""
    if precision != BY_SETTING:
        return precision
    try:
        return _OF_MATMUL[torch.get_float32_matmul_precision()]
    except RuntimeError:  # raised once the newer settings, one for each device type, have been used
        backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        return FLOAT32 if backend.matmul.fp32_precision in ("ieee", "none") else TF32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics, losses and gradient sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(precision: str, device_type: str) -> torch.dtype:
    """The dtype of the rounded inputs of a matrix product.

    CUDA multiplies half-precision inputs into an fp32 result. Other devices would round the result to the inputs' type, so the
    rounded inputs are widened first; the products are the same numbers.
    """
    if precision == FLOAT64:
        return torch.float64
    if device_type == "cuda" and precision in HALF_DTYPE:
        return HALF_DTYPE[precision]
    return torch.float32


def round_to_precision(values: Tensor, precision: str) -> Tensor:
    """`values` rounded once to `precision`, in `product_dtype`."""
    if precision == FLOAT32:
        return values
    if precision == TF32:
        return round_to_tf32(values)
    for dtype in (HALF_DTYPE.get(precision), product_dtype(precision, values.device.type)):
        if dtype is not None and values.dtype != dtype:  # a conversion that changes nothing takes the host 2 µs
            values = values.to(dtype)
    return values


def round_to_tf32(values: Tensor) -> Tensor:
    """Float32 `values` rounded to the nearest TF32 value: 13 bits of the significand fewer. NaN stays NaN."""
    bits = values.view(torch.int32)
    nearest = (bits + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(values.isnan(), values, nearest)


def round_to_tf32_(values: Tensor, spare: Tensor) -> Tensor:
    """`round_to_tf32` in place, with a buffer of the same size, for values far from overflow. NaN stays NaN by arithmetic.

    A value halfway between two TF32 values may go to the other neighbour than in `round_to_tf32`.
    """
    large = torch.mul(values, 2**13 + 1, out=spare)
    return torch.sub(large, torch.sub(large, values, out=values), out=values)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. Its memory is allocated by the product itself, which takes the host less time than two calls."""
    if a.dtype == b.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, accumulated in the type of `out`."""
    a, b = _widen(a, b, out)
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, accumulated in the type of `out`."""
    a, b = _widen(a, b, out)
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def _widen(a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """a and b in the dtype of `out`, except on CUDA, which multiplies into a wider type itself."""
    return (a, b) if out.device.type == "cuda" else (a.to(out.dtype), b.to(out.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# A block of similarities and its gradients: what the passes over tiles take and return.


@dataclass(frozen=True)
class Block:
    """s_ij = scale·⟨x_i, y_j⟩ + row_bias_i + col_bias_j, described but never held.

    Pairs with equal ids are left out of every sum, or all others are if `only_equal_ids` is set (kernels do not know that), and
    so is the main diagonal when `skip_diagonal` is set. If ids are positives, pairs with equal ones are not left out of sums of
    softplus, but enter them as −s_ij. A limit leaves out the pairs whose product ⟨x_i, y_j⟩ is above it; where there is a
    second model, its similarity is what is compared.
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
    limit: Tensor | None = None  # (N,) in the type of what it is compared with
    second_model: "Block | None" = None  # the same rows and columns as another model sees them: a guide, or a teacher
    only_equal_ids: bool = False
    positives_within: bool = False  # pairs that attract are in the sums, where the scale's gradient nearly cancels

    @classmethod
    def of(cls, x: Tensor, y: Tensor, scale: Tensor | None, precision: str, **known: Any) -> "Block":
        """The block of an operator: the scale in the type of similarities, 1 if None; the precision settled for the device."""
        dtype = accumulator_dtype(x.dtype)
        factor = torch.ones((), dtype=dtype, device=x.device) if scale is None else scale.to(dtype)
        return cls(x, y, factor, by_matmul_setting(precision, x.device.type), **known)

    @property
    def N(self) -> int:
        """Rows."""
        return self.x.shape[0]

    @property
    def M(self) -> int:
        """Columns."""
        return self.y.shape[0]

    @property
    def D(self) -> int:
        """Width."""
        return self.x.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no similarity in it."""
        return self.N == 0 or self.M == 0

    @property
    def dtype(self) -> torch.dtype:
        """The type of similarities, statistics and gradient sums."""
        return accumulator_dtype(self.x.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """A fresh accumulator."""
        return torch.zeros(shape, dtype=self.dtype, device=self.x.device)


class Needs(NamedTuple):
    """Which gradients are asked for. The order is that of the tensors every operator takes first."""

    dx: bool
    dy: bool
    dscale: bool
    drow_bias: bool = False
    dcol_bias: bool = False


class ColumnGradients(NamedTuple):
    """Sums over rows that a gradient pass adds to; None where not needed."""

    dy: Tensor | None  # (M, D), not yet multiplied by the scale
    dcol_bias: Tensor | None  # (M,)

    def zeros(self, columns: int) -> "ColumnGradients":
        """Fresh accumulators of the same kind for another block of columns."""
        return ColumnGradients(*(None if part is None else part.new_zeros(columns, *part.shape[1:]) for part in self))

    def tensors(self) -> list[Tensor]:
        """The accumulators that exist, as they travel."""
        return [part for part in self if part is not None]


class RowGradients(NamedTuple):
    """What a gradient pass has finished: some rows, summed over all columns of the block."""

    rows: slice
    dx: Tensor | None  # (n, D), not yet multiplied by the scale
    dscale: Tensor | None  # (n,) Σ_j g_ij·⟨x_i, y_j⟩; None if it is to be taken from dx
    drow_bias: Tensor | None  # (n,)


class RankTargets(NamedTuple):
    """The entry of each row and of each column whose rank is counted. Rows and columns are numbered over the whole batch."""

    row_match: Tensor  # (N,) the similarity of each row's entry
    col_match: Tensor  # (M,)
    row_target: Tensor  # (N,) int64, the column of each row's entry
    col_target: Tensor  # (M,) int64, the row of each column's entry
    row_index: Tensor  # (N,) int64, the number of each row
    col_index: Tensor  # (M,) int64


def equal_ids(row_ids: Tensor, col_ids: Tensor) -> Tensor:  # (n,) and (m,), or (n, 2) and (m, 2) -> (n, m) bool
    """Mask of the pairs with equal ids. Of ids in two columns, one column has to be equal."""
    if row_ids.dim() == 1:
        return row_ids[:, None] == col_ids
    return (row_ids[:, :1] == col_ids[:, 0]) | (row_ids[:, 1:] == col_ids[:, 1])


def windows(whole: int | slice, size: int) -> Iterator[slice]:
    """[0, whole), or the rows or columns of a slice, cut into windows of `size`; the last may be shorter."""
    start, stop = (0, whole) if isinstance(whole, int) else (whole.start, whole.stop)
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


def part(values: Tensor, window: slice) -> Tensor:
    """values[window], and `values` itself if that is all of it: a view takes the host several microseconds."""
    return values if window.start == 0 and window.stop == len(values) else values[window]


# ----------------------------------------------------------------------------------------------------------------------
# Logits of the matching pairs (i, i), rounded as in the tiles.


def matching_similarities(block: Block, products: Tensor) -> Tensor:  # (N,)
    """s_ii, from the products ⟨x_i, y_i⟩."""
    out = products * block.scale
    if block.row_bias is not None:
        out.add_(block.row_bias)
    if block.col_bias is not None:
        out.add_(block.col_bias)
    return out


def match_logits(block: Block, products: Tensor, *, by_kernels: bool) -> Tensor:  # (N,)
    """s_ii in float64, from the products ⟨x_i, y_i⟩, rounded as a backend rounds the logits of its tiles.

    So equal products have equal logits, and their difference is 0 at every scale.
    """
    if not by_kernels or block.second_model is not None:  # with a second model, kernels read tiles that are rounded like these
        return matching_similarities(block, products).double()
    out = round_logits(products, block.scale, block.precision, by_kernels=True)
    for bias in (block.row_bias, block.col_bias):
        if bias is not None:
            out.add_(bias)
    return out


def round_logits(products: Tensor, scale: Tensor, precision: str, *, by_kernels: bool) -> Tensor:  # (K,), ()
    """scale·products in float64, rounded as a backend rounds the logits of its tiles.

    PyTorch operations round to the type of sums. Kernels keep all digits of the logits, but round scale·log2 e to float32 for
    products of half precision (`kernels.operands.kernel_options`). A logit beyond the range of the type is infinite.
    """
    factor = scale.to(products.dtype)
    rounded_logits = (products * factor).double()
    if not by_kernels:
        return rounded_logits
    factor = factor.double()
    if precision in HALF_DTYPE:
        factor = (factor / math.log(2)).float().double() * math.log(2)
    return torch.where(rounded_logits.isfinite(), products.double() * factor, rounded_logits)


def targets_on_the_diagonal(block: Block, products: Tensor) -> RankTargets:
    """The matching pairs (i, i), from the products ⟨x_i, y_i⟩."""
    match, index = matching_similarities(block, products), torch.arange(block.N, device=block.x.device)
    return RankTargets(match, match, index, index, index, index)


# ----------------------------------------------------------------------------------------------------------------------
# The two engines behind one protocol. `dispatch` chooses one of them.

EAGER: Final = "eager"
TRITON: Final = "triton"


class Passes(Protocol):
    """The passes over the tiles of a block. `eager` says what each of them means."""

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
    """What is done row by row, without a pass over tiles. `eager` defines each of them."""

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
    """A backend: passes over tiles and work on rows."""


def sums_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """In which type a backend keeps the sums of exponentials, for statistics of `dtype`."""
    return torch.float64 if backend == TRITON else dtype


def backend_for(name: str, block: Block) -> Backend:
    """A backend by its name; a block without similarities needs no kernels."""
    if name == EAGER or block.is_empty:
        from megabatch.tiles import eager

        return eager
    from megabatch.kernels import logsumexp as triton_backend

    return triton_backend
