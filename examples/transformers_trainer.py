"""Trains a text encoder on pairs in transformers' `Trainer`, with a batch size independent of memory.

    pip install "megabatch[huggingface]"
    python examples/transformers_trainer.py --model BAAI/bge-small-en --data pairs.csv --batch 4096
    torchrun --nproc-per-node 8 examples/transformers_trainer.py --model … --data pairs.csv --batch 4096

The CSV file has two columns, one text of the pair in each, and no header. The output folder has the encoder, its tokenizer and
the trainer's checkpoints.
"""

import argparse
import csv

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel, AutoTokenizer, Trainer, TrainingArguments

import megabatch as mb
from megabatch.integrations.trainers import CachedTrainer, full_tensor


class Encoder(nn.Module):
    """Mean pooling to unit length, and the logarithm of the logit scale."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.log_scale = nn.Parameter(torch.tensor([3.0]))  # FSDP2 needs at least one dimension

    def forward(self, **tokens):
        states = self.model(**tokens).last_hidden_state  # (n, T, H)
        mask = tokens["attention_mask"][..., None].to(states.dtype)
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


class ContrastiveTrainer(CachedTrainer, Trainer):
    """Each batch is one loss with in-batch negatives; `chunk_size` texts are encoded at once."""

    def towers(self, module, inputs):
        return [(module, inputs["query"]), (module, inputs["document"])]

    def embedding_loss(self, module, query, document, *, group):
        return mb.info_nce_loss(query, document, scale=full_tensor(module.log_scale).exp(), symmetric=True, group=group)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder of a transformers encoder")
    parser.add_argument("--data", required=True, help="a CSV file of pairs")
    parser.add_argument("--batch", type=int, default=4096, help="pairs per device and step")
    parser.add_argument("--chunk", type=int, default=64, help="texts encoded at once")
    parser.add_argument("--steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--output", default="runs/pairs")
    args = parser.parse_args(argv)

    with open(args.data, newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == 2]
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def collate(pairs):
        options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
        sides = zip(("query", "document"), zip(*pairs, strict=True), strict=True)
        return {name: dict(tokenizer(list(texts), **options)) for name, texts in sides}

    arguments = TrainingArguments(
        args.output,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        max_steps=args.steps,
        num_train_epochs=1,
        logging_steps=1,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    )
    model = Encoder(AutoModel.from_pretrained(args.model))
    if getattr(model.model, "pooler", None) is not None:
        model.model.pooler.requires_grad_(False)  # not used here, and DDP would wait for its gradients
    trainer = ContrastiveTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.chunk_size = args.chunk
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    if trainer.is_world_process_zero():
        model.model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        print(f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}")


if __name__ == "__main__":
    main()
