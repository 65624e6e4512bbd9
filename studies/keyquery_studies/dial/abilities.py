"""Abilities of a language model, each as one value per sequence, so that comparisons are paired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from keyquery.instruments.ablation.losses import hide, logits, real_tokens
from keyquery.listening import Batch
from keyquery.listening.call import Call
from keyquery.listening.listen import listen
from keyquery_studies.dial.sequences import NOTHING, Material, Sequences

RIDGE = 0.1  # of the features' variance, in the probe


@dataclass(frozen=True)
class Ability:
    """What is measured, in which unit, which way is better, and of which models.

    `make` gives sequences: of a material, a source (the name of a text, or a seed), how many, how long, and whether
    these are only for means (others of the same kind). `measure` gives one value for each.
    """

    name: str
    unit: str
    better: str  # lower, higher, or neither
    of: str  # decoders or encoders
    source: str  # text or seed
    make: Callable[[Material, Any, int, int, bool], Sequences]
    measure: Callable[[nn.Module, Sequences], Tensor]
    lm_head: bool = True  # whether it needs logits
    by_head: bool = False  # whether it is worth a pass for every single head


def text(material: Material, source: str, count: int, length: int, others: bool = False) -> Sequences:
    """Windows of a text; the target of each token is the next."""
    return _following(material.windows(source, count, length, others))


def repeated(material: Material, seed: int, count: int, length: int, others: bool = False) -> Sequences:
    """Random tokens and the same again, [r; r]; in the second half each token is asked for the next."""
    ids = material.random(count, _half(material, length), _seed(seed, others))
    asked = _following(material.framed(torch.cat((ids, ids), 1)))
    assert asked.targets is not None
    start = len(material.before) + ids.shape[1]
    return Sequences(asked.inputs, asked.targets.index_fill(1, torch.arange(start), NOTHING))


def look_ups(material: Material, seed: int, count: int, length: int, others: bool = False) -> Sequences:
    """Random pairs (key, value), then the same in another order; a key that comes again is asked for its value.

    What stood before the key is of no help: unlike in a repeat, nothing can be followed from token to token.
    """
    seed = _seed(seed, others)
    pairs = material.random(count, _half(material, length) // 2 * 2, seed).unflatten(1, (-1, 2))
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(pairs.shape[1], generator=generator) for _ in range(count)]
    again = torch.stack([row[order] for row, order in zip(pairs, orders, strict=True)])
    asked = _following(material.framed(torch.cat((pairs, again), 1).flatten(1)))
    assert asked.targets is not None
    at = len(material.before) + 2 * pairs.shape[1] + torch.arange(0, 2 * pairs.shape[1], 2)
    blank = torch.full_like(asked.targets, NOTHING)
    return Sequences(asked.inputs, blank.index_copy(1, at, asked.targets[:, at]))


def doubles(material: Material, seed: int, count: int, length: int, others: bool = False) -> Sequences:
    """Random tokens; in the second half every other one, by chance, stood in the first: 1 where it did, 0 where not."""
    half, seed = _half(material, length) // 2 * 2, _seed(seed, others)
    drawn = material.random(2 * count, half + half // 2, seed)  # twice as many: a probe has to learn from them
    generator = torch.Generator().manual_seed(seed)
    first, fresh = drawn[:, :half], drawn[:, half:]
    olds = torch.stack([row[torch.randperm(half, generator=generator)[: half // 2]] for row in first])
    both = torch.cat((olds, fresh), 1)
    orders = torch.stack([torch.randperm(half, generator=generator) for _ in both])
    ids = material.framed(torch.cat((first, both.gather(1, orders)), 1))
    targets = torch.full_like(ids, NOTHING)
    targets[:, len(material.before) + half :] = (orders < half // 2).long()
    return Sequences({"input_ids": ids}, targets)


def hidden_words(material: Material, source: str, count: int, length: int, others: bool = False) -> Sequences:
    """Windows of a text with some tokens masked, which are the targets."""
    ids = material.windows(source, count, length, others)
    hidden = hide({"input_ids": ids}, material.special)
    assert material.mask is not None
    return Sequences({"input_ids": ids.masked_fill(hidden, material.mask)}, ids.masked_fill(~hidden, NOTHING))


def halves(material: Material, source: str, count: int, length: int, others: bool = False) -> Sequences:
    """The first halves of a text's windows, then their second halves, each a sequence of its own."""
    ids = material.windows(source, count, length, others)
    ids = ids[:, len(material.before) : ids.shape[1] - len(material.after)]
    half = ids.shape[1] // 2
    return Sequences({"input_ids": material.framed(torch.cat((ids[:, :half], ids[:, half : 2 * half])))})


def loss(model: nn.Module, sequences: Sequences) -> Float[Tensor, " batch"]:
    """Cross-entropy of the targets, mean over a sequence, in nats."""
    assert sequences.targets is not None
    asked = sequences.targets >= 0
    asked_logits = _asked(logits(model, sequences.inputs), asked)
    return _mean(cross_entropy(asked_logits, sequences.targets[asked].to(asked_logits.device), reduction="none"), asked)


