"""Scores of every head and role on batches, from attention maps that are dropped as soon as they are scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from keyquery.capture.attention_stream import Heard, stream_maps
from keyquery.capture.batches import LENGTH, SIZE
from keyquery.capture.hooks import Batch, has_two_sides, mask_for, masks_of
from keyquery.capture.probe import device_of
from keyquery.checkpoints import Heads
from keyquery.checkpoints.labels import PART
from keyquery.instruments.roles.patterns import Patterns, Scores, alignment, keys_of
from keyquery.instruments.roles.sequences import VALUE, Needles
from keyquery.support.progress import Progress

ANSWERED = 0.5  # share of a needle's tokens that the model must predict
Measured = dict[tuple[int, int, str], Scores]  # by layer, head and role: one value per sequence


@dataclass(frozen=True)
class Place:
    """An attention layer of a checkpoint, without its weights."""

    index: int
    name: str
    kind: str  # "self" or "cross"
    causal: bool
    heads: int


def places_of(heads: Heads) -> list[Place]:
    """The attention layers of a model; the two kernels of an MLA head share one map, and its module's name."""
    return [Place(at.index, PART.sub("", at.name), at.kind, at.causal, at.heads) for at in heads]


class _Listener:
    """Scores the maps of one batch; a module that is called several times gets the mean over its calls."""

    def __init__(self, places: Sequence[Place], model: nn.Module, batch: Batch, window: int, closed: bool) -> None:
        self._places, self._batch, self._window, self._closed = places, batch, window, closed
        self._paired, self._masks = has_two_sides(model), masks_of(batch)
        self._generator = torch.Generator().manual_seed(0)
        self._last: tuple[int, Patterns] | None = None  # patterns of the last call, which all its heads share
        self.scores: dict[tuple[int, int, str], list[Scores]] = defaultdict(list)

    def hear(self, heard: Heard) -> None:
        """Score the maps of some heads."""
        layers = matching(self._places, heard.module)
        if not layers:
            return
        if layers[0].kind == "cross":
            queries = self._real(heard.maps, -2, heard.module)
            scores = {"alignment": alignment(heard.maps, queries, self._generator)}
        else:
            scores = self._patterns(heard, layers[0]).of(heard.maps)
        for role, (score, null) in scores.items():
            for layer in layers:
                for head in range(score.shape[1]):
                    of_head = Scores(score[:, head], null[:, head])
                    self.scores[layer.index, heard.first + head, role].append(of_head)

    def _patterns(self, heard: Heard, layer: Place) -> Patterns:
        shared = heard.allowed is None or heard.allowed.shape[1] == 1
        if shared and self._last is not None and self._last[0] == heard.call:
            return self._last[1]
        batch, _, n, _ = heard.maps.shape
        real = self._real(heard.maps, -1, heard.module)
        seen = visible(heard, layer.causal) & real[:, None] & real[..., None]
        first, last = (way.int().argmax(1) for way in (real, real.flip(1)))
        last = n - 1 - last if self._closed and not layer.causal else torch.full_like(last, -1)
        ids = self._ids(layer, (batch, n))
        ends = torch.stack((first, last), 1)
        roles = [
            *([] if ids is None else ["induction"] * layer.causal + ["duplicate_token"]),
            *(["previous_token"] + ["next_token"] * (not layer.causal) + ["local", "sink"]),
        ]
        patterns = Patterns({role: keys_of(role, n, ids, self._window, ends) for role in roles}, seen)
        self._last = (heard.call, patterns) if shared else None
        return patterns

    def _real(self, maps: Tensor, side: int, module: str) -> Bool[Tensor, "batch n"]:
        """Which queries (side −2) or keys (side −1) are not padding."""
        shape = (len(maps), maps.shape[side])
        mask = mask_for(self._masks, shape, module, self._paired)
        return torch.ones(shape, dtype=torch.bool, device=maps.device) if mask is None else mask.to(maps.device)

    def _ids(self, layer: Place, shape: tuple[int, int]) -> Tensor | None:
        decoder = self._paired and "decoder" in layer.name.split(".")
        ids = self._batch.get("decoder_input_ids" if decoder else "input_ids")
        return ids if isinstance(ids, Tensor) and tuple(ids.shape) == shape else None

    def mean(self) -> Measured:
        """Scores per layer, head and role."""
        return {
            key: Scores(*(torch.stack(each).mean(0) for each in zip(*calls, strict=True)))
            for key, calls in self.scores.items()
        }


def matching(places: Sequence[Place], module: str) -> list[Place]:
    """The layers of a module: of its name, or else one that holds it or is held by it.

    >>> [at.index for at in matching([Place(0, "h.1.attn", "self", True, 2)], "h.1.attn.attention")]
    [0]
    """
    exact = [at for at in places if at.name == module]
    return exact or [at for at in places if at.name.startswith(f"{module}.") or module.startswith(f"{at.name}.")]


def visible(heard: Heard, causal: bool) -> Bool[Tensor, "batch n m"]:
    """The pairs that the heads of a map may attend to."""
    batch, heads, n, m = heard.maps.shape
    if heard.allowed is None:
        seen = torch.ones(n, m, dtype=torch.bool, device=heard.maps.device)
        return (seen.tril() if causal else seen).expand(batch, n, m)
    own = heard.allowed if heard.allowed.shape[1] == 1 else heard.allowed[:, heard.first : heard.first + heads]
    return own.any(1).expand(batch, n, m)


