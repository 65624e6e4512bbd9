"""Scores of every head and role on batches, from attention maps that are dropped as soon as they are scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from keyquery.checkpoints import Heads
from keyquery.checkpoints.labels import PART
from keyquery.instruments.roles.patterns import Patterns, Scores, alignment, keys_of
from keyquery.instruments.roles.sequences import VALUE, Needles
from keyquery.listening.call import Call
from keyquery.listening.hooks import Batch, has_two_sides
from keyquery.listening.inputs.batches import LENGTH, SIZE
from keyquery.listening.inputs.data import as_arguments, token_argument
from keyquery.listening.maps import is_square, maps_by_head, run_with
from keyquery.support.progress import Progress

ANSWERED = 0.5  # share of a needle's tokens that the model must predict
Measured = dict[tuple[int, int, str], Scores]  # by layer, head and role: one value per sequence


@dataclass(frozen=True)
class ScoredLayer:
    """An attention layer whose heads are scored, of a checkpoint or of a run."""

    index: int
    name: str
    kind: str  # "self" or "cross"
    causal: bool
    heads: int


def layers_read(heads: Heads) -> list[ScoredLayer]:
    """The attention layers of a checkpoint; the two kernels of an MLA head share one map, and its module's name."""
    return [
        ScoredLayer(layer.index, PART.sub("", layer.name), layer.kind, layer.causal, layer.heads) for layer in heads
    ]


def layers_seen(model: nn.Module, batch: Batch) -> list[ScoredLayer]:
    """The attention layers of any model, as they are called on a batch."""
    layers: dict[int, ScoredLayer] = {}

    def note(call: Call, _: int) -> None:
        kind = "cross" if call.is_cross else "self"
        layers.setdefault(call.layer, ScoredLayer(call.layer, call.name, kind, call.is_causal, call.heads))

    run_with(model, batch, note)
    return list(layers.values())


@dataclass(frozen=True)
class _BatchScores:
    """Scores the maps of one batch; a module that is called several times gets the mean over its calls."""

    layers: Sequence[ScoredLayer]
    model: nn.Module
    batch: Batch
    window: int
    closed: bool  # sequences end with a special token
    scores: dict[tuple[int, int, str], list[Scores]] = field(default_factory=lambda: defaultdict(list))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def add(self, call: Call, _: int) -> None:
        """Score the maps of a call, one head after the other."""
        layers = matching(self.layers, call.name)
        if not layers or (layers[0].kind == "self" and not is_square(call)):
            return
        cross, patterns = layers[0].kind == "cross", None
        for head, maps in maps_by_head(call):
            if cross:
                scores = {"alignment": alignment(maps, _real(call.real_queries, maps, -2), self.generator)}
            else:
                patterns = self._patterns(call, head, layers[0]) if patterns is None or _differ(call.mask) else patterns
                scores = patterns.of(maps)
            for role, (score, null) in scores.items():
                for layer in layers:
                    self.scores[layer.index, head, role].append(Scores(score[:, 0], null[:, 0]))

    def _patterns(self, call: Call, head: int, layer: ScoredLayer) -> Patterns:
        n, real = call.key.shape[-2], _real(call.real, call.key, -2)
        seen = visible(call, head) & real[:, None] & real[..., None]
        ids = self._ids(layer, real)
        causal = not bool(seen.triu(1).any())
        first, last = (way.int().argmax(1) for way in (real, real.flip(1)))
        last = n - 1 - last if self.closed and not causal else torch.full_like(last, -1)
        ends = torch.stack((first, last), 1)
        roles = [
            *([] if ids is None else ["induction"] * causal + ["duplicate_token"]),
            *(["previous_token"] + ["next_token"] * (not causal) + ["local", "sink"]),
        ]
        return Patterns({role: keys_of(role, n, ids, self.window, ends) for role in roles}, seen)

    def _ids(self, layer: ScoredLayer, real: Bool[Tensor, "batch n"]) -> Int[Tensor, "batch n"] | None:
        """Token ids of a layer, −1 for padding: no token of a text equals it; None if it has others."""
        decoder = has_two_sides(self.model) and "decoder" in layer.name.split(".")
        ids = self.batch.get("decoder_input_ids" if decoder else token_argument(self.model))
        if not isinstance(ids, Tensor) or ids.shape != real.shape or ids.is_floating_point():
            return None
        return ids.to(real.device).masked_fill(~real, -1)

    def mean(self) -> Measured:
        """Scores per layer, head and role."""
        return {
            key: Scores(*(torch.stack(values).mean(0) for values in zip(*calls, strict=True)))
            for key, calls in self.scores.items()
        }


def matching(layers: Sequence[ScoredLayer], module: str) -> list[ScoredLayer]:
    """The layers of a module: of its name, or else one that holds it or is held by it."""
    exact = [layer for layer in layers if layer.name == module]
    near = [(f"{layer.name}.", layer) for layer in layers] if not exact else []
    return exact or [layer for name, layer in near if name.startswith(f"{module}.") or module.startswith(name)]


def visible(call: Call, head: int) -> Bool[Tensor, "batch n m"]:
    """The pairs that a head may attend to."""
    shape = (len(call.query), call.query.shape[-2], call.key.shape[-2])
    if call.mask is None:
        return torch.ones(shape, dtype=torch.bool, device=call.query.device)
    return call.mask[:, min(head, call.mask.shape[1] - 1)].expand(shape)


