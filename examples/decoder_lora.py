"""Trains a small decoder with LoRA to find words by their definitions. It takes less than two minutes on a CPU.

    pip install "megabatch[huggingface,train,wordnet]"
    python examples/decoder_lora.py

The decoder has Qwen3's layers and random weights, so nothing is downloaded. `--model hf:Qwen/Qwen3-Embedding-0.6B` takes a
trained decoder. Its weights are frozen, and PEFT adds adapters to its linear layers, which are trained. One encoder serves
definitions and words. Texts are packed without padding, and the state of the last token is the embedding. Every step computes
one loss over all pairs, which are encoded in chunks. The word of a neighboring meaning is a hard negative. The script prints
recall@1 of words by their definitions before and after training. PEFT can load the adapter that `--output` saves.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import toy
from torch import Tensor

import megabatch as mb
from megabatch_train import towers
from megabatch_train.data.demo import WordNet
from megabatch_train.evaluation import encode
from megabatch_train.towers.tower import LoraConfig, Pair

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 8192, "max_position_embeddings": 64}
SCALE = 20.0


def triples(count: int) -> list[tuple[str, str, str]]:
    """A definition, its word and the word of the next meaning, for as many meanings from all over WordNet."""
    data = WordNet("test")
    first = {int(meaning): i for i, meaning in reversed(list(enumerate(data.ids(range(len(data))))))}
    rows = sorted(first.values())
    chosen = range(0, len(rows) - 1, len(rows) // count)[:count]
    return [(data.read(rows[i], 1), data.read(rows[i], 0), data.read(rows[i + 1], 0)) for i in chosen]


def recall(pair: Pair, definitions: Sequence[str], words: Sequence[str]) -> float:
    """The fraction of definitions whose own word is the nearest."""
    rank, _ = mb.pairwise_rank(encode(pair.first, definitions), encode(pair.second, words))
    return (rank == 0).float().mean().item()


class Loss:
    """Cross-entropy of each definition's word among all words and hard negatives, which are the second half of `words`."""

    further_rows = True

    def __call__(self, definition: Tensor, words: Tensor) -> Tensor:
        word, hard = words[: len(definition)], words[len(definition) :]
        return mb.info_nce_loss(definition, word, scale=SCALE, negatives=hard)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hf:NAME of a decoder (default: a small one with random weights)")
    parser.add_argument("--pairs", type=int, default=400, help="in the dataset and in each step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="(default %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="highest learning rate (default %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for the adapter (default: none is saved)")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
        pair = towers.load(args.model or f"hf-config:{folder}", ("text", "text"), lora=LoraConfig(args.rank))
    pair.first.module.to(toy.device())  # serves both sides
    definitions, words, hard = zip(*triples(args.pairs), strict=True)
    before = recall(pair, definitions, words)
    inputs = [pair.first.collate([pair.first.prepare(text, None) for text in texts]) for texts in (definitions, words + hard)]
    trained = [p for p in pair.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
    for step in range(args.steps):
        loss = mb.cached_backward(Loss(), [(pair.first.module, one) for one in inputs], chunk_size=64)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 20 == 0:
            print(f"step {step}, loss {loss:.3f}")
    part, total = (sum(p.numel() for p in parameters) for parameters in (trained, pair.parameters()))
    print(f"{part:,} of {total:,} parameters trained")
    print(f"words found by their definitions: {before:.3f} before, {recall(pair, definitions, words):.3f} after")
    if args.output is not None:
        towers.save(pair, args.output)


if __name__ == "__main__":
    main()
