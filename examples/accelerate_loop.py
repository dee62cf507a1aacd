"""An Accelerate training loop with the cached step in place of `accelerator.backward`.

    accelerate launch examples/accelerate_loop.py --accumulate 2

Precision, gradient scaler, accumulation, DDP and FSDP2 follow the settings of the accelerator.
"""

import argparse

import torch
import torch.distributed.nn.functional  # before the group exists: its default arguments would keep gloo's threads alive
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import megabatch as mb
from megabatch.integrations.trainers import cached_backward, default_group, full_tensor

WIDTH = 32


class Views(torch.utils.data.Dataset):
    """Pairs of noisy views of the same hidden point."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        maps = torch.randn(2, WIDTH // 4, WIDTH, generator=generator)
        points = torch.randn(count, WIDTH // 4, generator=generator)
        self.sides = torch.tanh(points @ maps) + 0.1 * torch.randn(2, count, WIDTH, generator=generator)  # (2, N, WIDTH)

    def __len__(self):
        return self.sides.shape[1]

    def __getitem__(self, i):
        return self.sides[0, i], self.sides[1, i]


class Model(nn.Module):
    """Two towers, and the logarithm of the logit scale."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor([2.7]))  # FSDP2 needs at least one dimension


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2048, help="pairs per process")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=32768)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.utils.data.DataLoader(Views(args.pairs), batch_size=args.batch, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    module = accelerator.unwrap_model(model)

    def loss_fn(a, b):
        a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        return mb.clip_loss(a, b, full_tensor(module.log_scale).exp(), group=default_group())

    losses = []
    for _ in range(args.epochs):
        for x, y in data:
            with accelerator.accumulate(model):
                towers = [(module.first, x), (module.second, y)]  # called through the wrapper of the model
                share = cached_backward(accelerator, model, loss_fn, towers, chunk_size=args.chunk)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(share, reduction="mean").item())
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
