"""Study `dial`: which ability depends on which part of the scores?

Each part is ablated in all heads, per layer and per head, and every ability is measured before and after on the same
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import stdev
from typing import Any

from torch import Tensor, nn

from keyquery.checkpoints import read
from keyquery.forms.parts import PARTS
from keyquery.intervene.dial.dial import dial
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.learn.data import read_corpus, unwrap
from keyquery.listening import Batch
from keyquery.listening.hooks import evaluating
from keyquery.listening.inputs.load import load_model
from keyquery.reading import Reading, digest, digests, provenance, short
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress, silent
from keyquery.support.statistics import Interval, paired, together
from keyquery_studies.common.rows import FORMER, firsts
from keyquery_studies.common.runner import check_folder, resumed
from keyquery_studies.common.store import Store, result_name
from keyquery_studies.dial.abilities import ABILITIES, Ability
from keyquery_studies.dial.sequences import Material, Sequences

LEVELS = ("all", "layer", "head")
MEANS = {"batch": None, "global": "global", "data": "position"}  # over the current batch, or over other sequences
OTHERS = 64  # sequences for the means; of a short text fewer, but enough for means by position
PLACE = ("model", "ability", "part", "layer", "head", "means")  # identify a row, together with its text or seed


@dataclass(frozen=True, kw_only=True)
class Abilities(Reading, kind="dial"):
    """The change of every ability when each part is ablated, for each model and each text or seed."""

    former = FORMER

    models: Sequence[Mapping[str, Any]]  # one per model
    abilities: Sequence[Mapping[str, Any]]  # one per ability: its name, unit, and which way is better
    rows: Sequence[Mapping[str, Any]]  # one per model, ability, part, place, kind of means, and text or seed

    def records(self) -> list[dict[str, Any]]:
        """One row per model, ability, part, place, kind of means, and text or seed."""
        return [dict(row) for row in self.rows]

    def summary(self, level: str = "all") -> list[dict[str, Any]]:
        """The rows of a level, averaged over texts or seeds: the change, its interval, and the sd between them."""
        check_choice("level", level, LEVELS)
        groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            if level_of(row) == level:
                groups.setdefault(tuple(row[name] for name in PLACE), []).append(row)
        means = []
        for key, rows in groups.items():
            whole = together([Interval(row["change"], row["low"], row["high"]) for row in rows])
            sd = stdev(row["change"] for row in rows) if len(rows) > 1 else None
            before = sum(row["before"] for row in rows) / len(rows)
            place = dict(zip(PLACE, key, strict=True))
            means.append({**place, "sources": len(rows), "before": before, **whole._asdict(), "sd": sd})
        return means

    @classmethod
    def joined(cls, *parts: Abilities) -> Abilities:
        """One reading of separate runs, such as models on another machine; of duplicate rows the first is kept."""
        rows = firsts((row for part in parts for row in part.rows), (*PLACE, "source"))
        models = firsts((model for part in parts for model in part.models), ("name",))
        abilities = firsts((ability for part in parts for ability in part.abilities), ("name",))
        runs = [part.provenance for part in parts]
        return cls(models=models, abilities=abilities, rows=rows, provenance={"runs": runs})

    def brief(self) -> Abilities:
        """What a page needs: single heads averaged over texts or seeds, and all numbers to four digits."""
        rows = [row for row in self.rows if level_of(row) != "head"]
        joined = {"source": "all", "sequences": None}
        for row in self.summary("head"):
            metrics = {name: row[name] for name in (*PLACE, "before", "change", "low", "high")}
            rows.append({**metrics, **joined, "value": row["before"] + row["change"]})
        return replace(self, rows=short(rows, 4))


def level_of(row: Mapping[str, Any]) -> str:
    """Where a row's part was ablated: in all heads, in those of a layer, or in one head."""
    return "all" if row["layer"] is None else "layer" if row["head"] is None else "head"


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under study, its tokenizer, and facts about it."""

    model: nn.Module
    tokenizer: Any
    facts: Mapping[str, Any]
    heads: Mapping[int, int]  # number of heads per layer
    placed: bool  # whether its scores have a position term, as with RoPE
    biased: bool  # whether a bias is added to its scores, as with ALiBi

    @classmethod
    def load(cls, source: str | Path, device: str) -> Subject:
        """The model of a folder or a .gguf file, with its LM head if it has one."""
        try:
            model, tokenizer = load_model(source, lm_head=True)
            lm_head = True
        except ValueError:  # a sentence encoder has none; any other error is raised again below
            model, tokenizer = load_model(source)
            lm_head = False
        return cls.of(name_of(source), model.to(device).eval(), tokenizer, lm_head, precision(source))

    @classmethod
    def of(cls, name: str, model: nn.Module, tokenizer: Any, lm_head: bool = True, stored: str = "") -> Subject:
        """A live model under a name."""
        layers, sites = read(model), sites_of(model)
        heads = {index: site.count for index, site in sites.items()}
        facts = {"name": name, "family": layers.model["family"], "layers": len(heads), "heads": sum(heads.values())}
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        facts |= {"causal": layers[0].causal, "lm_head": lm_head, "precision": stored, "vocabulary": vocabulary}
        biased = any(site.position != "none" for site in sites.values())
        return cls(model, tokenizer, facts, heads, any(site.placed for site in sites.values()), biased)

    def parts(self, means: str) -> list[str]:
        """The parts of its scores; with means over all positions, the position part needs a term such as RoPE."""
        return [part for part in PARTS if self.placed or means == "data" or part not in ("position", "query_only")]

    def abilities(self) -> list[Ability]:
        """Abilities it can be measured on; attention is computed from queries and keys, so only without a bias."""
        kind = "decoders" if self.facts["causal"] else "encoders"
        return [
            ability
            for ability in ABILITIES
            if ability.of == kind
            and (self.facts["lm_head"] or not ability.lm_head)
            and not (self.biased and ability.name == "first-token mass")
        ]

    def places(self) -> int | None:
        """Its maximum number of positions, if its config has one."""
        config = getattr(self.model, "config", None)
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "length"))
        return next((count for count in limits if isinstance(count, int)), None)


def name_of(source: str | Path) -> str:
    """The display name of a model: that of its folder or file."""
    return Path(source).absolute().name.removesuffix(".gguf")


def precision(source: str | Path) -> str:
    """How a checkpoint stores the queries of its first layer: a dtype, or a kind of quantisation."""
    heads = read(source)
    modules, tensors = heads[0].modules, heads.source
    roles = [modules[role] for role in ("query", "fused", "query_down", "module") if role in modules]
    name = next(name for name in tensors.shapes if roles and name.startswith(roles[0]))
    stored = getattr(tensors, "stored", None)  # quantised files are dequantised on read
    return str(stored(name) if stored else tensors.rows(name, 0, 1).dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Trial:
    """One ability on one text or seed: the sequences it is measured on, and others of the same kind for means."""

    ability: Ability
    source: Any
    measured: Sequences
    others: Sequences


@dataclass(frozen=True, eq=False)
class Setting:
    """A part that is ablated (none: all gains 1) in a layer, a head or everywhere, with one kind of means."""

    trial: Trial
    means: str
    part: str
    layer: int | None = None
    head: int | None = None

    def gains(self) -> dict[str, float]:
        """Gains; for "none" so close to 1 that scores are still decomposed into parts and summed again."""
        return {"symmetric": 1 + 1e-15} if self.part == "none" else {self.part: 0.0}

    def selection(self) -> str | None:
        """The heads, as a dial takes them."""
        return None if self.layer is None else f"{self.layer}.{'*' if self.head is None else self.head}"


def run(
    models: Sequence[str | Path],
    texts: Sequence[str | Path],
    by: str = "layer",
    seeds: Sequence[int] = (0,),
    sequences: int = 16,
    length: int = 256,
    device: str = "auto",
    progress: Progress | None = None,
    out: str | Path | None = None,
) -> Abilities:
    """Measure the abilities of models with each part of their scores ablated.

    `models` are folders or .gguf files, `texts` files, compressed by xz or not, `seeds` those of random tokens. `by` is
    where parts are ablated: in "all" heads at once, by "layer" too, or by "head" too, which only the two losses are
    measured for. `sequences` of `length` tokens are measured of each text and seed. With `out`, a folder, a study that
    was interrupted is resumed: what each model can do on each text and seed is kept there.

    Parameters
    ----------
    models
        Folders or .gguf files.
    texts
        Text files, compressed or not.
    by
        Where parts are ablated: "all" heads at once, also by "layer", or also by "head".
    seeds
        Of random tokens.
    sequences, length
        Measured of each text and seed. Default: 16 of 256 tokens.
    device
        Where to train. Default: "auto", a GPU if there is one.
    progress
        Wraps iterables in progress bars. Default: none.
    out
        A folder for results; an interrupted study is resumed. Default: none.

    Returns
    -------
    Abilities
        A Reading.

    Examples
    --------
    >>> study = run([kq.models.DECODER], [kq.models.TEXT], by="all", sequences=2, length=16, device="cpu")
    >>> [(row["ability"], row["part"], row["change"] > 0.01) for row in study.rows if row["means"] == "data"][:2]
    [('next token', 'none', False), ('next token', 'symmetric', True)]
    """
    check_choice("by", by, LEVELS)
    check_count("sequences", sequences, least=2)
    check_count("length", length, least=16)
    if not models or not texts or not seeds:
        raise ValueError("models, texts and seeds must each hold at least one")
    _check_distinct("models", [name_of(source) for source in models])
    _check_distinct("texts", [Path(path).name for path in texts])
    chosen = pick_device(device)
    contents = {Path(path).name: unwrap(read_corpus(path)) for path in texts}
    seeds, rows, facts = list(dict.fromkeys(seeds)), [], []
    used: dict[str, dict[str, str]] = {}
    folder = None if out is None else Path(out)
    for source in models:
        subject = Subject.load(source, chosen)
        rows += list(study(subject, contents, by, seeds, sequences, length, progress, folder))
        facts.append(subject.facts)
        used |= {
            ability.name: {"name": ability.name, "unit": ability.unit, "better": ability.better}
            for ability in subject.abilities()
        }
    settings = {"by": by, "seeds": seeds, "sequences": sequences, "length": length, "texts": list(contents)}
    return Abilities(
        models=facts, abilities=list(used.values()), rows=rows, provenance=provenance(**settings, device=chosen)
    )


def _check_distinct(what: str, names: Sequence[str]) -> None:
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"{what} must have distinct names, got two called {duplicate}")


def study(
    subject: Subject,
    texts: Mapping[str, str],
    by: str,
    seeds: Sequence[int],
    sequences: int,
    length: int,
    progress: Progress | None = None,
    out: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of one model; those of trials whose results `out` holds are read from there."""
    length = min(length, subject.places() or length)
    trials = list(trials_of(subject, texts, seeds, sequences, length))
    store = None if out is None else store_of(out)
    names = {} if store is None else result_names(subject, trials, by)
    todo = [trial for trial in trials if store is None or not store.done(names[trial])]
    settings = [setting for trial in todo for setting in settings_of(subject, trial, by)]
    tracked = (progress or silent)(settings, subject.facts["name"], len(settings))
    groups = groupby(tracked, lambda setting: setting.trial)

    def measure(trial: Trial) -> list[dict[str, Any]]:
        before = trial.ability.measure(subject.model, trial.measured)
        by_means = groupby(next(groups)[1], lambda setting: setting.means)
        return [row for means, same in by_means for row in _measured(subject, trial, before, means, same)]

    with evaluating(subject.model):
        for rows in resumed(trials, names.__getitem__, measure, store):
            yield from rows


