"""A two-tower recommender with in-batch negatives and logQ correction.

    python examples/two_towers.py

The negatives of a user are the items that the other users of the batch chose. Popular items are negatives more often, so a
model learns scores that are too low for them. The correction subtracts log Q, the logarithm of an item's sampling
frequency, from the logits: `col_bias` of `pairwise_logsumexp`. An item chosen by several users of a batch is not a negative
for any of them (`exclude`). The data is synthetic: a user chooses by taste and by popularity. The script trains the same
towers with and without the correction; recall@10 is higher with it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch_train.evaluation import search

SCALE = 10.0


class Choices:
    """Synthetic users and items. The probability of a choice grows with common taste and with popularity."""

    def __init__(self, users: int, items: int, generator: torch.Generator, width: int = 8) -> None:
        self.generator = generator
        self.users, self.items = (F.normalize(torch.randn(n, width, generator=generator), dim=1) for n in (users, items))
        popularity = torch.arange(1, items + 1).float().reciprocal()
        self.probability = (6.0 * self.users @ self.items.T + popularity.log()).softmax(1)  # (users, items)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:  # (count,), (count,)
        """Random users, and one chosen item for each."""
        user = torch.randint(len(self.users), (count,), generator=self.generator)
        return user, torch.multinomial(self.probability[user], 1, generator=self.generator).squeeze(1)


class Tower(nn.Module):
    """One learned vector for each of `count` users or items. An encoder of their features works as well."""

    def __init__(self, count: int, width: int = 32) -> None:
        super().__init__()
        self.vectors = nn.Embedding(count, width)

    def forward(self, index: Tensor) -> Tensor:  # (N,) → (N, D)
        """Vectors of about unit length."""
        return self.vectors(index) / self.vectors.embedding_dim**0.5


def loss_of_batch(query: Tensor, key: Tensor, item: Tensor, log_q: Tensor) -> Tensor:
    """Cross-entropy of the chosen item among the items of the batch. `log_q` (N,) is the log frequency of each item."""
    row, _ = mb.pairwise_logsumexp(query, key, SCALE, col_bias=-log_q, exclude=(item, item))
    match = SCALE * (query * key).sum(1) - log_q
    return F.softplus(row - match).mean()


def train(choices: Choices, corrected: bool, steps: int, batch: int) -> tuple[Tower, Tower]:
    torch.manual_seed(0)
    towers = Tower(len(choices.users)), Tower(len(choices.items))
    optimizer = torch.optim.Adam([p for tower in towers for p in tower.parameters()], lr=0.03)
    seen = torch.ones(len(choices.items))  # count of each item so far
    for _ in range(steps):
        user, item = choices.draw(batch)
        seen += torch.bincount(item, minlength=len(seen))
        log_q = (seen / seen.sum()).log()[item] if corrected else torch.zeros(batch)
        loss = loss_of_batch(towers[0](user), towers[1](item), item, log_q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return towers


def recall(choices: Choices, towers: tuple[Tower, Tower], k: int = 10, count: int = 2000) -> float:
    """Fraction of new choices that are among the user's k best items."""
    user, item = choices.draw(count)
    found = search(towers[0](user), towers[1](torch.arange(len(choices.items))), k)
    return (found.indices == item[:, None]).any(1).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=300, help="(default %(default)s)")
    parser.add_argument("--items", type=int, default=500, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=1024, help="choices in a batch (default %(default)s)")
    options = parser.parse_args(arguments)
    for corrected in (False, True):
        choices = Choices(options.users, options.items, torch.Generator().manual_seed(0))
        towers = train(choices, corrected, options.steps, options.batch)
        print(f"{'with' if corrected else 'without'} log Q: recall@10 {recall(choices, towers):.3f}")


if __name__ == "__main__":
    main()
