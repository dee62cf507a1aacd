"""`megabatch plan`: largest batch, memory and time of a model on given GPUs, estimated without running on them."""

import argparse
import json
import sys
from dataclasses import replace

from megabatch.planning import gpus, step


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 2 if an argument is not understood."""
    import torch

    from megabatch.planning import models, report

    try:
        setup = _setup(args)
        frozen = step.AUTOCAST.get(setup.precision, torch.float32)
        model = models.model(args.model, image_size=args.image_size, length=args.length, lora=args.lora, frozen=frozen)
        plan = step.make(model, setup, args.chunk, checkpointing=args.checkpointing)
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
    from megabatch.display.plots import EXTRA, available
    from megabatch.planning import plots

    if not available():
        return f'; no plots, because matplotlib is not installed (pip install "megabatch[{EXTRA}]")'
    plots.draw(plan, args.batch, args.output / "plan.png", args.output / "plan.svg")
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
        host_memory=args.host_memory * 2**30,
        encoder_efficiency=args.encoder_efficiency,
        loss_efficiency=args.loss_efficiency,
    )
