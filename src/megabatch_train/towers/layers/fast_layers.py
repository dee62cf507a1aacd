"""Faster layers of compiled towers: patch embeddings as matmuls, and self-attention without copies.

Both have the parameters and the results of the layers that they replace in place.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import dispatch
from megabatch.integrations.open_clip import CausalTexts

# ----------------------------------------------------------------------------------------------------------------------
# Patch embeddings as matmuls.
#
# A vision transformer embeds patches by a convolution whose windows do not overlap. Each pixel is in one window, so the
# convolution equals one matmul of windows and weights, but cuDNN does not use this. For 1,024 images of ViT-B/32 in bf16 on an
# H200, the forward pass takes 8.4 ms as a convolution and 0.8 ms as a matmul. Forward and backward take 17.8 ms and 1.2 ms.


class PatchConv2d(nn.Conv2d):
    """A convolution whose windows do not overlap, computed as one matmul. Parameters and results equal `nn.Conv2d`."""

    def forward(self, input: Tensor) -> Tensor:  # (N, C, H, W) → (N, out_channels, rows, columns)
        """Returns the convolution as a view of (N, rows, columns, out_channels), which is the layout of tokens."""
        height, width = self.kernel_size
        if input.dim() != 4 or input.shape[1] != self.in_channels or input.shape[2] < height or input.shape[3] < width:
            return super().forward(input)  # handles an image without a batch, or raises PyTorch's error
        if torch.is_autocast_enabled(input.device.type) and input.dtype == torch.float32:
            input = input.to(torch.get_autocast_dtype(input.device.type))  # cast first, so that fewer bytes are rearranged
        rows, columns = input.shape[2] // height, input.shape[3] // width
        covered = input[:, :, : rows * height, : columns * width]
        windows = covered.view(len(input), self.in_channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        return F.linear(windows.flatten(3), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def replace_patch_convolutions(modules: Sequence[nn.Module]) -> None:
    """Replaces convolutions whose windows do not overlap by `PatchConv2d`, in place. Parameters and names do not change.

    Subclasses of `nn.Conv2d` are not replaced, because they may compute something else. Convolutions with windows of one pixel
    are not replaced either, because they rearrange nothing, and a matmul would only change the memory layout for later layers.

    Args:
        modules: the modules of the two sides, before they are wrapped or sharded. Both can be the same module.
    """
    for module in modules:
        for part in module.modules():
            if type(part) is nn.Conv2d and _windows_do_not_overlap(part):
                part.__class__ = PatchConv2d


def _windows_do_not_overlap(layer: nn.Conv2d) -> bool:
    windows = layer.kernel_size == layer.stride != (1, 1) and layer.padding in ((0, 0), "valid")
    return windows and (layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), 1, "zeros")


# ----------------------------------------------------------------------------------------------------------------------
# Self-attention from the output of the joint input projection.
#
# `nn.MultiheadAttention` copies queries, keys and values to three tensors, and adds a mask to the logits. `SelfAttention`
# reads them where the input projection wrote them:
#
# - Sequences of at most 128 tokens (patches of ViT-B-32, trimmed captions) use a Triton kernel. A program computes all
#   attention weights of one head of one sample, and its backward pass writes the gradient of the projection.
# - Other sequences use `scaled_dot_product_attention`. A causal mask becomes a flag, so flash attention can be used.


LONGEST = 128  # tokens of a sequence for the kernel, whose programs hold all attention weights of a head in registers
HEAD_DIMS = (32, 64, 128)
BFLOAT16 = "bfloat16"  # the kernel serves GPUs that have the other kernels in this precision


class SelfAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` that computes self-attention without copies. Parameters and results are equal."""

    causal: bool = False  # whether every mask of two dimensions is causal
    has_kernel: bool = False  # whether the kernel serves the device

    def forward(
        self,
        query: Tensor,  # (n, L, E)
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attention output, and the attention weights if they are needed."""
        masked = attn_mask is not None and not (self.causal and attn_mask.dim() == 2)
        joint = query is key and key is value and query.dim() == 3
        if not joint or need_weights or masked or key_padding_mask is not None:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        attended = attend(projected, self.num_heads, causal=attn_mask is not None, has_kernel=self.has_kernel)
        return self.out_proj(attended), None


def replace_self_attention(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Replaces each `nn.MultiheadAttention` that projects its inputs at once by `SelfAttention`, in place.

    Args:
        modules: the modules of the two sides, before they are wrapped or sharded. Both can be the same module.
        device: the device that they run on.
    """
    has_kernel = device.type == "cuda" and dispatch.why_not_triton(BFLOAT16, device) is None
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                continue  # these read the parameters of their attention
            for child in part.children():
                if type(child) is nn.MultiheadAttention and _projects_at_once(child):
                    child.__class__ = SelfAttention
        for part in module.modules():
            if isinstance(part, SelfAttention):
                part.has_kernel = has_kernel
            if (texts := CausalTexts.of(part)) is not None and _is_causal(texts.parts.attn_mask):
                for child in texts.parts.transformer.modules():
                    if isinstance(child, SelfAttention):
                        child.causal = True


def _projects_at_once(attention: nn.MultiheadAttention) -> bool:
    plain = attention.bias_k is None and not attention.add_zero_attn and not attention.dropout
    return attention.batch_first and attention.in_proj_weight is not None and plain


def _is_causal(mask: Tensor) -> bool:
    tokens = len(mask)
    return torch.equal(mask.float().cpu(), torch.full((tokens, tokens), float("-inf")).triu_(1))


def attend(
    projected: Tensor,  # (n, L, 3 · E)
    heads: int,
    *,
    causal: bool = False,
    has_kernel: bool = False,
) -> Tensor:  # (n, L, E)
    """Returns self-attention from the joint projection, by the kernel where it is faster.

    Args:
        projected: queries, keys and values of all heads, next to each other.
        heads: number of heads.
        causal: whether a token attends only to itself and to earlier tokens.
        has_kernel: whether the kernel serves the device.
    """
    tokens, dim = projected.shape[1], projected.shape[2] // 3 // heads
    if has_kernel and tokens <= LONGEST and dim in HEAD_DIMS and projected.dtype in (torch.bfloat16, torch.float16):
        output: Tensor = _short_attention(projected, heads, causal)
        return output
    q, k, v = projected.view(*projected.shape[:2], 3, heads, dim).permute(2, 0, 3, 1, 4)  # (n, heads, L, dim) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


# ----------------------------------------------------------------------------------------------------------------------
# The kernel, as an operator that `torch.compile` calls as a whole.


def _kernels() -> ModuleType:
    from megabatch_train.towers.layers import attention_kernels  # imports Triton

    return attention_kernels


@torch.library.custom_op("megabatch_train::short_attention", mutates_args=())
def _short_attention(projected: Tensor, heads: int, causal: bool) -> Tensor:
    output: Tensor = _kernels().forward(projected.contiguous(), heads, causal)
    return output


@_short_attention.register_fake
def _(projected: Tensor, heads: int, causal: bool) -> Tensor:
    return projected.new_empty(*projected.shape[:2], projected.shape[2] // 3)


@torch.library.custom_op("megabatch_train::short_attention_backward", mutates_args=())
def _short_attention_backward(projected: Tensor, gradient: Tensor, heads: int, causal: bool) -> Tensor:
    result: Tensor = _kernels().backward(projected.contiguous(), gradient.contiguous(), heads, causal)
    return result


@_short_attention_backward.register_fake
def _(projected: Tensor, gradient: Tensor, heads: int, causal: bool) -> Tensor:
    return torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)


def _save(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
    projected, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(projected)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (projected,) = ctx.saved_tensors
    return _short_attention_backward(projected, gradient, ctx.heads, ctx.causal), None, None


_short_attention.register_autograd(_differentiate, setup_context=_save)
