"""The plain loop on many processes: negatives from all of them, and the gradients of one process with the whole batch.

    torchrun --nproc-per-node 2 examples/torchrun_loop.py

DDP wraps one module with both towers and the scale. Each call encodes one side.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group exists: its default arguments would keep gloo's threads alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb

WIDTH = 32


def views(count, seed):
    """Two noisy views of the same hidden points."""
    fixed, fresh = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + seed)
    maps = torch.randn(2, WIDTH // 4, WIDTH, generator=fixed)
    points = torch.randn(count, WIDTH // 4, generator=fresh)
    return torch.tanh(points @ maps) + 0.1 * torch.randn(2, count, WIDTH, generator=fresh)  # (2, N, WIDTH)


class Model(nn.Module):
    """Both towers, and the logarithm of the logit scale."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
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
        x, y = (side.tensor_split(world)[rank].to(device) for side in views(args.batch, step))
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16384, help="pairs over all processes")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    losses = train(args, device, dist.group.WORLD)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
