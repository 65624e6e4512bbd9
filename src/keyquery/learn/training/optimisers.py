"""Optimisers by name, and the two that torch does not have: LAMB and Lookahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, RAdam, RMSprop

OPTIMISERS = ("adamw", "radam", "lamb", "lamb+lookahead", "npt", "rmsprop")
SCHEDULES = ("flat", "linear", "cosine", "flat+cosine")
ENDLESS = 2**40  # steps, after which bias correction has no effect


class Lamb(Optimizer):
    """LAMB: Adam's direction u = m̂/(√v̂ + ε) + λw, scaled to the norm of each tensor: w ← w − lr·‖w‖/‖u‖·u.

    Without `unbiased`, there is no bias correction: m̂ = m and v̂ = v. `longest` clips ‖w‖, and so the steps of large
    tensors. If a tensor or its direction is 0, the step is lr·u.

    Parameters
    ----------
    params
        Parameters, or groups of them.
    lr, betas, eps, weight_decay
        As in Adam.
    unbiased
        Bias correction. Default: yes.
    longest
        Largest ‖w‖ that scales a step. Default: any.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        unbiased: bool = True,
        longest: float = math.inf,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "unbiased": unbiased, "longest": longest})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("a closure is not used: call backward before step")
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(weights, group)

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update all tensors of a group at once, to save kernel launches.

        The direction is one step of torch's fused Adam from zero weights, in a single pass over memory. With the step
        count ENDLESS, Adam's bias correction has no effect.
        """
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight].update(step=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
            self.state[weight]["step"] += 1
        states, (slow, slower) = [self.state[weight] for weight in weights], group["betas"]
        means, squares = [state["mean"] for state in states], [state["square"] for state in states]
        counts = [state["step"] if group["unbiased"] else ENDLESS for state in states]
        step_counts = {count: torch.full((), float(count), device=weights[0].device) for count in set(counts)}
        updates = [torch.empty_like(weight) for weight in weights]
        torch._foreach_zero_(updates)
        torch._fused_adam_(
            updates,
            gradients,
            means,
            squares,
            [],
            [step_counts[count] for count in counts],
            lr=1.0,
            beta1=slow,
            beta2=slower,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        if group["weight_decay"]:
            torch._foreach_sub_(updates, weights, alpha=group["weight_decay"])
        length, size = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates))
        moving = (length > 0) & (size > 0)
        ratios = torch.where(moving, length.clamp(max=group["longest"]) / size.where(moving, 1.0), 1.0)
        for weight, update, ratio in zip(weights, updates, (group["lr"] * ratios).unbind(), strict=True):
            weight.addcmul_(update, ratio)


class Lookahead(Optimizer):
    """Lookahead: every `every` steps of the inner optimiser, the slow weights move `share` of the way to the fast ones,
    and the fast ones are reset to them.

    Parameters
    ----------
    inner
        The optimiser of the fast weights.
    every
        Its steps per step of the slow weights. Default: 6.
    share
        How far the slow weights move. Default: 0.5.
    """

    def __init__(self, inner: Optimizer, every: int = 6, share: float = 0.5) -> None:
        self.inner = inner
        self.every = every
        self.share = share
        self.count = 0
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state
        self.slow = [[weight.detach().clone() for weight in group["params"]] for group in inner.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One inner step, and every `every` steps one of the slow weights."""
        self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for group, kept in zip(self.param_groups, self.slow, strict=True):
                torch._foreach_lerp_(kept, group["params"], self.share)
                torch._foreach_copy_(group["params"], kept)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner state, the slow weights and the count."""
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state."""
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for kept, saved in zip(self.slow, state_dict["slow"], strict=True):
            for slow, old in zip(kept, saved, strict=True):
                slow.copy_(old)
        self.count = state_dict["count"]


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
    if name == "lamb":
        return Lamb(groups, lr=lr)
    if name == "lamb+lookahead":
        return Lookahead(Lamb(groups, lr=lr))
    if name == "npt":  # as published for NPT
        return Lookahead(Lamb(groups, lr=lr, unbiased=False, longest=10.0))
    if name == "rmsprop":  # with the constants of Keras
        return RMSprop(groups, lr=lr, alpha=0.9, eps=1e-7)
    raise ValueError(f"there is no optimiser {name!r}; known: {', '.join(OPTIMISERS)}")


def schedule(name: str, step: int, steps: int, warmup: int, flat: float = 0.7) -> float:
    """Learning-rate factor: linear warmup over `warmup` steps, then flat, linear, cosine, or flat
    for a share `flat` of the rest and a cosine after ("flat+cosine").

    Parameters
    ----------
    name
        "flat", "linear", "cosine" or "flat+cosine".
    step, steps
        The present step, from 0, and their number.
    warmup
        Steps of linear warmup.
    flat
        Share of constant steps of "flat+cosine".

    Returns
    -------
    float
        Factor from 0 to 1.

    Examples
    --------
    >>> [round(schedule("cosine", step, 100, 10), 2) for step in (0, 9, 55, 99)]
    [0.1, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    match name:
        case "flat":
            return 1.0
        case "linear":
            return 1 - done
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "flat+cosine":
            return (1 + math.cos(math.pi * max(done - flat, 0) / (1 - flat))) / 2
    raise ValueError(f"there is no schedule {name!r}; known: {', '.join(SCHEDULES)}")
