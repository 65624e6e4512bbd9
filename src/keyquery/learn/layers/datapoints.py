"""Attention between datapoints (NPT): across the n rows of tables (batch, n, d, e), then across their d columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keyquery.layers.attention import Attention
from keyquery.layers.blocks import PLACE
from keyquery.support.checks import check_choice, check_count

ROWS = ("full", "induced", "none")
BATCH = 32768  # largest batch of the fused kernels


class Memory(NamedTuple):
    """Keys and values of the support set."""

    key: Float[Tensor, "batch heads m r"]
    value: Float[Tensor, "batch heads m r"]


class Between(Attention):
    """Unmasked `kq.Attention` that also does cross-attention; `full_scale` divides scores by √dim, not √r."""

    def __init__(self, dim: int, heads: int, full_scale: bool = False, cross: bool = False, **options: Any) -> None:
        for name in ("rope", "kv_heads"):
            if options.get(name) is not None:
                raise ValueError(f"{name} must be None for attention between datapoints, got {options[name]!r}")
        super().__init__(dim, heads, **options)
        self.full_scale, self.kind = full_scale, "cross" if cross else "self"  # for the analyses of heads

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return (self.dim if self.full_scale else self.head_dim) ** -0.5

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "batch n dim"],
        source: Float[Tensor, "batch m dim"] | None = None,
        memory: Memory | None = None,
        alone: bool = False,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n dim"]:
        """x attends to `source` (default: x), or to a precomputed `memory`; `seen` gets the weights, mean over heads.

        With `alone`, each token of x attends to the memory and to itself only, with its key from `source`, which has
        the last weight: the output does not depend on the other tokens of x.
        """
        if memory is None and source is None:
            query, *both = self._project(x)
            memory = Memory(*both)
        else:
            query, source = self.queries(x), x if source is None else source
            if memory is not None and alone:
                return self._output(self._apart(query, memory, self.memory(source), seen))
            memory = self.memory(source) if memory is None else memory
        if seen is not None:
            seen.append(self._scores(query, memory.key).softmax(-1).mean(1))
        return self._output(self._attend(query, *memory, None, None, False)[0])

    def queries(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch heads n r"]:
        """Queries only."""
        if self.query is not None:
            return self._heads(self.query(x), self.heads)
        assert self.shape is not None
        return self.shape(self._heads(self.key(x), self.heads))

    def memory(self, x: Float[Tensor, "batch m dim"]) -> Memory:
        """Keys and values of x."""
        return Memory(*(self._heads(part(x), self.heads) for part in (self.key, self.value)))

    def _scores(self, query: Tensor, key: Tensor) -> Float[Tensor, "batch heads n m"]:
        scores = query @ key.mT
        for term in self._key_norm(key):
            scores = scores + term.unsqueeze(-2)
        return scores * self.scale

    def _apart(self, query: Tensor, memory: Memory, itself: Memory, seen: list[Tensor] | None) -> Tensor:
        """Attention of each query to the memory and its own key, which comes last."""
        beside = (query * itself.key).sum(-1, keepdim=True)
        for term in self._key_norm(itself.key):
            beside = beside + term.unsqueeze(-1)
        weights = torch.cat((self._scores(query, memory.key), beside * self.scale), -1).softmax(-1)
        if seen is not None:
            seen.append(weights.mean(1))
        return weights[..., :-1] @ memory.value + weights[..., -1:] * itself.value


class Induced(nn.Module):
    """Learned points attend to all rows, and rows to them: linear in the rows, and equivariant to their order."""

    def __init__(self, dim: int, heads: int, points: int = 64, **options: Any) -> None:
        super().__init__()
        check_count("points", points, least=1)
        factory: dict[str, Any] = {name: options.get(name) for name in PLACE}
        self.points = nn.Parameter(torch.randn(points, dim, **factory))
        self.gather, self.spread = (Between(dim, heads, **{**options, "cross": True}) for _ in range(2))

    def forward(
        self,
        x: Float[Tensor, "batch n dim"],
        source: Float[Tensor, "batch m dim"] | None = None,
        memory: Memory | None = None,
        alone: bool = False,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n dim"]:
        """As `Between`; `alone` has no effect, since x does not reach the points of a memory."""
        memory = self.memory(x if source is None else source) if memory is None else memory
        return self.spread(x, memory=memory, seen=seen)

    def memory(self, x: Float[Tensor, "batch m dim"], seen: list[Tensor] | None = None) -> Memory:
        """Keys and values of the inducing points after they attended to x; appends weights (batch, p, m) to `seen`."""
        points = self.points.expand(len(x), -1, -1).to(x.dtype)
        return self.spread.memory(points + self.gather(points, source=x, seen=seen))


class _Block(nn.Module):
    """R = W x + attention(norm(x)), then R + mlp(norm(R)), over tokens (batch, n, dim)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        dropout: float = 0.0,
        published: bool = False,
        points: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        eps = 1e-12 if published else 1e-5
        factory: dict[str, Any] = {name: options.get(name) for name in PLACE}
        options = {"dropout": dropout, "full_scale": published, "cross": published, **options}
        self.published = published
        self.attention_norm = nn.LayerNorm(dim, eps, **factory)  # with `published`, of queries only
        self.attention: Between | Induced
        self.attention = Between(dim, heads, **options) if points is None else Induced(dim, heads, points, **options)
        self.residual = nn.Linear(dim, dim, **factory)
        if not published:
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)
        self.mlp_norm = nn.LayerNorm(dim, eps, **factory)
        wide, back = nn.Linear(dim, 4 * dim, **factory), nn.Linear(4 * dim, dim, **factory)
        self.mlp = nn.Sequential(wide, nn.GELU(), nn.Dropout(dropout), back)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        if self.published:
            options = {"source": x, **options}
        r = self.residual(x) + self.dropout(self.attention(self._normed(x), **options))
        return r + self.dropout(self.mlp(self.mlp_norm(r)))

    def memory(self, x: Tensor, **options: Any) -> Memory:
        return self.attention.memory(x if self.published else self._normed(x), **options)

    def _normed(self, x: Tensor) -> Tensor:
        return self.attention_norm(x).to(x.dtype)  # float32 under autocast: cast once, not in each projection


