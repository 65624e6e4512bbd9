"""Measures flow over the maps of a tensor, or of a model that is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.instruments.flow.counting import CallSums, Classes, Crossing, HeadMaps, net_shares, shares
from keyquery.instruments.flow.modality import CLASS, IMAGE, Tokens
from keyquery.instruments.flow.values import OutputMaps, lengths
from keyquery.listening.call import Call
from keyquery.listening.maps import SelfAttention, check_rows, is_square, layers_of, maps_by_head, run_with, stack_of
from keyquery.reading import short
from keyquery.support.checks import check_batches, check_count, check_float, check_number

DIGITS = 4  # significant digits of kept maps


@dataclass(frozen=True)
class Counting:
    """How attention is counted, as in `flow`; checked when created."""

    special: str  # label of special tokens
    counted: bool  # whether they are a class of their own
    keep: int
    sink: float

    def __post_init__(self) -> None:
        check_count("keep", self.keep, least=0)
        check_number("sink", self.sink)
        if not 0 < self.sink <= 1:
            raise ValueError(f"sink must be above 0 and at most 1 (no sinks), got {self.sink}")

    def crossing(self, labels: list[list[str]]) -> Crossing:
        """Sums over tokens with these labels, still empty."""
        classes = classes_of(labels, self.special, self.counted)
        within = classes.names.index(IMAGE) if set(classes.names) == {CLASS, IMAGE} else None
        return Crossing(classes, self.keep, self.sink, within)


def flow_of_model(model: nn.Module, run: Tokens, counting: Counting) -> dict[str, Any]:
    """Run a model and sum its attention as it is computed."""
    crossing, outputs, tokens = counting.crossing(run.labels), OutputMaps.of(model), len(run.labels[0])
    unknown: dict[int, str] = {}  # modules of calls whose output projection is not known

    def add(call: Call, number: int) -> None:
        if not is_square(call) or call.key.shape[-2] != tokens:
            return
        norms = outputs.norms(call)
        if norms is None:
            unknown[number] = call.name
        for head, maps in maps_by_head(call):
            if call.real_queries is not None:
                maps = maps.masked_fill(~call.real_queries[:, None, :, None], 0.0)
            last = head == call.heads - 1
            crossing.add(HeadMaps(number, stack_of(call.name), head, last, maps, call.mask, call.real), norms)

    layers = layers_of(model, *run_with(model, run.batch, add), tokens)
    calls = _checked(model, run, crossing, layers)
    missing = next((unknown[layer.number] for layer in layers if layer.number in unknown), None)
    reason = outputs.reason or (f"the output projection of {missing} is not known" if missing is not None else None)
    notes = [f"norm-weighted flow is not available: {reason}"] if reason else []
    lead = (len(calls), *([len(calls[0].symmetry)] if len(calls[0].symmetry) > 1 else []), calls[0].heads)
    measured = _measured(crossing, [layer.number for layer in layers], run.labels, lead, layered=True)
    return {**measured, "sizes": {"layers": len(layers), "heads": calls[0].heads}, "notes": notes}


def _checked(model: nn.Module, run: Tokens, crossing: Crossing, layers: Sequence[SelfAttention]) -> list[CallSums]:
    """Sums of the layers of a model, which must be over all of its tokens, and of as many heads."""
    name, count = type(model).__name__, len(run.labels[0])
    sizes = sorted({layer.tokens for layer in layers})
    if sizes != [count]:
        raise ValueError(f"modality has {count} labels, but {name} attends to {' and '.join(map(str, sizes))} tokens")
    calls = [crossing.calls[layer.number] for layer in layers]
    texts, heads = len(calls[0].symmetry), sorted({call.heads for call in calls})
    if len(run.labels) not in (1, texts):
        raise ValueError(f"modality has {len(run.labels)} rows of labels, but the inputs hold {texts} texts")
    if len(heads) != 1:
        raise ValueError(f"{name} has layers of {' and '.join(map(str, heads))} heads: not supported")
    return calls


def flow_of_tensor(
    attention: Any, labels: list[list[str]], counting: Counting, values: Any, output: Any, mask: Any
) -> dict[str, Any]:
    """Sum the attention of a tensor (..., n, n), or of a list of one per layer."""
    layered, layers = _layers(attention)
    lead, count = layers[0].shape[:-2], layers[0].shape[-1]
    if len(labels[0]) != count:
        raise ValueError(f"modality has {len(labels[0])} labels, but the attention has {count} tokens")
    texts = int(np.prod(lead[:-1]))
    if len(labels) not in (1, texts):
        raise ValueError(f"modality has {len(labels)} rows of labels, but the attention is of {texts} texts")
    crossing = counting.crossing(labels)
    real, pairs = _masked(mask, lead, count)
    for call, layer in enumerate(layers):
        maps = layer.reshape(texts, -1, count, count)
        seen = None if pairs is None else pairs.to(layer.device)
        check_rows(maps.flatten(0, 1), None if seen is None else seen.any(-1).expand(*maps.shape[:-1]).flatten(0, 1))
        if seen is not None and bool((maps * ~seen).any()):
            raise ValueError("attention must be 0 where mask is False")
        norms = _norms(_of_layer(values, call, layered), _of_layer(output, call, layered), lead, count)
        real_tokens = None if real is None else real.to(layer.device).expand(texts, -1)
        crossing.add(HeadMaps(call, "", 0, True, maps, seen, real_tokens), norms)
    shape = (len(layers), *lead) if layered else tuple(lead)
    sizes = {**({"layers": len(layers)} if layered else {}), "heads": crossing.calls[0].heads}
    return {**_measured(crossing, list(range(len(layers))), labels, shape, layered), "sizes": sizes}


def _layers(attention: Any) -> tuple[bool, list[Tensor]]:
    """Whether the first dimension is layers, and the attention of each layer."""
    parts = [attention] if attention is None else attention  # None: returned by models without output_attentions
    if isinstance(parts, (list, tuple)) and (not parts or any(part is None for part in parts)):
        raise ValueError(
            "attention contains no maps: fused attention returns none. Load the model with "
            "attn_implementation='eager', or pass the model itself: kq.flow(model, inputs=...)"
        )
    if isinstance(attention, (list, tuple)) and attention and all(isinstance(part, Tensor) for part in attention):
        for index, part in enumerate(attention):
            check_float(f"attention[{index}]", part, "... n n")
        if len({part.shape for part in attention}) != 1:
            shapes = " and ".join(str(tuple(shape)) for shape in dict.fromkeys(part.shape for part in attention))
            raise ValueError(f"all layers of attention must have one shape, got {shapes}")
        whole = [part.detach() for part in attention]
        layered = True
    else:
        tensor = torch.as_tensor(attention) if isinstance(attention, (np.ndarray, list, tuple)) else attention
        check_float("attention", tensor, "... n n")
        layered = tensor.ndim > 3
        whole = list(tensor.detach()) if layered else [tensor.detach()]
    if whole[0].shape[-1] != whole[0].shape[-2]:
        raise ValueError(f"attention must be (..., n, n), of tokens to the same tokens, got {tuple(whole[0].shape)}")
    # A batch dimension of 1, as models return it, is dropped.
    squeezed = layered and whole[0].ndim == 4 and whole[0].shape[0] == 1
    return layered, [part[0] for part in whole] if squeezed else whole


def _masked(mask: Any, lead: Sequence[int], count: int) -> tuple[Tensor | None, Tensor | None]:
    """Non-padding tokens (1, n), and visible pairs (texts or 1, heads or 1, n, n)."""
    if mask is None:
        return None, None
    mask = torch.as_tensor(mask) if isinstance(mask, (list, tuple, np.ndarray)) else mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be bool, True where attention may go, got {getattr(mask, 'dtype', type(mask).__name__)}"
        )
    if mask.shape == (count,):
        return mask.unsqueeze(0), (mask & mask.unsqueeze(-1))[None, None]
    if mask.ndim < 2 or tuple(mask.shape[-2:]) != (count, count):
        raise ValueError(f"mask must be ({count},) or (..., {count}, {count}), got {tuple(mask.shape)}")
    if mask.ndim == 2:
        return None, mask[None, None]
    whole = check_batches(attention=torch.Size(lead), mask=mask.shape[:-2])
    if whole != torch.Size(lead):
        raise ValueError(
            f"mask has leading dimensions {tuple(mask.shape[:-2])}, but each layer of the attention {tuple(lead)}"
        )
    return None, mask.expand(*lead, count, count).reshape(int(np.prod(lead[:-1])), -1, count, count)


def _of_layer(values: Any, index: int, layered: bool) -> Any:
    return values[index] if layered and values is not None else values


def _norms(values: Any, output: Any, lead: Sequence[int], count: int) -> Float[Tensor, "texts heads n"] | None:
    """‖f(x_j)‖ of each token, from values and output maps."""
    if values is None:
        if output is not None:
            raise ValueError("output needs values: f(x) is values times output")
        return None
    check_float("values", values, "... n r", n=count)
    if output is None:
        norms = torch.linalg.vector_norm(values.double(), dim=-1)
    else:
        check_float("output", output, "... r d", r=values.shape[-1])
        check_batches(values=values.shape[:-2], output=output.shape[:-2])
        norms = lengths(values, output)
    if check_batches(attention=torch.Size(lead), values=norms.shape[:-1]) != torch.Size(lead):
        raise ValueError(
            f"values have leading dimensions {tuple(norms.shape[:-1])}, but each layer of the attention {tuple(lead)}"
        )
    return norms.expand(*lead, count).reshape(int(np.prod(lead[:-1])), -1, count)


def classes_of(labels: list[list[str]], special: str, counted: bool) -> Classes:
    """Labels as class indices; requires at least two modalities."""
    names = list(dict.fromkeys(label for row in labels for label in row))
    modalities = [index for index, label in enumerate(names) if counted or label != special]
    if len([label for label in names if label != special]) < 2:
        only = ", ".join(map(repr, names))
        raise ValueError(f"modality must have at least two labels besides {special!r}, got only {only}")
    return Classes(names, torch.tensor([[names.index(label) for label in row] for row in labels]), modalities)


def _measured(
    crossing: Crossing, order: list[int], labels: list[list[str]], lead: tuple[int, ...], layered: bool
) -> dict[str, Any]:
    """The fields of a `Flow` that come from attention."""
    calls, classes = [crossing.calls[call] for call in order], crossing.classes
    counted, size = classes.counted, len(classes.counted)
    known = [name for name in calls[0].mass if all(name in call.mass for call in calls)]
    mass = {name: torch.tensor([call.mass[name] for call in calls], dtype=torch.float64) for name in known}
    both = {name: shares(mass[name], counted) for name in known if name != "net"}
    raw, net, even = mass["raw"][..., 0, :, :], mass["net"][..., 0, :, :], mass["net"][..., 1, :, :]
    both["net"] = torch.stack((net_shares(net, raw, counted), net_shares(net, raw, counted, even)), -3)
    both["rollout"] = shares(torch.tensor([call.rollout for call in calls], dtype=torch.float64), counted)
    depths = lead[:-1] if len(lead) > 1 or not layered else lead  # of a rollout: all but heads
    pairs = {
        name: values.reshape(*(depths if name == "rollout" else lead), 2, size, size) for name, values in both.items()
    }
    paid = raw[..., counted, :]
    left = [index for index in range(len(classes.names)) if index not in counted]
    special = paid[..., left].sum((-1, -2)) / paid.sum((-1, -2)).clamp(min=1e-300)
    return {
        "modalities": [classes.names[index] for index in counted],
        "counts": _counts(labels),
        "shares": {name: values[..., 0, :, :] for name, values in pairs.items()},
        "chance": {name: values[..., 1, :, :] for name, values in pairs.items()},
        "symmetry": _shaped([call.symmetry for call in calls], lead),
        "reciprocity": _shaped([call.reciprocity for call in calls], lead),
        "special": special.reshape(lead),
        "sink_mass": 1 - pairs["net"][..., 0, :, :].sum((-1, -2)),
        "maps": _kept(crossing, order),
    }


def _shaped(values: Any, lead: tuple[int, ...]) -> Any:
    """Values that may be None, as nested lists."""
    return np.array(values, dtype=object).reshape(lead).tolist()


def _counts(labels: list[list[str]]) -> dict[str, Any]:
    names = dict.fromkeys(label for row in labels for label in row)
    counts = {name: [row.count(name) for row in labels] for name in names}
    return {name: per_text[0] if len(per_text) == 1 else per_text for name, per_text in counts.items()}


def _kept(crossing: Crossing, order: list[int]) -> list[dict[str, Any]]:
    """Kept maps of the model's layers, strongest first."""
    names = [crossing.classes.names[index] for index in crossing.classes.counted]
    rows = []
    for above, call, head, (maps, popularity) in sorted(
        crossing.kept, key=lambda entry: (-entry[0], entry[1], entry[2])
    ):
        if call in order:
            blocks = [{"from": names[k], "to": names[q], "map": short(part.tolist(), DIGITS)} for k, q, part in maps]
            place = {"layer": order.index(call), "head": head, "net_above_chance": above}
            rows.append({**place, "blocks": blocks, "popularity": short(popularity, DIGITS)})
    return rows
