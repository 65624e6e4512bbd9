"""Background knowledge about columns, by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keyquery.learn.discovery import Knowledge, knowledge_of
from keyquery.support.checks import check_choice, check_count

CauseEffect = tuple[str, str]


@dataclass(frozen=True)
class Background:
    """Background knowledge by names, and as masks."""

    names: list[str]
    tiers: list[int] | None
    forbidden: list[CauseEffect]
    required: list[CauseEffect]
    masks: Knowledge

    @classmethod
    def of(
        cls,
        names: list[str],
        tiers: Sequence[Sequence[str]] | Mapping[str, int] | None,
        forbidden: Iterable[Sequence[str]],
        required: Iterable[Sequence[str]],
        steps: list[int] | None,
    ) -> Background:
        """Resolve names; `steps` are the tiers of lagged columns."""
        if steps is not None and tiers is not None:
            raise ValueError("tiers and lags exclude each other: the order of time gives the tiers")
        numbers = steps if tiers is None else _tiers(tiers, names)
        barred, given = _pairs("forbidden", forbidden, names), _pairs("required", required, names)
        place = {name: number for number, name in enumerate(names)}
        not_causes, causes = ([(place[a], place[b]) for a, b in each] for each in (barred, given))
        return cls(names, numbers, barred, given, knowledge_of(len(names), numbers, not_causes, causes, names))


def _tiers(tiers: Sequence[Sequence[str]] | Mapping[str, int], names: list[str]) -> list[int]:
    if isinstance(tiers, Mapping):
        for name, tier in tiers.items():
            check_choice("a column of tiers", name, names)
            check_count(f"the tier of {name!r}", tier, least=-(10**6))
        last = max(tiers.values(), default=0)
        return [int(tiers.get(name, last)) for name in names]
    if isinstance(tiers, str) or not all(isinstance(tier, (list, tuple, set)) for tier in tiers):
        raise TypeError("tiers must be lists of columns, earliest first, such as [['age'], ['bmi', 'bp']], or a dict")
    listed = [(name, number) for number, tier in enumerate(tiers) for name in tier]
    for name, _ in listed:
        check_choice("a column of tiers", name, names)
    if twice := [name for name, count in Counter(name for name, _ in listed).items() if count > 1]:
        raise ValueError(f"a column must be in one tier, but {twice[0]!r} is in several")
    return [dict(listed).get(name, len(tiers) - 1) for name in names]


def _pairs(role: str, pairs: Iterable[Sequence[str]], names: list[str]) -> list[CauseEffect]:
    listed = [tuple(pair) if isinstance(pair, (list, tuple)) else () for pair in pairs]
    for pair in listed:
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ValueError(f"{role} must be pairs of columns (cause, effect), such as [('rain', 'wet')]")
        for column in pair:
            check_choice(f"a column of {role}", column, names)
    return [(a, b) for a, b in listed]
