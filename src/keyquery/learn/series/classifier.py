"""SeriesClassifier: time-series classification by a small transformer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.learn.base import check_sizes, hold_out, seeded
from keyquery.learn.fitting import epochs_of, fit_network
from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.layers import regularizer
from keyquery.learn.series.base import Labelled, SeriesEstimator
from keyquery.learn.series.network import KINDS, TOKENS, SeriesNetwork
from keyquery.learn.training import Recipe
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress, bars, silent

BATCHES = 12  # of an epoch, at least: small sets are passed several times
TIE = 1e-3  # weight of the validation loss, as a tie-breaker of the error rate
WARMEST = 20.0  # the largest temperature
RANK = 20  # of primal layers, if heads are at least this wide


@dataclass(eq=False, repr=False)
class SeriesClassifier(SeriesEstimator):
    """Time-series classifier: a small transformer with the scikit-learn estimator interface.

    From papers: accuracy .808 against .870 of `ConvolutionRidgeClassifier` on 32 sets, at 41 times its CPU time.

    Series are a list of arrays (length, dims), one array (n, length, dims) or (n, length) padded with NaN, or the
    result of `kq.data.load_ts`. Time steps at which every dimension is NaN are masked. Other missing values are
    imputed by the mean of their dimension over the training data. Probabilities are softened by a temperature, if the
    validation split shows them to be too sure.

    Parameters
    ----------
    attention
        "primal" (every layer), "primal+" (the last layer), or a kernel of `kq.Attention`. Default: "primal+".
    width, depth, heads
        Size of the transformer. Default: 64, 2, 4.
    rank, eta
        Options of `kq.PrimalAttention`. Default: the smaller of 20 and the head width; 0.1.
    tokens
        What precedes attention: "multiscale", convolutions of widths 3, 9 and 27 that are pooled to at most 64 tokens,
        which is cheaper on long series, or "plain", a convolution of width 3. Default: "multiscale".
    dropout
        Default: 0.1.
    augment
        Strength of augmentation: random factors of dims and noise of this standard deviation, in standard deviations of
        the training data, and up to this share of steps cut off the ends. Default: 0.
    epochs, batch_size, lr
        An epoch has at least 12 batches: small sets are passed several times. Default: 60, 16, 1e-3.
    validation_fraction
        Share of each class used as the validation split: it chooses the number of epochs and fits the temperature.
        With 0, all epochs are run. Default: 0.2.
    patience
        Epochs without improvement on the validation split before training stops. Default: 20.
    refit
        Train again on all series, for the number of epochs that was best on the validation split. Default: True.
    class_weight
        None, "balanced" or {label: weight}. Default: None.
    axis
        The axis of time: 1 for arrays (n, length, dims) and lists of (length, dims); 2 for (n, dims, length) and lists
        of (dims, length), as in aeon. Default: 1.
    random_state
        Seed: None, an integer or a numpy generator. Default: None.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    See Also
    --------
    kq.data.load_ts : reads UEA and UCR archives.
    kq.PrimalAttention : the layer.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> noise, ramp = torch.randn(2, 20, 30), torch.linspace(-1, 1, 30)
    >>> X, y = torch.cat((noise[0] + ramp, noise[1] - ramp)), ["up"] * 20 + ["down"] * 20
    >>> model = kq.SeriesClassifier(width=16, heads=2, epochs=20, lr=5e-3, random_state=0)
    >>> model.fit(X, y).score(X, y) > 0.9
    True
    >>> model.predict([3 * ramp, -3 * ramp[::3]])
    array(['up', 'down'], dtype='<U4')
    """

    attention: str = "primal+"
    width: int = 64
    depth: int = 2
    heads: int = 4
    rank: int | None = None
    eta: float = 0.1
    tokens: str = "multiscale"
    dropout: float = 0.1
    augment: float = 0.0
    epochs: int = 60
    batch_size: int = 16
    lr: float = 1e-3
    validation_fraction: float = 0.2
    patience: int = 20
    refit: bool = True
    class_weight: Any = None
    axis: int = 1
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: bool = False

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], SeriesNetwork], int]:
        self._restore_common(facts, tensors)
        return lambda: self._network(len(self.mean_), len(self.classes_)), self.depth

    def _check(self) -> None:
        check_choice("attention", self.attention, KINDS)
        check_choice("tokens", self.tokens, TOKENS)
        sizes = ("width", "depth", "heads", "epochs", "batch_size", "patience")
        check_sizes(self, sizes, eta=math.inf, lr=math.inf, dropout=1, augment=1, validation_fraction=1)
        check_count("rank", self.rank, least=1, optional=True)
        check_count("axis", self.axis, least=1, most=2)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")

    def _network(self, dims: int, classes: int) -> SeriesNetwork:
        rank = min(RANK, self.width // self.heads) if self.rank is None else self.rank
        shape = (self.width, self.depth, self.heads)
        return SeriesNetwork(dims, classes, *shape, self.attention, rank, self.eta, self.dropout, tokens=self.tokens)

    def _learn(self, samples: Labelled, classes: int, seed: int) -> None:
        samples = samples._replace(weight=samples.weight.float())
        learned, held = hold_out(samples.target.cpu().numpy(), self.validation_fraction, seed)
        with seeded(seed, str(samples.target.device)), bars(self.verbose) as progress:
            network = self._network(samples.data.values.shape[-1], classes).to(samples.target.device)
            first = {name: tensor.clone() for name, tensor in network.state_dict().items()}
            checked = samples.take(held) if len(held) else None
            history, best, stopped = self._train(network, samples.take(learned), seed, progress, checked)
            temperature = 1.0 if checked is None else temperature_of(network, checked, 4 * self.batch_size)
            if checked is not None and self.refit and best and not stopped:
                network.load_state_dict(first)
                self._train(network, samples, seed, progress, epochs=best)
        self.network_, self.history_, self.temperature_ = network, history, temperature

    def _train(
        self,
        network: SeriesNetwork,
        samples: Labelled,
        seed: int,
        progress: Progress,
        checked: Labelled | None = None,
        epochs: int | None = None,
    ) -> tuple[list[dict[str, float]], int, bool]:
        """The history, the best epoch, and whether Ctrl-C was pressed; `epochs` ends the schedule early."""
        plain, every = epochs_of(samples.take, len(samples.target), self.batch_size, seed, BATCHES)

        def draw(step: int, generator: torch.Generator) -> Labelled:
            batch: Labelled = plain(step, generator)
            return augmented(batch, self.augment, generator) if self.augment else batch

        def validate(model: Any) -> dict[str, float]:
            assert checked is not None
            error, loss = judged(model, checked, 4 * self.batch_size)
            return {"validation": error + TIE * loss, "validation_error": error, "validation_loss": loss}

        steps, last = self.epochs * every, every * (self.epochs if epochs is None else epochs)
        options: dict[str, Any] = {"clip": 4.0, "check_every": every, "patience": self.patience}
        recipe = Recipe(steps, self.lr, warmup=min(2 * every, steps // 4), seed=seed, **options)
        log = fit_network(
            network,
            draw,
            class_loss,
            recipe,
            validate=validate if checked else None,
            until=lambda step: step >= last,
            progress=progress,
            verbose=self.verbose,
        )
        kept = ("loss", "validation_error", "validation_loss")
        rows = [
            {"epoch": int(row["step"]) // every} | {name: row[name] for name in kept if name in row} for row in log.rows
        ]
        return rows, log.best_step // every, log.interrupted

    @torch.no_grad()
    def _log_probabilities(self, data: Padded, progress: Progress = silent) -> Float64[Tensor, "batch classes"]:
        network = self.network_.to(data.values.device).eval()
        groups = data.alike(4 * self.batch_size)
        watched = progress(groups, "predicting", len(groups))
        logits = torch.cat([network(*data.take(group)) for group in watched])[torch.cat(groups).argsort()]
        if not logits.isfinite().all():
            most = float(data.values.abs().max())
            raise ValueError(f"X holds values too large: up to {most:.0e} standard deviations of the training data")
        return (logits.double() / self.temperature_).log_softmax(-1)


def augmented(samples: Labelled, strength: float, generator: torch.Generator) -> Labelled:
    """Series whose dims are scaled, with noise, and without a share of up to `strength` of the steps at the ends."""
    values, real = samples.data
    batch, _n, dims = values.shape
    factor = (1 + strength * torch.randn(batch, 1, dims, generator=generator)).to(values)
    noise = (strength * torch.randn(values.shape, generator=generator)).to(values)
    cut = (strength * torch.rand(2, batch, 1, generator=generator) / 2).to(values)
    rank, length = real.cumsum(1), real.sum(1, keepdim=True)
    kept = real & (rank > (cut[0] * length).floor()) & (rank <= length - (cut[1] * length).floor())
    return samples._replace(data=Padded((values * factor + noise).where(kept.unsqueeze(-1), 0.0), kept))


def class_loss(model: nn.Module, batch: Labelled) -> Float[Tensor, ""]:
    """Weighted cross-entropy plus the regularizer of primal layers."""
    losses = cross_entropy(model(*batch.data), batch.target, reduction="none")
    return (batch.weight * losses).mean() + regularizer(model)


@torch.no_grad()
def temperature_of(model: nn.Module, samples: Labelled, size: int) -> float:
    """The temperature, at least 1, with the least cross-entropy: small validation splits must not make it surer."""
    logits = _logits(model.eval(), samples, size)
    candidates = torch.logspace(0, math.log10(WARMEST), 200, dtype=torch.float64).clamp(max=WARMEST).tolist()
    return min(candidates, key=lambda temperature: _weighted(logits / temperature, samples)[1])


def _logits(model: nn.Module, samples: Labelled, size: int) -> Float[Tensor, "n classes"]:
    return torch.cat([model(*batch) for batch in samples.data.batches(size)]).float()


@torch.no_grad()
def judged(model: nn.Module, samples: Labelled, size: int) -> tuple[float, float]:
    """Weighted error rate and cross-entropy."""
    return _weighted(_logits(model, samples, size), samples)


def _weighted(logits: Float[Tensor, "n classes"], samples: Labelled) -> tuple[float, float]:
    losses = cross_entropy(logits, samples.target, reduction="none")
    errors = logits.argmax(1) != samples.target
    weight = samples.weight.double() / samples.weight.double().sum()
    return float(weight @ errors.double()), float(weight @ losses.double())
