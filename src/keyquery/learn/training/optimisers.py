"""Optimisers by name, and the one that torch does not have: LAMB inside Lookahead."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer, RAdam

from keyquery.support.checks import check_choice

OPTIMISERS = ("adamw", "radam", "npt")
SCHEDULES = ("flat", "linear", "cosine", "flat+cosine")
EVERY = 6  # steps of the fast weights of Lookahead per step of the slow ones
LONGEST = 10.0  # the norm of a tensor that scales its step, at most


class Lamb(Optimizer):
    """LAMB inside Lookahead, as in NPT, without bias correction: for each tensor w, with u = m/(√v + ε) + λw,

        w ← w − lr·min(‖w‖, 10)/‖u‖·u, or w − lr·u if w or u is 0;

    every six steps the slow weights move half of the way to w, and w is reset to them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; all tensors of a group at once."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            for weight in weights:
                if not self.state[weight]:
                    zeros = {name: torch.zeros_like(weight) for name in ("mean", "square")}
                    self.state[weight].update(zeros, slow=weight.clone())
            gradients = [weight.grad for weight in weights]
            means, squares, slow = ([self.state[w][name] for w in weights] for name in ("mean", "square", "slow"))
            first, second = group["betas"]
            torch._foreach_lerp_(means, gradients, 1 - first)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_add_(roots, group["eps"])
            updates = torch._foreach_div(means, roots)
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            length, size = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates))
            moving = (length > 0) & (size > 0)
            ratios = torch.where(moving, length.clamp(max=LONGEST) / size.where(moving, 1.0), 1.0)
            for weight, update, ratio in zip(weights, updates, (group["lr"] * ratios).unbind(), strict=True):
                weight.addcmul_(update, -ratio)
            group["count"] += 1
            if group["count"] % EVERY == 0:
                torch._foreach_lerp_(slow, weights, 0.5)
                torch._foreach_copy_(weights, slow)


def make_optimiser(name: str, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """An optimiser by name; no weight decay for vectors (biases, gains, a kernel's diagonal) and embeddings."""
    kept = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kept |= {id(weight) for name, weight in model.named_parameters() if weight.ndim <= 1 or name.endswith("gain")}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    decays = [weight for weight in trained if id(weight) not in kept]
    rest = [weight for weight in trained if id(weight) in kept]
    groups = [{"params": decays, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=all(w.is_cuda for w in trained))
    if name == "radam":
        return RAdam(groups, lr=lr, decoupled_weight_decay=True)
    check_choice("optimiser", name, OPTIMISERS)
    return Lamb(groups, lr=lr)


def schedule(name: str, step: int, steps: int, warmup: int, flat: float = 0.7) -> float:
    """Learning-rate factor of a step, from 0: linear warmup over `warmup` steps, then flat, linear, cosine, or flat
    for a share `flat` of the rest and a cosine after ("flat+cosine").

    >>> [round(schedule("cosine", step, 100, 10), 2) for step in (0, 9, 55, 99)]
    [0.1, 1.0, 0.5, 0.0]
    """
    check_choice("schedule", name, SCHEDULES)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    if name == "flat+cosine":
        done = max(done - flat, 0) / (1 - flat)
    return {"flat": 1.0, "linear": 1 - done}.get(name, (1 + math.cos(math.pi * done)) / 2)
