"""Interactions between event types: effect of one inserted event on the predictions of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int
from torch import Tensor

from keyquery.learn.events.covariates import Described
from keyquery.learn.events.losses import following
from keyquery.learn.events.network import Mixture
from keyquery.learn.events.windows import Batch, Windows
from keyquery.learn.inputs.targets import label_facts
from keyquery.reading import Reading
from keyquery.support.devices import pick_device
from keyquery.support.progress import Progress, bars

CONTEXTS, LAGS = 64, 16  # histories and lags
Predict = Callable[[Batch], tuple[Tensor, Mixture]]


@dataclass(frozen=True, kw_only=True)
class Interactions(Reading, kind="interactions"):
    """Effect of the type of one inserted past event: `change[a][b][l]` of the log-probability of b.

    An event is inserted into real histories `lags[l]` before a reference time: that of the last event with
    `information` "past", that of the predicted event with "target_time". `change` is log p(next is b | it is an a)
    minus the median over all types c of log p(next is b | it is a c): the effect of the type, not of an additional
    event. Values are means over the `contexts` histories that reach back to the longest lag, and `error` their standard
    errors.
    `sooner[a][l]` is the log ratio by which the median time to the next event is shorter than with most other types.
    """

    units: ClassVar[Mapping[str, str]] = {"change": "nats", "error": "nats", "sooner": "nats", "lags": "as in the data"}

    types: Sequence[Any]  # the event types a and b
    lags: Sequence[float]
    clock: str  # what times are: "numbers", "dates" or "spans"
    information: str  # what predictions may use: "past" or "target_time"
    contexts: int  # histories that values are means over
    change: Sequence[Sequence[Sequence[float]]]
    error: Sequence[Sequence[Sequence[float]]]
    sooner: Sequence[Sequence[float]]

    def records(self) -> list[dict[str, Any]]:
        """One row per pair of types and lag."""
        return [
            {
                "past": a,
                "next": b,
                "lag": lag,
                "change": self.change[i][j][k],
                "error": self.error[i][j][k],
                "information": self.information,
            }
            for i, a in enumerate(self.types)
            for j, b in enumerate(self.types)
            for k, lag in enumerate(self.lags)
        ]

    def strongest(self, count: int = 6) -> list[dict[str, Any]]:
        """The pairs with the largest increase, each at its best lag, largest first.

        Two standard errors are subtracted. Increases only: if one type becomes more probable, others become less.

        Parameters
        ----------
        count
            How many pairs.

        Returns
        -------
        list of dict
            Rows with the pair, its lag and its change.
        """

        def lower_bound(row: Mapping[str, Any]) -> float:
            return float(row["change"] - 2 * row["error"])

        rows, step = self.records(), len(self.lags)
        best = [max(rows[first : first + step], key=lower_bound) for first in range(0, len(rows), step)]
        return sorted(best, key=lower_bound, reverse=True)[:count]


@dataclass(frozen=True, eq=False)
class Context:
    """A history and the time of its next event, in units of the median inter-event time."""

    types: Int[np.ndarray, " n"]
    times: Float64[np.ndarray, " n"]
    next_time: float
    inputs: Float32[np.ndarray, "n k"] | None = None  # encoded covariates
    blank: Float32[np.ndarray, " k"] | None = None  # those of an inserted event

    def now(self, targeted: bool) -> float:
        """The time that lags are measured from."""
        return self.next_time if targeted else float(self.times[-1])

    def reach(self, targeted: bool) -> float:
        """The longest lag within the history."""
        return self.now(targeted) - float(self.times[0])

    def batch(self, device: str, lags: Any = None, types: int = 1, targeted: bool = False) -> Batch:
        """The history, or (types · lags) histories with one inserted event, the lags of the first type first."""
        codes, times = self.types[None], self.times[None]
        inputs = None if self.inputs is None else self.inputs[None]
        if lags is not None:
            inserted = self.now(targeted) - np.asarray(lags)
            # At ties the inserted event comes first: simultaneous events are not in each other's past.
            index = np.searchsorted(self.times, inserted, side="left")
            index = index if targeted else np.minimum(index, len(self.times) - 1)
            codes = np.concatenate([[np.insert(self.types, i, kind) for i in index] for kind in range(types)])
            times = np.tile([np.insert(self.times, i, t) for i, t in zip(index, inserted, strict=True)], (types, 1))
            if self.inputs is not None and self.blank is not None:
                inputs = np.tile([np.insert(self.inputs, i, self.blank, axis=0) for i in index], (types, 1, 1))
        counted = np.zeros(codes.shape, dtype=bool)
        counted[:, -1] = True
        parts = [codes, times, np.ones(codes.shape, dtype=bool), np.zeros_like(codes)]
        parts += [np.full(codes.shape, self.next_time), counted, *([] if inputs is None else [inputs])]
        return Batch(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts))


def compare(
    predict: Predict,
    contexts: Sequence[Context],
    lags: Float64[np.ndarray, " lags"],
    types: int,
    targeted: bool,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    """Change and error (types, types, lags), sooner (types, lags), and the number of contexts.

    Contexts are those that reach back to the longest lag, the same for all lags, so that curves are comparable.
    """
    chosen = [context for context in contexts if lags.max() <= context.reach(targeted) * (1 + 1e-12)]
    if not chosen:
        raise ValueError(f"lags must not exceed the longest history, got {lags.max():g} median gaps")
    changes = np.empty((len(chosen), types, types, len(lags)))
    sooner = np.empty((len(chosen), types, len(lags)))
    for number, context in enumerate(progress(chosen, "inserting events", len(chosen))):
        logits, gaps = predict(context.batch(device, lags, types, targeted))
        logs = logits.double().log_softmax(-1).cpu().numpy().reshape(types, len(lags), types)
        changes[number] = (logs - np.median(logs, 0)).swapaxes(1, 2)
        waits = gaps.quantile().clamp(min=gaps.floor).log().double().cpu().numpy().reshape(types, len(lags))
        sooner[number] = np.median(waits, 0) - waits
    effects = {"change": changes.mean(0), "error": changes.std(0) / np.sqrt(len(chosen)), "sooner": sooner.mean(0)}
    return {**{name: values.tolist() for name, values in effects.items()}, "contexts": len(chosen)}


def interactions_of(model: Any, contexts: Sequence[Context], lags: Any) -> Interactions:
    """The interactions of a fitted EventModel, in these histories."""
    device, targeted, types = pick_device(model.device), model._targeted, len(model.classes_)
    contexts = [context for context in contexts if context.reach(targeted) > 0]
    if not contexts:
        raise ValueError("there are no histories to compare: pass events, times and groups")
    chosen = usual_lags(contexts, targeted) if lags is None else checked_lags(lags) / model.scale_
    network = model.network_.to(device).eval()

    @torch.no_grad()
    def predict(batch: Batch) -> tuple[Tensor, Mixture]:
        logits, mixture = following(network, batch)
        return logits[:, :types], mixture

    with bars(model.verbose) as progress:
        effects = compare(predict, contexts, chosen, types, targeted, device, progress)
    return Interactions(
        types=label_facts(model.classes_)["labels"],
        lags=(chosen * model.scale_).tolist(),
        clock=model.clock_,
        information=model.params_["information"],
        provenance=model._provenance(),
        **effects,
    )


def contexts_of(windows: Windows, longest: int, seed: int, described: Described) -> list[Context]:
    """A few histories, each the last `longest` events of a window, with the time of the next event."""
    contexts = []
    for number in np.random.default_rng(seed).permutation(len(windows.starts))[:CONTEXTS]:
        batch = windows.take([number])
        types, times = batch.types[0, -longest:].cpu().numpy(), batch.times[0, -longest:].cpu().numpy()
        inputs = None if batch.inputs is None else batch.inputs[0, -longest:].cpu().numpy()
        blank = None if inputs is None else described.unknown(inputs[0])
        contexts.append(Context(types, times, float(batch.next_times[0, -1]), inputs, blank))
    return contexts


def usual_lags(contexts: Sequence[Context], targeted: bool) -> Float64[np.ndarray, " lags"]:
    """Log-spaced lags, from the 10 % quantile of the inter-event times to the median length of the contexts."""
    gaps = np.concatenate([np.diff(context.times) for context in contexts])
    longest = float(np.median([context.reach(targeted) for context in contexts]))
    shortest = float(np.quantile(gaps[gaps > 0], 0.1)) if (gaps > 0).any() else longest / 100
    return np.geomspace(min(shortest, longest / 10), longest, LAGS)


def checked_lags(lags: Any) -> Float64[np.ndarray, " lags"]:
    """Validated lags, numbers above 0."""
    try:
        values = np.asarray(lags, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.zeros(0)
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"lags must be a list of numbers above 0, got {lags!r}")
    return values


def context_tensors(contexts: Sequence[Context]) -> dict[str, Tensor]:
    """Contexts as tensors to save."""
    tensors = {}
    for number, context in enumerate(contexts):
        tensors[f"contexts.{number:03}.types"] = torch.from_numpy(context.types)
        tensors[f"contexts.{number:03}.times"] = torch.from_numpy(np.append(context.times, context.next_time))
        if context.inputs is not None and context.blank is not None:
            rows = np.concatenate((context.inputs, context.blank[None]))
            tensors[f"contexts.{number:03}.inputs"] = torch.from_numpy(rows)
    return tensors


def take_contexts(tensors: dict[str, Tensor], classes: int, inputs: int) -> list[Context]:
    """Contexts from the tensors of a file, which are removed; raises unless types and times are valid."""
    contexts = []
    for name in sorted(name for name in tensors if name.startswith("contexts.") and name.endswith(".types")):
        times, types = tensors.pop(name.replace(".types", ".times")), tensors.pop(name)
        valid = types.dtype == torch.int64 and times.dtype == torch.float64 and types.ndim == times.ndim == 1
        valid = valid and len(times) - 1 == len(types) > 0 and 0 <= int(types.min()) <= int(types.max()) < classes
        if not valid or not bool(times.isfinite().all() & (times.diff() >= 0).all()):
            raise ValueError(f"{name} must be event types below {classes}, at times that do not decrease")
        covariates: tuple[np.ndarray, ...] = ()
        if inputs:
            rows = tensors.pop(name.replace(".types", ".inputs"))
            if rows.dtype != torch.float32 or rows.shape != (len(times), inputs) or not bool(rows.isfinite().all()):
                raise ValueError(f"{name} must have {inputs} covariates for each event")
            covariates = (rows[:-1].numpy(), rows[-1].numpy())
        contexts.append(Context(types.numpy(), times[:-1].numpy(), float(times[-1]), *covariates))
    return contexts
