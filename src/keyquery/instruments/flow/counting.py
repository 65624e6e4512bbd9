"""The arithmetic of flow: attention mass between classes of tokens, summed head by head as maps are computed.

A map A (n, n) and one-hot classes E (n, classes) give the mass EᵀAE between classes, queries by keys. Every sum is also
made of uniform attention over the visible positions, the null level: pairs (attention, uniform) lead. A rollout needs
no product of maps: with V = E below the first layer, and V ← (mean of A V + V)/2 at each, the mass is EᵀV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.reading import short
from keyquery.support.checks import check_count, check_number

READINGS = ("raw", "residual", "weighted", "net", "rollout")
SPECIAL, IMAGE, CLASS = "special", "image", "class"  # labels; class: class tokens and registers of a ViT
SINK = 0.3  # share of a head's attention above which a token is a sink (Gu et al., 2024)
FLAT = 1e-6  # relative to the mean: attention that varies less is uniform up to rounding
DIGITS = 4  # significant digits of kept maps


@dataclass(frozen=True, eq=False)
class HeadMap:
    """The map of one head on one text, with the visible pairs of tokens, and those that are not padding."""

    text: int
    attention: Float[Tensor, "n n"]
    visible: Bool[Tensor, "n n"]
    real: Bool[Tensor, " n"] | None = None  # None: what a query sees
    lengths: Float[Tensor, " n"] | None = None  # norms of what each token writes


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
        self.sums: dict[int, list[list[dict[str, Any]]]] = {}  # of every head, by call and text
        self.values: dict[tuple[str, int], Float64[Tensor, "*2 n classes"]] = {}  # V of a rollout, by stack and text
        self.kept: list[dict[str, Any]] = []

    def add(self, call: int, stack: str, texts: int, maps: Iterable[HeadMap]) -> None:
        """Add the heads of an attention call on some texts, and extend the rollout of its stack by this layer."""
        self.sums[call] = [[] for _ in range(texts)]
        through: dict[int, Tensor] = {}  # Σ A V over heads, by text
        for head in maps:
            moved = self._add_head(call, stack, head, kept=self.keep > 0 and texts == 1)
            through[head.text] = through.get(head.text, 0) + moved
        for text, moved in through.items():
            self.values[stack, text] = (moved / len(self.sums[call][text]) + self.values[stack, text]) / 2

    def _add_head(self, call: int, stack: str, head: HeadMap, kept: bool) -> Float64[Tensor, "2 n classes"]:
        """Add a head, and return A V; a function of its own, so that no map outlives it."""
        keys, queries = self._members(head)
        uniform = head.visible / head.visible.sum(-1, keepdim=True).clamp(min=1).double()
        both = torch.stack((head.attention.double(), uniform))
        mass = self._masses(both, keys, queries, head.lengths)
        values = self.values.setdefault((stack, head.text), keys)
        moved: Tensor = both @ values
        mass["rollout"] = queries.mT @ (moved + values) / 2
        row = self.sums[call][head.text]
        if kept:
            net = net_shares(mass["net"], mass["raw"], self.counted)
            above = float(crossing(net[0]) - crossing(net[1]))
            self._keep(above, call, len(row), both[0] * queries.any(-1, keepdim=True))
        groups = [keys[:, number].nonzero().squeeze(1) for number in self.counted]
        lists = {name: part.tolist() for name, part in mass.items()}  # many small live tensors fragment memory
        row.append(lists | _returned(both[0], head.visible, groups))
        return moved

    def _members(self, head: HeadMap) -> tuple[Float64[Tensor, "n classes"], Float64[Tensor, "n classes"]]:
        """One-hot classes as keys and as queries; zero for padding and for queries that see nothing."""
        classes = self.classes[min(head.text, len(self.classes) - 1)].to(head.attention.device)
        real = head.visible.any(0) if head.real is None else head.real
        keys = torch.nn.functional.one_hot(classes, len(self.names)).double() * real.unsqueeze(-1)
        return keys, keys * head.visible.any(1).unsqueeze(-1)

    def _masses(
        self,
        both: Float64[Tensor, "2 n n"],
        keys: Float64[Tensor, "n classes"],
        queries: Float64[Tensor, "n classes"],
        lengths: Float[Tensor, " n"] | None,
    ) -> dict[str, Float64[Tensor, "2 classes classes"]]:
        """Mass between classes by reading, of the attention and of uniform attention."""
        raw = queries.mT @ (both @ keys)
        mass = {"raw": raw, "residual": (raw + torch.diag_embed(queries.sum(0))) / 2}
        if lengths is not None:
            mass["weighted"] = queries.mT @ (both @ (keys * lengths.double().unsqueeze(-1)))
        paying = queries[:, self.counted].sum(-1)
        received, even = paying @ both
        sinks = ((received > self.sink * paying.sum()) & (received > 3 * even)).nonzero().squeeze(1)
        mass["net"] = raw - queries.mT @ (both[..., sinks] @ keys[sinks])
        return mass

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

    def check(self, source: str, tokens: set[int], texts: int) -> None:
        """Require one label per token of the attention of a source, or one row of them per text."""
        if tokens != {len(self.labels[0])}:
            sizes = " and ".join(map(str, sorted(tokens)))
            raise ValueError(f"modality has {len(self.labels[0])} labels, but {source} has {sizes} tokens")
        if len(self.labels) not in (1, texts):
            raise ValueError(f"modality has {len(self.labels)} rows of labels, but {source} has {texts} texts")

    def fields(self, calls: Sequence[int], lead: tuple[int, ...], depths: tuple[int, ...]) -> dict[str, Any]:
        """The fields of a `Flow`: of these calls, in the shape `lead`; `depths` is that of a rollout."""
        rows = [row for call in calls for text in self.sums[call] for row in text]
        known = [name for name in READINGS if all(name in row for row in rows)]
        mass = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in known}
        paid = mass["raw"][:, 0, self.counted].sum(1)
        both = {name: shares(mass[name], self.counted) for name in known if name != "rollout"}
        both["net"] = net_shares(mass["net"], mass["raw"], self.counted)
        pairs = {name: values.reshape(*lead, *values.shape[1:]) for name, values in both.items()}
        rolled = mass["rollout"].reshape(*depths, -1, *mass["rollout"].shape[1:]).mean(len(depths))  # over heads
        pairs["rollout"] = shares(rolled, self.counted)
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
    """Mass between the counted classes without sinks (`net`), as shares of all attention of their queries."""
    paid = raw[..., :1, counted, :].sum((-1, -2), keepdim=True)
    left = net[..., :1, counted, :][..., counted].sum((-1, -2), keepdim=True)
    return shares(net, counted) * left / paid.where(paid > 0, 1.0)


def crossing(blocks: Any) -> Any:
    """The total share between different classes, of blocks (..., m, m)."""
    values = np.asarray(blocks, dtype=np.float64)
    return values.sum((-1, -2)) - np.trace(values, axis1=-2, axis2=-1)


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
    attention: Float64[Tensor, "n n"], visible: Bool[Tensor, "n n"], groups: Sequence[Int[Tensor, " _"]]
) -> dict[str, float | None]:
    """Symmetry and reciprocity of C, attention across classes.

    tr(C²)/‖C‖², and the correlation of C_ij with C_ji over pairs visible both ways. The latter is within each pair of
    classes, averaged by their number: pooled over classes, it would reflect which classes attend to each other most.
    """
    mutual = energy = total = pairs = 0.0
    for first, second in combinations(groups, 2):
        ways = torch.stack((attention[first][:, second], attention[second][:, first].mT)).flatten(1)
        mutual += 2 * float(ways.prod(0).sum())
        energy += float(ways.square().sum())
        ways = ways[:, (visible[first][:, second] & visible[second][:, first].mT).flatten()]
        if ways.shape[1] > 1 and bool((ways.std(1) > FLAT * ways.mean(1).amax()).all()):
            total += ways.shape[1] * float(torch.corrcoef(ways)[0, 1])
            pairs += ways.shape[1]
    return {
        "symmetry": mutual / energy if energy > 0 else None,
        "reciprocity": total / pairs if pairs else None,
    }
