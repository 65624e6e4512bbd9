"""Study `dial`: which ability depends on which part of the scores?

Each part is ablated in all heads, and every ability is measured before and after on the same sequences. The published
reading also holds single layers and heads, and five further abilities, which were run at commit 7792c819.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.losses import hide, logits
from keyquery.intervene.dial.dial import dial
from keyquery.intervene.dial.means import Means
from keyquery.learn.data import read_corpus, unwrap
from keyquery.listening.hooks import evaluating
from keyquery.support.checks import check_choice
from keyquery.support.statistics import Interval, paired, together
from keyquery_studies.common.rows import grouped
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.study import Rows, Study, StudyReading, Train, Trial, option
from keyquery_studies.common.subjects import Material, Subject

LEVELS = ("all", "layer", "head")
MEANS = {"global": "global", "data": "position"}  # what parts are about: means over all positions, or by position
OTHERS = 64  # sequences for the means; of a short text fewer, but enough for means by position
PLACE = ("model", "ability", "part", "layer", "head", "means")  # identify a row, together with its text or seed
NOTHING = -100  # a target that is ignored
BATCH = 16  # sequences that are run at once
# Unit, which way is better, whether it is of decoders, and whether it is measured on texts.
ABILITIES = {
    "next token": ("nats", "lower", True, True),
    "repeated tokens": ("nats", "lower", True, False),
    "copying": ("accuracy", "higher", True, False),
    "masked words": ("accuracy", "higher", False, True),
}


@dataclass(frozen=True, kw_only=True)
class Abilities(StudyReading, kind="dial"):
    """The change of every ability when each part is ablated, for each model and each text or seed."""

    models: Sequence[Mapping[str, Any]]  # one per model
    abilities: Sequence[Mapping[str, Any]]  # one per ability: its name, unit, and which way is better
    rows: Sequence[Mapping[str, Any]]  # one per model, ability, part, place, kind of means, and text or seed

    def records(self) -> list[dict[str, Any]]:
        """One row per model, ability, part, place, kind of means, and text or seed."""
        return [dict(row) for row in self.rows]

    def summary(self, level: str | None = None) -> list[dict[str, Any]]:
        """The rows of a level, averaged over texts or seeds: the change, its interval, and the sd between them.

        Default: "all" heads at once, or the first of "layer" and "head" that there is.
        """
        levels: dict[str, list[Any]] = {name: [] for name in LEVELS}
        for row in self.rows:
            levels[LEVELS[(row["layer"] is not None) + (row["head"] is not None)]].append(row)
        level = next(name for name in LEVELS if levels[name]) if level is None else level
        check_choice("level", level, LEVELS)
        means = []
        for key, alike in grouped(levels[level], PLACE).items():
            whole = together([Interval(row["change"], row["low"], row["high"]) for row in alike])
            spread = stdev(row["change"] for row in alike) if len(alike) > 1 else None
            facts = {"sources": len(alike), "before": mean(row["before"] for row in alike), **whole._asdict()}
            means.append({**dict(zip(PLACE, key, strict=True)), **facts, "sd": spread})
        return means


def sequences(
    ability: str, material: Material, source: str, count: int, length: int, others: bool
) -> tuple[Int[Tensor, "count n"], Int[Tensor, "count n"]]:
    """Inputs and targets: of a text, or of random tokens by a seed; `others` are more of the same kind, for means."""
    if ability == "masked words":
        ids = material.windows(source, count, length, others)
        hidden = hide({"input_ids": ids}, material.special)
        assert material.mask is not None
        return ids.masked_fill(hidden, material.mask), ids.masked_fill(~hidden, NOTHING)
    if ability == "next token":
        ids, start = material.windows(source, count, length, others), 0
    else:  # [r; r]; in the second half each token is asked for the next
        half = (length - len(material.before) - len(material.after)) // 2
        drawn = material.random(count, half, int(source) + 1_000_003 * others)
        ids, start = material.framed(drawn.repeat(1, 2)), len(material.before) + half
    targets = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], NOTHING)), 1)
    targets[:, :start] = NOTHING
    return ids, targets


@torch.no_grad()
def measured(model: nn.Module, ability: str, ids: Tensor, targets: Tensor) -> Float[Tensor, " count"]:
    """One value per sequence: the mean cross-entropy or accuracy of its targets."""
    values = []
    for inputs, wanted in zip(ids.split(BATCH), targets.split(BATCH), strict=True):
        predicted = logits(model, {"input_ids": inputs}).float().cpu()
        losses = cross_entropy(predicted.mT, wanted, reduction="none", ignore_index=NOTHING)
        right = (predicted.argmax(-1) == wanted).double()
        values.append((losses.double() if ABILITIES[ability][0] == "nats" else right).sum(1) / (wanted >= 0).sum(1))
    return torch.cat(values)


@lru_cache(maxsize=1)
def loaded(source: str, texts: tuple[str, ...], device: str) -> tuple[Subject, Material]:
    """A model, and its encoded texts."""
    subject = Subject.load(source, device)
    contents = {Path(path).name: unwrap(read_corpus(path)) for path in texts}
    return subject, Material(contents, subject.tokenizer, subject.facts["causal"], subject.facts["vocabulary"] or 0)


@dataclass(frozen=True, kw_only=True)
class AbilityTrial(Trial):
    """One ability of one model on one text or seed, with each part ablated in all heads.

    A part is relative to the mean query and key of some distribution: of other sequences of the same kind. Relative to
    the means of plain text, queries of random tokens are off-centre, and popularity would count as pairwise.
    """

    model: str
    texts: tuple[str, ...]
    ability: str
    source: str
    sequences: int
    length: int

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """A row per part and kind of means; "none" is all gains 1, decomposed and summed again."""
        subject, material = loaded(self.model, self.texts, device)
        model, length = subject.model, min(self.length, subject.places() or self.length)
        ids, targets = sequences(self.ability, material, self.source, self.sequences, length, False)
        others = sequences(self.ability, material, self.source, OTHERS, length, True)[0]
        rows = []
        with evaluating(model):
            before = measured(model, self.ability, ids, targets)
            for means, kind in MEANS.items():
                pieces = [{"input_ids": piece.to(device)} for piece in others.split(BATCH)]
                with dial(model, data=Means(model, pieces, kind)) as dialled:
                    for part in ("none", *PARTS):
                        if part in ("position", "query_only") and not (subject.placed or means == "data"):
                            continue  # about means over all positions, it needs a position term such as RoPE
                        dialled.turn(None, **({"symmetric": 1 + 1e-15} if part == "none" else {part: 0.0}))
                        after = measured(model, self.ability, ids, targets)
                        row: dict[str, Any] = {
                            "part": part,
                            "layer": None,
                            "head": None,
                            "means": means,
                            "source": self.source,
                        }
                        row |= {"value": float(after.mean()), "before": float(before.mean())}
                        rows.append({**row, **paired(before, after)._asdict(), "sequences": len(after)})
        return {"model": subject.facts["name"], "ability": self.ability, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Dial(Study):
    """Which ability goes with which part of the scores?

    Leaves out the symmetric, skew, popularity, query-only and position part in all heads, and measures the loss on
    plain text and on repeated random tokens, copying, and masked words.
    """

    result = Abilities

    models: tuple[Path, ...] = option(help="Folders or .gguf files of language models.", argument=True)
    texts: tuple[Path, ...] = option(help="A text file, plain or compressed.", name="text")
    seeds: tuple[int, ...] = option((0,), "A seed of the random tokens.", "seed")
    sequences: int = option(16, "Number of sequences per text and seed.", least=2)
    length: int = option(256, "Tokens per sequence.", least=16)

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """Facts of every model; a sentence encoder has no ability that is measured here."""
        for name, paths in (("models", self.models), ("texts", self.texts)):
            if not paths or len({path.name for path in paths}) < len(paths):
                raise ValueError(f"{name} must have distinct names, got {', '.join(path.name for path in paths)}")
        return {"models": [dict(Subject.load(path, "cpu").facts) for path in self.models]}

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """Every ability of every model, on every text or seed."""
        texts, sizes = tuple(map(str, self.texts)), {"sequences": self.sequences, "length": self.length}
        trials = [
            AbilityTrial(model=str(path), texts=texts, ability=ability, source=source, **sizes)
            for path, about in zip(self.models, facts["models"], strict=True)
            for ability, (_, _, decoder, of_text) in ABILITIES.items()
            if about["lm_head"] and about["causal"] is decoder
            for source in ([path.name for path in self.texts] if of_text else map(str, self.seeds))
        ]
        used = dict.fromkeys(trial.ability for trial in trials)
        names = [{"name": name, "unit": ABILITIES[name][0], "better": ABILITIES[name][1]} for name in used]
        rows = [{"model": of["model"], "ability": of["ability"], **row} for of in train(trials) for row in of["rows"]]
        return {"models": facts["models"], "abilities": names, "rows": rows}
