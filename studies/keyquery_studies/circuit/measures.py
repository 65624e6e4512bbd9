"""The copying circuit of one model: roles and symmetry of every head, and the cost of each part with two controls.

Heads are selected on some sequences (the screen, and `kq.roles`) and their costs estimated on others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.checkpoints import read
from keyquery.forms.parts import PARTS
from keyquery.instruments.roles.roles import roles
from keyquery.intervene.dial.dial import dial
from keyquery.intervene.dial.means import Means
from keyquery.support.statistics import paired
from keyquery_studies.circuit.prefix import Prefix
from keyquery_studies.circuit.score_changes import KINDS, Change, Changes, changeable

ROLES = ("previous_token", "induction", "duplicate_token")
GAINS = (0.0, 0.75, 0.9)  # of a part in all heads: short of 0 the model can still copy
BATCH = 16  # sequences that are run at once
OTHERS = 32  # sequences for the means


@dataclass(frozen=True, eq=False)
class Task:
    """Sequences on which a loss is measured: the last `asked` tokens of each are predicted.

    `corrupted` are other sequences for resampling, `others` more of the same kind for the means.
    """

    ids: Int[Tensor, "count n"]
    asked: int
    others: Int[Tensor, "many n"]
    corrupted: Int[Tensor, "count n"]

    def batches(self) -> list[slice]:
        """Rows that are run at once."""
        return [slice(at, at + BATCH) for at in range(0, len(self.ids), BATCH)]


def copying(pool: Tensor, before: Sequence[int], count: int, half: int, seed: int) -> Task:
    """Random tokens twice, [r; r], of which the second half but its first token is asked for; corrupted is [r*; t*].

    In [r; r] the repeat is at the same places in all sequences, so that a part resampled from another [r; r] would
    still match them: r* and t* are random tokens without a repeat.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, length: int) -> Tensor:
        return torch.stack([pool[torch.randperm(len(pool), generator=generator)[:length]] for _ in range(rows)])

    def framed(ids: Tensor) -> Tensor:
        return torch.cat((torch.tensor(before, dtype=torch.long).expand(len(ids), -1), ids), 1)

    twice, others = (framed(drawn(rows, half).repeat(1, 2)) for rows in (count, OTHERS))
    return Task(twice, half - 1, others, framed(drawn(count, 2 * half)))


@torch.no_grad()
def losses(model: nn.Module, task: Task, rows: slice) -> tuple[Float[Tensor, " count"], Float[Tensor, " count"]]:
    """Cross-entropy in nats and accuracy of some sequences, each a mean over the tokens asked for."""
    device = next(model.parameters()).device
    ids = task.ids[rows].to(device)
    fewest = "logits_to_keep" in signature(model.forward).parameters
    out = model(input_ids=ids, **({"logits_to_keep": task.asked + 1} if fewest else {}))
    logits = (out if isinstance(out, Tensor) else out.logits)[:, -task.asked - 1 : -1]
    targets = ids[:, -task.asked :]
    nats = cross_entropy(logits.float().mT, targets, reduction="none")
    return nats.mean(1).double().cpu(), (logits.argmax(-1) == targets).double().mean(1).cpu()


def heads_of(model: nn.Module, tokenizer: Any = None, length: int = 128, sequences: int = 32) -> list[dict[str, Any]]:
    """Roles of every head on random tokens, and the symmetry of its QK form from the weights alone."""
    layers = read(model)
    raw = {layer.index: layer.form.symmetry.flatten().tolist() for layer in layers}
    folded = {layer.index: layer.folded.symmetry.flatten().tolist() for layer in layers}
    rows = []
    for row in roles(model, tokenizer=tokenizer, length=length, sequences=sequences, seed=1).heads:
        place = {"layer": row["layer"], "head": row["head"], "roles": row["roles"]}
        scores = {role: row["scores"][role]["random"] for role in ROLES}
        of_weights = {"raw": raw[row["layer"]][row["head"]], "folded": folded[row["layer"]][row["head"]]}
        rows.append({**place, **of_weights, "scores": scores})
    return rows


def costs(
    model: nn.Module,
    task: Task,
    settings: Sequence[Change],
    means: Mapping[str, Means],
    late: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, Any]]:
    """The rise in loss by each change, one value per sequence; stops once `late`."""
    batches, prefix = task.batches(), Prefix(model)
    with changeable(model, means) as changes:
        pieces: dict[Change | None, list[tuple[Tensor, Tensor]]] = {}
        for rows in batches:
            if any(change.kind == "resample" for change in settings):
                _record(changes, task, rows)
            changes.set(None)
            with prefix.kept({change.layer for change in settings}):
                pieces.setdefault(None, []).append(losses(model, task, rows))
            for change in settings:
                if late():
                    break
                changes.set(change)
                with prefix.skipped(change.layer):
                    pieces.setdefault(change, []).append(losses(model, task, rows))
    whole = {change: _joined(parts) for change, parts in pieces.items() if len(parts) == len(batches)}
    before = whole.pop(None)
    for setting, after in whole.items():
        assert setting is not None
        yield {**asdict(setting), **compared(before, after)}


def means_of(model: nn.Module, task: Task, kinds: Sequence[str] = ("position",)) -> dict[str, Means]:
    """Means over a task's other sequences."""
    device = next(model.parameters()).device
    pieces = [{"input_ids": ids.to(device)} for ids in task.others.split(BATCH)]
    return {kind: Means(model, pieces, kind) for kind in kinds}


def _record(changes: Changes, task: Task, rows: slice) -> None:
    with changes.recording(), torch.no_grad():
        changes.model(input_ids=task.corrupted[rows].to(next(changes.model.parameters()).device))


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    nats, right = zip(*parts, strict=True)
    return torch.cat(nats), torch.cat(right)


def compared(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Loss and accuracy before and after, the paired change with its interval, and the change of every sequence."""
    change = paired(before[0], after[0])
    values = [round(float(value), 5) for value in after[0] - before[0]]
    nats, right = ([float(side[index].mean()) for side in (before, after)] for index in (0, 1))
    return {
        "before": nats[0],
        **change._asdict(),
        "accuracy_before": right[0],
        "accuracy": right[1],
        "sequences": len(values),
        "values": values,
    }


def everywhere(model: nn.Module, task: Task, means: Means) -> Iterator[dict[str, Any]]:
    """The rise in loss with a gain on each part of all heads."""
    batches = task.batches()
    before = _joined([losses(model, task, rows) for rows in batches])
    with dial(model, data=means) as dialled:
        for part in PARTS:
            for gain in GAINS:
                dialled.turn(None, **{part: gain})
                after = _joined([losses(model, task, rows) for rows in batches])
                yield {"part": part, "gain": gain, **compared(before, after)}


def highest(heads: Sequence[Mapping[str, Any]], count: int) -> list[tuple[int, int]]:
    """The heads of highest score in each role."""
    chosen = []
    for role in ROLES:
        best = sorted(heads, key=lambda row: -row["scores"][role]["score"])[:count]
        chosen += [(row["layer"], row["head"]) for row in best]
    return list(dict.fromkeys(chosen))


def settings_of(places: Sequence[tuple[int, int]], kinds: Sequence[str] = KINDS) -> list[Change]:
    """Every part of some heads by every kind; position has no content, so nothing to resample."""
    return [
        Change(layer, head, part, kind)
        for layer, head in places
        for part in PARTS
        for kind in kinds
        if (part, kind) != ("position", "resample")
    ]


def deadline(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds from now have passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end
