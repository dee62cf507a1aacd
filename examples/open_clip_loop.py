"""An open_clip model in your own loop: gradient caching in place of `--accum-freq`, with the correct gradient of the scale.

    pip install "megabatch[open-clip]"
    python examples/open_clip_loop.py
    torchrun --nproc-per-node 2 examples/open_clip_loop.py

Images are colored noise and captions name the color, so the example has something to learn without a download.
open_clip's own trainer can resume from the checkpoint that it writes.
"""

import argparse
import math
import os

import open_clip
import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel

from megabatch.integrations.open_clip import ClipLoss, cached_backward, save_checkpoint

LENGTH, VOCABULARY = 8, 512


def batch(count, seed, size):
    """Images of one color each, and captions: a start token, one token per color channel, an end token."""
    generator = torch.Generator().manual_seed(seed)
    colors = torch.randint(0, 128, (count, 3), generator=generator)
    noise = torch.randn(count, 3, *size, generator=generator)
    images = (colors / 64 - 1)[:, :, None, None] + 0.3 * noise
    texts = torch.zeros(count, LENGTH, dtype=torch.long)
    texts[:, 0], texts[:, 1:4], texts[:, 4] = VOCABULARY - 2, colors + 128 * torch.arange(3), VOCABULARY - 1
    return images, texts


def tiny_model():
    vision = open_clip.CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=8, image_size=32)
    text = open_clip.CLIPTextCfg(context_length=LENGTH, vocab_size=VOCABULARY, width=64, heads=4, layers=2)
    return open_clip.CLIP(64, vision, text, output_dict=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2048, help="pairs over all processes (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="pairs encoded at once (default %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="(default %(default)s)")
    parser.add_argument("--model", help="an open_clip model name (default: a tiny model)")
    parser.add_argument("--checkpoint", help="file for a checkpoint at the end (default: none)")
    args = parser.parse_args(argv)

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = toy.device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    model = (open_clip.create_model(args.model, output_dict=True) if args.model else tiny_model()).to(device)
    size = model.visual.image_size
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model = DistributedDataParallel(model)
    loss = ClipLoss(rank=rank, world_size=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    losses = []
    for step in range(args.steps):
        images, texts = (side.tensor_split(world)[rank].to(device) for side in batch(args.batch, step, size))
        found = cached_backward(model, images, texts, loss, chunk_size=args.chunk)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            getattr(model, "module", model).logit_scale.clamp_(0, math.log(100))
        losses.append(found["loss"].item())
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        if args.checkpoint:
            save_checkpoint(args.checkpoint, model, optimizer, epoch=1)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