def measure(
    model: nn.Module, batches: Iterable[Batch], places: Sequence[Place], window: int, closed: bool = False
) -> Measured:
    """Scores of every role but retrieval; `closed`: sequences end with a special token, which counts as a sink."""
    parts: list[Measured] = []
    for batch in (part for whole in batches for part in in_parts(whole)):
        on_device = {name: value.to(device_of(model)) for name, value in batch.items()}
        listener = _Listener(places, model, on_device, window, closed)
        stream_maps(model, {**on_device, **_fewest_logits(model, 1)}, listener.hear)
        parts.append(listener.mean())
    return joined(parts)


def in_parts(batch: Batch) -> Iterator[Batch]:
    """A batch in parts, of fewer sequences the longer they are: maps grow with the square of the length.

    The decoder of an encoder-decoder that reads the ids of the encoder gets its mask as well.

    >>> [len(part["input_ids"]) for part in in_parts({"input_ids": torch.zeros(5, 256)})]
    [4, 1]
    """
    if batch.get("decoder_input_ids") is batch.get("input_ids", 0) and "attention_mask" in batch:
        batch = {"decoder_attention_mask": batch["attention_mask"], **batch}
    rows = {len(value) for value in batch.values()}
    longest = max((value.shape[1] for value in batch.values() if value.ndim == 2), default=LENGTH)
    if len(rows) > 1:  # not all of them are by sequence
        yield batch
        return
    for start in range(0, max(rows), at_once(longest)):
        yield {name: value[start : start + at_once(longest)] for name, value in batch.items()}


def at_once(length: int) -> int:
    """How many sequences of a length are run at once.

    >>> at_once(128), at_once(1024)
    (16, 1)
    """
    return max(1, SIZE * LENGTH**2 // max(length, LENGTH) ** 2)


def joined(parts: Sequence[Measured]) -> Measured:
    """The scores of several batches, one after the other."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {
        key: Scores(*(torch.cat(each) for each in zip(*(part[key] for part in parts if key in part), strict=True)))
        for key in keys
    }


def retrieval(
    model: nn.Module, needles: Needles, places: Sequence[Place], watching: Progress
) -> tuple[Measured, float] | None:
    """Retrieval scores, and how often the model gives the right token; None for a model without logits."""
    parts, right, size = [], [], at_once(needles.ids.shape[1])
    for start in watching(range(0, len(needles.ids), size), "needles", -(-len(needles.ids) // size)):
        rows = slice(start, start + size)
        tops: dict[tuple[int, int], Tensor] = {}

        def hear(heard: Heard, tops: dict[tuple[int, int], Tensor] = tops) -> None:
            for layer in matching(places, heard.module):
                for head, top in enumerate(heard.maps[:, :, -VALUE:].argmax(-1).unbind(1)):
                    tops[layer.index, heard.first + head] = top.cpu()

        ids = needles.ids[rows]
        batch: Any = {"input_ids": ids.to(device_of(model)), **_fewest_logits(model, VALUE)}
        _, out = stream_maps(model, batch, hear)
        logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if logits is None or logits.ndim != 3:
            return None
        answered = logits[:, -VALUE:].argmax(-1).cpu() == needles.answers[rows]
        seen = torch.arange(ids.shape[1] - VALUE, ids.shape[1]) + 1
        parts.append(
            {(*key, "retrieval"): copied(top, needles.targets[rows], answered, seen) for key, top in tops.items()}
        )
        right.append(answered.double().mean(1))
    return joined(parts), float(torch.cat(right).mean())


def copied(
    top: Int[Tensor, "batch value"],
    targets: Int[Tensor, "batch value"],
    answered: Bool[Tensor, "batch value"],
    seen: Int[Tensor, " value"],
) -> Scores:
    """Retrieval scores of a head, whose most attended keys are `top`: the share of a needle's tokens that it copies.

    A head copies a token if its most attended key is that token in the needle, and the model predicts the token next.
    Only needles of which the model predicts at least half count. The null level is the larger of the same for a key
    drawn from all visible ones (`seen` many) and for the needle's other tokens.

    >>> targets, yes = torch.tensor([[3, 4]]), torch.ones(1, 2, dtype=torch.bool)
    >>> copied(torch.tensor([[3, 9]]), targets, yes, torch.tensor([10, 11])).score
    tensor([0.5000], dtype=torch.float64)
    """
    hits = (top[..., None] == targets[:, None]) & answered[..., None]  # query by target
    own = hits.diagonal(dim1=1, dim2=2).double()
    others = (hits.sum(-1) - own) / (targets.shape[1] - 1)
    null = torch.maximum((answered / seen).double().mean(1), others.mean(1))
    counts = answered.double().mean(1) >= ANSWERED
    return Scores(*(torch.where(counts, values, torch.nan) for values in (own.mean(1), null)))


def _fewest_logits(model: nn.Module, count: int) -> dict[str, Any]:
    """An argument that keeps a model from computing the logits of all tokens, if it takes one."""
    return {"logits_to_keep": count} if "logits_to_keep" in signature(model.forward).parameters else {}
