"""A two-tower recommender with in-batch negatives and logQ correction.

    python examples/two_towers.py

The negatives of a user are the items that the other users of the batch chose. Popular items are negatives more often, so a
model learns scores that are too low for them. The correction subtracts log Q, the logarithm of an item's sampling
frequency, from the logits (`log_q` of `info_nce_loss`). An item chosen by several users of a batch is not a negative for any
of them (`ids`). The data is synthetic: a user chooses by taste and by popularity. The script trains the same towers with and
without the correction. Recall@10 is higher with it.
"""

import argparse

import torch
import torch.nn.functional as F
import toy
from torch import Tensor, nn

import megabatch as mb

SCALE = 10.0


class Choices:
    """Synthetic users and items. The probability of a choice grows with common taste and with popularity."""

    def __init__(self, users: int, items: int, device: torch.device, width: int = 8) -> None:
        self.generator, self.device = torch.Generator().manual_seed(0), device
        self.users, self.items = (F.normalize(torch.randn(n, width, generator=self.generator), dim=1) for n in (users, items))
        popularity = torch.arange(1, items + 1).float().reciprocal()
        self.probability = (6.0 * self.users @ self.items.T + popularity.log()).softmax(1)  # (users, items)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:  # (count,), (count,)
        """Random users, and one chosen item for each."""
        user = torch.randint(len(self.users), (count,), generator=self.generator)
        item = torch.multinomial(self.probability[user], 1, generator=self.generator).squeeze(1)
        return user.to(self.device), item.to(self.device)


class Tower(nn.Module):
    """One learned vector for each of `count` users or items. An encoder of their features works as well."""

    def __init__(self, count: int, width: int = 32) -> None:
        super().__init__()
        self.vectors = nn.Embedding(count, width)

    def forward(self, index: Tensor) -> Tensor:  # (N,) → (N, D)
        """Vectors of about unit length."""
        return self.vectors(index) / self.vectors.embedding_dim**0.5


def train(choices: Choices, corrected: bool, steps: int, batch: int) -> tuple[Tower, Tower]:
    torch.manual_seed(0)
    towers = Tower(len(choices.users)).to(choices.device), Tower(len(choices.items)).to(choices.device)
    optimizer = torch.optim.Adam([p for tower in towers for p in tower.parameters()], lr=0.03)
    seen = torch.ones(len(choices.items), device=choices.device)  # count of each item so far
    for _ in range(steps):
        user, item = choices.draw(batch)
        seen += torch.bincount(item, minlength=len(seen))
        log_q = (seen / seen.sum()).log()[item] if corrected else None
        loss = mb.info_nce_loss(towers[0](user), towers[1](item), SCALE, ids=item, log_q=log_q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return towers


def recall(choices: Choices, towers: tuple[Tower, Tower], k: int = 10, count: int = 2000) -> float:
    """Fraction of new choices that are among the user's k best items."""
    user, item = choices.draw(count)
    items = towers[1].vectors.weight  # a common factor does not change the order
    found = mb.pairwise_topk(towers[0](user).detach(), items.detach(), k)
    return (found.indices == item[:, None]).any(1).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=300, help="(default %(default)s)")
    parser.add_argument("--items", type=int, default=500, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=1024, help="choices in a batch (default %(default)s)")
    args = parser.parse_args(arguments)
    for corrected in (False, True):
        choices = Choices(args.users, args.items, toy.device())
        towers = train(choices, corrected, args.steps, args.batch)
        print(f"{'with' if corrected else 'without'} log Q: recall@10 {recall(choices, towers):.3f}")


if __name__ == "__main__":
    main()
