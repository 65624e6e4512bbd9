"""Does the loss of a primal layer find the KSVD? The share of K's leading left singular subspace that e spans.

Random tokens, five seeds, with and without data dependence, every head by itself; We, Wr and Λ are trained by Adam with
nothing but the layer's own loss, the rate falling to 0 as a cosine. The overlap is by a full SVD of the n × n kernel in
float64, not by the layer's own reading.

    python bench/overlaps.py      about two minutes on one core
"""

from __future__ import annotations

import torch
from harness import publish, row

import keyquery as kq

SEEDS, HEADS = range(5), 2
SIZES = {(64, 48, 4): "64 tokens, dim 48, rank 4", (128, 64, 8): "128 tokens, dim 64, rank 8"}
LARGE = (128, 64, 8)
# size, loss, steps, rate
TRAININGS = [(size, *rest) for size in SIZES for rest in (("none", 0, 0.1), ("paper", 500, 0.1), ("ksvd", 500, 0.1))]
TRAININGS += [(LARGE, "ksvd", 250, 0.05), (LARGE, "ksvd", 1000, 0.05)]


def train(size, loss, steps, rate, seed, data_dependent):
    """Overlaps of every head after so many steps, and the loss that is left."""
    n, dim, rank = size
    torch.manual_seed(seed)
    x = torch.randn(1, n, dim)
    loss = "paper" if loss == "none" else loss
    layer = kq.PrimalAttention(dim, HEADS, rank, loss=loss, eta=1.0, data_dependent=data_dependent)
    optimiser = torch.optim.Adam([layer.directions, layer.log_lambda], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    for _ in range(steps):
        layer(x)
        optimiser.zero_grad()
        layer.regularizer().backward()
        optimiser.step()
        schedule.step()
    layer, x = layer.double(), x.double()
    with torch.no_grad():
        layer(x)
        return overlaps(layer, x), layer.regularizer().item()


def overlaps(layer, x):
    """‖UᵀQ‖²/s head by head: U the s leading left singular vectors of K, Q an orthonormal basis of e's columns."""
    phi, sample = layer.kernel_parts(x)
    query, key = phi[:, 0]
    middle = None if sample is None else sample[0]
    kernel = query @ key.mT if middle is None else query @ middle.mT @ middle @ key.mT
    weights = layer.we if middle is None else middle.mT @ layer.we[:, : middle.shape[1]]
    left = torch.linalg.svd(kernel)[0][..., : layer.rank]
    return ((left.mT @ torch.linalg.qr(query @ weights)[0]).square().sum((1, 2)) / layer.rank).tolist()


def main():
    torch.set_num_threads(1)
    rows = []
    for size, loss, steps, rate in TRAININGS:
        found = [train(size, loss, steps, rate, seed, own) for seed in SEEDS for own in (True, False)]
        name = "untrained" if loss == "none" else f'loss="{loss}", {steps:,} steps at {rate}'
        rows.append(row(f"overlap, {SIZES[size]}, {name}", [one for heads, _ in found for one in heads], "", "—"))
        rows[-1] |= {"shown": False, "size": SIZES[size], "loss": loss, "steps": steps, "rate": rate}
        rows[-1] |= {"chance": size[2] * HEADS / size[1], "highest_loss_left": max(left for _, left in found)}
    publish("overlaps", rows, seeds=len(SEEDS), heads=HEADS, machine="one CPU thread")


if __name__ == "__main__":
    main()
