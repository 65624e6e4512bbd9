"""What a model is measured by: losses per sequence, and the predictions that they come from.

An objective turns a batch into inputs and labels once, so that an estimate and a measurement use the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.listening import Batch
from keyquery.listening.hooks import evaluating
from keyquery.listening.live import live_heads

# A model and a batch in, one loss per sequence out; sequences that have none may be left out.
Loss = Callable[[nn.Module, Batch], Float[Tensor, " sequences"]]
IGNORED = -100  # label of a token without a loss
ROWS = {"cuda": 8192, "cpu": 256}  # tokens whose losses are computed at once, since the copy of their logits is large
MASKED = 0.15  # share of an encoder's non-padding tokens that are masked


@dataclass(frozen=True)
class Objective:
    """A model's objective: `task` gives the inputs and the labels of a batch.

    Labels are (batch, n), or (batch,) for one class per sequence, IGNORED where there is no loss. Without labels (None)
    the objective is the output itself, and what is measured is how far it moves.
    """

    name: str
    task: Callable[[nn.Module, Batch], tuple[Batch, Tensor | None]]
    units: str = "nats per token"

    def __call__(self, model: nn.Module, batch: Batch, copies: int = 1) -> Float[Tensor, " sequences"]:
        """Mean cross-entropy per sequence, in nats, of so many copies of the batch one after another."""
        inputs, labels = self.task(model, batch)
        if labels is None:
            raise ValueError("this objective has no loss: it compares outputs")
        inputs, labels = repeated((inputs, labels), copies, len(labels))
        return _mean_loss(predictions(model, inputs, labels), labels)


def losses_of(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> Float[Tensor, " sequences"]:
    """One loss per sequence."""
    with evaluating(model):
        losses = torch.cat([checked(loss(model, batch)) for batch in batches])
    if not len(losses):
        raise ValueError("no sequence has a loss: one of at least two tokens is needed")
    return losses


def checked(losses: Any) -> Float[Tensor, " sequences"]:
    """What a loss returned, in float64 on the CPU; raises if it is not one finite number per sequence."""
    values = torch.as_tensor(losses).detach().double().cpu()
    if values.ndim != 1:
        raise ValueError(f"loss must return one value per sequence, (batch,), got {tuple(values.shape)}")
    wrong = values[~values.isfinite()]
    if len(wrong):
        raise ValueError(f"the loss is not finite: it is {float(wrong[0])} for {len(wrong)} of {len(values)} sequences")
    return values


def repeated(values: Any, copies: int, rows: int | None = None) -> Any:
    """Tensors of `rows` rows, in containers, repeated along them; default: all that have a batch."""
    if isinstance(values, Tensor):
        batched = values.ndim > (rows is None) and copies > 1 and rows in (None, len(values))
        return values.repeat(copies, *[1] * (values.ndim - 1)) if batched else values
    if isinstance(values, Mapping):
        parts = {name: repeated(part, copies, rows) for name, part in values.items()}
        return parts if type(values) is dict else type(values)(**parts)
    if type(values) in (tuple, list):
        return type(values)(repeated(part, copies, rows) for part in values)
    return values


def output_of(
    model: nn.Module, batch: Batch, names: Sequence[str] = ("last_hidden_state", "logits"), missing: str = "pass a loss"
) -> Float[Tensor, "batch *rest"]:
    """The output of a model for a batch, moved to its device: by its name, or the first tensor that it returns."""
    device = next(model.parameters()).device
    out = model(**{name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()})
    out = next((getattr(out, name) for name in names if hasattr(out, name)), out)
    out = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(out, Tensor):
        raise ValueError(f"{type(model).__name__} returns a {type(out).__name__}: {missing}")
    return out.to(torch.promote_types(out.dtype, torch.float32))


def real_outputs(output: Float[Tensor, "batch *rest"], batch: Batch) -> Bool[Tensor, "batch *n"]:
    """Which vectors of an output are of tokens that are not padding; all, if it has one vector per sequence."""
    shape, mask = output.shape[: 2 if output.ndim > 2 else 1], batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask.to(output.device).bool()
    return torch.ones(shape, dtype=torch.bool, device=output.device)


def logits(model: nn.Module, batch: Batch) -> Float[Tensor, "batch *rest"]:
    """Logits of a model for a batch."""
    return output_of(model, batch, ("logits",), "load it with its LM head, which returns logits")


def predictions(model: nn.Module, inputs: Batch, labels: Shaped[Tensor, "batch *n"]) -> Float[Tensor, "batch *n v"]:
    """Logits of a model, one vector per label; raises for any other output."""
    values = logits(model, inputs)
    if values.shape[:-1] != labels.shape or values.shape[-1] <= int(labels.max()):
        got, wanted = tuple(values.shape), tuple(labels.shape)
        raise ValueError(f"{type(model).__name__} returns {got}, not logits for each of {wanted}: pass a loss")
    return values


def _next_token(model: nn.Module, batch: Batch) -> tuple[Batch, Int[Tensor, "batch n"]]:
    ids, real = ids_of(batch), real_tokens(batch)
    labels = ids.new_full(ids.shape, IGNORED)
    labels[:, :-1] = ids[:, 1:].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED)
    return batch, labels


# Averaged per sequence over tokens that follow one which is no padding either; a single token has none.
next_token_loss = Objective("next token", _next_token)


def masked_loss(mask: int, special: set[int], seed: int = 0) -> Objective:
    """Masked-token cross-entropy, averaged per sequence, in nats; the same tokens are masked at every call."""

    def task(model: nn.Module, batch: Batch) -> tuple[Batch, Int[Tensor, "batch n"]]:
        ids, hidden = ids_of(batch), hide(batch, special, seed)
        inputs = {**batch, "input_ids": ids.masked_fill(hidden, mask)}
        return inputs, ids.masked_fill(~hidden, IGNORED)

    return Objective("masked", task)


# For models without a loss, such as encoders of sentences.
OUTPUT = Objective("output", lambda model, batch: (batch, None), "share of the output's squared norm")


def hide(batch: Batch, special: set[int], seed: int = 0) -> Bool[Tensor, "batch n"]:
    """Which tokens of a batch are masked: a share MASKED of the non-padding ones, at least one per sequence."""
    ids = ids_of(batch)
    dice = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).to(ids.device)
    usable = real_tokens(batch) & ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype, device=ids.device))
    dice = dice.masked_fill(~usable, 2.0)
    lowest = dice == dice.amin(1, keepdim=True)
    return usable & ((dice < MASKED) | lowest)


def ids_of(batch: Batch) -> Int[Tensor, "batch n"]:
    """The token ids of a batch: `input_ids`, or its only other matrix of integers."""
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.ndim == 2 and "mask" not in name}
    ids = [x for x in tensors.values() if not x.is_floating_point() and x.dtype != torch.bool]
    if "input_ids" in batch or len(ids) != 1:
        ids = [x for name, x in tensors.items() if name == "input_ids"]
    if not ids:
        raise ValueError(f"batches must hold token ids as 'input_ids', got {', '.join(batch) or 'nothing'}")
    return ids[0]


def real_tokens(batch: Batch) -> Bool[Tensor, "batch n"]:
    """Which tokens are not padding."""
    ids = ids_of(batch)
    return batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)


def default_loss(model: nn.Module, tokenizer: Any) -> Objective:
    """The training objective of a model: next token if its attention is causal, else masked tokens."""
    if live_heads(model)[0].causal:
        return next_token_loss
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError("the model is bidirectional, but its tokenizer has no mask token: pass a loss")
    return masked_loss(mask, set(getattr(tokenizer, "all_special_ids", [])) | {mask})


def labelled(
    values: Float[Tensor, "batch *n vocabulary"], labels: Shaped[Tensor, "batch *n"]
) -> tuple[Float[Tensor, "labels vocabulary"], Int[Tensor, " labels"], Int[Tensor, " labels"]]:
    """Logits of the tokens that have a label, with it and the number of their sequence."""
    labels = labels.to(values.device)
    rows = torch.arange(len(labels), device=values.device).reshape(-1, *[1] * (labels.ndim - 1)).expand_as(labels)
    counted = labels != IGNORED
    return values[counted], labels[counted], rows[counted]


def _mean_loss(
    predicted: Float[Tensor, "batch *n vocabulary"], labels: Int[Tensor, "batch *n"]
) -> Float[Tensor, " sequences"]:
    """The mean loss of every sequence that has tokens to count."""
    labels = labels.reshape(len(labels), -1).to(predicted.device)
    rows, targets = predicted.flatten(0, -2), labels.flatten()
    size = ROWS.get(rows.device.type, ROWS["cpu"])
    parts = zip(rows.split(size), targets.split(size), strict=True)
    losses = torch.cat([cross_entropy(*part, ignore_index=IGNORED, reduction="none") for part in parts])
    counted = (labels != IGNORED).cpu()
    means = losses.cpu().double().reshape(counted.shape).sum(1) / counted.sum(1)
    return means[counted.any(1)]
