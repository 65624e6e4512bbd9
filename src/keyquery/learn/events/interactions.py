"""Interactions between event types: effect of one inserted event on the predictions of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from keyquery.learn.events.network import Mixture, following
from keyquery.learn.events.windows import Batch, Windows
from keyquery.learn.inputs.targets import label_facts
from keyquery.reading import Reading
from keyquery.support.progress import Progress, bars, silent

CONTEXTS, LAGS = 64, 16  # histories and lags
Predict = Callable[[Batch], tuple[Tensor, Mixture]]
Unknown = Callable[[np.ndarray], np.ndarray]  # inputs of an event to those of another one of its group


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
        """The pairs with the largest increase minus two standard errors, each at its best lag, largest first.

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


def now(history: Batch, targeted: bool) -> Float64[Tensor, ""]:
    """The time that lags are measured from, of a batch of one history."""
    return history.next_times[0, -1] if targeted else history.times[0, -1]


def reach(history: Batch, targeted: bool) -> float:
    """The longest lag within a history."""
    return float(now(history, targeted) - history.times[0, 0])


def inserted(
    history: Batch, lags: Float64[Tensor, " lags"], types: int, targeted: bool, unknown: Unknown = np.zeros_like
) -> Batch:
    """Copies (types · lags) of a history with one event more, the lags of the first type first."""
    times = (now(history, targeted) - lags).unsqueeze(1).repeat(types, 1)
    count, device = len(times), lags.device
    # At ties the inserted event comes first: simultaneous events are not in each other's past.
    times, order = torch.cat((times, history.times.expand(count, -1)), 1).sort(dim=1, stable=True)
    kinds = torch.arange(types, device=device).repeat_interleave(len(lags)).unsqueeze(1)
    codes = torch.cat((kinds, history.types.expand(count, -1)), 1).gather(1, order)
    inputs = history.inputs
    if inputs is not None:
        blank = torch.from_numpy(unknown(inputs[:, :1].cpu().numpy())).to(device)
        inputs = torch.cat((blank, inputs), 1)[0, order]
    real, counted = torch.ones_like(codes, dtype=torch.bool), torch.zeros_like(codes, dtype=torch.bool)
    counted[:, -1] = True
    next_times = history.next_times[:, -1:].expand(codes.shape)
    return Batch(codes, times, real, torch.zeros_like(codes), next_times, counted, inputs)


def compare(
    predict: Predict,
    histories: Sequence[Batch],
    lags: Float64[Tensor, " lags"],
    types: int,
    targeted: bool,
    unknown: Unknown = np.zeros_like,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Change and error (types, types, lags), sooner (types, lags), and the number of histories.

    Histories are those that reach back to the longest lag, the same for all lags, so that curves are comparable.
    """
    longest = float(lags.max())
    chosen = [history for history in histories if longest <= reach(history, targeted) * (1 + 1e-12)]
    if not chosen:
        raise ValueError(f"lags must not exceed the longest history, got {longest:g} median gaps")
    changes = np.empty((len(chosen), types, types, len(lags)))
    sooner = np.empty((len(chosen), types, len(lags)))
    for number, history in enumerate(progress(chosen, "inserting events", len(chosen))):
        logits, gaps = predict(inserted(history, lags, types, targeted, unknown))
        logs = logits.double().log_softmax(-1).cpu().numpy().reshape(types, len(lags), types)
        changes[number] = (logs - np.median(logs, 0)).swapaxes(1, 2)
        waits = gaps.quantile().clamp(min=gaps.floor).log().double().cpu().numpy().reshape(types, len(lags))
        sooner[number] = np.median(waits, 0) - waits
    effects = {"change": changes.mean(0), "error": changes.std(0) / np.sqrt(len(chosen)), "sooner": sooner.mean(0)}
    return {**{name: values.tolist() for name, values in effects.items()}, "contexts": len(chosen)}


def interactions_of(model: Any, windows: Windows, lags: Any) -> Interactions:
    """The interactions of a fitted EventModel, in some of these histories."""
    targeted, types = model._targeted, len(model.classes_)
    histories = [history for history in histories_of(windows, model.params_["window"]) if reach(history, targeted) > 0]
    if not histories:
        raise ValueError("no history of the events has two different times: there is nothing to compare")
    chosen = _usual_lags(histories, targeted) if lags is None else _checked_lags(lags) / model.scale_
    network = model.network_.to(windows.starts.device).eval()

    @torch.no_grad()
    def predict(batch: Batch) -> tuple[Tensor, Mixture]:
        logits, mixture = following(network, batch)
        return logits[:, :types], mixture

    moments = torch.from_numpy(chosen).to(windows.starts.device)
    with bars(model.verbose) as progress:
        effects = compare(predict, histories, moments, types, targeted, model.described_.unknown, progress)
    return Interactions(
        types=label_facts(model.classes_)["labels"],
        lags=(chosen * model.scale_).tolist(),
        clock=model.clock_,
        information=model.params_["information"],
        provenance=model._provenance(),
        **effects,
    )


def histories_of(windows: Windows, window: int) -> list[Batch]:
    """The ends of some windows, one event shorter than the network's, each with the time of the next event."""
    drawn = np.random.default_rng(0).permutation(len(windows.starts))[:CONTEXTS]
    return [Batch(*(part if part is None else part[:, 1 - window :] for part in windows.take([n]))) for n in drawn]  # type: ignore[arg-type]


def _usual_lags(histories: Sequence[Batch], targeted: bool) -> Float64[np.ndarray, " lags"]:
    """Log-spaced lags, from the 10 % quantile of the inter-event times to the median length of the histories."""
    gaps = torch.cat([history.times[0].diff() for history in histories]).cpu().numpy()
    longest = float(np.median([reach(history, targeted) for history in histories]))
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
