"""An Accelerate training loop with gradient caching in place of `accelerator.backward`.

    pip install "megabatch[huggingface]"
    accelerate launch examples/accelerate_loop.py --accumulate 2

Precision, gradient scaler, accumulation, DDP and FSDP2 follow the settings of the accelerator.
"""

import argparse

import torch
import torch.nn.functional as F
import toy
from accelerate import Accelerator
from torch import nn

import megabatch as mb
from megabatch.integrations.trainers import cached_backward, default_group, full_tensor


class Model(nn.Module):
    """Two towers, and the logarithm of the logit scale."""

    def __init__(self):
        super().__init__()
        self.first, self.second = toy.tower(), toy.tower()
        self.log_scale = nn.Parameter(torch.tensor([2.7]))  # FSDP2 needs at least one dimension


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2048, help="pairs per process (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="samples encoded at once (default %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step of the optimizer (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=32768, help="in the dataset (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(default %(default)s)")
    args = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.utils.data.DataLoader(toy.Views(args.pairs), batch_size=args.batch, shuffle=True)
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
