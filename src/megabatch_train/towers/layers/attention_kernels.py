"""Triton kernels of self-attention over short sequences. `fast_layers.py` describes when they run.

A program computes one head of one sample: L × L attention weights, with L at most 128, stay in registers. Matmuls accumulate in
float32, and weights are rounded to the dtype of the inputs before the second matmul, as in flash attention. The backward pass
computes the weights again, so it needs neither the output nor a logsumexp of the forward pass.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weights(q, k, row, column, tokens, scale_log2, CAUSAL: tl.constexpr):  # -> (BLOCK, BLOCK), rows sum to 1
    logits = tl.dot(q, tl.trans(k)) * scale_log2
    seen = (column < tokens)[None, :]
    if CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
    logits = tl.where(seen, logits, float("-inf"))
    weights = tl.exp2(logits - tl.max(logits, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _attention_kernel(
    projected, output, tokens, heads, scale_log2, DIM: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    row, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    width = heads * DIM
    inside = (row < tokens)[:, None]
    places = projected + (sample * tokens + row)[:, None] * (3 * width) + (head * DIM + d)[None, :]
    q = tl.load(places, mask=inside, other=0.0)
    k = tl.load(places + width, mask=inside, other=0.0)
    v = tl.load(places + 2 * width, mask=inside, other=0.0)
    weights = _weights(q, k, row, row, tokens, scale_log2, CAUSAL)
    result = tl.dot(weights.to(v.dtype), v)
    target = output + (sample * tokens + row)[:, None] * width + (head * DIM + d)[None, :]
    tl.store(target, result.to(v.dtype), mask=inside)


@triton.jit
def _attention_gradient_kernel(
    projected, gradient, result, tokens, heads, scale_log2, scale, DIM: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    row, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    width = heads * DIM
    inside = (row < tokens)[:, None]
    offsets = (sample * tokens + row)[:, None] * (3 * width) + (head * DIM + d)[None, :]
    q = tl.load(projected + offsets, mask=inside, other=0.0)
    k = tl.load(projected + offsets + width, mask=inside, other=0.0)
    v = tl.load(projected + offsets + 2 * width, mask=inside, other=0.0)
    places = gradient + (sample * tokens + row)[:, None] * width + (head * DIM + d)[None, :]
    do = tl.load(places, mask=inside, other=0.0)  # rows beyond the sequence add nothing to dk and dv
    weights = _weights(q, k, row, row, tokens, scale_log2, CAUSAL)
    dv = tl.dot(tl.trans(weights.to(v.dtype)), do)
    tl.store(result + offsets + 2 * width, dv.to(v.dtype), mask=inside)
    dweights = tl.dot(do, tl.trans(v))
    dlogits = weights * (dweights - tl.sum(weights * dweights, 1)[:, None]) * scale
    dlogits = dlogits.to(v.dtype)
    tl.store(result + offsets, tl.dot(dlogits, k).to(v.dtype), mask=inside)
    tl.store(result + offsets + width, tl.dot(tl.trans(dlogits), q).to(v.dtype), mask=inside)


def _block(tokens: int) -> int:
    return max(16, int(triton.next_power_of_2(tokens)))


# Warps of a program by the block of tokens, measured on an H200: forward, backward.
_WARPS = {16: (1, 2), 32: (1, 2), 64: (4, 4), 128: (8, 4)}


def forward(projected: Tensor, heads: int, causal: bool) -> Tensor:  # (n, L, 3 · E) -> (n, L, E)
    """Returns the attention output."""
    samples, tokens, triple = projected.shape
    dim, block = triple // 3 // heads, _block(tokens)
    output = torch.empty(samples, tokens, triple // 3, dtype=projected.dtype, device=projected.device)
    if output.numel():
        scale_log2 = math.log2(math.e) / math.sqrt(dim)
        constants = {"DIM": dim, "BLOCK": block, "CAUSAL": causal, "num_warps": _WARPS[block][0]}
        _attention_kernel[(samples * heads,)](projected, output, tokens, heads, scale_log2, **constants)
    return output


def backward(projected: Tensor, gradient: Tensor, heads: int, causal: bool) -> Tensor:  # (n, L, 3 · E)
    """Returns the gradient of the projection."""
    samples, tokens, triple = projected.shape
    dim, block = triple // 3 // heads, _block(tokens)
    result = torch.empty_like(projected)
    if result.numel():
        scale = 1 / math.sqrt(dim)
        constants = {"DIM": dim, "BLOCK": block, "CAUSAL": causal, "num_warps": _WARPS[block][1]}
        _attention_gradient_kernel[(samples * heads,)](
            projected, gradient, result, tokens, heads, math.log2(math.e) * scale, scale, **constants
        )
    return result
