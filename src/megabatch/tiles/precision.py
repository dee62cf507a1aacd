"""In which type the products are computed: inputs are rounded to it once, and everything after that is exact or fp32.

| inputs                     | products see              | sums are kept in |
|----------------------------|---------------------------|------------------|
| float64                    | float64                   | float64          |
| float32                    | float32, IEEE ("highest") | float32          |
| float32, "high", "medium"  | TF32, rounded to nearest  | float32          |
| float32 under autocast     | the autocast type         | float32          |
| bfloat16, float16          | the inputs as they are    | float32          |

"highest", "high" and "medium" are `torch.get_float32_matmul_precision()`. The rounding is done here, explicitly, so that the
same call means the same thing on every device: a product of TF32 values is the same whether an IEEE or a TF32 unit forms it.
"""

import torch
from torch import Tensor

FLOAT64 = "float64"
FLOAT32 = "float32"
TF32 = "tf32"
BFLOAT16 = "bfloat16"
FLOAT16 = "float16"
BY_SETTING = "by setting"  # float32 or TF32, to be settled when the work is done

_OF_DTYPE = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_OF_MATMUL = {"highest": FLOAT32, "high": TF32, "medium": TF32}
HALF_DTYPE = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}

SUPPORTED_DTYPES = tuple(_OF_DTYPE)

# log1p(exp(s)) − s is below one rounding of s from here on, in float64 as well.
SOFTPLUS_IS_IDENTITY = 50.0


def compute_precision(dtype: torch.dtype, device_type: str) -> str:
    """The precision in which inputs of `dtype` are multiplied, under the autocast state and matmul setting in force now.

    The compiler cannot read the setting; a compiled call reads it when it runs (`by_matmul_setting`).
    """
    if dtype != torch.float32:
        return _OF_DTYPE[dtype]
    if torch.is_autocast_enabled(device_type):
        return _OF_DTYPE[torch.get_autocast_dtype(device_type)]
    return BY_SETTING if torch.compiler.is_compiling() else by_matmul_setting(BY_SETTING, device_type)


def by_matmul_setting(precision: str, device_type: str) -> str:
    """`precision`, or what PyTorch's settings say of float32 products on this kind of device now."""
    if precision != BY_SETTING:
        return precision
    try:
        return _OF_MATMUL[torch.get_float32_matmul_precision()]
    except RuntimeError:  # it refuses to answer once the newer settings, one for each kind of device, have been used
        backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        return FLOAT32 if backend.matmul.fp32_precision in ("ieee", "none") else TF32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics, losses and gradient sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(precision: str, device_type: str) -> torch.dtype:
    """The type in which rounded inputs are handed to the matrix product.

    CUDA multiplies half-precision inputs into an fp32 result. Elsewhere the result would be rounded to the inputs' type,
    so there the rounded values are widened first: the products are the same numbers.
    """
    if precision == FLOAT64:
        return torch.float64
    if device_type == "cuda" and precision in HALF_DTYPE:
        return HALF_DTYPE[precision]
    return torch.float32


def rounded(values: Tensor, precision: str) -> Tensor:
    """`values` as the products see them: rounded once to `precision`, held in `product_dtype`."""
    if precision == TF32:
        return round_to_tf32(values)
    if precision in HALF_DTYPE:
        values = values.to(HALF_DTYPE[precision])
    return values.to(product_dtype(precision, values.device.type))


def round_to_tf32(values: Tensor) -> Tensor:
    """Float32 `values` with the 13 lowest bits of the significand rounded away, to nearest; NaN stays NaN."""
    bits = values.view(torch.int32)
    nearest = (bits + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(values.isnan(), values, nearest)


def round_to_tf32_(values: Tensor, spare: Tensor) -> Tensor:
    """The same in place, with one buffer of the same size, for values far from overflow: NaN stays NaN without a look at it."""
    large = torch.mul(values, 2**13 + 1, out=spare)
    return torch.sub(large, torch.sub(large, values, out=values), out=values)


def multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, accumulated in the type of `out`."""
    a, b = _widened(a, b, out)
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, accumulated in the type of `out`."""
    a, b = _widened(a, b, out)
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def _widened(a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Only CUDA multiplies into a wider type."""
    return (a, b) if out.device.type == "cuda" else (a.to(out.dtype), b.to(out.dtype))