def _real(mask: Bool[Tensor, "batch n"] | None, like: Tensor, side: int) -> Bool[Tensor, "batch n"]:
    """Which tokens along a side of a tensor are not padding."""
    shape = (len(like), like.shape[side])
    return torch.ones(shape, dtype=torch.bool, device=like.device) if mask is None else mask.to(like.device)


def _differ(mask: Tensor | None) -> bool:
    """Whether some heads see other pairs than the first."""
    return mask is not None and mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all())


def measure(
    model: nn.Module, batches: Iterable[Batch], layers: Sequence[ScoredLayer], window: int, closed: bool = False
) -> Measured:
    """Scores of every role but retrieval; `closed`: sequences end with a special token, which counts as a sink."""
    parts: list[Measured] = []
    for whole in batches:
        for batch in (part for fitting in as_arguments(model, whole) for part in in_parts(fitting)):
            scores = _BatchScores(layers, model, batch, window, closed)
            run_with(model, {**batch, **_fewest_logits(model, 1)}, scores.add)
            parts.append(scores.mean())
    return joined(parts)


def in_parts(batch: Batch) -> Iterator[Batch]:
    """A batch in parts, of fewer sequences the longer they are: maps grow with the square of the length."""
    if batch.get("decoder_input_ids") is batch.get("input_ids", 0) and "attention_mask" in batch:  # of both sides
        batch = {"decoder_attention_mask": batch["attention_mask"], **batch}
    rows = {len(value) for value in batch.values()}
    longest = max((value.shape[1] for value in batch.values() if value.ndim == 2), default=LENGTH)
    if len(rows) > 1:  # not all of them are by sequence
        yield batch
        return
    for start in range(0, max(rows), at_once(longest)):
        yield {name: value[start : start + at_once(longest)] for name, value in batch.items()}


def at_once(length: int) -> int:
    """How many sequences of a length are run at once."""
    return max(1, SIZE * LENGTH**2 // max(length, LENGTH) ** 2)


def joined(parts: Sequence[Measured]) -> Measured:
    """The scores of several batches, one after the other."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {
        key: Scores(*(torch.cat(values) for values in zip(*(part[key] for part in parts if key in part), strict=True)))
        for key in keys
    }


def retrieval(
    model: nn.Module, needles: Needles, layers: Sequence[ScoredLayer], watching: Progress
) -> tuple[Measured, float] | str:
    """Retrieval scores, and how often the model gives the right token; or why there are none."""
    parts, right, size = [], [], at_once(needles.ids.shape[1])
    for start in watching(range(0, len(needles.ids), size), "needles", -(-len(needles.ids) // size)):
        rows = slice(start, start + size)
        tops: dict[tuple[int, int], Tensor] = {}

        def add(call: Call, _: int, tops: dict[tuple[int, int], Tensor] = tops) -> None:
            called = matching(layers, call.name)
            for head, maps in maps_by_head(call.part(queries=slice(-VALUE, None))) if called else ():
                tops.update({(layer.index, head): maps[:, 0].argmax(-1).cpu() for layer in called})

        ids = needles.ids[rows]
        batch: Any = {token_argument(model): ids, **_fewest_logits(model, VALUE)}
        logits = _logits(run_with(model, batch, add)[1], hasattr(model, "main_input_name"))
        if logits is None or logits.ndim != 3 or logits.shape[-1] <= int(needles.ids.max()):
            return f"{type(model).__name__} has no LM head"
        if logits.shape[1] < VALUE:
            return f"{type(model).__name__} returns logits of {logits.shape[1]} of the last {VALUE} tokens"
        answered = logits[:, -VALUE:].argmax(-1).cpu() == needles.answers[rows]
        seen = torch.arange(ids.shape[1] - VALUE, ids.shape[1]) + 1
        parts.append(
            {(*key, "retrieval"): copied(top, needles.targets[rows], answered, seen) for key, top in tops.items()}
        )
        right.append(answered.double().mean(1))
    return joined(parts), float(torch.cat(right).mean())


def _logits(out: Any, named: bool) -> Tensor | None:
    """The logits of a model's output: by their name, or of a model that names none, its first tensor."""
    if isinstance(out, (tuple, list)) and not named:
        out = next((value for value in out if isinstance(value, Tensor)), None)
    return out if isinstance(out, Tensor) else getattr(out, "logits", None)


def copied(
    top: Int[Tensor, "batch value"],
    targets: Int[Tensor, "batch value"],
    answered: Bool[Tensor, "batch value"],
    seen: Int[Tensor, " value"],
) -> Scores:
    """The share of a needle's tokens that a head attends to most as the model predicts them; null: any seen key."""
    hits = (top[..., None] == targets[:, None]) & answered[..., None]  # query by target
    right = hits.diagonal(dim1=1, dim2=2).double()
    others = (hits.sum(-1) - right) / (targets.shape[1] - 1)
    null = torch.maximum((answered / seen).double().mean(1), others.mean(1))
    counts = answered.double().mean(1) >= ANSWERED
    return Scores(*(torch.where(counts, values, torch.nan) for values in (right.mean(1), null)))


def _fewest_logits(model: nn.Module, count: int) -> dict[str, Any]:
    """An argument that keeps a model from computing the logits of all tokens, if it takes one."""
    return {"logits_to_keep": count} if "logits_to_keep" in signature(model.forward).parameters else {}
