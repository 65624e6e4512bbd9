"""Scores read from a checkpoint against those that the model itself computed."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.positions.relative import GIVEN
from keyquery.checkpoints.sources import read_tensors
from keyquery.forms.rope import PlacedRope
from keyquery.listening.products import Softmax
from keyquery.listening.softmaxes import Capture
from keyquery.proof.masks import HIDDEN, by_pairs, mask_error
from keyquery.proof.tokens import Tokens, entered, own_window, pooled, windows

QUERY = ("query", "query_down", "query_up", "module", "fused")
KEY = ("key", "key_down", "module", "fused")
EXACTLY = 1e-6  # relative error of a score that is the same for all keys
UNTESTED = "only at position 0, behind a mask, or beyond the positions that are read"
CONTENT = ("unread", "rotary", *GIVEN)  # terms of positions that are not read


@dataclass(frozen=True)
class Match:
    """One softmax and the layer that explains it best: relative errors, without and with a constant per query."""

    owner: str
    layer: str | None
    error: float  # up to a constant per query, which softmax does not see
    strict: float
    why: str = ""


def memory_names(model: nn.Module, folder: Path) -> dict[str, str]:
    """Modules in memory of the tensors on disk, whose names may differ: by their values, else by their names."""
    owners: dict[str, str] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        owners.setdefault(_digest(tensor), name.rpartition(".")[0])
    names: dict[str, str] = {}
    rows: dict[str, str] = {}
    for name, tensor in (item for file in folder.glob("*.safetensors") for item in read_tensors(file).items()):
        owner = owners.get(_digest(tensor))
        if owner is None and tensor.ndim == 2:  # split or fused: by its first row
            rows = rows or _rows(state)
            owner = rows.get(_digest(tensor[0]))
        names[name] = name.rpartition(".")[0] if owner is None else owner
    return names


def tied_modules(model: nn.Module) -> dict[str, list[str]]:
    """Modules whose weights are those of another one, by the first of them."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {names[0]: names[1:] for names in owners.values() if len(names) > 1}


def _rows(state: dict[str, Tensor]) -> dict[str, str]:
    """Modules by the rows of their matrices."""
    sizes: dict[str, str] = {}
    for name, tensor in state.items():
        if tensor.ndim == 2 and len(tensor) < 5000:
            for row in tensor:
                sizes.setdefault(_digest(row), name.rpartition(".")[0])
    return sizes


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().flatten()
    return hashlib.sha1(flat.view(torch.uint8).numpy().tobytes()).hexdigest() if flat.numel() else ""


