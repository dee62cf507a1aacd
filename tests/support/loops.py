"""A model of two towers and its plain loop, which trainers have to agree with; float64, so that rounding stays small."""

import torch
import torch.nn.functional as F
from torch import nn

from helpers import dense_clip

BATCH, BATCHES, EPOCHS = 6, 7, 2  # pairs of all ranks; 7 batches are no multiple of the 3 that are accumulated
ADAM = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.0}
# Two ways to the same gradient differ by 1e-16; Adam makes lr / eps = 1e4 times that of it at most, in each of 14 steps.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Model(nn.Module):
    """Towers as parts, a method as a tower, and a scale that the loss alone uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor([1.5]))
        self.double()

    def encode_text(self, text):
        return F.normalize(self.text(text), dim=1)

    def forward(self, image):
        return self.image(image)


class Pairs(torch.utils.data.Dataset):
    def __init__(self, batches=BATCHES):
        generator = torch.Generator().manual_seed(1)
        self.image, self.text = torch.randn(2, batches * BATCH, 5, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return {"image": self.image[i], "text": self.text[i]}


def dense_loss(model, rows):
    pairs = Pairs()
    image = F.normalize(model.image(pairs.image[rows]), dim=1)
    return dense_clip(image, model.encode_text(pairs.text[rows]), model.log_scale.exp())


def plainly_trained(accumulate, clip=None):
    """The weights after all epochs, and the loss of each batch."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for _ in range(EPOCHS):
        batches = [slice(i * BATCH, (i + 1) * BATCH) for i in range(BATCHES)]
        for start in range(0, BATCHES, accumulate):
            window = batches[start : start + accumulate]
            parts = [dense_loss(model, rows) for rows in window]
            (sum(parts) / len(window)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses += [part.item() for part in parts]
    return {name: value.detach() for name, value in model.named_parameters()}, losses


def assert_trained(found, wanted):
    start = dict(Model().named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (value - start[name]).abs().max() > 1e-3, f"{name} has not been trained"
        torch.testing.assert_close(found[name], value, **CLOSE)
