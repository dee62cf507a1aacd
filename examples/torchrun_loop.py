"""The plain loop on many processes: negatives from all of them, and the gradients of one process with the whole batch.

    torchrun --nproc-per-node 2 examples/torchrun_loop.py

DDP wraps one module with both towers and the scale. Each call encodes one side.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb


class Model(nn.Module):
    """Both towers, and the logarithm of the logit scale."""

    def __init__(self):
        super().__init__()
        self.first, self.second = toy.tower(), toy.tower()
        self.log_scale = nn.Parameter(torch.tensor(2.7))

    def forward(self, first=None, second=None):
        return F.normalize(self.first(first) if second is None else self.second(second), dim=-1)


def train(args, device, group):
    """Runs all steps. Returns the global loss of each step."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    module = Model().to(device)
    model = DistributedDataParallel(module, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(args.steps):
        # This rank's shard; shards may have different sizes.
        x, y = (side.tensor_split(world)[rank].to(device) for side in toy.views(args.batch, step))
        share = mb.cached_backward(
            lambda a, b: mb.clip_loss(a, b, module.log_scale.exp(), group=group),
            [(model, {"first": x}), (model, {"second": y})],
            chunk_size=args.chunk,
        )
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(share, group=group)  # the loss is the mean of the shares
        losses.append(share.item() / world)
    return losses


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16384, help="pairs over all processes (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="samples encoded at once (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default %(default)s)")
    args = parser.parse_args(argv)

    device = toy.device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    losses = train(args, device, dist.group.WORLD)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
