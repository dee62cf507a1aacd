"""`megabatch export`: a model for transformers, sentence-transformers, open_clip or onnxruntime."""

import argparse
from pathlib import Path

import torch

from megabatch.commands import model
from megabatch.data.dataset import IMAGE, TEXT
from megabatch.export import check_token, export, push, write_card


def run(args: argparse.Namespace) -> int:
    """Writes the folder with its card, and uploads it."""
    folder = Path(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"FOLDER must be empty or not exist, got {folder}")
    if args.push:
        check_token()
    own = model.run_of(args.model)
    # Towers by name: one encoder of transformers is for texts alone.
    kinds = (TEXT, TEXT) if args.model.startswith("hf") and "+" not in args.model else (IMAGE, TEXT)
    pair = model.load_pair(args.model, torch.device("cpu"), kinds)
    export(pair, args.to, folder)
    card = write_card(pair, args.to, folder, run=own, name=args.push)
    print(f"written to {folder}; the model card, {card.name}, says how to load it, and names the data and all settings")
    if args.push:
        print(f"pushed to {push(folder, args.push)} (a new model is private)")
    return 0
