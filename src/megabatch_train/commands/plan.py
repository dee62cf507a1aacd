"""`megabatch plan`: estimates the largest batch, the memory and the time of a model on given GPUs, without these GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megabatch import extras
from megabatch_train.commands import CHUNK_HELP, LORA_HELP, add_json, describe, parse_positive_int, print_json
from megabatch_train.planning import gpus

if TYPE_CHECKING:
    from megabatch_train.planning import step


BATCH = 32768
DESCRIPTION = """
Estimates the largest batch of a model on given GPUs with four losses, and the memory and the time
of a step. The GPUs are not needed. The first line of the output says whether the loss or the
encoder is the limit.

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
        help=f"name of a model (see `megabatch help models`), or {gpus.STAND_IN}",
    )
    add(
        "--gpus",
        required=True,
        metavar="8xNAME",
        help=f"number and name of the GPUs of a node, or memory and dense rate, as in 8x80GB@312TFLOPS; names: {names}",
    )
    add("--nodes", type=parse_positive_int, default=1, metavar="N", help="number of nodes (default: 1)")
    add(
        "--batch-size",
        type=_parse_batch_size,
        default=BATCH,
        metavar="B",
        help=f"pairs in a step, over all processes; 64k is 65536, 1M is 1048576 (default: {BATCH})",
    )
    add(
        "--chunk-size",
        type=parse_positive_int,
        metavar="C",
        help=f"{CHUNK_HELP} (default: activations use a fifth of the GPU memory)",
    )
    add(
        "--image-size",
        type=parse_positive_int,
        metavar="PIXELS",
        help="side length of images in pixels (default: from the model)",
    )
    add(
        "--patch-dropout",
        type=_parse_dropout,
        default=0.0,
        metavar="X",
        help="fraction of the patches of an image that a step drops (default: none)",
    )
    add("--length", type=parse_positive_int, metavar="TOKENS", help="length of texts in tokens (default: from the model)")
    add(
        "--lora",
        type=parse_positive_int,
        default=0,
        metavar="RANK",
        help=f"{LORA_HELP} (default: none)",
    )
    checkpointing = "use activation checkpointing: larger chunks, but one more forward pass"
    add("--checkpointing", action="store_true", help=checkpointing)
    add(
        "--precision",
        choices=list(gpus.PRECISIONS),
        default="bf16",
        help="dtype of the matmuls; bf16 and fp16 use autocast (default: %(default)s)",
    )
    add(
        "--optimizer",
        choices=list(gpus.OPTIMIZERS),
        default="adamw",
        help="optimizer, whose state takes memory (default: %(default)s)",
    )
    sharding = "what ranks shard: none (DDP), optimizer (ZeRO 1), or fsdp (weights, too) (default: %(default)s)"
    add("--sharding", choices=list(gpus.SHARDINGS), default="none", help=sharding)
    add(
        "--inside",
        type=_parse_positive,
        metavar="GB/s",
        help="one-way bandwidth of a GPU inside a node, in GB/s (default: from the GPU)",
    )
    add(
        "--between",
        type=_parse_positive,
        metavar="GB/s",
        help="one-way bandwidth of a link between nodes, in GB/s (default: 50, or 12.5 for PCIe cards)",
    )
    add("--one-link", action="store_true", help="each node has one link to the other nodes (default: one link for each GPU)")
    add(
        "--host-memory",
        type=_parse_positive,
        default=gpus.HOST_MEMORY / 2**30,
        metavar="GiB",
        help="host memory of a node, in GiB (default: %(default).0f)",
    )
    rate = "fraction of the peak rate of the GPU that {} reach (default: %(default)s)"
    add(
        "--encoder-efficiency",
        type=_parse_fraction,
        default=gpus.ENCODER_EFFICIENCY,
        metavar="SHARE",
        help=rate.format("encoders"),
    )
    add("--loss-efficiency", type=_parse_fraction, default=gpus.LOSS_EFFICIENCY, metavar="SHARE", help=rate.format("losses"))
    files = "folder for plan.txt, plan.json, plan.png and plan.svg (default: print only)"
    add("--output", type=Path, metavar="FOLDER", help=files)
    add_json(parser, "the plan")


def _parse_batch_size(text: str) -> int:
    units = {"k": 2**10, "M": 2**20}
    try:
        value = float(text[:-1].replace(",", "")) * units[text[-1]] if text[-1:] in units else gpus.number(text)
        return gpus.number(str(value))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of 1 or more, such as 32768 or 1M, got {text!r}") from None


def _parse_positive(text: str, largest: float = sys.float_info.max, condition: str = "above 0") -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= largest:
        raise argparse.ArgumentTypeError(f"must be a number {condition}, got {text!r}")
    return value


def _parse_fraction(text: str) -> float:
    return _parse_positive(text, 1.0, "above 0 and at most 1")


def _parse_dropout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0 and less than 1, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 2 if an argument is not valid."""
    import torch

    from megabatch_train.planning import models, step

    try:
        setup = _build_setup(args)
        frozen = step.AUTOCAST.get(setup.precision, torch.float32)
        sizes = {"image_size": args.image_size, "length": args.length, "patch_dropout": args.patch_dropout}
        model = models.model(args.model, lora=args.lora, frozen=frozen, **sizes)
        plan = step.make(model, setup, args.chunk_size, checkpointing=args.checkpointing)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"megabatch plan: {error}", file=sys.stderr)
        return 2
    text, values = step.format_plan(plan, args.batch_size), step.plan_values(plan, args.batch_size)
    if args.json:
        print_json(values)
    else:
        print(text, end="")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "plan.txt").write_text(text)
        (args.output / "plan.json").write_text(json.dumps(values, indent=1) + "\n")
        written = f"Written to {args.output}: plan.txt, plan.json" + _draw_plots(plan, args)
        print(written, file=sys.stderr if args.json else sys.stdout)
    return 0


def _draw_plots(plan: step.Plan, args: argparse.Namespace) -> str:
    from megabatch_train.display.plots import available
    from megabatch_train.planning import step

    if not available():
        return f"; no plots, because matplotlib is not installed ({extras.install_command('matplotlib')})"
    step.draw_plan(plan, args.batch_size, args.output / "plan.png", args.output / "plan.svg")
    return ", plan.png, plan.svg"


def _build_setup(args: argparse.Namespace) -> step.Setup:
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
