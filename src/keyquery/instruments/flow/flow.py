"""`flow`: how much attention crosses between modalities, in which direction, and how far above the null level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from keyquery.checkpoints.sources import bare
from keyquery.instruments.flow.counting import READINGS, SINK, Crossing, crossing
from keyquery.instruments.flow.measure import flow_of_model, flow_of_tensor
from keyquery.instruments.flow.modality import Tokens, labelled, located, patch_order, prepared, tokens_of
from keyquery.intervene.rewrites import check_unchanged
from keyquery.listening.inputs.load import load_model, load_processor
from keyquery.reading import Reading, digests, provenance
from keyquery.support.checks import check_choice


@dataclass(frozen=True, kw_only=True)
class Flow(Reading, kind="flow"):
    """Shares of attention between modalities, per layer and head (or other leading dimensions).

    `shares[reading][…][q][k]` is the share of all attention mass from queries of modality q to keys of modality k, in
    the order of `modalities`; `chance` is the same for uniform attention. The properties give single numbers.
    """

    units: ClassVar[Mapping[str, str]] = {
        "shares": "share of the attention among counted tokens",
        "chance": "the same for uniform attention over the positions that the mask allows",
        "symmetry": "tr(C²)/‖C‖² of the attention C across modalities: 1 symmetric, 0 one-directional",
        "reciprocity": "correlation of C_ij with C_ji within pairs of modalities, over mutually visible pairs",
        "special": "share of the attention of counted tokens to excluded tokens",
        "sink_mass": "share of the attention of counted tokens to sinks and excluded tokens",
    }

    model: Mapping[str, Any]  # name and facts of the model
    modalities: Sequence[str]  # names
    counts: Mapping[str, Any]  # tokens per modality; a list where there are several texts
    shares: Mapping[str, Any]
    chance: Mapping[str, Any]
    symmetry: Any
    reciprocity: Any
    special: Any
    sink_mass: Any = None
    tokens: Sequence[str] = ()  # of the sequence
    labels: Sequence[str] = ()  # modality of each token
    maps: Sequence[Mapping[str, Any]] = ()  # of the strongest heads, if kept
    picture: Mapping[str, Any] | None = None  # the image, if any
    notes: Sequence[str] = field(default_factory=list)  # what a reader should know

    @property
    def raw(self) -> Any:
        """The share of attention that goes from one modality to another."""
        return self.of("raw")

    @property
    def residual(self) -> Any:
        """The same for ½A + ½I, which includes the residual stream."""
        return self.of("residual")

    @property
    def weighted(self) -> Any:
        """The same for A_ij‖f(x_j)‖, norm-weighted attention; None where values are unknown."""
        return self.of("weighted")

    @property
    def net(self) -> Any:
        """The share of all attention of counted tokens that crosses, sinks excluded."""
        return self.of("net")

    @property
    def rollout(self) -> Any:
        """Attention rollout: the same for the product of ½A + ½I, averaged over heads, up to each layer."""
        return self.of("rollout")

    @property
    def corrected(self) -> Any:
        """`raw` minus its null level."""
        return self.of("raw", corrected=True)

    @property
    def directed(self) -> dict[tuple[str, str], Any]:
        """{(key modality, query modality): share of all mass}; the crossing ones sum to `raw`."""
        return self.directed_of("raw")

    def of(self, reading: str, corrected: bool = False) -> Any:
        """Crossing share by a reading: raw, residual, weighted, net or rollout; `corrected`: minus its null level."""
        check_choice("reading", reading, READINGS)
        if reading not in self.shares:
            return None
        share = crossing(self.shares[reading])
        return (share - crossing(self.chance[reading]) if corrected else share).tolist()

    def chance_of(self, reading: str) -> Any:
        """The null level of a reading: the crossing share of uniform attention under the mask."""
        check_choice("reading", reading, tuple(self.shares))
        return crossing(self.chance[reading]).tolist()

    def directed_of(self, reading: str, corrected: bool = False) -> dict[tuple[str, str], Any]:
        """`directed` by another reading; `corrected` subtracts the null level of each direction."""
        check_choice("reading", reading, tuple(self.shares))
        blocks = np.asarray(self.shares[reading]) - (np.asarray(self.chance[reading]) if corrected else 0.0)
        names = list(enumerate(self.modalities))
        return {(source, target): blocks[..., q, k].tolist() for k, source in names for q, target in names}

    def without_popularity(self, layer: int, head: int) -> list[dict[str, Any]]:
        """The kept maps of a head with the popularity of keys taken out: where it looks, without the sinks.

        A′_ij ∝ A_ij·exp(−p_j), with p_j the key-only term of the scores, and the attention of each query to each
        modality as before: `kq.dial(popularity=0)` within the modality. Blocks are as in `maps`.
        """
        kept = next((maps for maps in self.maps if (maps["layer"], maps["head"]) == (layer, head)), None)
        if kept is None:
            raise ValueError(f"the maps of head {layer}.{head} were not kept: raise keep")
        blocks = []
        for block in kept["blocks"]:
            pairs = zip(kept["popularity"], self.labels, strict=True)
            popularity = [value for value, label in pairs if label == block["from"]]
            if None in popularity:
                raise ValueError(f"popularity of {block['from']} is undefined: fewer than two queries see all of it")
            values = np.array(block["map"], dtype=np.float64)
            rest = values * np.exp(-np.array(popularity))
            rest *= values.sum(-1, keepdims=True) / np.maximum(rest.sum(-1, keepdims=True), 1e-300)
            blocks.append({"from": block["from"], "to": block["to"], "map": rest.tolist()})
        return blocks

    def records(self) -> list[dict[str, Any]]:
        """One row per head (and layer, and text): every reading, also above the null level, and every direction."""
        known = [name for name in READINGS[:4] if name in self.shares]
        columns = {name: self.of(name) for name in known}
        columns |= {f"{name}_above_chance": self.of(name, corrected=True) for name in known}
        columns |= {
            f"{source} to {target}": share for (source, target), share in self.directed.items() if source != target
        }
        metrics = ("symmetry", "reciprocity", "special", "sink_mass")
        columns |= {name: getattr(self, name) for name in metrics if getattr(self, name) is not None}
        arrays = {name: np.array(values, dtype=object) for name, values in columns.items()}
        shape = arrays["raw"].shape
        single = ("layer",) if "layers" in self.model else ("head",)
        axes = {0: (), 1: single, 2: ("layer", "head")}.get(len(shape), ("layer", "text", "head"))
        return [
            dict(zip(axes, index, strict=True)) | {name: values[index] for name, values in arrays.items()}
            for index in np.ndindex(shape)
        ]


def flow(
    attention: Any,
    modality: Any = None,
    *,
    mask: Any = None,
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
    """Measure how much attention crosses between modalities, per layer and head.

    With A the attention and C its part between tokens of different labels:
    raw = ΣC/ΣA; residual, of ½A + ½I; rollout, of the product of these over layers, averaged over heads; weighted, of
    A_ij‖f(x_j)‖ with f(x) = W_O(W_V x + b_V), of models; net, raw without attention sinks, as a share of all attention.
    The null level is the same for uniform attention under the mask.

    Parameters
    ----------
    attention
        A tensor (..., n, n) with rows that sum to 1: of a head, of heads, or of layers and heads; or a list of one per
        layer, as transformers returns it. Or any live model that `kq.listen` sees, or the path of one; it is run once,
        with the map of one head in memory at a time.
    modality
        One label per token. Default: those of a vision-language model.
    mask
        With a tensor: bool, (n,) non-padding tokens or (..., n, n) visible pairs. Default: everything is visible.
    counted
        Whether tokens labelled "special" count as a class of their own. Default: excluded.
    inputs
        With a model: a mapping of input tensors. Default: none.
    text, image, processor
        With a model: a text (or two) and an image, or an image alone for a vision Transformer, whose class token and
        patches are then the two modalities; and the processor for them. Default: none; the model's processor.
    tokens
        Names of the tokens. Default: those of the inputs, else positions.
    keep
        How many maps to keep for the page, of the heads farthest above the null level. Default: 0.
    sink
        A key is a sink if it takes more than this share of a head's attention, and three times its null level.
        Default: 0.3.
    name
        Name of the model. Default: that of its class or file.

    Returns
    -------
    Flow
        Shares by reading, their null levels, and sink masses.

    Examples
    --------
    >>> reading = kq.flow(torch.full((20, 20), 1 / 20), ["image"] * 12 + ["text"] * 8)
    >>> round(reading.raw, 3), round(abs(reading.corrected), 3), round(reading.directed["image", "text"], 3)
    (0.48, 0.0, 0.24)
    """
    if not isinstance(attention, (nn.Module, str, Path)):
        if any(argument is not None for argument in (inputs, text, image, processor)):
            raise ValueError("inputs, text, image and processor need a model, and attention is a tensor")
        if modality is None:
            raise ValueError("modality is required with a tensor: one label per token")
        run = Tokens({}, labelled(modality))
        measured = flow_of_tensor(attention, Crossing(run.labels, counted, keep, sink), mask)
        layers = attention if isinstance(attention, (list, tuple)) else [attention]
        names = [f"attention.{number}" for number in range(len(layers))] if layers is attention else ["attention"]
        tensors = dict(zip(names, map(torch.as_tensor, layers), strict=True))
        label = name or "attention"
    else:
        if mask is not None:
            raise ValueError("mask is only for a tensor: a model has its own")
        model, tokenizer = (bare(attention), None) if isinstance(attention, nn.Module) else load_model(attention)
        if not isinstance(attention, nn.Module) and processor is None and inputs is None:
            processor = load_processor(attention) or tokenizer
        check_unchanged(model)
        run = _run_on(model, inputs, text, image, processor, modality)
        with patch_order(model) as order:
            measured = flow_of_model(model, run.batch, Crossing(run.labels, counted, keep, sink))
        run = located(run, order, processor, shown=keep > 0)
        label = name or (type(model).__name__ if isinstance(attention, nn.Module) else Path(attention).name)
        tensors = model.state_dict()
    count, single = len(run.labels[0]), len(run.labels) == 1
    if tokens is not None and (isinstance(tokens, str) or len(tokens) != count):
        raise ValueError(f"tokens must be a list of {count} strings, one per token")
    texts = list(map(str, tokens if tokens is not None else run.texts or range(count)))
    return Flow(
        model={"name": label, **measured.pop("sizes")},
        tokens=texts if single else [],
        labels=run.labels[0] if single else [],
        picture=run.picture,
        provenance=provenance(special="counted" if counted else "left out", tensors=digests(tensors)),
        **measured,
    )


def _run_on(model: nn.Module, inputs: Any, text: Any, image: Any, processor: Any, modality: Any) -> Tokens:
    """Inputs of a model, and labels, passed or its own."""
    if (inputs is None) == (text is None and image is None):
        raise ValueError("a model needs either inputs, or text and image (or two texts, or an image for a ViT)")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be a mapping of argument names to tensors, got {type(inputs).__name__}")
    if inputs is not None and modality is not None:
        return Tokens(inputs, labelled(modality))
    run = prepared(model, text, image, processor) if inputs is None else tokens_of(model, inputs, processor)
    return run if modality is None else replace(run, labels=labelled(modality))