class Comparison:
    """The layers of a checkpoint, grouped where their scores add up, and where the model keeps their projections."""

    def __init__(self, heads: Heads, model: nn.Module, folder: Path) -> None:
        """`folder` is where the model is saved that `heads` were read from."""
        self.heads, self.names, self._tied = heads, memory_names(model, folder), tied_modules(model)
        self.groups: dict[str, list[Layer]] = {}
        self.seen: set[str] = set()
        for layer in heads:
            self.groups.setdefault(layer.name.removesuffix(" (nope)").removesuffix(" (rope)"), []).append(layer)
        self.modules = {name: self._projections(layers[0]) for name, layers in self.groups.items()}

    def _projections(self, layer: Layer) -> tuple[str, str]:
        """The modules in memory that make queries and keys."""
        both, names = [], self.names
        for roles in (QUERY, KEY):
            role = next(role for role in roles if role in layer.modules)
            stem = layer.modules[role]
            stems = [name for name in names if name.startswith(stem) and names[name] and _rest(name, stem)]
            full = min(stems, key=lambda name: not name.endswith("weight"), default=None)  # biases may be renamed alone
            both.append(names[full] if full is not None and role != "module" else stem)
        return both[0], both[1]

    def matches(self, capture: Capture, positions: Tensor | None) -> Iterator[Match]:
        """Every softmax, with the layer that explains it best."""
        for event in capture.events:
            formless = self.heads.family.formless
            if formless and re.search(formless, event.owner):
                continue
            matched = [self._match(event, *near, capture, positions) for near in self._near(event, capture)]
            if not informative(event.scores):  # keys of one token, as of frames before their first layer
                matched = [replace(match, error=match.strict) for match in matched if match.strict <= EXACTLY]
                if not matched:
                    continue
            best = min(matched, key=lambda match: match.error, default=None)
            if best is None:
                yield Match(event.owner, None, float("inf"), float("inf"), "not read")
                continue
            self.seen.add(str(best.layer))
            yield best

    def _near(self, event: Softmax, capture: Capture) -> list[tuple[str, str, str]]:
        """Layers, with their projections, whose queries are made under the owner of a softmax, or beside it."""
        shared = {}
        for name, (first, key) in self.modules.items():
            if capture.before(first, event.time) is None:  # its weights are passed to a function
                first = key = self.groups[name][0].modules.get("module", first)
            for query in (first, *self._tied.get(first, [])):
                keys = [k for k in (key, *self._tied.get(key, [])) if capture.before(k, event.time) is not None]
                if keys and capture.before(query, event.time) is not None:
                    nearest = max(keys, key=lambda k: _common(event.owner, k))  # may be those of another layer
                    shared[name, query, nearest] = _common(event.owner, query)
        depth = len(event.owner.split(".")) if event.owner else 0
        best = max(shared.values(), default=-1)
        if best < max(depth - 1, 0):
            return []
        return [near for near, common in shared.items() if common == best]

    def _match(
        self, event: Softmax, name: str, query: str, key: str, capture: Capture, positions: Tensor | None
    ) -> Match:
        layers = self.groups[name]
        apart = layers[0].position == "disentangled"  # its projections are also called on distances
        x, y = (entered(capture, m, event.time, i, event if apart else None) for i, m in enumerate((query, key)))
        if layers[0].learned:
            x = self.heads.source.rows(layers[0].modules["query"]).to(event.scores)
        bad = float("inf")
        if not bool((event.scores > HIDDEN).any()):
            return Match(event.owner, name, 0.0, bad, UNTESTED)
        if x is None or y is None:
            return Match(event.owner, name, bad, bad, "its projections take no tokens")
        last = event.scores.shape[-1] - 1  # some models count tokens, whatever their positions
        last = last if positions is None else max(last, int(positions.max()))
        if last >= min((layer.context for layer in layers if layer.context is not None), default=math.inf):
            return Match(event.owner, name, 0.0, bad, UNTESTED)
        event = _in_pairs(event, layers[0], x)
        counts = [t.numel() // t.shape[-1] for t in (x, y)]
        memory = y if layers[0].kind == "self" and sum(counts) == event.scores.shape[-1] else None
        if memory is not None:  # one softmax over own tokens, and over others by the same weights
            call = capture.before(key, event.time)
            y = x if call is None else entered(capture, key, call.time, 1)
        if y is None:
            return Match(event.owner, name, bad, bad, "its projections take no tokens of its own")
        try:
            tokens = windows(x, y, event, layers[0], capture, query)
            both = torch.stack([scores(layer, tokens, positions, capture) for layer in layers]).sum(0)
            both = own_window(event, both)
            if layers[0].position in CONTENT:
                return content(event, name, both, layers[0], positions)
            nearest = closest(event, name, self._finished(layers[0], both, tokens), layers[0])
            if memory is not None:
                both_kinds = torch.cat((both, to_memory(layers[0], tokens.x, memory, positions)), -1)
                nearest = replace(closest(event, name, both_kinds, layers[0]), why=nearest.why)
            return nearest
        except (RuntimeError, ValueError) as error:
            return Match(event.owner, name, bad, bad, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")

    def _finished(self, layer: Layer, ours: Tensor, tokens: Tokens) -> Tensor:
        """With position terms and soft-cap."""
        places = [torch.arange(count) for count in ours.shape[-2:]]
        bias = self.heads.pair_bias(layer, *places)
        ours = ours if bias is None else ours + bias.to(ours)
        query, key = (t.expand(-1, -1, layer.weights.query.shape[1], -1, -1) for t in layer.project(tokens.x, tokens.y))
        for term in self.heads.relatives(layer, *places):
            ours = ours + term.scores((query if term.side == "query" else key).flatten(1, 2))
        return ours if not layer.softcap else layer.softcap * torch.tanh(ours / layer.softcap)


def scores(layer: Layer, tokens: Tokens, positions: Tensor | None, capture: Capture) -> Tensor:
    """Scaled scores (windows, heads, n, m) of tokens, under RoPE at their positions."""
    windows, n, m = *tokens.x.shape[:2], tokens.y.shape[1]
    rope = layer.rope
    if layer.axial is not None:
        rope = _on_grid(layer, capture)
        index = torch.arange(windows * n).reshape(windows, 1, 1, n) + tokens.first
        places = [index % len(rope.table)] * 2  # several images of one size
    else:
        places = [
            positions if positions is not None and len(positions) == count else torch.arange(count) for count in (n, m)
        ]
    query, key = layer.rotated(tokens.x, tokens.y, rope, *places)
    query = pooled(query, tokens.queries, layer.pool) if layer.pool else query
    return layer.scale * (query @ key.mT).flatten(1, 2)


def to_memory(layer: Layer, x: Tensor, memory: Tensor, positions: Tensor | None) -> Tensor:
    """Scaled scores of tokens with those of another sequence, whose keys are not rotated."""
    n, y = x.shape[1], memory.reshape(1, -1, memory.shape[-1])
    places_of = positions if positions is not None and len(positions) == n else torch.arange(n)
    query, key = layer.rotated(x, y, layer.rope, places_of, torch.zeros(y.shape[1], dtype=torch.long))
    return layer.scale * (query @ key.mT).flatten(1, 2)


def _on_grid(layer: Layer, capture: Capture) -> PlacedRope:
    """The rotation of tokens on the grid of a run's images."""
    assert layer.axial is not None
    sizes = layer.axial.layout.sizes(capture.inputs)
    if sizes is None:
        raise ValueError("the grid of its tokens is not known")
    return replace(layer.axial, layout=layer.axial.layout.merged(capture.inputs)).on(sizes)


def _in_pairs(event: Softmax, layer: Layer, x: Tensor) -> Softmax:
    """An event of local attention with its scores by query and key; other events as they are."""
    count = x.numel() // x.shape[-1]
    pairs = None if layer.window is None else by_pairs(event.scores, layer.heads, count, layer.window)
    return event if pairs is None else replace(event, scores=pairs)


def closest(event: Softmax, name: str, ours: Tensor, layer: Layer) -> Match:
    """The match of a softmax with scores of ours."""
    bad = float("inf")
    best = Match(event.owner, name, bad, bad, f"scores {tuple(event.scores.shape)}, read {tuple(ours.shape)}")
    for arranged in arrangements(event.scores, ours):
        error, strict = errors(ours, arranged)
        if error < best.error or best.error == bad:
            best = Match(event.owner, name, error, strict, mask_error(arranged, layer) if error < 1e-4 else "")
    return best


def arrangements(theirs: Tensor, ours: Tensor) -> Iterator[Tensor]:
    """Scores of a model in the order of ours: (windows, heads, n, m)."""
    count, heads, n, m = ours.shape
    # Sinks stand behind the keys or before them.
    cuts = [theirs[..., :m], theirs[..., -m:]] if theirs.shape[-1] > m else [theirs]
    for cut in cuts:
        if cut.numel() == ours.numel():
            yield cut.reshape(count, heads, n, m)
            yield cut.reshape(count, n, heads, m).transpose(1, 2)
            yield cut.reshape(heads, count, n, m).transpose(0, 1)


def content(event: Softmax, name: str, ours: Tensor, layer: Layer, positions: Tensor | None) -> Match:
    """The match of what is read of a layer whose term of positions is not: the product of queries and keys.

    A rotation leaves the score of a token with itself as it is, and at position 0 all scores. What is added to the
    product does not change it; it is compared up to a factor, and the factor to the softmax's input must be nearer to
    ours than to twice or half of it.
    """
    bad = float("inf")
    best = Match(event.owner, name, bad, bad, f"scores {tuple(event.scores.shape)}, read {tuple(ours.shape)}")
    rotary = layer.position.startswith("rotary")
    unscaled = [] if rotary else event.unscaled()
    products = unscaled or [event.scores]
    pairs = [zip(arrangements(theirs, ours), arrangements(event.scores, ours), strict=False) for theirs in products]
    for arranged, whole in chain.from_iterable(pairs):
        if rotary:
            mine, other = ours.double(), arranged.double()
            if positions is None or bool(positions.any()):  # not all at position 0
                mine, other = (t.diagonal(dim1=-2, dim2=-1) for t in (mine, other))
            mine, other = (torch.where(other > HIDDEN, t, 0.0) for t in (mine, other))
            error = float((mine - other).abs().max() / other.abs().max().clamp(min=1e-9))
        else:
            factor = fitted(ours, arranged)
            error, _ = errors(factor * ours, arranged)
            error = error if 0.5 < fitted(ours, whole) < 2 else bad
        if error < best.error:
            best = Match(event.owner, name, error, error, mask_error(whole, layer) if error < 1e-4 else "")
    return best


def fitted(ours: Tensor, theirs: Tensor) -> float:
    """The factor of our scores that comes nearest to theirs, up to a constant per query, at visible pairs."""
    mine, other = (_centred(scores, theirs > HIDDEN) for scores in (ours, theirs))
    return float((mine * other).sum() / mine.square().sum().clamp(min=1e-12))


def _centred(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores minus the mean of their query, at visible pairs; 0 elsewhere."""
    visible = torch.where(seen, scores.double(), 0.0)
    return torch.where(seen, visible - visible.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1), 0.0)


def informative(scores: Tensor) -> bool:
    """Whether some query sees keys of different scores: otherwise any reading would agree."""
    if scores.shape[-1] < 2:
        return False
    seen = scores > HIDDEN
    low, high = scores.masked_fill(~seen, torch.inf).amin(-1), scores.masked_fill(~seen, -torch.inf).amax(-1)
    return bool((high - low > 1e-6).any())


def errors(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Largest difference at visible pairs relative to the largest score: up to a constant per query, and as it is."""
    seen = theirs > HIDDEN
    ours, theirs = (torch.where(seen, scores.double(), 0.0) for scores in (ours, theirs))
    difference = ours - theirs
    pairs = ((_centred(difference, seen), _centred(theirs, seen)), (difference, theirs))
    centred, strict = (float(wrong.abs().max() / right.abs().max().clamp(min=1e-9)) for wrong, right in pairs)
    return centred, strict


def _rest(name: str, stem: str) -> bool:
    """Whether a tensor's name is that of a role: nothing but a short ending follows it."""
    rest = name[len(stem) :]
    return "." not in rest[1:] and (not rest or not rest[0].isalnum())


def _common(first: str, second: str) -> int:
    """How many modules two names have in common, from the outermost on."""
    alike = (one == other for one, other in zip(first.split("."), second.split("."), strict=False))
    return sum(1 for _ in takewhile(bool, alike))
