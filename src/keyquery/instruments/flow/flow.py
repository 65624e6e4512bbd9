"""`flow`: how much attention crosses between modalities, which way, and above what token counts alone would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from keyquery.capture.load import load_model, load_processor
from keyquery.checkpoints.sources import bare
from keyquery.instruments.flow.counting import SINK
from keyquery.instruments.flow.measure import Measured, heard, listened
from keyquery.instruments.flow.modality import SPECIAL, Tokens, labelled, located, patch_order, prepared, tokens_of
from keyquery.reading import Reading, digest, digests, provenance
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.surgery.rewriting.attach import check_unchanged

READINGS = ("raw", "residual", "weighted", "net", "rollout")


@dataclass(frozen=True, kw_only=True)
class Flow(Reading, kind="flow"):
    """Shares of attention between modalities, by layer and head (or whatever leads in the attention).

    `shares[reading][…][q][k]` is the share of all mass that tokens of modality q take of those of modality k, in the
    order of `modalities`, and `chance` the same of uniform attention. The properties say it in single figures.
    """

    units: ClassVar[Mapping[str, str]] = {
        "shares": "share of the attention among the tokens that are counted",
        "chance": "the same, of uniform attention over the positions that the mask allows",
        "symmetry": "tr(C²)/‖C‖² of the attention C across modalities: 1 reciprocal, 0 nothing looks back",
        "reciprocity": "correlation of C_ij with C_ji within pairs of modalities, over pairs that may look both ways",
        "special": "share of the attention of counted tokens that goes to tokens that are left out",
        "sink_mass": "share of the attention of counted tokens that goes to sinks and to tokens that are left out",
    }

    model: Mapping[str, Any]
    modalities: Sequence[str]
    counts: Mapping[str, Any]
    shares: Mapping[str, Any]
    chance: Mapping[str, Any]
    symmetry: Any
    reciprocity: Any
    special: Any
    sink_mass: Any = None
    tokens: Sequence[str] = ()
    labels: Sequence[str] = ()
    maps: Sequence[Mapping[str, Any]] = ()  # of the strongest heads, where they were kept
    picture: Mapping[str, Any] | None = None
    notes: Sequence[str] = field(default_factory=list)

    @property
    def raw(self) -> Any:
        """The share of attention that goes from one modality to another."""
        return self.of("raw")

    @property
    def residual(self) -> Any:
        """The same of ½A + ½I, attention with the residual stream beside it."""
        return self.of("residual")

    @property
    def weighted(self) -> Any:
        """The same of A_ij‖f(x_j)‖, what is really carried over; None where values are not known."""
        return self.of("weighted")

    @property
    def net(self) -> Any:
        """The share of all attention of counted tokens that crosses, but for what sinks take."""
        return self.of("net")

    @property
    def rollout(self) -> Any:
        """The same of the product of ½A + ½I, heads averaged, of all layers up to each."""
        return self.of("rollout")

    @property
    def corrected(self) -> Any:
        """`raw` less its chance level."""
        return self.of("raw", corrected=True)

    @property
    def directed(self) -> dict[tuple[str, str], Any]:
        """{(where from, where to): share of all mass}, of keys and queries; those that cross add up to `raw`."""
        return self.directed_of("raw")

    def of(self, reading: str, corrected: bool = False) -> Any:
        """What crosses by a reading: raw, residual, weighted, net or rollout; `corrected`: less its chance level."""
        check_choice("reading", reading, READINGS)
        if reading not in self.shares:
            return None
        found = _across(self.shares[reading])
        return (found - _across(self.chance[reading]) if corrected else found).tolist()

    def chance_of(self, reading: str) -> Any:
        """The chance level of a reading: what crosses if attention is uniform over what the mask allows."""
        check_choice("reading", reading, [name for name in READINGS if name in self.shares])
        return _across(self.chance[reading]).tolist()

    def directed_of(self, reading: str, corrected: bool = False) -> dict[tuple[str, str], Any]:
        """`directed` by another reading; `corrected` takes the chance level of each direction off."""
        check_choice("reading", reading, [name for name in READINGS if name in self.shares])
        found = np.asarray(self.shares[reading])
        found = found - np.asarray(self.chance[reading]) if corrected else found
        return {
            (source, target): found[..., q, k].tolist()
            for k, source in enumerate(self.modalities)
            for q, target in enumerate(self.modalities)
        }

    def records(self) -> list[dict[str, Any]]:
        """One row a head (and a layer, and a text): every reading, above chance too, and every direction."""
        columns = {name: np.asarray(self.of(name)) for name in READINGS[:4] if name in self.shares}
        columns |= {f"{name}_above_chance": np.asarray(self.of(name, True)) for name in list(columns)}
        for (source, target), share in self.directed.items():
            if source != target:
                columns[f"{source} to {target}"] = np.asarray(share)
        figures = ("symmetry", "reciprocity", "special", "sink_mass")
        columns |= {name: np.asarray(getattr(self, name)) for name in figures if getattr(self, name) is not None}
        lead = columns["raw"].shape
        alone = ("layer",) if "layers" in self.model else ("head",)
        names = {0: (), 1: alone, 2: ("layer", "head")}.get(len(lead), ("layer", "text", "head"))
        rows = []
        for place in np.ndindex(lead):
            row: dict[str, Any] = dict(zip(names, place, strict=True))
            rows.append(row | {name: _number(values[place]) for name, values in columns.items()})
        return rows


def flow(
    attention: Any,
    modality: Any = None,
    *,
    values: Any = None,
    output: Any = None,
    mask: Any = None,
    special: str = SPECIAL,
    counted: bool = False,
    inputs: Any = None,
    text: Any = None,
    image: Any = None,
    processor: Any = None,
    tokens: Sequence[str] | None = None,
    keep: int = 0,
    sink: float = SINK,
    name: str | None = None,
) -> Flow:
    """How much attention crosses between modalities, by layer and head, as a Reading.

    `attention` is a tensor (..., n, n) with rows that sum to 1, of a head (n, n), of heads, or of layers and heads; or
    a list of those of each layer, as transformers returns it. Or it is a model of transformers, `kq.Attention`, or
    anything built of it, with `inputs`, a mapping of what it takes, or with a `text` (or two) and an `image` and the
    `processor` that makes inputs of them; or the path of such a model. Models are run once, and no more than one
    layer's maps are in memory. `modality` is a label for each token; a vision-language model's own, unless given.

    With A the attention and C its part between tokens of unlike labels, the readings are raw ΣC/ΣA; residual, of
    ½A + ½I; rollout, of the product of these over the layers, heads averaged; weighted, of A_ij‖f(x_j)‖ with
    f(x) = W_O(W_V x + b_V), from a model's own maps, or from `values` (..., n, r) and `output` maps (..., r, d),
    default: the identity; and net, raw without sinks, keys that take more than `sink` of a head's attention and three
    times their chance, as a share of all attention. Chance is the same reading of uniform attention over what `mask`
    allows: bool, (n,) real tokens, or (..., n, n) pairs. Tokens labelled `special` are left out, or `counted` as a
    class of their own. `keep` the maps of so many heads, the furthest above chance net of sinks, for the page.

    >>> reading = kq.flow(torch.full((20, 20), 1 / 20), ["image"] * 12 + ["text"] * 8)
    >>> round(reading.raw, 3), round(abs(reading.corrected), 3), round(reading.directed["image", "text"], 3)
    (0.48, 0.0, 0.24)
    """
    _check(keep, sink)
    if not isinstance(attention, (nn.Module, str, Path)):
        if any(given is not None for given in (inputs, text, image, processor)):
            raise ValueError("inputs, text, image and processor go with a model, and attention is a tensor here")
        if modality is None:
            raise ValueError("modality must be a label for each token: attention alone does not tell them")
        found = heard(attention, labelled(modality), (special, counted), values, output, mask, keep, sink)
        run, facts = Tokens({}, found.labels), {"name": name or "attention"}
        return _told(found, run, tokens, facts, counted, _digests(attention))
    if any(given is not None for given in (values, output, mask)):
        raise ValueError("values, output and mask go with a tensor: a model has its own")
    model, tokenizer = (bare(attention), None) if isinstance(attention, nn.Module) else load_model(attention)
    if not isinstance(attention, nn.Module) and processor is None and inputs is None:
        processor = load_processor(attention) or tokenizer
    check_unchanged(model)
    run = _run_on(model, inputs, text, image, processor, modality)
    with patch_order(model) as order:
        found = listened(model, run, (special, counted), keep, sink)
    run = located(run, order, processor, shown=keep > 0)
    label = name or (type(model).__name__ if isinstance(attention, nn.Module) else Path(attention).name)
    return _told(found, run, tokens, {"name": label}, counted, digests(model.state_dict()))


def _check(keep: int, sink: float) -> None:
    check_count("keep", keep, least=0)
    check_number("sink", sink)
    if not 0 < sink <= 1:
        raise ValueError(f"sink must be a share of attention above 0, at most 1 (no key is a sink), got {sink}")


def _run_on(model: nn.Module, inputs: Any, text: Any, image: Any, processor: Any, modality: Any) -> Tokens:
    """What a model is run on, and labels, given or its own."""
    if (inputs is None) == (text is None and image is None):
        raise ValueError("a model needs inputs, or a text and an image (or two texts), and only one of these ways")
    if inputs is None:
        run = prepared(model, text, image, processor)
        return run if modality is None else Tokens(run.batch, labelled(modality), run.texts, run.picture)
    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be a mapping of what the model takes, got {type(inputs).__name__}")
    if modality is None:
        return tokens_of(model, inputs, processor)
    return Tokens(inputs, labelled(modality))


def _digests(attention: Any) -> dict[str, str]:
    """Of a tensor, or of several, a layer each."""
    if isinstance(attention, (list, tuple)):
        return digests({f"attention.{number}": torch.as_tensor(one) for number, one in enumerate(attention)})
    return {"attention": digest(torch.as_tensor(attention))}


def _told(
    found: Measured,
    run: Tokens,
    tokens: Sequence[str] | None,
    model: dict[str, Any],
    counted: bool,
    tensors: dict[str, str],
) -> Flow:
    count = len(found.labels[0])
    if tokens is not None and (isinstance(tokens, str) or len(tokens) != count):
        raise ValueError(f"tokens must be a list of {count} texts, one for each token")
    texts = list(map(str, tokens)) if tokens is not None else run.texts or [str(place) for place in range(count)]
    one = len(found.labels) == 1
    return Flow(
        model={**model, **found.sizes},
        modalities=found.modalities,
        counts=found.counts,
        shares=found.shares,
        chance=found.chance,
        symmetry=found.symmetry,
        reciprocity=found.reciprocity,
        special=found.special,
        sink_mass=found.sink_mass,
        tokens=texts if one else [],
        labels=found.labels[0] if one else [],
        maps=found.maps,
        picture=run.picture,
        notes=found.notes,
        provenance=provenance(special="counted" if counted else "left out", tensors=tensors),
    )


def _across(blocks: Any) -> Any:
    values = np.asarray(blocks, dtype=np.float64)
    return values.sum((-1, -2)) - np.trace(values, axis1=-2, axis2=-1)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