class DatapointAttention(nn.Module):
    """Attention between datapoints (NPT): rows of a table (batch, n, d, e) attend to rows, as tokens of width d·e.

        R = W x + attention(norm(x)),  out = R + mlp(norm(R))

    Parameters
    ----------
    columns, embedding
        d and e.
    heads
        Number of heads.
    kernel
        Any kernel of `kq.Attention`. Default: "general".
    rows
        "full", or "induced": through inducing points, with a cost linear in n. Default: "full".
    points
        Number of inducing points. Default: 64.
    dropout
        Default: 0.
    published
        As in the released NPT code: keys and values from x, not norm(x); scores divided by √(d·e), not √r; LayerNorm
        eps 1e-12; W initialised at random, not as the identity. Default: False.
    **attention
        Other options of `kq.Attention`.

    See Also
    --------
    NPTClassifier, NPTRegressor : estimators built from it.

    Examples
    --------
    >>> layer = kq.DatapointAttention(columns=3, embedding=8, heads=2, kernel="symmetric")
    >>> layer(torch.randn(1, 20, 3, 8)).shape
    torch.Size([1, 20, 3, 8])
    """

    def __init__(
        self,
        columns: int,
        embedding: int,
        heads: int,
        kernel: str = "general",
        rows: str = "full",
        points: int = 64,
        dropout: float = 0.0,
        published: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_count("columns", columns, least=1)
        check_count("embedding", embedding, least=1)
        check_choice("rows", rows, ROWS[:2])
        self.columns, self.embedding, self.rows = columns, embedding, rows
        inducing = points if rows == "induced" else None
        self.block = _Block(columns * embedding, heads, dropout, published, inducing, kernel=kernel, **attention)

    def forward(
        self,
        x: Float[Tensor, "batch n d e"],
        memory: Memory | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n d e"]:
        """Each row attends to all rows of x; with a `memory`, to the rows of the memory and to itself only."""
        _check(x, self.columns, self.embedding)
        return self.block(x.flatten(2), memory=memory, alone=memory is not None, seen=seen).view(x.shape)

    def memory(self, x: Float[Tensor, "batch m d e"], seen: list[Tensor] | None = None) -> Memory:
        """Keys and values of x as a support set for later rows; appends inducing-point weights to `seen`.

        >>> layer, x = kq.DatapointAttention(3, 8, heads=2), torch.randn(1, 20, 3, 8)
        >>> later = layer(torch.randn(1, 5, 3, 8), memory=layer.memory(x))
        >>> later.shape
        torch.Size([1, 5, 3, 8])
        """
        _check(x, self.columns, self.embedding)
        options = {"seen": seen} if self.rows == "induced" else {}
        return self.block.memory(x.flatten(2), **options)


class AttributeAttention(nn.Module):
    """Attention across columns, within each row: batch·n sequences of d tokens; options as of `DatapointAttention`."""

    def __init__(self, embedding: int, heads: int, **options: Any) -> None:
        super().__init__()
        check_count("embedding", embedding, least=1)
        self.embedding, self.block = embedding, _Block(embedding, heads, **options)

    def forward(self, x: Float[Tensor, "batch n d e"]) -> Float[Tensor, "batch n d e"]:
        """Each entry attends to all entries of its row."""
        _check(x, x.shape[2] if x.ndim == 4 else 0, self.embedding)
        return torch.cat([self.block(rows) for rows in x.flatten(0, 1).split(BATCH)]).view(x.shape)


class DatapointEncoder(nn.Module):
    """`depth` layers, alternating attention across rows and across columns; with `rows="none"` columns only.

    `thrifty` is activation checkpointing; other options are those of `kq.DatapointAttention`.
    """

    def __init__(
        self,
        columns: int,
        embedding: int,
        depth: int,
        heads: int,
        rows: str = "full",
        points: int = 64,
        thrifty: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count("depth", depth, least=1)
        check_choice("rows", rows, ROWS)
        self.thrifty, self.layers = thrifty, nn.ModuleList()
        for number in range(depth):
            if number % 2 == 0 and rows != "none":
                self.layers.append(DatapointAttention(columns, embedding, heads, rows=rows, points=points, **options))
            else:
                self.layers.append(AttributeAttention(embedding, heads, **options))

    def forward(
        self,
        x: Float[Tensor, "batch n d e"],
        memories: list[Memory] | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n d e"]:
        """Apply all layers; with `memories`, one per row layer, each row of x attends to those and to itself only."""
        unread, recomputed = iter(memories or ()), self.thrifty and torch.is_grad_enabled()
        for layer in self.layers:
            if memories is not None and isinstance(layer, DatapointAttention):
                x = layer(x, next(unread), seen)
            else:
                x = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        return x

    @torch.no_grad()
    def memories(self, x: Float[Tensor, "batch m d e"], seen: list[Tensor] | None = None) -> list[Memory]:
        """Keys and values of the support set x in every row layer."""
        memories = []
        for layer in self.layers:
            if isinstance(layer, DatapointAttention):
                memories.append(layer.memory(x, seen))
            x = layer(x)
        return memories


def _check(x: Tensor, columns: int, embedding: int) -> None:
    if x.ndim != 4 or x.shape[2:] != (columns, embedding):
        expected = f"(batch, n, {columns or 'd'}, {embedding})"
        raise ValueError(f"x must be {expected}, got {tuple(x.shape)}")
