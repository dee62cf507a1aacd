"""Trains a sentence-transformers encoder on text pairs in its own trainer, with a batch size independent of memory.

    pip install "megabatch[sentence-transformers]"
    python examples/sentence_pairs.py --model sentence-transformers/all-MiniLM-L6-v2 --data pairs.csv --batch 4096
    torchrun --nproc-per-node 8 examples/sentence_pairs.py --model … --data pairs.csv --batch 4096

The CSV file has two columns, one text of the pair in each, and no header. A text that occurs several times in the first
column has several positives: its rows share a label and are not each other's negatives. The temperature is learned. Every
50th row is held out; the script prints recall@1 on the held-out rows before and after training.
"""

import argparse
import csv
from collections.abc import Sequence

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

import megabatch as mb
from megabatch.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss


def recall(model: SentenceTransformer, rows: Sequence[Sequence[str]]) -> float:
    """Recall@1 from the first column to the second, without a matrix of similarities."""
    left, right = (model.encode([row[side] for row in rows], convert_to_tensor=True) for side in (0, 1))
    rank, _ = mb.pairwise_rank(left, right)
    return (rank == 0).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder of a SentenceTransformer")
    parser.add_argument("--data", required=True, help="a CSV file of pairs")
    parser.add_argument("--batch", type=int, default=4096, help="pairs per device and step")
    parser.add_argument("--mini-batch", type=int, default=64, help="texts encoded at once")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--output", default="runs/sentences")
    args = parser.parse_args(arguments)

    with open(args.data, newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == 2]
    unseen, seen = rows[::50], [row for i, row in enumerate(rows) if i % 50]
    number = {text: i for i, text in enumerate(dict.fromkeys(row[0] for row in rows))}
    pairs = {
        "anchor": [row[0] for row in seen],
        "positive": [row[1] for row in seen],
        "label": [number[row[0]] for row in seen],
    }

    model = SentenceTransformer(args.model)
    before = recall(model, unseen)
    loss = CachedMultipleNegativesRankingLoss(
        model, mini_batch_size=args.mini_batch, gather_across_devices=True, learn_temperature=True, labels_are_ids=True
    )
    settings = SentenceTransformerTrainingArguments(
        args.output,
        per_device_train_batch_size=args.batch,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = SentenceTransformerTrainer(model=model, args=settings, train_dataset=Dataset.from_dict(pairs), loss=loss)
    trainer.train()
    if trainer.is_world_process_zero():
        model.save_pretrained(args.output)
        scale = loss.learned_scale.bias.exp().item()
        print(
            f"recall@1 of {len(unseen)} unseen pairs: {before:.3f} before, {recall(model, unseen):.3f} after; scale {scale:.2f}"
        )


if __name__ == "__main__":
    main()
