"""Heads of a live model: read from its weights, or, for a class of one's own, found by running it once.

Queries and keys of its attention calls are looked up among the outputs of the linear maps that it applied. At position
0 a query is such an output whatever RoPE does later: there rows are found, rotations are then fitted, and everything is
verified on all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keyquery.checkpoints import read
from keyquery.checkpoints.family import Family
from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.layer import Layer, Projections
from keyquery.checkpoints.layouts import Values
from keyquery.checkpoints.sources import Live, bare
from keyquery.forms import Rope
from keyquery.forms.rope import fitted_ropes
from keyquery.listening.call import Call
from keyquery.listening.hooks import Batch
from keyquery.listening.maps import run_with
from keyquery.listening.products import linear_map
from keyquery.reading import digests
from keyquery.support.printable import first_line

FAMILY = Family("observed", [], [])
TOLERANCE = 1e-5  # largest error of a query or key, relative to the largest, that counts as rounding
ANGLE = 1.2e-7  # rounding of an angle in float32, per position
SAMPLED = 256  # tokens by which columns are looked up


@dataclass(frozen=True, eq=False)
class ParameterView:
    """A view of a parameter, which follows it where the model is moved to another device or dtype."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> ParameterView | None:
        """None if a tensor is neither a parameter nor a view of one."""
        parameter = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        if not isinstance(parameter, nn.Parameter):
            return None
        offset = int(tensor.storage_offset() - parameter.storage_offset())
        return cls(parameter, tuple(tensor.shape), tensor.stride(), offset)

    def now(self) -> Tensor:
        """The values as they are now."""
        values = self.parameter.detach()
        return values.as_strided(self.shape, self.stride, values.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map of a model, x·weightᵀ + bias, or the rows (heads, r) of it that make queries, keys or values."""

    weights: ParameterView
    biases: ParameterView | None
    rows: Any = ...

    def weight(self) -> Tensor:
        """The weights as they are now."""
        return self.weights.now()[self.rows]

    def bias(self) -> Tensor | None:
        """The biases as they are now."""
        return None if self.biases is None else self.biases.now()[self.rows]


class Application(NamedTuple):
    """A linear map that a model applied, and to what."""

    map: LinearMap
    x: Float[Tensor, "*tokens in"]
    out: Float[Tensor, "*tokens out"]


class Observed(NamedTuple):
    """What one attention call showed of its layer: facts of a `Layer`, and its linear maps."""

    facts: dict[str, Any]
    query: LinearMap
    key: LinearMap
    value: LinearMap | None
    output: LinearMap | None


class LinearMaps(TorchFunctionMode):
    """Records the linear maps that a model applies."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[Application] = []
        self._last: Tensor | None = None  # output of the last one, to which a bias may be added

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        if (applied := linear_map(name, args, kwargs)) is not None:
            x, weight, bias = applied
            weights, biases = ParameterView.of(weight), None if bias is None else ParameterView.of(bias)
            if weights is not None and (bias is None or biases is not None):
                self.applied.append(Application(LinearMap(weights, biases), x.detach(), out.detach()))
                self._last = out
        elif name in ("add", "__add__") and args[0] is self._last and isinstance(args[1], nn.Parameter):
            before = self.applied[-1]
            with_bias = replace(before.map, biases=ParameterView.of(args[1]))
            self.applied.append(Application(with_bias, before.x, out.detach()))
        return out


_OBSERVED: WeakKeyDictionary[nn.Module, tuple[dict[str, int], list[Observed]]] = WeakKeyDictionary()


def live_heads(model: nn.Module, batch: Batch | None = None) -> Heads:
    """The attention layers of a live model; those of an unknown class are found on a batch, once."""
    model = bare(model)
    try:
        heads = read(model)
        heads[0]  # layers are read when they are asked for
        return heads
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # What was observed holds for these parameters. It keeps them, so that no other gets their id.
        identities = {name: id(parameter) for name, parameter in model.named_parameters()}
        known, layers = _OBSERVED.get(model, ({}, []))
        if layers and known == identities:
            return ObservedHeads(model, layers)
        if any(weight.is_meta or not bool(weight.isfinite().all()) for weight in model.parameters()):
            raise
        if batch is None:
            raise ValueError(f"{first_line(error)}; with data, its heads are found by running it") from error
        layers = _observed(model, batch)
    _OBSERVED[model] = identities, layers
    return ObservedHeads(model, layers)


def _observed(model: nn.Module, batch: Batch) -> list[Observed]:
    """The layers of a model by its attention calls; raises in one sentence if projections are not found."""
    owners = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
    calls: list[tuple[Call, int]] = []
    with LinearMaps() as maps:
        run_with(model, batch, lambda call, _: calls.append((call, len(maps.applied))))
    ends = [0, *(count for _, count in calls), len(maps.applied)]
    layers: dict[str, Observed] = {}
    for number, (call, count) in enumerate(calls):
        if call.name not in layers:
            before, after = maps.applied[ends[number] : count], maps.applied[count : ends[number + 2]]
            layers[call.name] = _layer(call, before, after, owners)
    return list(layers.values())


def _layer(call: Call, before: list[Application], after: list[Application], owners: dict[int, str]) -> Observed:
    label = call.name or "attention"
    if call.scale is None or call.query.shape[-1] == 0:
        raise ValueError(f"{label}: its scores are no product of queries and keys times a number")
    query, rope = _matched(call.query, call.positions, before, f"queries of {label}")
    key, rope = _matched(call.key, call.key_positions, before, f"keys of {label}", rope)
    roles = {role: owners.get(id(rows.weights.parameter), call.name) for role, rows in (("query", query), ("key", key))}
    notes = ("a bias of positions is added to its scores, and not read",) if call.bias is not None else ()
    facts = {
        "name": label,
        "kind": "cross" if call.is_cross else "self",
        "causal": call.is_causal,
        "scale": call.scale,
        "rope": rope,
        "position": "unread" if notes else "none",
        "modules": {"module": call.name} if call.name in roles.values() else roles,
        "notes": notes,
        "softcap": call.softcap,
    }
    if call.value is None:
        return Observed(facts, query, key, None, None)
    merged = _tokens(call.output()).flatten(1)
    outputs = (
        application.map
        for application in after
        for x in _aligned(application.x, call.query)
        if x.shape == merged.shape and _error(x.double(), merged) <= TOLERANCE
    )
    value, _ = _looked_up(call.value, _all_tokens(call.value), before)
    return Observed(facts, query, key, value, next(outputs, None))


def _matched(
    heads: Float[Tensor, "batch heads n r"],
    positions: Tensor,
    maps: Sequence[Application],
    what: str,
    *ropes: Rope | None,
) -> tuple[LinearMap, Rope | None]:
    """The rows that make queries or keys, and how these are rotated; the latter as in `ropes`, if given."""
    target = _tokens(heads)
    turns = positions.expand(len(heads), -1).flatten()
    for turned in (False, True):
        if ropes and turned != (ropes[0] is not None):
            continue
        tokens = (turns == 0).nonzero().flatten() if turned else _all_tokens(heads)
        rows, out = _looked_up(heads, tokens, maps) if len(tokens) > 1 else (None, None)
        if rows is None or out is None:
            continue
        plain = out[:, rows.rows].double()
        candidates = [None] if not turned else list(ropes) or fitted_ropes(plain, target, turns, TOLERANCE)
        for rope in candidates:
            rotated = plain if rope is None else rope.rotate(plain, turns[:, None])
            if _error(rotated, target) <= TOLERANCE + (float(turns.max()) * ANGLE if turned else 0.0):
                return rows, rope
    raise ValueError(
        f"the {what} are no linear map of its input, with or without RoPE, on these tokens (at least two sequences "
        "tell them apart): their weights are not read"
    )


def _tokens(heads: Float[Tensor, "batch heads n r"]) -> Float[Tensor, "tokens heads r"]:
    return heads.detach().double().transpose(1, 2).flatten(0, 1)


def _all_tokens(heads: Float[Tensor, "batch heads n r"]) -> Int[Tensor, " tokens"]:
    """Some of all tokens, evenly spaced."""
    count = heads.shape[0] * heads.shape[2]
    return torch.arange(0, count, max(count // SAMPLED, 1), device=heads.device)


def _aligned(out: Tensor, heads: Float[Tensor, "batch heads n r"]) -> list[Float[Tensor, "tokens out"]]:
    """The outputs of a map in the order of the tokens of heads: sequence by sequence, also where tokens came first."""
    batch, n = heads.shape[0], heads.shape[2]
    if out[..., 0].numel() != batch * n:
        return []
    orders = [out.reshape(batch * n, -1)]
    if tuple(out.shape[:-1]) == (n, batch) and min(n, batch) > 1:
        orders.append(out.transpose(0, 1).reshape(batch * n, -1))
    return orders


def _looked_up(
    heads: Tensor, tokens: Int[Tensor, " some"], maps: Sequence[Application]
) -> tuple[LinearMap, Float[Tensor, "tokens out"]] | tuple[None, None]:
    """The rows of a map whose outputs on some tokens are those of the heads, and all its outputs; the latest map."""
    target = _tokens(heads)[tokens]
    flat = target.flatten(1)
    probe = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(flat.device)
    for application in reversed(maps):
        for out in _aligned(application.out, heads):
            columns = out[tokens].double()
            keys, order = (probe @ columns).sort()
            above = torch.searchsorted(keys, probe @ flat).clamp(max=len(keys) - 1)
            pair = torch.stack((order[above], order[(above - 1).clamp(min=0)]))  # the next larger, and the next smaller
            errors = torch.stack([(columns[:, rows] - flat).abs().amax(0) for rows in pair])
            smallest, best = errors.min(0)
            if float(smallest.max()) <= TOLERANCE * max(float(flat.abs().max()), 1e-30):
                rows = pair.gather(0, best[None])[0].reshape(target.shape[1:])
                return replace(application.map, rows=rows), out
    return None, None


def _error(actual: Tensor, target: Tensor) -> float:
    return float((actual - target).abs().max() / target.abs().max().clamp(min=1e-30))


class ObservedHeads(Heads):
    """The attention layers of a live model that were found by running it; weights are read as they are now."""

    def __init__(self, model: nn.Module, layers: Sequence[Observed]) -> None:
        self.source, self.family, self._layers = Live(model), FAMILY, list(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def depth(self) -> int:
        """Number of attention layers."""
        return len(self)

    def recorded(self, into: dict[str, str] | None = None) -> dict[str, str]:
        """Digests of the weights of all layers."""
        tensors = {f"{layer.name}.{role}": weight for layer in self for role, weight in vars(layer.weights).items()}
        recorded = {} if into is None else into
        recorded |= digests({name: weight for name, weight in tensors.items() if weight is not None})
        return recorded

    def _named(self) -> list[tuple[str, str]]:
        return [(layer.facts["name"], layer.facts["kind"]) for layer in self._layers]

    def _read(self, index: int) -> Layer:
        layer = self._layers[index]
        weights = _projections(layer.query, layer.key)
        return Layer(index=index, label=self.labels()[index], weights=weights, **layer.facts)

    def values(self, index: int) -> Values:
        """Value and output weights of a layer."""
        layer = self._layers[index]
        if layer.value is None or layer.output is None:
            name = layer.facts["name"]
            raise ValueError(f"{name}: no linear maps of its parameters make its values and take its output")
        groups, shared = _projections(layer.query, layer.key).query.shape[:2]
        value, bias, output = layer.value.weight(), layer.value.bias(), layer.output.weight()
        step = len(value) // groups
        biases = None if bias is None else bias[::step, None], layer.output.bias()
        return Values(value[::step, None], output.mT.reshape(groups, shared, -1, len(output)), *biases)


def _projections(query: LinearMap, key: LinearMap) -> Projections:
    """Weights by key head: heads whose keys are the same rows share one."""
    rows = key.rows
    repeats = [n for n in range(len(rows), 0, -1) if len(rows) % n == 0]
    repeat = next(n for n in repeats if bool((rows.reshape(-1, n, rows.shape[-1]) == rows[::n, None]).all()))
    groups, bias = len(rows) // repeat, query.bias()
    key = replace(key, rows=rows[::repeat, None])
    bias = None if bias is None else bias.unflatten(0, (groups, -1))
    return Projections(query.weight().unflatten(0, (groups, -1)), key.weight(), bias, key.bias())
