"""`megabatch export`: a model for transformers, sentence-transformers, open_clip or onnxruntime."""

import argparse
from pathlib import Path

from megabatch_train import names
from megabatch_train.commands import describe, model
from megabatch_train.commands.model import add_trust
from megabatch_train.names import tell

DESCRIPTION = """
Writes a trained model for other programs, with a model card (README.md): how to load it, data,
batch, evaluation, curves, settings.

  megabatch export runs/photos --to open_clip photos-clip     open_clip.create_model("local-dir:…")
  megabatch export runs/photos --to hf photos-clip            transformers' CLIPModel
  megabatch export runs/qa --to hf qa-encoder                 SentenceTransformer, AutoModel
  megabatch export runs/photos --to onnx photos-onnx          image.onnx and text.onnx
  megabatch export runs/qa --to hf qa-encoder --push me/qa-encoder

  --to        models
  hf          hf: and hf-config:, one encoder or two (folders image and text); CLIP of open_clip:
  open_clip   open_clip:
  onnx        all; embeddings are compared with the model's if onnxruntime is installed

--push uploads the folder to the Hugging Face hub (a new model is private). It needs a token:
`hf auth login`, or HF_TOKEN. Read the card first: it has the paths of the data and all settings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch export`."""
    describe(parser, DESCRIPTION)
    parser.add_argument(
        "model", metavar="MODEL", help=f"folder of a run or a checkpoint, or towers by name: {'; '.join(names.MODELS)}"
    )
    parser.add_argument("folder", metavar="FOLDER", help="where to write; new or empty")
    parser.add_argument("--to", required=True, choices=("hf", "open_clip", "onnx"), help="format to write")
    parser.add_argument("--push", metavar="NAME", help="upload to the Hugging Face hub under this name, such as me/qa-encoder")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the folder with its card, and uploads it."""
    import torch

    from megabatch_train.data.dataset import IMAGE, TEXT
    from megabatch_train.export import check_token, export, push, write_card

    folder = Path(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"FOLDER must be empty or not exist, got {folder}")
    if args.push:
        check_token()
    own = model.run_of(args.model)
    # Towers by name: one encoder of transformers is for texts alone.
    kinds = (TEXT, TEXT) if args.model.startswith("hf") and "+" not in args.model else (IMAGE, TEXT)
    device, step = torch.device("cpu"), None
    if own is None:
        pair = model.load_pair(args.model, device, kinds, trust=args.trust_remote_code)
    else:
        pair, step = model.load_run(Path(args.model), device, trust=args.trust_remote_code)
    export(pair, args.to, folder)
    card = write_card(pair, args.to, folder, run=own, step=step, name=args.push)
    tell(f"written to {folder}; the model card, {card.name}, says how to load it, and names the data and all settings")
    if args.push:
        tell(f"pushed to {push(folder, args.push)} (a new model is private)")
    return 0
