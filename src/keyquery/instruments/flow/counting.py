"""The arithmetic of flow: attention mass between classes of tokens, summed head by head as maps are computed.

A map A (n, n) and one-hot classes E (n, classes) give the mass EᵀAE between classes, queries by keys. Every sum is also
made of uniform attention over the visible positions, the null level: pairs (attention, uniform) lead. A rollout needs
no product of maps: with V = E below the first layer, and V ← (mean of A V + V)/2 at each, the mass is EᵀV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.reading import short
from keyquery.support.checks import check_count, check_number

SPECIAL, IMAGE, CLASS = "special", "image", "class"  # labels; class: class tokens and registers of a ViT
SINK = 0.3  # share of a head's attention above which a token is a sink (Gu et al., 2024)
FLAT = 1e-6  # relative to the mean: attention that varies less is uniform up to rounding
DIGITS = 4  # significant digits of kept maps


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """Maps of some heads of one attention call, with the visible pairs of tokens, and those that are not padding."""

    call: int
    stack: str  # the layers that a rollout goes through
    maps: Float[Tensor, "batch heads n n"]
    visible: Bool[Tensor, "batch heads n n"] | None  # None: everything
    real: Bool[Tensor, "batch n"] | None = None  # None: all
    lengths: Float[Tensor, "batch heads n"] | None = None  # norms of what each token writes


class Crossing:
    """Sums attention between classes of tokens; keeps only the maps of the `keep` strongest heads."""

    def __init__(self, labels: list[list[str]], with_special: bool, keep: int, sink: float) -> None:
        check_count("keep", keep, least=0)
        check_number("sink", sink)
        if not 0 < sink <= 1:
            raise ValueError(f"sink must be above 0 and at most 1 (no sinks), got {sink}")
        self.names = list(dict.fromkeys(label for row in labels for label in row))
        if len(set(self.names) - {SPECIAL}) < 2:
            only = ", ".join(map(repr, self.names))
            raise ValueError(f"modality must have at least two labels besides {SPECIAL!r}, got only {only}")
        self.labels, self.keep, self.sink = labels, keep, sink
        self.counted = [index for index, name in enumerate(self.names) if with_special or name != SPECIAL]
        self.classes = torch.tensor([[self.names.index(label) for label in row] for row in labels])
        self.sums: dict[tuple[int, int], list[dict[str, Any]]] = {}  # of every head, by call and text
        self.rollouts: dict[tuple[int, int], Any] = {}
        self.values: dict[tuple[str, int], Float64[Tensor, "2 n classes"]] = {}  # V of a rollout, by stack and text
        self.through: dict[int, Tensor] = {}  # Σ A V over the heads of this call, by text
        self.kept: list[dict[str, Any]] = []

    def add(self, heads: HeadMaps) -> None:
        """Add some heads of an attention call."""
        batch, count = heads.maps.shape[:2]
        for text in range(batch):
            for index in range(count):
                self._add_head(heads, text, index, kept=self.keep > 0 and batch == 1)

    def _add_head(self, heads: HeadMaps, text: int, index: int, kept: bool) -> None:
        attention = heads.maps[text, index].double()
        visible = None if heads.visible is None else heads.visible[text, index]
        keys, queries = self._members(heads, text, index)
        both = torch.stack((attention, _uniform(visible, attention)))
        raw = queries.mT @ (both @ keys)
        sums: dict[str, Any] = {"raw": raw, "residual": (raw + torch.diag_embed(queries.sum(0))) / 2}
        if heads.lengths is not None:
            lengths = heads.lengths[text, index].double()
            sums["weighted"] = queries.mT @ (both @ (keys * lengths.unsqueeze(-1)))
        paying = queries[:, self.counted].sum(-1)
        received, even = paying @ both
        sinks = ((received > self.sink * paying.sum()) & (received > 3 * even)).nonzero().squeeze(1)
        sums["net"] = raw - queries.mT @ (both[..., sinks] @ keys[sinks])
        through = both @ self.values.get((heads.stack, text), keys)
        self.through[text] = self.through[text] + through if text in self.through else through
        groups = [(keys[:, number] > 0).nonzero().squeeze(1) for number in self.counted]
        symmetry, reciprocity = _returned(attention, visible, groups)
        row = self.sums.setdefault((heads.call, text), [])
        if kept:
            shares = net_shares(sums["net"], raw, self.counted)
            above = float(crossing(shares[0]) - crossing(shares[1]))
            self._keep(above, heads.call, len(row), attention * queries.any(-1, keepdim=True))
        # Lists, since many small live tensors fragment memory.
        masses = {name: mass.tolist() for name, mass in sums.items()}
        row.append({**masses, "symmetry": symmetry, "reciprocity": reciprocity})

    def _members(self, heads: HeadMaps, text: int, index: int) -> tuple[Tensor, Tensor]:
        """One-hot classes as keys and as queries, (n, classes); zero for padding and for queries that see nothing."""
        device = heads.maps.device
        classes = self.classes[min(text, len(self.classes) - 1)].to(device)
        keys = torch.nn.functional.one_hot(classes, len(self.names)).double()
        visible = None if heads.visible is None else heads.visible[text, index].to(device)
        if heads.real is not None:
            keys = keys * heads.real[text].to(device).unsqueeze(-1)
        elif visible is not None:
            keys = keys * visible.any(0).unsqueeze(-1)
        return keys, keys if visible is None else keys * visible.any(1).unsqueeze(-1)

    def end_call(self, heads: HeadMaps) -> None:
        """Extend the rollout by this layer: heads averaged, plus the residual stream."""
        for text, through in self.through.items():
            keys, queries = self._members(heads, text, 0)
            count = len(self.sums[heads.call, text])
            values = (through / count + self.values.get((heads.stack, text), keys)) / 2
            self.values[heads.stack, text] = values
            self.rollouts[heads.call, text] = (queries.mT @ values).tolist()
        self.through = {}

    def _keep(self, above: float, call: int, head: int, attention: Tensor) -> None:
        """Keep the maps between classes of a head, if it is among those with the largest net crossing."""
        if len(self.kept) == self.keep and above <= self.kept[-1]["net_above_chance"]:
            return
        names = [self.names[number] for number in self.counted]
        groups = [(self.classes[0] == number).nonzero().squeeze(1).to(attention.device) for number in self.counted]
        pairs = [(q, k) for k in range(len(groups)) for q in range(len(groups)) if q != k]
        if set(self.names) == {CLASS, IMAGE}:
            pairs.append((names.index(IMAGE), names.index(IMAGE)))
        blocks = [
            {"from": names[k], "to": names[q], "map": short(attention[groups[q]][:, groups[k]].tolist(), DIGITS)}
            for q, k in pairs
        ]
        popularity = short(_popularity(attention, groups), DIGITS)
        row = {"layer": call, "head": head, "net_above_chance": above, "blocks": blocks, "popularity": popularity}
        self.kept = sorted([*self.kept, row], key=lambda head: -head["net_above_chance"])[: self.keep]

    def fields(self, calls: Sequence[int], lead: tuple[int, ...], depths: tuple[int, ...]) -> dict[str, Any]:
        """The fields of a `Flow`: of these calls, in the shape `lead`; `depths` is that of a rollout."""
        texts = sorted({text for _, text in self.sums})
        rows = [head for call in calls for text in texts for head in self.sums[call, text]]
        known = [name for name in ("raw", "residual", "weighted", "net") if all(name in row for row in rows)]
        mass = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in known}
        paid = mass["raw"][:, 0, self.counted].sum(1)
        both = {name: shares(mass[name], self.counted) for name in known}
        both["net"] = net_shares(mass["net"], mass["raw"], self.counted)
        rolled = [self.rollouts[call, text] for call in calls for text in texts]
        both["rollout"] = shares(torch.tensor(rolled, dtype=torch.float64), self.counted)
        shapes = {name: depths if name == "rollout" else lead for name in both}
        pairs = {name: values.reshape(*shapes[name], *values.shape[1:]) for name, values in both.items()}
        left = [index for index in range(len(self.names)) if index not in self.counted]
        counts = {name: [row.count(name) for row in self.labels] for name in self.names}
        return {
            "modalities": [self.names[index] for index in self.counted],
            "counts": {name: count[0] if len(count) == 1 else count for name, count in counts.items()},
            "shares": {name: values[..., 0, :, :] for name, values in pairs.items()},
            "chance": {name: values[..., 1, :, :] for name, values in pairs.items()},
            "symmetry": np.array([row["symmetry"] for row in rows], dtype=object).reshape(lead),
            "reciprocity": np.array([row["reciprocity"] for row in rows], dtype=object).reshape(lead),
            "special": (paid[:, left].sum(-1) / paid.sum(-1).clamp(min=1e-300)).reshape(lead),
            "sink_mass": 1 - pairs["net"][..., 0, :, :].sum((-1, -2)),
            "maps": [{**row, "layer": calls.index(row["layer"])} for row in self.kept if row["layer"] in calls],
        }


def shares(mass: Float64[Tensor, "*lead classes classes"], counted: Sequence[int]) -> Float64[Tensor, "*lead m m"]:
    """Mass between the counted classes as shares of all mass between them; 0 without mass."""
    chosen = mass[..., list(counted), :][..., list(counted)]
    total = chosen.sum((-1, -2), keepdim=True)
    return chosen / total.where(total > 0, 1.0)


def net_shares(
    net: Float64[Tensor, "*lead 2 classes classes"], raw: Float64[Tensor, "*lead 2 classes classes"], counted: list[int]
) -> Float64[Tensor, "*lead 2 m m"]:
    """Mass between the counted classes without sinks (`net`), as shares of all attention of their queries.

    They sum to 1 minus what goes to sinks and uncounted classes; the null level divides the same total.
    """
    paid = raw[..., :1, counted, :].sum((-1, -2), keepdim=True)
    left = net[..., :1, counted, :][..., counted].sum((-1, -2), keepdim=True)
    return shares(net, counted) * left / paid.where(paid > 0, 1.0)


def crossing(blocks: Float[Tensor, "*lead m m"]) -> Float[Tensor, "*lead"]:
    """The total share between different classes."""
    return blocks.sum((-1, -2)) - blocks.diagonal(dim1=-2, dim2=-1).sum(-1)


def _uniform(visible: Bool[Tensor, "n n"] | None, like: Float64[Tensor, "n n"]) -> Float64[Tensor, "n n"]:
    """Uniform attention over the visible keys; 0 for a query that sees none."""
    if visible is None:
        return torch.full_like(like, 1 / len(like))
    return visible / visible.sum(-1, keepdim=True).clamp(min=1).double()


def _popularity(attention: Float[Tensor, "n n"], groups: Sequence[Int[Tensor, " _"]]) -> list[float | None]:
    """The key-only term of the scores, per token: the mean of log A over the queries that attend to all of its group.

    Each row's mean over the group is subtracted first, since softmax ignores it. For scores q·k without a position term
    it is q̄·(k − k̄), with means over these queries and keys. None with fewer than two such queries.
    """
    popularity: list[float | None] = [None] * len(attention)
    for keys in groups:
        rows = attention[:, keys]
        rows = rows[(rows > 0).all(-1)].log()
        if len(rows) > 1:
            values = (rows - rows.mean(-1, keepdim=True)).mean(0)
            for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                popularity[key] = value
    return popularity


def _returned(
    attention: Float64[Tensor, "n n"], visible: Bool[Tensor, "n n"] | None, groups: list[Tensor]
) -> tuple[float | None, float | None]:
    """Symmetry and reciprocity of C, attention across classes.

    tr(C²)/‖C‖², and the correlation of C_ij with C_ji over pairs visible both ways. The latter is within each pair of
    classes, averaged by their number: pooled over classes, it would reflect which classes attend to each other most.
    """
    mutual = energy = total = pairs = 0.0
    for a, first in enumerate(groups):
        for second in groups[:a]:
            both = torch.stack((attention[first][:, second], attention[second][:, first].mT)).flatten(1)
            mutual += 2 * float(both.prod(0).sum())
            energy += float(both.square().sum())
            if visible is not None:
                both = both[:, (visible[first][:, second] & visible[second][:, first].mT).flatten()]
            if both.shape[1] > 1 and bool((both.std(1) > FLAT * both.mean(1).amax()).all()):
                total += both.shape[1] * float(torch.corrcoef(both)[0, 1])
                pairs += both.shape[1]
    return mutual / energy if energy > 0 else None, total / pairs if pairs else None
