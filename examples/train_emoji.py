"""Trains two small towers to match emoji with their names, on two CPU cores, and shows what they find.

    pip install "megabatch[emoji]"
    python examples/train_emoji.py

The drawings of half of one artist's emoji are kept for the test: the other artist's drawing of the same concept has been seen,
these have not. Every batch is 1,024 pairs, encoded 256 at a time; the loss never holds a matrix.
"""

import argparse
import math
import time

import torch

import megabatch as mb
from megabatch import towers
from megabatch.data.emoji import Emoji
from megabatch.data.order import Order
from megabatch.evaluation import embed, encode, evaluate, search
from megabatch.evaluation.sheet import Found, draw

# Made of words that occur in names: the model has read nothing else, and of other words it knows nothing.
QUERIES = ("smiling cat", "red heart", "person playing ball", "green tree", "fast train", "flower")


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    train, test = Emoji("train", size=32), Emoji("test", size=32)
    pair = towers.load("small")
    scale = torch.nn.Parameter(torch.tensor(math.log(pair.logit_scale)))
    optimizer = torch.optim.AdamW(groups(pair, scale), lr=options.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, options.steps))

    began = time.perf_counter()
    for batch in Order(len(train), options.batch_size, options.seed).batches(0, options.steps):
        indices, ids = batch.indices.tolist(), train.ids(batch.indices)
        inputs = [
            (tower.module, train.source(indices, side, tower, seed=options.seed, epoch=batch.epoch))
            for side, tower in enumerate(pair.towers)
        ]
        loss = mb.cached_backward(
            lambda image, text, ids=ids: mb.clip_loss(image, text, scale.exp(), ids=ids), inputs, chunk_size=256, budget="auto"
        )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            scale.clamp_(max=math.log(100))
        if (batch.number + 1) % 20 == 0:
            seconds = time.perf_counter() - began
            print(
                f"step {batch.number + 1:4d}  loss {loss.item():.3f}  scale {scale.exp().item():.1f}  {seconds:.0f} s",
                flush=True,
            )

    found = evaluate(pair, test)
    for name in ("text_to_image_R@1", "text_to_image_R@5", "text_to_image_R@10", "image_to_text_R@1"):
        print(f"{name:20s} {found[name]:.1%}")
    print(f"over {found['num_samples']} drawings that were not trained on; chance is {1 / found['num_samples']:.1%} at 1")
    if options.sheet:
        show(pair, test, options.sheet)


def show(pair: towers.Pair, test: Emoji, path: str) -> None:
    drawings = Emoji("test", size=72)  # the same, larger
    matches = search(encode(pair.second, list(QUERIES)), embed(pair.first, test, 0), k=8)
    rows = [
        [Found(drawings.read(i, 0), drawings.name(i), score) for score, i in zip(scores, indices, strict=True)]
        for scores, indices in zip(matches.scores.tolist(), matches.indices.tolist(), strict=True)
    ]
    draw(path, QUERIES, rows, title="Found among drawings that were not trained on", credits=test.credits)
    print(f"wrote {path}")


def groups(pair: towers.Pair, scale: torch.nn.Parameter) -> list[dict[str, object]]:
    """Weight decay for matrices; none for norms, biases and the scale."""
    matrices = [p for p in pair.parameters() if p.dim() > 1]
    rest = [p for p in pair.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [*rest, scale], "weight_decay": 0.0}]


def warm_up_and_cosine(step: int, steps: int, warm_up: int = 20) -> float:
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1024, help="pairs in a batch (default %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", default="", help="where to draw what a few queries find, as PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
