"""`roles`: which heads attend to the previous token, complete repeats, copy a needle, or rest on the first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from keyquery.checkpoints import Heads, read
from keyquery.instruments.roles.naming import check_heads, decided, flat_scores
from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.run import EXCESS, SEQUENCES, WINDOW, Options, run
from keyquery.intervene.rewrites import check_unchanged
from keyquery.listening.hooks import Batch
from keyquery.listening.inputs.batches import LENGTH
from keyquery.listening.inputs.data import Data
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice
from keyquery.support.progress import Progress, silent


@dataclass(frozen=True, kw_only=True)
class Roles(Reading, kind="roles"):
    """Scores of every head by role, and the roles that clear their null level.

    `heads[i]["scores"][role][data]` has the mean score over sequences, the `low` and `high` end of its 95 % interval,
    its `null` level, the number of `sequences`, and whether it `clears` the null level. `data` is "random" (repeated
    random tokens), "text", "inputs" or "needle". `roles` are those that are named, `role` is the most specific one.
    """

    units: ClassVar[Mapping[str, str]] = {
        "induction": "mean attention to the token after another occurrence of the query's token",
        "duplicate_token": "mean attention to other occurrences of the query's token",
        "retrieval": "share of a needle's tokens that the head attends to most as the model predicts them",
        "previous_token": "mean attention one token back",
        "next_token": "mean attention one token ahead",
        "alignment": "P(j < j′) − P(j > j′) of keys drawn for queries i < i′: 1 monotone, 0 none, −1 backwards",
        "local": "mean attention to the keys of the local window",
        "sink": "mean attention to the first token (of an encoder, also to the last special token)",
        "null": "positions: under uniform attention; content: the larger of that and the keys of other queries; "
        "alignment: 95th percentile over random orders of the queries",
        "clears": "whether score − null is above 0, simultaneously (Bonferroni) at 95 % for all heads and roles",
    }

    model: Mapping[str, Any]  # name and facts of the model
    heads: list[dict[str, Any]]  # per head: layer, head, scores, roles, role
    notes: list[str] = field(default_factory=list)  # what a reader should know
    summary: Mapping[str, int] = field(default_factory=dict)  # heads per role, most frequent first; recomputed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.model, self.heads)
        counts = Counter(role for head in self.heads for role in head["roles"]).most_common()
        object.__setattr__(self, "summary", dict(counts))

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {role}" for role, count in self.summary.items()) or "no roles"
        return f"Roles({self.model['name']}: {len(self.heads)} heads: {counts})"

    def ranking(self, role: str, data: str | None = None) -> list[tuple[str, float]]:
        """Heads as "layer.head" by falling score of a role; `data` defaults to that which decides on it."""
        check_choice("role", role, ROLES)
        rows = []
        for head in self.heads:
            of_role = head["scores"].get(role, {})
            on = data or decided(role, of_role)
            if on in of_role:
                rows.append((f"{head['layer']}.{head['head']}", of_role[on]["score"]))
        return sorted(rows, key=lambda row: -row[1])

    def records(self) -> list[dict[str, Any]]:
        """One row per head: its roles, and score, interval and null level by role and data."""
        return [
            {
                **{key: head[key] for key in ("layer", "head", "name", "kind", "role")},
                "roles": ", ".join(head["roles"]),
                **flat_scores(head["scores"]),
            }
            for head in self.heads
        ]


def roles(
    model: str | Path | nn.Module,
    text: str | Path | None = None,
    inputs: Batch | Iterable[Batch] | None = None,
    *,
    tokenizer: Any = None,
    length: int = LENGTH,
    sequences: int = SEQUENCES,
    window: int = WINDOW,
    least: float = EXCESS,
    seed: int = 0,
    name: str | None = None,
    progress: Progress | None = None,
) -> Roles:
    """Score every attention head by published roles, each with a null level and an interval over sequences.

    `induction` and `previous_token` are the prefix-matching and previous-token scores of Olsson et al. (2022),
    `duplicate_token` that of Wang et al. (2022), `sink` the attention mass of the first token (Xiao et al., 2023), and
    `retrieval` the copy-paste frequency of Wu et al. (2024). Attention maps are scored as they are computed; none are
    kept.

    Parameters
    ----------
    model
        A folder, a .gguf file, a hub name in the local cache, or a live model.
    text, inputs
        A text file, one sequence per line, or batches of input tensors, on which roles are measured as well. Default:
        none: random tokens and needles need the vocabulary alone.
    tokenizer
        For `text`, and for special tokens. Default: the one stored with the model.
    length, sequences
        Tokens per sequence; random sequences and needles of each kind, and at most `sequences · length` tokens of
        the text. Default: 128 and 32.
    window
        A key less than `window` tokens away is `local`. Default: 8.
    least
        A role is named only if its score exceeds its null level by at least this. Default: 0.3.
    seed, name, progress
        Of the random tokens; of the model; progress bars. Default: 0, that of its file or class, and none.

    Returns
    -------
    Roles
        Scores per head. A role is named if its score exceeds its null level by `least`, and the interval of the paired
        difference over at least 8 sequences, at level 1 − 0.05/tests (Bonferroni over all heads and roles), lies above
        0.

    Examples
    --------
    >>> reading = kq.roles(kq.models.DECODER, sequences=8, length=40)
    >>> sorted(reading.heads[0]["scores"])
    ['duplicate_token', 'induction', 'local', 'previous_token', 'sink']
    """
    options = Options(length=length, sequences=sequences, window=window, least=least, seed=seed)
    data = Data(text=text, inputs=inputs, tokenizer=tokenizer, length=length, tokens=sequences * length)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if not isinstance(model, (str, Path, nn.Module)):
        raise TypeError(f"model must be a path or a live model, got a {type(model).__name__}")
    watching = progress or silent
    prepared = data.load(model, watching, lm_head=True)
    check_unchanged(prepared.model)
    batches = {"inputs" if text is None else "text": prepared.batches} if prepared.batches else {}
    heads = _read(prepared.model)
    rows, facts, notes = run(prepared.model, heads, prepared.tokenizer, batches, options, watching)
    known = heads.model if heads is not None else {"layers": len({row["layer"] for row in rows})}
    stored = type(prepared.model).__name__ if isinstance(model, nn.Module) else Path(model).name
    facts_of_text = {} if text is None else {"from": Path(text).name}
    return Roles(
        model={**known, "name": name or stored, "heads": len(rows)},
        heads=rows,
        notes=notes,
        provenance=provenance(**facts, **facts_of_text),
    )


def _read(model: nn.Module) -> Heads | None:
    """The heads of a model; None if its weights are not read, which its attention calls do not need."""
    try:
        heads = read(model)
        return heads if len(heads) and heads[0].heads else None  # layers are read when they are asked for
    except (ValueError, TypeError, KeyError):
        return None
