"""Draws transport.svg: what a small encoder gives for three classes of sequences, on its way through training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import keyquery as kq
from keyquery import pages

EPOCHS, COUNT, BATCH = 12, 960, 32
CENTRES = torch.tensor([[-1.2, 0.0], [1.2, 0.0], [0.0, 1.5]])


class Model(nn.Module):
    """Vectors in, three classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.body, self.out = nn.Linear(2, 32), kq.Encoder(32, depth=2, heads=4), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.out(self.body(self.enter(x)).mean(1))


def data(count: int, drawn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of six points around the centre of their class."""
    labels = torch.randint(3, (count,), generator=drawn)
    return CENTRES[labels][:, None] + 1.4 * torch.randn(count, 6, 2, generator=drawn), labels


def main() -> None:
    """Train, and write the picture beside this file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(0)
    x, y = data(COUNT, drawn)
    probe, labels = data(60, drawn)
    model = Model()
    lens = kq.TransportLens(model, "body", inputs=probe, labels=labels, name="a small encoder")
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for some in torch.randperm(COUNT, generator=drawn).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimiser.step()
        lens.step()
    path = Path(__file__).with_suffix(".svg")
    path.write_bytes(pages.picture_bytes(path, lens.reading(points=150)))


if __name__ == "__main__":
    main()
