"""`megabatch export`: converts a model for transformers, sentence-transformers, open_clip or onnxruntime."""

import argparse
from pathlib import Path

from megabatch_train.commands import MODEL_HELP, add_trust, describe, model
from megabatch_train.names import tell

DESCRIPTION = """
Writes a trained model in the format of another library. The folder also contains a model card
(README.md) with code that loads the model, the data, the evaluation, curves and all settings.

  megabatch export runs/photos --to open_clip photos-clip     open_clip.create_model("local-dir:…")
  megabatch export runs/photos --to hf photos-clip            transformers' CLIPModel
  megabatch export runs/qa --to hf qa-encoder                 SentenceTransformer, AutoModel
  megabatch export runs/photos --to onnx photos-onnx          image.onnx and text.onnx
  megabatch export runs/qa --to hf qa-encoder --push me/qa-encoder

  --to        models that can be exported
  hf          hf: and hf-config: (two encoders become two folders, image and text), open_clip: CLIP
  open_clip   open_clip:
  onnx        all models; if onnxruntime is installed, the command compares the embeddings

--push uploads the folder to the Hugging Face hub. A new model is private. The upload needs a token,
from `hf auth login` or HF_TOKEN. Read the model card before you push it, because it contains the
paths of the data and all settings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch export`."""
    describe(parser, DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("folder", metavar="FOLDER", help="folder to write; it must be empty or not exist")
    parser.add_argument("--to", required=True, choices=("hf", "open_clip", "onnx"), help="format of the exported model")
    parser.add_argument(
        "--push", metavar="NAME", help="upload the folder to the Hugging Face hub with this name, such as me/qa-encoder"
    )
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the folder with the model card. Uploads it if `--push` is given."""
    import torch

    from megabatch_train.data.dataset import IMAGE, TEXT
    from megabatch_train.export import check_token, export, push, write_card

    folder = Path(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"FOLDER must be empty or not exist, got {folder}")
    if args.push:
        check_token()
    run_folder = model.run_of(args.model)
    # A model by name: a single encoder of transformers encodes texts only.
    kinds = (TEXT, TEXT) if args.model.startswith("hf") and "+" not in args.model else (IMAGE, TEXT)
    device, step = torch.device("cpu"), None
    if run_folder is None:
        pair = model.load_pair(args.model, device, kinds, trust=args.trust_remote_code)
    else:
        pair, step = model.load_run(Path(args.model), device, trust=args.trust_remote_code)
    export(pair, args.to, folder)
    card = write_card(pair, args.to, folder, run=run_folder, step=step, name=args.push)
    tell(f"wrote {folder}; the model card {card.name} contains code that loads the model, the data and all settings")
    if args.push:
        tell(f"pushed to {push(folder, args.push)} (a new model is private)")
    return 0
