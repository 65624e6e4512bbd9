"""Diffusion on the graph of mutual neighbours: a baseline re-ranker over the whole database."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from keyquery.learn.base import check_sizes
from keyquery.learn.inputs.vectors import Asked
from keyquery.learn.rerank.base import ListReranker
from keyquery.learn.rerank.search import CHUNK, itself_first, mutual, search

NUMBERS = 2**24  # that are gathered at a time


class Walk(NamedTuple):
    """The matrix S of a database: row i has `weights[i]` in columns `near[i]`, 0 where neighbours are not mutual."""

    near: Int64[Tensor, "n k"]
    weights: Float[Tensor, "n k"]


class Diffusion(ListReranker):
    """Scores f with (1 − αS) f = y (Iscen et al. 2017), by `rounds` of conjugate gradients.

    S = D^−½ W D^−½ of weights max(x_i·x_j, 0)^γ between items that are among the `neighbours` nearest of each other;
    y has those of the query and its `seeds` nearest items. What no path reaches keeps its order, at the end.
    """

    def __init__(
        self,
        top: int = 1024,
        neighbours: int = 50,
        seeds: int = 10,
        alpha: float = 0.99,
        gamma: float = 3.0,
        rounds: int = 20,
        device: str | torch.device = "auto",
    ) -> None:
        self.top = top
        self.neighbours = neighbours
        self.seeds = seeds
        self.alpha = alpha
        self.gamma = gamma
        self.rounds = rounds
        self.device = device

    def _check(self) -> None:
        check_sizes(self, ("top", "neighbours", "seeds", "rounds"), alpha=1, gamma=float("inf"))

    def _scores(self, asked: Asked, lists: Int64[Tensor, "q top"]) -> Float[Tensor, "q top"]:
        return self.by_graph(asked, lists, self.graph(asked.database))

    def graph(self, database: Float[Tensor, "n dim"]) -> Walk:
        """S of a database whose vectors have length 1; it is the same for all queries."""
        near = itself_first(search(database, database, min(self.neighbours + 1, len(database))))[:, 1:]
        rows = torch.arange(len(near), device=near.device).split(CHUNK)
        like = torch.cat([(database[near[some]] @ database[some].unsqueeze(-1)).squeeze(-1) for some in rows])
        weights = like.clamp(min=0) ** self.gamma * mutual(near)
        scale = weights.sum(1).clamp(min=torch.finfo(weights.dtype).tiny).rsqrt()
        return Walk(near, weights * scale.unsqueeze(1) * scale[near])

    def by_graph(self, asked: Asked, lists: Int64[Tensor, "q top"], graph: Walk) -> Float[Tensor, "q top"]:
        """Scores of candidates, where the database's graph is known."""
        first = lists[:, : self.seeds]
        like = (asked.database[first] @ asked.queries.unsqueeze(-1)).squeeze(-1).clamp(min=0) ** self.gamma
        start = like.new_zeros(len(lists), len(asked.database)).scatter_(1, first, like)
        size = max(NUMBERS // graph.near.numel(), 1)
        return torch.cat([self._solved(graph, some) for some in start.split(size)]).gather(1, lists)

    def _solved(self, graph: Walk, y: Float[Tensor, "q n"]) -> Float[Tensor, "q n"]:
        """Conjugate gradients, all queries at a time; one that has come to its end stays there."""
        f, rest = torch.zeros_like(y), y.clone()
        step, left = rest.clone(), rest.square().sum(1, keepdim=True)
        for _ in range(self.rounds):
            image = step - self.alpha * (step[:, graph.near] * graph.weights).sum(-1)
            length = left / (step * image).sum(1, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
            f, rest = f + length * step, rest - length * image
            now = rest.square().sum(1, keepdim=True)
            step, left = rest + now / left.clamp(min=torch.finfo(y.dtype).tiny) * step, now
        return f
