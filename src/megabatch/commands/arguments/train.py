"""The arguments of `megabatch train`."""

import argparse
from pathlib import Path

from megabatch import names
from megabatch.commands.arguments.options import add_columns

AUTO = "auto"
LOSSES = ("clip", "siglip", "info_nce", "dcl", "hcl", "nt_xent", "sup_con", "matryoshka", "distill")
DESCRIPTION = f"""
Trains two encoders (towers) with a contrastive loss: each sample becomes most similar to its own match.

  megabatch train                                  emoji and their names; two small towers, two cores, 1 to 2 minutes
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384 --epochs 10 --lr 5e-4
  megabatch train --data "cc12m/{{00000..01242}}.tar" --validation coco.csv --model open_clip:ViT-B-16 --batch-size 65536
  megabatch train --data photos.csv --columns image=file text=description --batch-size 4096
  megabatch train --data triples.jsonl --loss info_nce --model hf:BAAI/bge-small-en --holdout 0.01
  megabatch train --data triples.jsonl --loss info_nce --model hf:Qwen/Qwen3-Embedding-0.6B --lora 16
  megabatch train --data wordnet --batch-size 8192 --set optimizer.scaling=sqrt
  torchrun --nproc-per-node 8 -m megabatch train --config run.toml
  megabatch train --resume runs/emoji-1            from its last checkpoint, with its settings

The batch size is the number of pairs over all processes. It does not depend on memory: towers encode one
chunk at a time, and the loss needs no similarity matrix. The chunk size is chosen automatically. On a GPU the
towers are compiled and compute in bf16.

data    {f"{chr(10)}        ".join(names.DATA)}
model   {f"{chr(10)}        ".join(names.MODELS)}

Settings are merged in this order: defaults for the model and the data, --config, flags, --set. Later ones
win. The run's config.toml records all of them; pass it to --config to repeat a run. `megabatch config` lists
all settings. Some of them:

  lock = "first"                 freeze the first tower and compute its embeddings once (LiT)
  precision = "auto"             bf16 on a GPU, fp32 on a CPU; or "bf16", "fp16", "fp32"
  parallel = "fsdp"              shard the towers over ranks; "ddp" replicates them
  optimizer.name = "adafactor"   or "adamw", "lion"
  optimizer.scaling = "sqrt"     or "linear": the learning rate grows with the batch size
  loss.name = "siglip"           the same as --loss siglip
  ema = 0.999                    evaluate and save averaged weights
  memory.checkpointing = "on"    compute activations again in the backward pass, for larger chunks
  memory.chunk = 0.25            fraction of free memory for the activations of a chunk
  checkpoint.every = 500         steps between checkpoints, at most checkpoint.minutes = 15; checkpoint.keep = 2

Ctrl-C and SIGTERM save a checkpoint first. --resume auto resumes the last run, or starts a new one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch train`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", metavar="DATA", help="training data (default: emoji)")
    add(
        "--validation",
        nargs="+",
        metavar="DATA",
        help="evaluation data, one or more (default: the test split of emoji, wordnet)",
    )
    add("--holdout", type=float, metavar="X", help="fraction of the data to hold out for evaluation, such as 0.01")
    add_columns(parser)
    add("--model", metavar="MODEL", help="towers to train (default: small)")
    add("--lora", dest="rank", type=int, metavar="RANK", help="train adapters of this rank in place of an hf: model's weights")
    add("--batch-size", type=int, metavar="N", help="pairs in a step, over all processes (default: 512 for emoji, else 1024)")
    add("--chunk-size", type=_number_or_auto, metavar="N", help='samples encoded at once, or "auto" (default)')
    add("--epochs", type=float, metavar="N", help="passes over the data (default: 28 for emoji, 4 for wordnet, else 32)")
    add("--steps", type=int, metavar="N", help="steps, instead of --epochs")
    add("--lr", type=float, metavar="RATE", help="highest learning rate (default: 3e-3 for small, else 5e-4)")
    add(
        "--warm-up", type=_steps_or_fraction, metavar="N", help="steps of the warm-up, or a fraction such as 0.1 (default: 0.1)"
    )
    add("--weight-decay", type=float, metavar="X", help="of matrices (default: 0.1 for small, else 0.2)")
    add("--clip-norm", type=float, metavar="X", help="largest gradient norm (default: 0, no clipping)")
    add("--evaluate-every", type=int, metavar="N", help="steps between evaluations (default: 0, one at the end)")
    add(
        "--workers",
        type=_number_or_auto,
        metavar="N",
        help='readers of samples, or "auto" (default): the cores of a GPU machine',
    )
    add("--compile", choices=(AUTO, "on", "off"), help="compile the towers (default: on for CUDA)")
    add("--loss", choices=LOSSES, help="the loss (default: clip); `megabatch config loss` lists its settings")
    add("--precision", choices=(AUTO, "bf16", "fp16", "fp32"), help="dtype of the towers' products (default: bf16 on a GPU)")
    add("--seed", type=int, metavar="N", help="for initial weights, order and augmentation (default: 0)")
    add("--output", type=Path, metavar="FOLDER", help="folder of the run (default: runs/DATA-1, or the next number)")
    add("--config", type=Path, metavar="TOML", help="settings from a file, such as another run's config.toml")
    add("--resume", metavar="auto|PATH", help='resume a run, a checkpoint, or with "auto" the last run if there is one')
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting, such as ema=0.999; `megabatch config` lists all",
    )
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases too")
    add("--no-report", action="store_true", help="write no report.html, neither during the run nor at the end")


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'must be a whole number or "{AUTO}", got {text!r}') from error


def _steps_or_fraction(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of steps, or a fraction such as 0.1, got {text!r}") from error
