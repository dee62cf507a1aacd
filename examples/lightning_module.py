"""A LightningModule with batches of any size.

    pip install lightning
    python examples/lightning_module.py --devices 2 --accumulate 2

`towers` returns the encoders and their inputs, `embedding_loss` the loss. The mixin `CachedModule` does the rest.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
import toy
from torch import nn

import megabatch as mb
from megabatch.integrations.trainers import CachedModule, full_tensor


class Model(CachedModule, lightning.LightningModule):
    """Two towers, trained with CLIP's loss."""

    def __init__(self, chunk_size, accumulate):
        super().__init__()
        self.chunk_size, self.accumulate = chunk_size, accumulate
        self.first, self.second = toy.tower(), toy.tower()
        self.log_scale = nn.Parameter(torch.tensor([2.7]))
        self.losses = []

    def towers(self, batch):
        x, y = batch
        return [(self.first, x), (self.second, y)]

    def embedding_loss(self, a, b, *, group):
        return mb.clip_loss(F.normalize(a, dim=-1), F.normalize(b, dim=-1), full_tensor(self.log_scale).exp(), group=group)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)  # gradients, and the optimizer step after `accumulate` batches
        self.log("loss", loss, prog_bar=True, sync_dist=True)  # the loss is the mean of the shares of all processes
        self.losses.append(loss.item())

    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2048, help="pairs per process (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="samples encoded at once (default %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step of the optimizer (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=32768, help="in the dataset (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="processes, one per GPU if there are GPUs (default %(default)s)")
    args = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    model = Model(args.chunk, args.accumulate)
    data = torch.utils.data.DataLoader(toy.Views(args.pairs), batch_size=args.batch, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    print(f"loss {model.losses[0]:.4f} -> {model.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
