"""Interactions between event types: effect of one inserted event on the predictions of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int
from torch import Tensor

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
            {"past": a, "next": b, "lag": lag, "change": change, "error": error, "information": self.information}
            for a, changes, errors in zip(self.types, self.change, self.error, strict=True)
            for b, *curves in zip(self.types, changes, errors, strict=True)
            for lag, change, error in zip(self.lags, *curves, strict=True)
        ]

    def strongest(self, count: int = 6) -> list[dict[str, Any]]:
        """The pairs with the largest increase, each at its best lag, largest first, minus two standard errors.

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

    def batch(self, device: str, lags: Any, types: int, targeted: bool) -> Batch:
        """Histories (types · lags) with one inserted event, the lags of the first type first."""
        inserted = self.now(targeted) - np.asarray(lags)
        # At ties the inserted event comes first: simultaneous events are not in each other's past.
        index = np.searchsorted(self.times, inserted, side="left")
        index = index if targeted else np.minimum(index, len(self.times) - 1)
        codes = np.concatenate([[np.insert(self.types, i, kind) for i in index] for kind in range(types)])
        times = np.tile([np.insert(self.times, i, t) for i, t in zip(index, inserted, strict=True)], (types, 1))
        counted = np.zeros(codes.shape, dtype=bool)
        counted[:, -1] = True
        real, next_times = np.ones_like(counted), np.full(codes.shape, self.next_time)
        parts = [codes, times, real, np.zeros_like(codes), next_times, counted]
        if self.inputs is not None and self.blank is not None:
            parts.append(np.tile([np.insert(self.inputs, i, self.blank, axis=0) for i in index], (types, 1, 1)))
        return Batch(*(torch.from_numpy(part).to(device) for part in parts))


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


def interactions_of(model: Any, windows: Windows, lags: Any) -> Interactions:
    """The interactions of a fitted EventModel, in some of these histories."""
    device, targeted, types = pick_device(model.device), model._targeted, len(model.classes_)
    contexts = [context for context in _contexts(model, windows) if context.reach(targeted) > 0]
    if not contexts:
        raise ValueError("no history of the events has two different times: there is nothing to compare")
    chosen = _usual_lags(contexts, targeted) if lags is None else _checked_lags(lags) / model.scale_
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


def _contexts(model: Any, windows: Windows) -> list[Context]:
    """The ends of some windows, one event shorter than the network's, each with the time of the next event."""
    contexts, longest = [], model.params_["window"] - 1
    for number in np.random.default_rng(0).permutation(len(windows.starts))[:CONTEXTS]:
        batch = windows.take([number])
        types, times = batch.types[0, -longest:].cpu().numpy(), batch.times[0, -longest:].cpu().numpy()
        inputs = None if batch.inputs is None else batch.inputs[0, -longest:].cpu().numpy()
        blank = None if inputs is None else model.described_.unknown(inputs[0])
        contexts.append(Context(types, times, float(batch.next_times[0, -1]), inputs, blank))
    return contexts


def _usual_lags(contexts: Sequence[Context], targeted: bool) -> Float64[np.ndarray, " lags"]:
    """Log-spaced lags, from the 10 % quantile of the inter-event times to the median length of the contexts."""
    gaps = np.concatenate([np.diff(context.times) for context in contexts])
    longest = float(np.median([context.reach(targeted) for context in contexts]))
    shortest = float(np.quantile(gaps[gaps > 0], 0.1)) if (gaps > 0).any() else longest / 100
    return np.geomspace(min(shortest, longest / 10), longest, LAGS)


def _checked_lags(lags: Any) -> Float64[np.ndarray, " lags"]:
    try:
        values = np.asarray(lags, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.zeros(0)
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"lags must be a list of numbers above 0, got {lags!r}")
    return values
