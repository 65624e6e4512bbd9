"""Language models that differ in the start of queries and keys, the rate and the seed, trained side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from keyquery.layers import Attention, LanguageModel, Shape
from keyquery.support.checks import check_choice, check_count
from keyquery.training import schedule
from keyquery_studies.common.language_models import begin, tasks
from keyquery_studies.common.objectives import CAUSAL, OBJECTIVES, Task
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.stacked import Adam, Weights, embed, linear, norm, split_heads, stacked, within
from keyquery_studies.common.store import result_name

STARTS = ("default", "tied", "matched", "small", "small tied")
CHECKS = 40  # evaluations during a training
WARMUP, DECAY, CLIP = 300, 0.1, 1.0
Late = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class StartRun:
    """One model, with learned positions."""

    objective: str
    start: str
    lr: float
    seed: int
    text: str  # digest of the corpus
    vocabulary: int = 512
    steps: int = 8000
    width: int = 64
    depth: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 32

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("start", self.start, STARTS)
        for name in ("steps", "width", "depth", "heads", "length", "batch"):
            check_count(name, getattr(self, name))

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name((self.objective, self.start, self.lr, self.seed), asdict(self))

    def initial(self) -> Weights:
        """Its weights before training."""
        torch.manual_seed(self.seed)
        shape = Shape(self.vocabulary, self.width, self.depth, self.heads, self.length, CAUSAL[self.objective])
        model = LanguageModel(shape)
        start_of(model, self.start)
        return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def start_of(model: torch.nn.Module, start: str) -> None:
    """Initialise queries and keys; `small tied` is `small` with Wq = Wk, both of standard deviation .02.

    >>> layer = kq.Attention(8, heads=2)
    >>> start_of(layer, "small tied")
    >>> bool(layer.form().symmetry.min() > 1 - 1e-12), bool(layer.query.weight.std() < 0.04)
    (True, True)
    """
    if start != "small tied":
        return begin(model, start)
    begin(model, "small")
    for layer in model.modules():
        if isinstance(layer, Attention) and layer.query is not None:
            layer.query.load_state_dict(layer.key.state_dict())
    return None


def losses(weights: Weights, run: StartRun, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every model on its own windows, (models, batch, n); targets of −100 are ignored."""
    models, batch, n = inputs.shape
    x = (embed(weights["tokens.weight"], inputs) + weights["places.weight"][:, None, :n]).flatten(1, 2)
    for block in range(run.depth):
        own = within(weights, f"body.blocks.{block}.")
        normed = norm(own, "attention_norm", x)
        parts = (linear(own, f"attention.{name}", normed) for name in ("query", "key", "value"))
        query, key, value = (split_heads(part, (batch, n), run.heads) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=CAUSAL[run.objective])
        x = x + linear(own, "attention.output", mixed.transpose(1, 2).reshape(x.shape))
        x = x + linear(own, "mlp.2", gelu(linear(own, "mlp.0", norm(own, "mlp_norm", x))))
    logits = torch.bmm(norm(weights, "body.norm", x), weights["tokens.weight"].mT)
    each = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").unflatten(0, (models, -1))
    return each.sum(1) / (targets.flatten(1) != -100).sum(1).clamp(min=1)


def trained(runs: Sequence[StartRun], folder: Path, device: str, late: Late) -> list[dict[str, Any]] | None:
    """The rows of models of one objective, trained side by side; None once `late`.

    Models of one seed see the same windows.
    """
    run = runs[0]
    task, exam = tasks(folder, device, run.objective, run.length, batch=run.batch)
    seeds = sorted({own.seed for own in runs})
    of_seed = torch.tensor([seeds.index(own.seed) for own in runs], device=device)
    weights = stacked([own.initial() for own in runs], device)
    decays = [
        name for name, weight in weights.items() if weight.ndim > 2 and "tokens" not in name and "places" not in name
    ]
    optimiser, rates = Adam(weights, decays, DECAY, CLIP), torch.tensor([own.lr for own in runs], device=device)
    best = {name: weight.detach().clone() for name, weight in weights.items()}
    lowest = torch.full((len(runs),), torch.inf, device=device)
    at, curve = torch.zeros(len(runs), device=device), []
    generator = torch.Generator()
    for step in range(run.steps):
        drawn = []
        for seed in seeds:
            generator.manual_seed((seed * 1_000_003 << 24) + step)
            drawn.append(task.draw(step, generator))
        inputs, targets = (torch.stack(each)[of_seed] for each in zip(*drawn, strict=True))
        _step(weights, run, inputs, targets.long())
        optimiser.step(rates * schedule("cosine", step, run.steps, min(WARMUP, run.steps // 4)))
        if (step + 1) % max(run.steps // CHECKS, 1) == 0:
            values = evaluated(weights, run, task)
            better = values < lowest
            lowest, at = torch.where(better, values, lowest), torch.where(better, step + 1, at)
            for name, weight in weights.items():
                best[name][better] = weight.detach()[better]
            curve.append([step + 1, *values.tolist()])
            print(run.objective, step + 1, f"{values.nanmean().item():.3f}", flush=True)
        if late():
            return None
    tested = evaluated(best, run, exam).tolist()
    return [
        {
            **asdict(own),
            "loss": tested[index],
            "validation": lowest[index].item(),
            "best_step": int(at[index]),
            "curve": [[row[0], row[1 + index]] for row in curve],
            "tokens": len(task.ids),
            "parameters": sum(weight[index].numel() for weight in weights.values()),
            "device": device_name(device),
        }
        for index, own in enumerate(runs)
    ]


def _step(weights: Weights, run: StartRun, inputs: Tensor, targets: Tensor) -> None:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        value = losses(weights, run, inputs, targets)
    value.sum().backward()


@torch.no_grad()
def evaluated(weights: Weights, run: StartRun, task: Task) -> Tensor:
    """The loss of every model on held-out text."""
    models, batches = len(weights["tokens.weight"]), []
    for inputs, targets in task.held_out:
        pair = (part.expand(models, -1, -1) for part in (inputs, targets.long()))
        batches.append(losses(weights, run, *pair))
    return torch.stack(batches).mean(0)
