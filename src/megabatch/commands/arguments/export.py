"""The arguments of `megabatch export`."""

import argparse

from megabatch import names

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
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model", metavar="MODEL", help=f"folder of a run or a checkpoint, or towers by name: {'; '.join(names.MODELS)}"
    )
    parser.add_argument("folder", metavar="FOLDER", help="where to write; new or empty")
    parser.add_argument("--to", required=True, choices=("hf", "open_clip", "onnx"), help="format to write")
    parser.add_argument("--push", metavar="NAME", help="upload to the Hugging Face hub under this name, such as me/qa-encoder")
