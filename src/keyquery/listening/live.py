"""Heads of a live model: read from its weights, or, for a class of one's own, found by running it once.

Queries and keys of its attention calls are looked up among the outputs of the linear maps that it applied. At position
0 a query is such an output whatever RoPE does later: there rows are found, rotations are then fitted, and everything is
verified on all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
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
from keyquery.listening.attachment import add_listener, no_attention, warn_unseen
from keyquery.listening.call import Call
from keyquery.listening.hooks import Batch, running
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
    """A linear map of a model: x·weightᵀ + bias."""

    weight: ParameterView
    bias: ParameterView | None


@dataclass(frozen=True, eq=False)
class Application:
    """A linear map that a model applied, and to what."""

    map: LinearMap
    x: Float[Tensor, "*tokens in"]
    out: Float[Tensor, "*tokens out"]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a linear map that make the queries, keys or values of all heads."""

    map: LinearMap
    rows: Int[Tensor, "heads r"]

    def weight(self) -> Float[Tensor, "heads r d"]:
        """The weights as they are now."""
        return self.map.weight.now()[self.rows]

    def bias(self) -> Float[Tensor, "heads r"] | None:
        """The biases as they are now."""
        return None if self.map.bias is None else self.map.bias.now()[self.rows]


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """What one attention call showed of its layer."""

    name: str
    cross: bool
    causal: bool
    scale: float
    query: Rows
    key: Rows
    value: Rows | None
    output: LinearMap | None
    rope: Rope | None
    softcap: float | None
    modules: dict[str, str]
    notes: tuple[str, ...]


