"""Reranker: the top of any retrieval list in a better order, by candidates that attend to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from keyquery.capture.load import pick_device
from keyquery.estimators.base import (
    check_sizes,
    filled,
    labels_of,
    read_fitted,
    seed_of,
    seeded,
    write_fitted,
)
from keyquery.estimators.inputs.vectors import Asked, asked_of, descriptors_of
from keyquery.estimators.rerank.base import ListReranker, check_anchors, in_batches, rows_of
from keyquery.estimators.rerank.network import RerankNetwork, affinities, cosines, rerank_loss
from keyquery.estimators.rerank.search import itself_first, search
from keyquery.layers.kernels import KERNELS
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import bars
from keyquery.training import Recipe, train

WIDTH = 64  # at which the learning rate is the plan's; wider networks take smaller steps


@dataclass(frozen=True)
class Plan:
    """How a network is trained, beyond what users choose."""

    batch: int = 64  # lists a step
    lr: float = 1e-3
    weight_decay: float = 1e-4
    warmup: float = 0.1  # share of the steps
    dropout: float = 0.0


class Reranker(ListReranker):
    """Contextual similarity aggregation: a query's nearest items, re-ranked by a small transformer.

    Of each candidate the network knows its affinities, the dot products with L = `anchors` vectors: the query and its
    first L − 1 items. So it is independent of where vectors come from, and rotating all of them changes nothing. The
    query and its `top` candidates go through a linear map and `depth` blocks without positions; a candidate's score is
    the cosine of its vector with the query's. `kernel` is any of `kq.Attention`. Where `heads` do not divide `width`,
    there are as many as do.

    It learns from `features` and `labels` of items that need not be those it is used on, not even their classes: each
    item's own nearest ones are a list, and those of its label are to come first.

    >>> _ = torch.manual_seed(0)
    >>> labels = torch.arange(40).repeat_interleave(8)
    >>> features = torch.randn(40, 16)[labels] + torch.randn(320, 16)
    >>> model = kq.Reranker(top=32, anchors=16, width=32, steps=30, random_state=0).fit(features, labels)
    >>> order, scores = model.rerank(features[:3], features)
    >>> order.shape, scores.shape
    (torch.Size([3, 32]), torch.Size([3, 32]))
    """

    plan: ClassVar[Plan] = Plan()
    network_: RerankNetwork
    history_: list[dict[str, float]]  # the mean loss, some steps at a time

    def __init__(
        self,
        top: int = 1024,
        anchors: int = 512,
        width: int = 768,
        depth: int = 2,
        heads: int = 12,
        kernel: str = "general",
        steps: int = 400,
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.top, self.anchors = top, anchors
        self.width, self.depth, self.heads, self.kernel = width, depth, heads, kernel
        self.steps, self.random_state, self.device, self.verbose = steps, random_state, device, verbose

    def fit(self, features: Any = None, labels: Any = None) -> Reranker:
        """Learn from vectors (n, dim) and a label of each; or from several descriptors of the same n items, in a list.

        Every item whose label others have too is a query in its turn; an item alone with its label is only a candidate.
        """
        self._check()
        device = pick_device(self.device)
        if features is None:
            raise ValueError("fit needs features, vectors (n, dim), and a label of each")
        sets = descriptors_of(features, device)
        count = len(sets[0])
        if self.anchors > count:
            raise ValueError(
                f"anchors is {self.anchors}, but features have only {count} items: give fewer anchors, or more items"
            )
        given = labels_of(type(self).__name__, labels, count, "labels", "features")
        _, numbers, members = np.unique(given, return_inverse=True, return_counts=True)
        queries = np.flatnonzero(members[numbers] > 1)
        if not len(queries):
            raise ValueError(f"labels must give two items or more the same label, got {count} items of {count} labels")
        if len(members) < 2:
            raise ValueError("labels must be of two kinds or more: where all items are alike there is nothing to order")
        seed = seed_of(self.random_state)
        lists = Lists(sets, torch.from_numpy(numbers).to(device), torch.from_numpy(queries), self.anchors)
        with seeded(seed, device):
            network = self._network().to(device)
            history = self._train(network, lists, seed)
        self.network_, self.history_, self.params_ = network, history, self._plain_params()
        return self

    def save(self, path: str | Path) -> None:
        """Write the network and the parameters of the fit into one safetensors file."""
        self._check_fitted()
        tensors = {f"network.{name}": tensor for name, tensor in self.network_.state_dict().items()}
        write_fitted(path, type(self).__name__, {"params": self.params_, "history": self.history_}, tensors)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "auto") -> Reranker:
        """The re-ranker of a file that `save` wrote, to run on `device`."""
        pick_device(device)
        facts, tensors = read_fitted(path, cls.__name__)
        try:
            made = cls(**{**facts["params"], "device": device})
            made._check()
            made.params_, made.history_ = facts["params"], list(facts["history"])
            weights = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
            made.network_ = filled(made._network, weights, made.depth)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: {str(error).splitlines()[0]}") from None
        return made

    def _check(self) -> None:
        check_sizes(self, ("top", "anchors", "width", "depth", "heads", "steps"))
        check_count("anchors", self.anchors, least=2)  # the query and another
        check_choice("kernel", self.kernel, KERNELS)

    def _network(self) -> RerankNetwork:
        heads = max(count for count in range(1, self.heads + 1) if self.width % count == 0)
        network = RerankNetwork(self.anchors, self.width, self.depth, heads, self.kernel, self.plan.dropout)
        for module in network.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        return network

    def _train(self, network: RerankNetwork, lists: Lists, seed: int) -> list[dict[str, float]]:
        plan = self.plan
        recipe = Recipe(
            self.steps,
            lr=plan.lr * (WIDTH / max(self.width, WIDTH)) ** 0.5,
            warmup=round(plan.warmup * self.steps),
            weight_decay=plan.weight_decay,
            seed=seed,
            check_every=max(self.steps // 20, 1),
        )
        with bars(self.verbose) as progress:
            log = train(network, lambda step, g: lists.draw(plan.batch, g), rerank_loss, recipe, progress=progress)
        return [{"step": int(row["step"]), "loss": row["loss"]} for row in log.rows]

    def _asked(self, queries: Any, database: Any) -> Asked:
        self._check_fitted()
        return asked_of(queries, database, pick_device(self.device), self.network_.tokens.weight.dtype)

    @torch.no_grad()
    def _scores(self, asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
        device = asked.queries.device
        network = self.network_.to(device).eval()
        check_anchors(network.anchors, lists.shape[1])
        short = device.type == "cuda" and asked.queries.dtype == torch.float32
        found = []
        for some in in_batches(asked, lists):
            affinity = affinities(rows_of(asked, lists, some), network.anchors)
            with torch.autocast(device.type, torch.float16, enabled=short):
                refined = network(affinity)
            found.append(cosines(refined)[:, 1:])
        return torch.cat(found)


class Lists:
    """What a network learns from: for each item, and by each descriptor, itself and its nearest, `size` in all."""

    def __init__(
        self, sets: list[Tensor], labels: Int64[Tensor, " n"], queries: Int64[Tensor, " queries"], size: int
    ) -> None:
        self.sets, self.labels, self.queries = sets, labels, queries
        self.lists = [itself_first(search(one, one, size)) for one in sets]

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Affinities (count, size, size) and positives (count, size) of lists by one of the descriptors.

        Rows behind the first are shuffled, as published: there is nothing to be learned from their order.
        """
        place = int(torch.randint(len(self.sets), (), generator=generator))
        vectors, lists = self.sets[place], self.lists[place]
        drawn = self.queries[torch.randint(len(self.queries), (count,), generator=generator)].to(lists.device)
        chosen = lists[drawn]
        rest = torch.rand(count, chosen.shape[1] - 1, generator=generator).argsort(1).to(lists.device) + 1
        rows = torch.cat((torch.zeros_like(rest[:, :1]), rest), 1)
        affinity = affinities(vectors[chosen], chosen.shape[1]).gather(
            1, rows.unsqueeze(-1).expand(-1, -1, chosen.shape[1])
        )
        return affinity, self.labels[chosen.gather(1, rows)] == self.labels[drawn].unsqueeze(1)
