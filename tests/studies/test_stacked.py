"""Models side by side against single ones."""

from __future__ import annotations

import torch
from keyquery_studies.common.stacked import Adam


def test_adam_with_a_rate_per_model() -> None:
    start, rates = torch.randn(2, 4), [1e-2, 0.1]
    together, singles = start.clone().requires_grad_(), [row.clone().requires_grad_() for row in start]
    ours = Adam({"weight": together}, ["weight"], decay=0.1, clip=1.0)
    theirs = [
        torch.optim.AdamW([row], rate, (0.9, 0.98), weight_decay=0.1) for row, rate in zip(singles, rates, strict=True)
    ]
    for _ in range(5):
        (together**3).sum().backward()
        ours.step(torch.tensor(rates))
        for row, optimiser in zip(singles, theirs, strict=True):
            optimiser.zero_grad()
            (row**3).sum().backward()
            torch.nn.utils.clip_grad_norm_([row], 1.0)
            optimiser.step()
    torch.testing.assert_close(together, torch.stack(singles))