class LinearMaps(TorchFunctionMode):
    """Records the linear maps that a model applies, since the last attention call and since the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Application] = []
        self.after: list[Application] = []
        self._last: tuple[Tensor, Application] | None = None  # with its output, to which a bias may be added

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "linear":
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self._add(args[1], bias, args[0], out)
        elif name == "addmm" and args[2].ndim == 2:
            self._add(args[2].mT, args[0], args[1], out)
        elif name in ("matmul", "__matmul__") and args[1].ndim == 2:
            self._add(args[1].mT, None, args[0], out)
        elif name in ("add", "__add__"):
            self._add_bias(args[0], args[1], out)
        return out

    def _add_bias(self, x: Any, bias: Any, out: Tensor) -> None:
        """A bias that is added on its own."""
        if self._last is not None and x is self._last[0] and isinstance(bias, nn.Parameter) and bias.ndim == 1:
            before = self._last[1]
            biased = LinearMap(before.map.weight, ParameterView.of(bias))
            self._append(Application(biased, before.x, out.detach()), out)

    def _add(self, weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
        weights, biases = ParameterView.of(weight), None if bias is None else ParameterView.of(bias)
        if weights is not None and (bias is None or biases is not None):
            self._append(Application(LinearMap(weights, biases), x.detach(), out.detach()), out)

    def _append(self, application: Application, out: Tensor) -> None:
        self.before.append(application)
        self.after.append(application)
        self._last = out, application


@dataclass(eq=False)
class Observation:
    """An attention call, the linear maps before it, and those after it up to the next."""

    call: Call
    before: list[Application]
    after: list[Application] = field(default_factory=list)


def observe(model: nn.Module, batch: Batch) -> list[Observation]:
    """Run a batch; the attention calls of a model with the linear maps around them."""
    seen: list[Observation] = []
    maps = LinearMaps()

    def note(call: Call) -> None:
        seen.append(Observation(call, maps.before))
        maps.before = []
        maps.after = seen[-1].after

    with running(model) as run, ExitStack() as changes, maps:
        attachment = add_listener(model, note, changes)
        run(batch)
    if not seen:
        raise no_attention(model)
    warn_unseen(attachment)
    return seen


_OBSERVED: WeakKeyDictionary[nn.Module, tuple[dict[str, int], list[LayerFacts]]] = WeakKeyDictionary()


def live_heads(model: nn.Module, batch: Batch | None = None) -> Heads:
    """The attention layers of a live model; those of an unknown class are found on a batch, once."""
    model = bare(model)
    try:
        heads = read(model)
        heads[0]  # layers are read when they are asked for
        return heads
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        known, facts = _OBSERVED.get(model, ({}, []))
        if facts and known == _identities(model):
            return ObservedHeads(model, facts)
        if any(weight.is_meta or not bool(weight.isfinite().all()) for weight in model.parameters()):
            raise
        if batch is None:
            raise ValueError(f"{first_line(error)}; with data, its heads are found by running it") from error
        facts = _observed_layers(model, batch)
    _OBSERVED[model] = _identities(model), facts
    return ObservedHeads(model, facts)


def _identities(model: nn.Module) -> dict[str, int]:
    """The parameters of a model: what was observed holds for these. It keeps them, so that no other gets their id."""
    return {name: id(parameter) for name, parameter in model.named_parameters()}


def _observed_layers(model: nn.Module, batch: Batch) -> list[LayerFacts]:
    """The layers of a model by its attention calls; raises in one sentence if projections are not found."""
    owners = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
    layers: dict[str, LayerFacts] = {}
    for observation in observe(model, batch):
        if observation.call.name not in layers:
            layers[observation.call.name] = _layer(observation, owners)
    return list(layers.values())


def _layer(observation: Observation, owners: dict[int, str]) -> LayerFacts:
    call, maps = observation.call, observation.before
    label = call.name or "attention"
    if call.scale is None or call.query.shape[-1] == 0:
        raise ValueError(f"{label}: its scores are no product of queries and keys times a number")
    query, rope = _matched(call.query, call.positions, maps, f"queries of {label}")
    key, rope = _matched(call.key, call.key_positions, maps, f"keys of {label}", rope)
    pairs = (("query", query), ("key", key))
    roles = {role: owners.get(id(rows.map.weight.parameter), call.name) for role, rows in pairs}
    itself = call.name in roles.values()
    notes = ("a bias of positions is added to its scores, and not read",) if call.bias is not None else ()
    return LayerFacts(
        name=label,
        cross=call.is_cross,
        causal=call.is_causal,
        scale=call.scale,
        query=query,
        key=key,
        value=None if call.value is None else _looked_up(call.value, _all_tokens(call.value), maps)[0],
        output=_output(call, observation.after),
        rope=rope,
        softcap=call.softcap,
        modules={"module": call.name} if itself else roles,
        notes=notes,
    )


def _matched(
    heads: Float[Tensor, "batch heads n r"],
    positions: Tensor,
    maps: Sequence[Application],
    what: str,
    *ropes: Rope | None,
) -> tuple[Rows, Rope | None]:
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
) -> tuple[Rows, Float[Tensor, "tokens out"]] | tuple[None, None]:
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
                return Rows(application.map, pair.gather(0, best[None])[0].reshape(target.shape[1:])), out
    return None, None


def _error(actual: Tensor, target: Tensor) -> float:
    return float((actual - target).abs().max() / target.abs().max().clamp(min=1e-30))


def _output(call: Call, maps: Sequence[Application]) -> LinearMap | None:
    """The linear map that takes the merged output of all heads."""
    if call.value is None:
        return None
    merged = _tokens(call.output()).flatten(1)
    for application in maps:
        for x in _aligned(application.x, call.query):
            if x.shape == merged.shape and _error(x.double(), merged) <= TOLERANCE:
                return application.map
    return None


class ObservedHeads(Heads):
    """The attention layers of a live model that were found by running it; weights are read as they are now."""

    def __init__(self, model: nn.Module, layers: Sequence[LayerFacts]) -> None:
        self.source, self.family, self._layers = Live(model), FAMILY, list(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def depth(self) -> int:
        """Number of attention layers."""
        return len(self)

    def recorded(self, into: dict[str, str] | None = None) -> dict[str, str]:
        """Digests of the weights of all layers."""
        tensors = {f"{layer.name}.{role}": weight for layer in self for role, weight in vars(layer.weights).items()}
        found = {} if into is None else into
        found |= digests({name: weight for name, weight in tensors.items() if weight is not None})
        return found

    def _named(self) -> list[tuple[str, str]]:
        return [(facts.name, "cross" if facts.cross else "self") for facts in self._layers]

    def _read(self, index: int) -> Layer:
        facts = self._layers[index]
        return Layer(
            index=index,
            label=self.labels()[index],
            name=facts.name,
            kind="cross" if facts.cross else "self",
            causal=facts.causal,
            weights=_projections(facts.query, facts.key),
            scale=facts.scale,
            rope=facts.rope,
            position="unread" if facts.notes else "none",
            modules=facts.modules,
            notes=facts.notes,
            softcap=facts.softcap,
        )

    def values(self, index: int) -> Values:
        """Value and output weights of a layer."""
        facts = self._layers[index]
        if facts.value is None or facts.output is None:
            raise ValueError(f"{facts.name}: no linear maps of its parameters make its values and take its output")
        paired = _projections(facts.query, facts.key)
        groups, shared = paired.query.shape[:2]
        value, bias = facts.value.weight(), facts.value.bias()
        step = len(value) // groups
        weight, shift = facts.output.weight.now(), facts.output.bias
        output = weight.mT.reshape(groups, shared, -1, len(weight))
        biases = (None if bias is None else bias[::step, None], None if shift is None else shift.now())
        return Values(value[::step, None], output, *biases)


def _projections(query: Rows, key: Rows) -> Projections:
    """Weights by key head: heads whose keys are the same rows share one."""
    heads, rows = len(query.rows), key.rows
    shared = heads // len(rows)
    repeats = [n for n in range(len(rows), 0, -1) if len(rows) % n == 0]
    repeat = next(n for n in repeats if bool((rows.reshape(-1, n, rows.shape[-1]) == rows[::n, None]).all()))
    groups = len(rows) // repeat

    def by_group(x: Tensor | None, queries: bool) -> Tensor | None:
        if x is None:
            return None
        return x.unflatten(0, (groups, shared * repeat)) if queries else x[::repeat].unsqueeze(1)

    weight, other = by_group(query.weight(), True), by_group(key.weight(), False)
    assert weight is not None
    assert other is not None
    return Projections(weight, other, by_group(query.bias(), True), by_group(key.bias(), False))
