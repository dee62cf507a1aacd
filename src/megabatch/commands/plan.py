"""What fits, and how long does it take? A model's largest batch on given GPUs, its memory and time, before anything is run."""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from megabatch.commands.options import whole
from megabatch.planning import gpus, step
from megabatch.planning.models import STAND_IN, number

BATCH = 32768
DESCRIPTION = """
What fits, and how long does it take? A model's largest batch on given GPUs with four losses, its
memory and the time of a step, before anything is run. The first line says whether it is the loss
or the encoder that is in the way.

  megabatch plan --model open_clip:ViT-L-14 --gpus 8xA800-80GB
  megabatch plan --model open_clip:ViT-B-16 --gpus 8xH100 --nodes 4 --batch 1M --output plan
  megabatch plan --model 304M:257x1024,124M:77x768 --gpus 8x80GB@312TFLOPS --sharding fsdp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `megabatch plan`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    names = ", ".join(gpu.name for gpu in gpus.CATALOGUE)
    add = parser.add_argument
    add("--model", required=True, help=f"small, open_clip:MODEL, hf:NAME, hf:IMAGES+TEXTS, hf-config:FOLDER, or {STAND_IN}")
    add("--gpus", required=True, metavar="8xNAME", help=f"of a node: {names}; or memory and dense rate, 8x80GB@312TFLOPS")
    add("--nodes", type=whole, default=1, metavar="N", help="of so many GPUs each (1)")
    add(
        "--batch",
        type=_count,
        default=BATCH,
        metavar="B",
        help=f"pairs, for memory and time ({BATCH}); 64k is 65536, 1M is 1048576",
    )
    add(
        "--chunk",
        type=whole,
        metavar="C",
        help="samples encoded at once (the largest whose activations take a fifth of a GPU)",
    )
    add("--image-size", type=whole, metavar="PIXELS", help="of a side (the model's own)")
    add("--length", type=whole, metavar="TOKENS", help="of a text (the model's own)")
    add(
        "--precision",
        choices=list(step.PRECISIONS),
        default="bf16",
        help="bf16 and fp16 are autocast; weights are float32 (bf16)",
    )
    add("--optimizer", choices=list(step.OPTIMIZERS), default="adamw", help="(adamw)")
    add(
        "--sharding",
        choices=list(step.SHARDINGS),
        default="none",
        help="none is DDP; optimizer is ZeRO 1; fsdp shards weights, too",
    )
    add("--inside", type=_positive, metavar="GB/s", help="one way, of a GPU to others of its node (the GPU's own)")
    add("--between", type=_positive, metavar="GB/s", help="one way, of a link between nodes (50, or 12.5 for PCIe cards)")
    add("--one-link", action="store_true", help="a node has one link to the others, not one for each GPU")
    add("--host-memory", type=_positive, metavar="GiB", help=f"of a node, for inputs there ({step.HOST_MEMORY / 2**30:.0f})")
    add(
        "--encoder-efficiency",
        type=_share,
        default=gpus.ENCODER_EFFICIENCY,
        metavar="SHARE",
        help="of the GPU's rate (%(default)s)",
    )
    add("--loss-efficiency", type=_share, default=gpus.LOSS_EFFICIENCY, metavar="SHARE", help="of the GPU's rate (%(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="also write plan.txt, plan.json, plan.png and plan.svg there")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 2 where an argument is not understood."""
    from megabatch.planning import models, report

    try:
        setup = _setup(args)
        model = models.model(args.model, image_size=args.image_size, length=args.length)
        plan = step.make(model, setup, args.chunk)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"megabatch plan: {error}", file=sys.stderr)
        return 2
    text = report.text(plan, args.batch)
    print(text, end="")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "plan.txt").write_text(text)
        (args.output / "plan.json").write_text(json.dumps(report.data(plan, args.batch), indent=1) + "\n")
        print(f"Written to {args.output}: plan.txt, plan.json" + _plots(plan, args))
    return 0


def _plots(plan: step.Plan, args: argparse.Namespace) -> str:
    from megabatch.planning import plots

    try:
        plots.draw(plan, args.batch, [args.output / "plan.png", args.output / "plan.svg"])
    except ModuleNotFoundError:
        return '; no plots, because matplotlib is not installed (pip install "megabatch[bench]")'
    return ", plan.png, plan.svg"


def _setup(args: argparse.Namespace) -> step.Setup:
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
        host_memory=step.HOST_MEMORY if args.host_memory is None else args.host_memory * 2**30,
        encoder_efficiency=args.encoder_efficiency,
        loss_efficiency=args.loss_efficiency,
    )


def _count(text: str) -> int:
    units = {"k": 2**10, "M": 2**20}
    try:
        value = float(text[:-1].replace(",", "")) * units[text[-1]] if text[-1:] in units else number(text)
        return number(str(value))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of 1 or more, such as 32768 or 1M, got {text!r}") from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 1, got {text!r}")
    return value
