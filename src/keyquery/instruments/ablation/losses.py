"""Losses of language models per sequence, so that two runs of a model can be compared sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from keyquery.listening import Batch
from keyquery.listening.inputs.data import token_argument
from keyquery.listening.live import live_heads

# A model and a batch in, one loss per sequence out; sequences that have none may be left out.
Loss = Callable[[nn.Module, Batch], Float[Tensor, " sequences"]]
IGNORED = -100  # target of a token without a loss
ROWS = 256  # tokens whose losses are computed at once on a CPU, since the copy of their logits is large
MASKED = 0.15  # share of an encoder's non-padding tokens that are masked


def logits(model: nn.Module, batch: Batch) -> Float[Tensor, "*tokens vocabulary"]:
    """Logits of a model for a batch, which is moved to the model's device."""
    device = next(model.parameters()).device
    out: Any = model(**{name: tensor.to(device) for name, tensor in batch.items()})
    values = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
    if not isinstance(values, Tensor):
        raise ValueError(f"{type(model).__name__} returns no logits: load it with its LM head")
    return values.float()


def token_ids(model: nn.Module, batch: Batch) -> Int[Tensor, "batch n"]:
    """The token ids of a batch, whatever the model calls them."""
    name = token_argument(model)
    ids = batch.get(name)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2:
        raise ValueError(f"{type(model).__name__} has no token ids {name!r} in its batches: pass a loss")
    return ids


def next_token_loss(model: nn.Module, batch: Batch) -> Float[Tensor, " sequences"]:
    """Next-token cross-entropy in nats, averaged per sequence over tokens that follow one which is no padding either.

    Sequences of a single token are left out.
    """
    ids = token_ids(model, batch)
    real = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)
    counted, predicted = real[:, 1:] & real[:, :-1], logits(model, batch)
    if predicted.shape[:-1] != ids.shape or predicted.shape[-1] <= int(ids.max()):
        got = tuple(predicted.shape)
        raise ValueError(
            f"{type(model).__name__} returns {got}, not logits for each of {tuple(ids.shape)}: pass a loss"
        )
    return _mean_loss(predicted, *(pad(values, (0, 1)) for values in (ids[:, 1:], counted)))


def masked_loss(mask: int, special: set[int], seed: int = 0) -> Loss:
    """Masked-token cross-entropy, averaged per sequence, in nats; the same tokens are masked at every call."""

    def loss(model: nn.Module, batch: Batch) -> Float[Tensor, " sequences"]:
        hidden = hide(batch, special, seed)
        masked = {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, mask)}
        return _mean_loss(logits(model, masked), batch["input_ids"], hidden)

    return loss


def hide(batch: Batch, special: set[int], seed: int = 0) -> Bool[Tensor, "batch n"]:
    """Which tokens of a batch are masked: a share MASKED of the non-padding ones, at least one per sequence."""
    ids = batch["input_ids"]
    dice = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
    usable = real_tokens(batch) & ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))
    dice = dice.masked_fill(~usable, 2.0)
    least = dice == dice.amin(1, keepdim=True)
    return usable & ((dice < MASKED) | least)


def real_tokens(batch: Batch) -> Bool[Tensor, "batch n"]:
    """Which tokens are not padding."""
    ids = batch["input_ids"]
    return batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)


def default_loss(model: nn.Module, tokenizer: Any) -> tuple[str, Loss]:
    """The training objective of a model: next token if its attention is causal, else masked tokens."""
    if live_heads(model)[0].causal:
        return "next token", next_token_loss
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError("the model is bidirectional, but its tokenizer has no mask token: pass a loss")
    return "masked", masked_loss(mask, set(getattr(tokenizer, "all_special_ids", [])) | {mask})


def _mean_loss(
    predicted: Float[Tensor, "batch n vocabulary"], targets: Int[Tensor, "batch n"], counted: Bool[Tensor, "batch n"]
) -> Float[Tensor, " sequences"]:
    """The mean loss of every sequence that has tokens to count."""
    targets = targets.masked_fill(~counted, IGNORED).to(predicted.device).flatten()
    rows = predicted.flatten(0, 1)
    size = len(rows) if rows.is_cuda else ROWS
    parts = zip(rows.split(size), targets.split(size), strict=True)
    losses = torch.cat([cross_entropy(*part, ignore_index=IGNORED, reduction="none") for part in parts])
    counted = counted.cpu()
    means = losses.cpu().double().reshape(counted.shape).sum(1) / counted.sum(1)
    return means[counted.any(1)]