def store_of(folder: Path) -> Store:
    """The store of a study's folder, which is created."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return Store(folder, list)


def result_names(subject: Subject, trials: Sequence[Trial], by: str) -> dict[Trial, str]:
    """The name of each trial's result file: a digest of everything its rows depend on."""
    settings = {"weights": digests(subject.model.state_dict()), "by": by, "parts": PARTS, "means": list(MEANS)}
    names = {}
    for trial in trials:
        measured, others = (digest(sequences.inputs["input_ids"]) for sequences in (trial.measured, trial.others))
        words = (subject.facts["name"], trial.ability.name, trial.source)
        names[trial] = result_name(words, {**settings, "given": measured, "others": others})
    return names


def _measured(
    subject: Subject, trial: Trial, before: Tensor, means: str, settings: Iterator[Setting]
) -> Iterator[dict[str, Any]]:
    """The rows of one trial with one kind of means."""
    model, ability = subject.model, trial.ability
    kind = MEANS[means]
    with dial(model, data=Means(model, _pieces(trial.others.inputs), kind) if kind else None) as dialled:
        for setting in settings:
            dialled.turn(setting.selection(), **setting.gains())
            after = ability.measure(model, trial.measured)
            row = {
                "model": subject.facts["name"],
                "ability": ability.name,
                "part": setting.part,
                "layer": setting.layer,
            }
            row |= {"head": setting.head, "means": means, "source": str(trial.source), "value": float(after.mean())}
            yield {**row, "before": float(before.mean()), **paired(before, after)._asdict(), "sequences": len(after)}


