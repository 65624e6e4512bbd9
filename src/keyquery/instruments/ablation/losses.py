"""How well a language model does on a batch, sequence by sequence, so that two ways of running it can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.capture import Batch
from keyquery.checkpoints import read

# A model and a batch in, one loss a sequence out.
Loss = Callable[[nn.Module, Batch], Float[Tensor, " batch"]]
MASKED = 0.15  # of an encoder's real tokens are hidden


def logits(model: nn.Module, batch: Batch) -> Float[Tensor, "batch n vocabulary"]:
    """The logits that a model gives for a batch, which is put where the model is."""
    device = next(model.parameters()).device
    out: Any = model(**{name: tensor.to(device) for name, tensor in batch.items()})
    found = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if found is None:
        raise ValueError(f"{type(model).__name__} gives no logits: load it with its language-model head")
    return found.float()


def next_token_loss(model: nn.Module, batch: Batch) -> Float[Tensor, " batch"]:
    """−log p of each real token but the first, mean over a sequence, in nats."""
    targets = batch["input_ids"][:, 1:]
    return _mean_loss(logits(model, batch)[:, :-1], targets, real_tokens(batch)[:, 1:])


def masked_loss(mask: int, special: set[int], seed: int = 0) -> Loss:
    """−log p of tokens that are hidden behind `mask`, the same ones at every call, mean over a sequence, in nats."""

    def loss(model: nn.Module, batch: Batch) -> Float[Tensor, " batch"]:
        hidden = hide(batch, special, seed)
        masked = {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, mask)}
        return _mean_loss(logits(model, masked), batch["input_ids"], hidden)

    return loss


def hide(batch: Batch, special: set[int], seed: int = 0) -> Bool[Tensor, "batch n"]:
    """Which tokens of a batch are hidden: a share MASKED of the real ones, one of each sequence at least."""
    ids = batch["input_ids"]
    dice = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
    usable = real_tokens(batch) & ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))
    dice = dice.masked_fill(~usable, 2.0)
    least = dice == dice.amin(1, keepdim=True)
    return usable & ((dice < MASKED) | least)


def real_tokens(batch: Batch) -> Bool[Tensor, "batch n"]:
    """Which tokens are no padding."""
    ids = batch["input_ids"]
    return batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)


def default_loss(model: nn.Module, tokenizer: Any) -> tuple[str, Loss]:
    """What a model was made for, by its attention: the next token where that is causal, else hidden ones."""
    if read(model)[0].causal:
        return "next token", next_token_loss
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError("its attention sees both sides, but its tokenizer has no mask token: give a loss")
    return "masked", masked_loss(mask, set(getattr(tokenizer, "all_special_ids", [])) | {mask})


def _mean_loss(
    given: Float[Tensor, "batch n vocabulary"], targets: Int[Tensor, "batch n"], asked: Bool[Tensor, "batch n"]
) -> Float[Tensor, " batch"]:
    losses = cross_entropy(given.mT, targets.to(given.device), reduction="none").cpu().double()
    return (losses * asked).sum(1) / asked.sum(1)
