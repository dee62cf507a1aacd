"""Choices and defaults of a plan. Imports nothing large, so that the help of `megabatch plan` appears at once."""

import math

PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
OPTIMIZERS = {"adamw": 2, "lion": 1, "sgd": 1, "none": 0}  # float32 states per parameter
SHARDINGS = ("none", "optimizer", "fsdp")
HOST_MEMORY = 2 * 2**40  # bytes of a node; assumed
STAND_IN = "PARAMETERS:TOKENSxWIDTH for each tower, such as 304M:257x1024,124M:77x768"


def number(text: str) -> int:
    """ "304M", "1.2B", "64k" or "1,048,576" as a number; k, M and B are thousands, millions and billions."""
    units = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
    bare = text.replace(",", "").replace("_", "").strip()
    try:
        value = float(bare[:-1]) * units[bare[-1]] if bare[-1:] in units else float(bare)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"must be a number of 1 or more, such as 304M, got {text!r}")
    return round(value)
