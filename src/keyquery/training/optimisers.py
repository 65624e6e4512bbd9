"""Optimisers by name, and the two that torch does not have: LAMB and Lookahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, RAdam

OPTIMISERS = ("adamw", "radam", "lamb", "lamb+lookahead")
SCHEDULES = ("flat", "linear", "cosine", "flat+cosine")


class Lamb(Optimizer):
    """Adam's direction u = m̂/(√v̂ + ε) + λw, each tensor's step as long as the tensor itself: w ← w − lr·‖w‖/‖u‖·u."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("a closure is not used: call backward before step")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight -= group["lr"] * self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state, (slow, slower), gradient = self.state[weight], group["betas"], weight.grad
        assert gradient is not None
        if not state:
            state.update(step=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - slow)
        state["square"].lerp_(gradient.square(), 1 - slower)
        mean = state["mean"] / (1 - slow ** state["step"])
        square = state["square"] / (1 - slower ** state["step"])
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * weight
        length, step = weight.norm(), update.norm()
        return update * torch.where((length > 0) & (step > 0), length / step, 1.0)


class Lookahead(Optimizer):
    """Every `every` steps of the inner optimiser, slow weights move `share` of the way to the fast ones, which return
    to them.
    """

    def __init__(self, inner: Optimizer, every: int = 6, share: float = 0.5) -> None:
        self.inner, self.every, self.share, self.count = inner, every, share, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        self.slow = [[weight.detach().clone() for weight in group["params"]] for group in inner.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One inner step, and the slow weights' where it is their turn."""
        self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for group, kept in zip(self.param_groups, self.slow, strict=True):
                for weight, slow in zip(group["params"], kept, strict=True):
                    weight.copy_(slow.lerp_(weight, self.share))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner state, the slow weights and the count."""
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for kept, saved in zip(self.slow, state_dict["slow"], strict=True):
            for slow, old in zip(kept, saved, strict=True):
                slow.copy_(old)
        self.count = state_dict["count"]


def make_optimiser(name: str, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """An optimiser by name; vectors (biases, gains, a kernel's diagonal) and embeddings do not decay."""
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
    raise ValueError(f"there is no optimiser {name!r}; known: {', '.join(OPTIMISERS)}")


def schedule(name: str, step: int, steps: int, warmup: int) -> float:
    """What the learning rate is multiplied by: a linear rise over `warmup` steps, then flat, linear, cosine, or flat
    for seven tenths and a cosine after ("flat+cosine").

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
            return (1 + math.cos(math.pi * max(done - 0.7, 0) / 0.3)) / 2
    raise ValueError(f"there is no schedule {name!r}; known: {', '.join(SCHEDULES)}")
