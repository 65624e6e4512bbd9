"""Draws time.svg: the time kernel of a layer that has learned that what matters is a span of 3, whatever the clock."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

import keyquery as kq
from keyquery import pages
from keyquery.learn.training import Recipe, train


class Span(nn.Module):
    """Four types of events in twelve places; the answer is read at the last."""

    def __init__(self, code: nn.Module) -> None:
        super().__init__()
        self.types, self.places = nn.Embedding(4, 32), nn.Embedding(12, 32)
        self.attention = kq.TimeAttention(32, heads=2, time=code, how="additive")
        self.read = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, types: Tensor, times: Tensor) -> Tensor:
        """Logits of the two answers."""
        x = self.types(types) + self.places.weight
        return self.read((x + self.attention(x, times))[:, -1])


def draw(step: int, generator: torch.Generator, count: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Random types at random gaps; the answer is the sign of cos(2π·span/3), from the middle event to the last."""
    types = torch.randint(0, 4, (count, 12), generator=generator)
    times = (2 * torch.rand(count, 12, generator=generator, dtype=torch.float64)).cumsum(1)
    return types, times, (torch.cos(2 * math.pi * (times[:, -1] - times[:, 6]) / 3) > 0).long()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross-entropy."""
    types, times, label = batch
    return nn.functional.cross_entropy(model(types, times), label)


def main() -> None:
    """Train, and write the picture beside this file."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    code = kq.MercerTime(32, degree=1, periods=16)
    code.see(draw(0, torch.Generator().manual_seed(1), 1000)[1])
    model = Span(code)
    train(model, draw, loss, Recipe(1500, lr=3e-3))
    reading = model.attention.time_kernel(torch.linspace(0, 9, 721, dtype=torch.float64))
    path = Path(__file__).with_name("time.svg")
    path.write_bytes(pages.picture_bytes(path, reading, periods=[3]))


if __name__ == "__main__":
    main()