def _pieces(inputs: Batch, rows: int = 16) -> list[Batch]:
    """A batch as several smaller ones, since logits of many sequences need much memory."""
    count = len(inputs["input_ids"])
    return [{name: tensor[at : at + rows] for name, tensor in inputs.items()} for at in range(0, count, rows)]


def trials_of(
    subject: Subject, texts: Mapping[str, str], seeds: Sequence[int], sequences: int, length: int
) -> Iterator[Trial]:
    """Every ability on every text or seed.

    A score's parts are relative to the mean query and key of some distribution. Means are taken over other sequences of
    the same kind as the measured ones: relative to the means of plain text, queries of random tokens are off-centre,
    their common component would count as pairwise, and ablating a pairwise part would also remove popularity.
    """
    material = Material(texts, subject.tokenizer, subject.facts["causal"], subject.facts["vocabulary"] or 0)
    for ability in subject.abilities():
        for source in texts if ability.source == "text" else seeds:
            measured = ability.make(material, source, sequences, length, False)
            yield Trial(ability, source, measured, ability.make(material, source, OTHERS, length, True))


def settings_of(subject: Subject, trial: Trial, by: str) -> Iterator[Setting]:
    """All ablations of a trial: in all heads with each kind of means, then per layer and per head."""
    finest = LEVELS.index(by) if trial.ability.by_head else min(LEVELS.index(by), 1)
    for means in MEANS:
        for part in ("none", *subject.parts(means)):
            yield Setting(trial, means, part)
    for layer, count in subject.heads.items() if finest > 0 else ():
        for part in subject.parts("data"):
            for head in (None, *(range(count) if finest > 1 else ())):
                yield Setting(trial, "data", part, layer, head)
