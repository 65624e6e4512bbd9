"""Reranker: learned re-ranking of retrieval lists, by candidates that attend to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from keyquery.layers.kernels import KERNELS
from keyquery.learn.base import SavedEstimator, check_is_fitted, check_sizes, seed_of, seeded
from keyquery.learn.fitting import fit_network
from keyquery.learn.inputs.targets import labels_of
from keyquery.learn.inputs.vectors import Asked, asked_of, vectors_of
from keyquery.learn.rerank.base import ListReranker, in_batches, rows_of
from keyquery.learn.rerank.graph import nearest
from keyquery.learn.rerank.network import (
    KERNEL,
    STEPS,
    RerankNetwork,
    affinities,
    check_anchors,
    cosines,
    rerank_loss,
    sizes_for,
)
from keyquery.learn.training import Recipe
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import bars

BATCH = 64  # lists per step
RATE, FULL_RATE_WIDTH = 1e-3, 64  # of learning; it falls with 1/√width above this width
WEIGHT_DECAY = 1e-4
WARMUP = 0.1  # share of the steps


@dataclass(eq=False, repr=False)
class Reranker(ListReranker, SavedEstimator):
    """Contextual similarity aggregation: the nearest neighbours of a query, re-ranked by a small transformer.

    From a paper: mAP −.034, −.003 and +.020 over the first ranking on three datasets; at the published size no gain.

    The input token of a candidate is its affinity vector, the dot products with L = `anchors` vectors: the query and
    its first L − 1 neighbours. The model therefore does not depend on the descriptor, and is invariant to rotations of
    it. Query and candidates pass through a linear map and `depth` blocks without positional encoding; a candidate's
    score is the cosine of its output with that of the query. Training items and their classes may differ from those
    at test time: each item's nearest neighbours are a list, in which items with its label should come first.

    Parameters
    ----------
    top, device, verbose
        As in `kq.AffinityReranker`.
    anchors
        Length L of the affinity vectors. Default: 96, or all items if there are fewer; 512, as published, with 50,000
        items or more.
    width, depth, heads
        Size of the transformer; if `heads` does not divide `width`, the next smaller number that does is used.
        Default: 64, or 768, as published, with 50,000 items or more; 2; 12.
    kernel
        Any kernel of `kq.Attention`. Default: "general".
    steps
        Training steps. Default: 400.
    random_state
        Seed: None, an integer or a numpy generator. Default: None.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> labels = torch.arange(40).repeat_interleave(8)
    >>> features = torch.randn(40, 16)[labels] + torch.randn(320, 16)
    >>> model = kq.Reranker(top=32, anchors=16, width=32, steps=30, random_state=0).fit(features, labels)
    >>> order, scores = model.rerank(features[:3], features)
    >>> order.shape, scores.shape
    (torch.Size([3, 32]), torch.Size([3, 32]))
    """

    top: int | None = None
    anchors: int | None = None
    width: int | None = None
    depth: int = 2
    heads: int = 12
    kernel: str = KERNEL
    steps: int = STEPS
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: bool = False

    def fit(self, features: Any = None, labels: Any = None) -> Reranker:
        """Fit to vectors (n, dim) and labels (n,).

        Every item whose label occurs more than once serves as a query; the others are candidates only.

        Parameters
        ----------
        features
            Vectors (n, dim).
        labels
            Class of each item (n,).

        Returns
        -------
        Reranker
            The fitted estimator.
        """
        self._check()
        device = pick_device(self.device)
        vectors = vectors_of("features", features, device)
        count = len(vectors)
        if self.anchors is not None and self.anchors > count:
            raise ValueError(f"anchors is {self.anchors}, but features have only {count} items: use anchors={count}")
        labels = labels_of(type(self).__name__, labels, count, "labels")
        _, numbers, members = np.unique(labels, return_inverse=True, return_counts=True)
        queries = np.flatnonzero(members[numbers] > 1)
        if len(members) < 2 or not len(queries):
            raise ValueError(f"labels must have two classes or more, one of two items: {len(members)} of {count} items")
        seed = seed_of(self.random_state)
        anchors, width = sizes_for(count)
        anchors, width = self.anchors or min(anchors, count), self.width or width
        lists = nearest(vectors, anchors, self.verbose)
        data = Lists(vectors, lists, torch.from_numpy(numbers).to(device), torch.from_numpy(queries))
        with seeded(seed, device):
            network = self._network(anchors, width).to(device)
            history = self._train(network, data, seed)
        self.network_, self.history_, self.params_ = network, history, self._plain_params()
        self.n_features_in_ = vectors.shape[1]
        return self

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {}

    def _restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Callable[[], RerankNetwork], int]:
        width, anchors = tensors[f"{self._prefix}tokens.weight"].shape
        return lambda: self._network(self.anchors or anchors, self.width or width), self.depth

    def _check(self) -> None:
        super()._check()
        check_sizes(self, ("depth", "heads", "steps"))
        check_count("width", self.width, optional=True)
        check_count("anchors", self.anchors, least=2, optional=True)  # the query and another
        check_choice("kernel", self.kernel, KERNELS)

    def _network(self, anchors: int, width: int) -> RerankNetwork:
        heads = max(count for count in range(1, self.heads + 1) if width % count == 0)
        network = RerankNetwork(anchors, width, self.depth, heads, self.kernel)
        for module in network.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        return network

    def _train(self, network: RerankNetwork, lists: Lists, seed: int) -> list[dict[str, float]]:
        recipe = Recipe(
            self.steps,
            lr=RATE * (FULL_RATE_WIDTH / max(network.tokens.out_features, FULL_RATE_WIDTH)) ** 0.5,
            warmup=round(WARMUP * self.steps),
            weight_decay=WEIGHT_DECAY,
            seed=seed,
            check_every=max(self.steps // 20, 1),
        )
        with bars(self.verbose) as progress:
            log = fit_network(network, lists.draw, rerank_loss, recipe, progress=progress, verbose=self.verbose)
        return [{"step": int(row["step"]), "loss": row["loss"]} for row in log.rows]

    def _asked(self, queries: Any, database: Any) -> Asked:
        check_is_fitted(self)
        return asked_of(queries, self._database(database), pick_device(self.device), self.network_.tokens.weight.dtype)

    @torch.no_grad()
    def _scores(self, asked: Asked, lists: Int64[Tensor, "q m"], top: int) -> Float[Tensor, "q top"]:
        device, lists = asked.queries.device, lists[:, :top]
        network = self.network_.to(device).eval()
        check_anchors(network.anchors, top)
        half_precision = device.type == "cuda" and asked.queries.dtype == torch.float32
        widest = max(layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear))
        scores = []
        for chosen in in_batches(asked, lists, self.verbose, widest):
            affinity = affinities(rows_of(asked, lists, chosen), network.anchors)
            with torch.autocast(device.type, torch.float16, enabled=half_precision):
                refined = network(affinity)
            scores.append(cosines(refined)[:, 1:])
        return torch.cat(scores)


class Lists(NamedTuple):
    """What to train on: the list of each item, itself first, labels, and the items that serve as queries."""

    vectors: Float[Tensor, "n dim"]
    lists: Int64[Tensor, "n size"]
    labels: Int64[Tensor, " n"]
    queries: Int64[Tensor, " queries"]

    def draw(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Affinities (batch, size, size) and positives (batch, size) of random lists.

        Rows after the first are shuffled, as published, so that their order carries no information.
        """
        torch.randint(1, (), generator=generator)  # as before, so that seeds give the same lists
        drawn = self.queries[torch.randint(len(self.queries), (BATCH,), generator=generator)].to(self.lists.device)
        chosen = self.lists[drawn]
        size = chosen.shape[1]
        rest = torch.rand(BATCH, size - 1, generator=generator).argsort(1).to(chosen.device) + 1
        rows = torch.cat((torch.zeros_like(rest[:, :1]), rest), 1)
        affinity = affinities(self.vectors[chosen], size).gather(1, rows.unsqueeze(-1).expand(-1, -1, size))
        return affinity, self.labels[chosen.gather(1, rows)] == self.labels[drawn].unsqueeze(1)
