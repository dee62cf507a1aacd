"""The arguments of `megabatch plan`."""

import argparse
import sys
from pathlib import Path

from megabatch.commands.arguments.options import whole
from megabatch.planning import choices, gpus

BATCH = 32768
DESCRIPTION = """
Estimates a model's largest batch on given GPUs with four losses, its memory and the time of a
step, without running on them. The first line says whether the loss or the encoder is the limit.

  megabatch plan --model open_clip:ViT-L-14 --gpus 8xA800-80GB
  megabatch plan --model open_clip:ViT-B-16 --gpus 8xH100 --nodes 4 --batch 1M --output plan
  megabatch plan --model hf:Qwen/Qwen3-Embedding-8B --lora 16 --length 512 --gpus 1xH200
  megabatch plan --model 304M:257x1024,124M:77x768 --gpus 8x80GB@312TFLOPS --sharding fsdp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch plan`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    names = ", ".join(gpu.name for gpu in gpus.CATALOGUE)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help=f"small, open_clip:MODEL, hf:NAME, hf:IMAGES+TEXTS, hf-config:FOLDER, or {choices.STAND_IN}",
    )
    add("--gpus", required=True, metavar="8xNAME", help=f"GPUs of a node: {names}; or memory and dense rate, 8x80GB@312TFLOPS")
    add("--nodes", type=whole, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--batch", type=_count, default=BATCH, metavar="B", help=f"pairs; 64k is 65536, 1M is 1048576 (default: {BATCH})")
    add("--chunk", type=whole, metavar="C", help="samples encoded at once (default: activations take a fifth of a GPU)")
    add("--image-size", type=whole, metavar="PIXELS", help="side length of an image (default: the model's own)")
    add("--length", type=whole, metavar="TOKENS", help="tokens of a text (default: the model's own)")
    add("--lora", type=whole, default=0, metavar="RANK", help="train adapters of this rank in place of an hf: model's weights")
    checkpointing = "compute activations again in the backward pass: larger chunks, one more forward pass"
    add("--checkpointing", action="store_true", help=checkpointing)
    add("--precision", choices=list(choices.PRECISIONS), default="bf16", help="bf16 and fp16: autocast (default: %(default)s)")
    add("--optimizer", choices=list(choices.OPTIMIZERS), default="adamw", help="default: %(default)s")
    sharding = "none: DDP; optimizer: ZeRO 1; fsdp: weights, too (default: %(default)s)"
    add("--sharding", choices=list(choices.SHARDINGS), default="none", help=sharding)
    add("--inside", type=_positive, metavar="GB/s", help="one-way bandwidth inside a node (default: the GPU's own)")
    add(
        "--between",
        type=_positive,
        metavar="GB/s",
        help="one-way bandwidth between nodes (default: 50, or 12.5 for PCIe cards)",
    )
    add("--one-link", action="store_true", help="one link from a node to the others instead of one for each GPU")
    add(
        "--host-memory",
        type=_positive,
        default=choices.HOST_MEMORY / 2**30,
        metavar="GiB",
        help="host memory of a node (default: %(default).0f)",
    )
    rate = "share of the GPU's rate that {} reach (default: %(default)s)"
    add("--encoder-efficiency", type=_share, default=gpus.ENCODER_EFFICIENCY, metavar="SHARE", help=rate.format("encoders"))
    add("--loss-efficiency", type=_share, default=gpus.LOSS_EFFICIENCY, metavar="SHARE", help=rate.format("losses"))
    files = "folder for plan.txt, plan.json, plan.png and plan.svg (default: none is written)"
    add("--output", type=Path, metavar="FOLDER", help=files)


def _count(text: str) -> int:
    units = {"k": 2**10, "M": 2**20}
    try:
        value = float(text[:-1].replace(",", "")) * units[text[-1]] if text[-1:] in units else choices.number(text)
        return choices.number(str(value))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of 1 or more, such as 32768 or 1M, got {text!r}") from None


def _positive(text: str, most: float = sys.float_info.max, told: str = "above 0") -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"must be a number {told}, got {text!r}")
    return value


def _share(text: str) -> float:
    return _positive(text, 1.0, "above 0 and at most 1")
