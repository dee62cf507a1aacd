"""`megabatch plan`: largest batch, memory and time of a model on given GPUs, estimated without running on them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megabatch import extras
from megabatch_train.commands import describe, whole
from megabatch_train.planning import gpus

if TYPE_CHECKING:
    from megabatch_train.planning import step


BATCH = 32768
DESCRIPTION = """
Estimates a model's largest batch on given GPUs with four losses, its memory and the time of a
step, without running on them. The first line says whether the loss or the encoder is the limit.

  megabatch plan --model open_clip:ViT-L-14 --gpus 8xA800-80GB
  megabatch plan --model open_clip:ViT-B-16 --gpus 8xH100 --nodes 4 --batch-size 1M --output plan
  megabatch plan --model hf:Qwen/Qwen3-Embedding-8B --lora 16 --length 512 --gpus 1xH200
  megabatch plan --model 304M:257x1024,124M:77x768 --gpus 8x80GB@312TFLOPS --sharding fsdp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch plan`."""
    describe(parser, DESCRIPTION)
    names = ", ".join(gpu.name for gpu in gpus.CATALOGUE)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help=f"small, open_clip:MODEL, hf:NAME, hf:IMAGES+TEXTS, hf-config:FOLDER, or {gpus.STAND_IN}",
    )
    add("--gpus", required=True, metavar="8xNAME", help=f"GPUs of a node: {names}; or memory and dense rate, 8x80GB@312TFLOPS")
    add("--nodes", type=whole, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--batch-size", type=_count, default=BATCH, metavar="B", help=f"pairs; 64k is 65536, 1M is 1048576 (default: {BATCH})")
    add("--chunk-size", type=whole, metavar="C", help="samples encoded at once (default: activations take a fifth of a GPU)")
    add("--image-size", type=whole, metavar="PIXELS", help="side length of an image (default: the model's own)")
    add("--length", type=whole, metavar="TOKENS", help="tokens of a text (default: the model's own)")
    add("--lora", type=whole, default=0, metavar="RANK", help="train adapters of this rank in place of an hf: model's weights")
    checkpointing = "compute activations again in the backward pass: larger chunks, one more forward pass"
    add("--checkpointing", action="store_true", help=checkpointing)
    add("--precision", choices=list(gpus.PRECISIONS), default="bf16", help="bf16 and fp16: autocast (default: %(default)s)")
    add("--optimizer", choices=list(gpus.OPTIMIZERS), default="adamw", help="default: %(default)s")
    sharding = "none: DDP; optimizer: ZeRO 1; fsdp: weights, too (default: %(default)s)"
    add("--sharding", choices=list(gpus.SHARDINGS), default="none", help=sharding)
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
        default=gpus.HOST_MEMORY / 2**30,
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
        value = float(text[:-1].replace(",", "")) * units[text[-1]] if text[-1:] in units else gpus.number(text)
        return gpus.number(str(value))
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


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 2 if an argument is not understood."""
    import torch

    from megabatch_train.planning import models, report, step

    try:
        setup = _setup(args)
        frozen = step.AUTOCAST.get(setup.precision, torch.float32)
        model = models.model(args.model, image_size=args.image_size, length=args.length, lora=args.lora, frozen=frozen)
        plan = step.make(model, setup, args.chunk_size, checkpointing=args.checkpointing)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"megabatch plan: {error}", file=sys.stderr)
        return 2
    text = report.text(plan, args.batch_size)
    print(text, end="")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "plan.txt").write_text(text)
        (args.output / "plan.json").write_text(json.dumps(report.data(plan, args.batch_size), indent=1) + "\n")
        print(f"Written to {args.output}: plan.txt, plan.json" + _plots(plan, args))
    return 0


def _plots(plan: step.Plan, args: argparse.Namespace) -> str:
    from megabatch_train.display.plots import available
    from megabatch_train.planning import report

    if not available():
        return f"; no plots, because matplotlib is not installed ({extras.install_command('matplotlib')})"
    report.draw(plan, args.batch_size, args.output / "plan.png", args.output / "plan.svg")
    return ", plan.png, plan.svg"


def _setup(args: argparse.Namespace) -> step.Setup:
    from megabatch_train.planning import step

    per_node, gpu = gpus.parse(args.gpus)
    if args.inside is not None:
        gpu = replace(gpu, inside=args.inside, to_one=None)
    if args.between is not None:
        gpu = replace(gpu, between=args.between)
    if args.one_link:
        gpu = replace(gpu, rail_each=False)
    return step.Setup(
        gpu=gpu,
        per_node=per_node,
        nodes=args.nodes,
        precision=args.precision,
        optimizer=args.optimizer,
        sharding=args.sharding,
        host_memory=args.host_memory * 2**30,
        encoder_efficiency=args.encoder_efficiency,
        loss_efficiency=args.loss_efficiency,
    )