def accuracy(model: nn.Module, sequences: Sequences) -> Float[Tensor, " batch"]:
    """Top-1 accuracy."""
    assert sequences.targets is not None
    asked = sequences.targets >= 0
    predicted = _asked(logits(model, sequences.inputs), asked).argmax(-1)
    return _mean(predicted.cpu() == sequences.targets[asked], asked)


def probe(model: nn.Module, sequences: Sequences) -> Float[Tensor, " batch"]:
    """Accuracy of a linear probe of the last hidden state, fitted on the other half of the sequences."""
    assert sequences.targets is not None
    return read_out(last_hidden(model, sequences.inputs), sequences.targets)


def read_out(hidden: Float[Tensor, "batch n d"], targets: Tensor) -> Float[Tensor, " batch"]:
    """The accuracy of w = (XᵀX + λnI)⁻¹Xᵀy on sequences it was not fitted on, X standardised, y = ±1, in float64."""
    asked, fold = targets >= 0, torch.arange(len(targets)) % 2 == 0
    right = torch.zeros(targets.shape, dtype=torch.float64)
    for fitted in (fold, ~fold):
        at, to = (asked & some[:, None] for some in (fitted, ~fitted))
        x, y = hidden[at.to(hidden.device)].cpu().double(), 2.0 * targets[at].double() - 1
        mean, size = x.mean(0), x.std(0).clamp(min=1e-12)
        x = (x - mean) / size
        gram = x.mT @ x + RIDGE * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
        weights = torch.linalg.solve(gram, x.mT @ y)
        predicted = ((hidden[to.to(hidden.device)].cpu().double() - mean) / size) @ weights > 0
        right[to] = (predicted == (targets[to] == 1)).double()
    return right.sum(1) / asked.sum(1)


def neighbours(model: nn.Module, sequences: Sequences) -> Float[Tensor, " passages"]:
    """1 where a first half's own second half is the nearest of all, by cosine of mean hidden states; else 0."""
    hidden = last_hidden(model, sequences.inputs).cpu().double()
    real = real_tokens(sequences.inputs)[..., None].cpu()
    first, second = normalize((hidden * real).sum(1) / real.sum(1), dim=-1).chunk(2)
    return ((first @ second.mT).argmax(1) == torch.arange(len(first))).double()


def first_token_mass(model: nn.Module, sequences: Sequences) -> Float[Tensor, " batch"]:
    """Attention-sink mass: attention of later tokens to the first, mean over layers, heads and tokens."""
    masses: list[Tensor] = []

    def keep(call: Call) -> None:
        masses.append(call.weights()[..., 1:, 0].mean((1, 2)).cpu().double())

    with listen(model, keep):
        run(model, sequences.inputs)
    return torch.stack(masses).mean(0)


def run(model: nn.Module, batch: Batch) -> Any:
    """The output of a model for a batch, which is moved to its device."""
    device = next(model.parameters()).device
    return model(**{name: tensor.to(device) for name, tensor in batch.items()})


def last_hidden(model: nn.Module, batch: Batch) -> Float[Tensor, "batch n d"]:
    """What a model's body hands to its head; the model is run as a whole, as a dial wants it."""
    body: Any = getattr(model, "body", getattr(model, "base_model", model))
    kept: list[Any] = []
    hook = body.register_forward_hook(lambda module, args, out: kept.append(out))
    try:
        run(model, batch)
    finally:
        hook.remove()
    return (kept[0] if isinstance(kept[0], Tensor) else kept[0][0]).float()


def _following(ids: Tensor) -> Sequences:
    """Ids, and for each the next as its target."""
    return Sequences({"input_ids": ids}, torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], NOTHING)), 1))


def _half(material: Material, length: int) -> int:
    return (length - len(material.before) - len(material.after)) // 2


def _seed(seed: int, others: bool) -> int:
    """Sequences for means are drawn by another seed, far from those that are given."""
    return seed + 1_000_003 * others


def _asked(values: Float[Tensor, "batch n vocabulary"], asked: Bool[Tensor, "batch n"]) -> Tensor:
    return values[asked.to(values.device)]


def _mean(values: Tensor, asked: Bool[Tensor, "batch n"]) -> Float[Tensor, " batch"]:
    """Mean over the target tokens of each sequence."""
    spread = torch.zeros(asked.shape, dtype=torch.float64)
    spread[asked] = values.cpu().double()
    return spread.sum(1) / asked.sum(1)


ABILITIES = (
    Ability("next token", "nats", "lower", "decoders", "text", text, loss, by_head=True),
    Ability("repeated tokens", "nats", "lower", "decoders", "seed", repeated, loss, by_head=True),
    Ability("copying", "accuracy", "higher", "decoders", "seed", repeated, accuracy),
    Ability("look-ups", "accuracy", "higher", "decoders", "seed", look_ups, accuracy),
    Ability("duplicates", "accuracy", "higher", "decoders", "seed", doubles, probe, lm_head=False),
    Ability("first-token mass", "share", "neither", "decoders", "text", text, first_token_mass, lm_head=False),
    Ability("masked words", "accuracy", "higher", "encoders", "text", hidden_words, accuracy),
    Ability("sentence halves", "accuracy", "higher", "encoders", "text", halves, neighbours, lm_head=False),
)
