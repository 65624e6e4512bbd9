"""Everything that is made from a base model, by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from keyquery_studies.lineage import changes
from keyquery_studies.lineage.models import Size, Weights

NOISE = (0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
MERGE = 0.6  # share of the first model


DISGUISES = ("all disguises", "all but rescaling", "heads disguised")


@dataclass(frozen=True)
class Kin:
    """A model, the model that it is compared with, and others that a merge is made of."""

    kind: str
    weights: Weights
    source: str = "base"  # or the kind of another model of the same base
    others: Sequence[str] = field(default_factory=tuple)
    start: str | None = None  # of the training, from which its change is measured. Default: the source


def disguises(size: Size, base: Weights, seed: int) -> dict[str, Weights]:
    """The base disguised by all means; by all but q·c and k/c; and inside its heads alone.

    An optimiser with steps of one size for all weights suffers from q·c and k/c, which an adversary can leave out.
    """
    draw = torch.Generator().manual_seed(1_000_003 + seed)
    turn = changes.random_rotation(size.width, draw) @ changes.random_permutation(size.width, draw)
    plain = changes.heads_rotated(size, changes.heads_permuted(size, changes.turned(base, turn), draw), draw)
    inside = base
    for change in (changes.heads_permuted, changes.heads_rotated, changes.heads_rescaled):
        inside = change(size, inside, draw)
    return dict(zip(DISGUISES, (changes.disguised(size, base, draw), plain, inside), strict=True))


def kin_of(size: Size, base: Weights, tuned: Mapping[str, Weights], other: Weights, seed: int) -> Iterator[Kin]:
    """All kinds, from a base, its fine-tunes by name, and an unrelated base; disguises leave the loss as it is."""
    draw = torch.Generator().manual_seed(seed)
    for kind, weights in disguises(size, base, seed).items():
        yield Kin(kind, weights)
    for name, weights in tuned.items():
        yield Kin(name, weights, start=next((kind for kind in DISGUISES if name.startswith(kind)), None))
    for kind in ("Q8_0", "Q4_0", "FP8"):
        yield Kin(kind, changes.quantised(base, kind))
    yield Kin("heads permuted", changes.heads_permuted(size, base, draw))
    yield Kin("heads rotated", changes.heads_rotated(size, base, draw))
    yield Kin("heads rescaled", changes.heads_rescaled(size, base, draw))
    yield Kin("stream permuted", changes.turned(base, changes.random_permutation(size.width, draw)))
    yield Kin("stream rotated", changes.turned(base, changes.random_rotation(size.width, draw)))
    yield Kin("all disguises, Q4_0", changes.quantised(changes.disguised(size, base, draw), "Q4_0"))
    for size_of_noise in (0.3, 1.0):
        noisy = changes.noisy(base, size_of_noise, draw)
        yield Kin(f"all disguises, noise {size_of_noise:g}", changes.disguised(size, noisy, draw))
    depth = len(base["query"])
    middle = depth // 2
    yield Kin("pruned", changes.with_layers(base, [i for i in range(depth) if i != middle]))
    yield Kin("stacked", changes.with_layers(base, [*range(depth - 1), *range(1, depth)]))
    for size_of_noise in NOISE:
        yield Kin(f"noise {size_of_noise:g}", changes.noisy(base, size_of_noise, draw))
    names = [name for name in tuned if name.startswith(("tuned", "continued"))]
    first, second = (max((n for n in names if n.startswith(word)), key=_steps) for word in ("tuned", "continued"))
    yield Kin("linear merge", changes.merged(tuned[first], tuned[second], MERGE), first, (second,))
    yield Kin("SLERP merge", changes.slerped(tuned[first], tuned[second], MERGE), first, (second,))
    yield Kin("task vectors", changes.task_vectors(base, [tuned[first], tuned[second]]))
    yield Kin("merge with an unrelated model", changes.merged(base, other, MERGE), "base", ("other",))
    yield Kin("fine-tuned, then all disguises", changes.disguised(size, tuned[first], draw))


def _steps(name: str) -> int:
    return int(name.split()[-1])
