"""Attention between datapoints: rows of a table attend to rows, then columns to columns, as in NPT.

A table is (batch, n, d, e): n rows, d columns, e numbers for each entry. Nothing here knows the order of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keyquery.layers.attention import Attention
from keyquery.layers.blocks import PLACE
from keyquery.layers.cpu_dropout import Dropout, drop_and_attend
from keyquery.layers.fused import extend
from keyquery.support.checks import check_choice, check_count

ROWS = ("full", "induced", "none")
MOST = 32768  # sequences that fused kernels take at a time
SHORT = 32  # keys, up to which they leave most of a GPU idle: a tile of theirs has 64 or 128


class Memory(NamedTuple):
    """Keys and values of rows, for others to attend to."""

    key: Float[Tensor, "batch heads m r"]
    value: Float[Tensor, "batch heads m r"]


class Between(Attention):
    """`kq.Attention` whose keys and values may be those of other tokens than its queries; all tokens see all.

    With `full_scale` scores are divided by √dim, not by √r. With `cross` keys are never of the vectors that queries are
    of, which whoever looks at its heads must know.
    """

    def __init__(self, dim: int, heads: int, full_scale: bool = False, cross: bool = False, **options: Any) -> None:
        for name in ("rope", "kv_heads"):
            if options.get(name) is not None:
                raise ValueError(f"{name} must be None between datapoints, got {options[name]!r}")
        super().__init__(dim, heads, **options)
        self.full_scale, self.kind = full_scale, "cross" if cross else "self"

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return (self.dim if self.full_scale else self.head_dim) ** -0.5

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "batch n dim"],
        source: Float[Tensor, "batch m dim"] | None = None,
        memory: Memory | None = None,
        alone: bool = False,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n dim"]:
        """x attends to `source` (None: to itself), or to a `memory` made earlier.

        With `alone`, each token of x attends to the memory and to itself, whose key is of `source`: what it gives does
        not depend on the other tokens of x. `seen` is given the weights, the mean over heads (batch, n, m), or with
        `alone` (batch, n, m + 1).
        """
        query = self.queries(x)
        if memory is not None and alone:
            return self._output(self._apart(query, memory, self.memory(x if source is None else source), seen))
        found = self.memory(x if source is None else source) if memory is None else memory
        if seen is not None:
            seen.append(self._scores(query, found.key).softmax(-1).mean(1))
        return self._output(self._mixed(query, *found))

    def queries(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch heads n r"]:
        """Queries, without keys."""
        if self.query is not None:
            return self._heads(self.query(x), self.heads)
        assert self.shape is not None
        return self.shape(self._heads(self.key(x), self.heads))

    def memory(self, x: Float[Tensor, "batch m dim"]) -> Memory:
        """Keys and values of x."""
        return Memory(self._heads(self.key(x), self.heads), self._heads(self.value(x), self.heads))

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "batch heads n r"]:
        """Values by the weights of their keys, fused, but where torch has nothing fused that is any good."""
        dropout = self.dropout if self.training else 0.0
        by_hand = key.shape[-2] <= SHORT if query.is_cuda else dropout > 0
        if not by_hand or torch.compiler.is_compiling():
            return self._attend(query, key, value, None, None, False)[0]
        parts = extend(query, key, value, self._key_norm(key))
        return drop_and_attend(*parts, self.scale, dropout)[..., : value.shape[-1]]

    def _scores(self, query: Tensor, key: Tensor) -> Float[Tensor, "batch heads n m"]:
        scores = query @ key.mT
        for term in self._key_norm(key):
            scores = scores + term.unsqueeze(-2)
        return scores * self.scale

    def _apart(self, query: Tensor, memory: Memory, own: Memory, seen: list[Tensor] | None) -> Tensor:
        """Each query over the memory and its own key, which stands last whichever query it is."""
        beside = (query * own.key).sum(-1, keepdim=True)
        for term in self._key_norm(own.key):
            beside = beside + term.unsqueeze(-1)
        weights = torch.cat((self._scores(query, memory.key), beside * self.scale), -1).softmax(-1)
        if seen is not None:
            seen.append(weights.mean(1))
        return weights[..., :-1] @ memory.value + weights[..., -1:] * own.value


class Induced(nn.Module):
    """Attention through `points` learned tokens: they attend to all rows, and rows attend to them.

    Its cost grows with the number of rows, not with its square, and the order of rows still does not matter; through
    primal attention, which has a row of weights for each place, it would.
    """

    def __init__(self, dim: int, heads: int, points: int = 64, **options: Any) -> None:
        super().__init__()
        check_count("points", points, least=1)
        place: dict[str, Any] = {name: options.get(name) for name in PLACE}
        self.points = nn.Parameter(torch.randn(points, dim, **place))
        self.gather, self.spread = (Between(dim, heads, **{**options, "cross": True}) for _ in range(2))

    def forward(
        self,
        x: Float[Tensor, "batch n dim"],
        source: Float[Tensor, "batch m dim"] | None = None,
        memory: Memory | None = None,
        alone: bool = False,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n dim"]:
        """x attends to the points, which have attended to `source`; with a `memory`, to what they were then.

        `alone` changes nothing: x does not reach the points of a memory. `seen` has the weights of points.
        """
        found = self.memory(x if source is None else source) if memory is None else memory
        return self.spread(x, memory=found, seen=seen)

    def memory(self, x: Float[Tensor, "batch m dim"], seen: list[Tensor] | None = None) -> Memory:
        """Keys and values of the points after they have attended to x; `seen` is given the weights (batch, p, m)."""
        points = self.points.expand(len(x), -1, -1).to(x.dtype)
        return self.spread.memory(points + self.gather(points, source=x, seen=seen))


class _Block(nn.Module):
    """R = W x + attention(norm(x)), then R + mlp(norm(R)), over tokens (batch, n, dim)."""

    def __init__(self, dim: int, heads: int, dropout: float, published: bool, points: int | None, **options: Any):
        super().__init__()
        eps = 1e-12 if published else 1e-5
        place: dict[str, Any] = {name: options.get(name) for name in PLACE}
        options = {"dropout": dropout, "full_scale": published, "cross": published, **options}
        self.published = published
        self.attention_norm = nn.LayerNorm(dim, eps, **place)  # as published, of queries alone
        self.attention: Between | Induced
        self.attention = Between(dim, heads, **options) if points is None else Induced(dim, heads, points, **options)
        self.residual = nn.Linear(dim, dim, **place)
        if not published:
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)
        self.mlp_norm = nn.LayerNorm(dim, eps, **place)
        wide, back = nn.Linear(dim, 4 * dim, **place), nn.Linear(4 * dim, dim, **place)
        self.mlp = nn.Sequential(wide, nn.GELU(), Dropout(dropout), back)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        normed = self._normed(x)
        source = {"source": x} if self.published else {}
        r = self.residual(x) + self.dropout(self.attention(normed, **source, **options))
        return r + self.dropout(self.mlp(self.mlp_norm(r)))

    def memory(self, x: Tensor, **options: Any) -> Memory:
        return self.attention.memory(x if self.published else self._normed(x), **options)

    def _normed(self, x: Tensor) -> Tensor:
        return self.attention_norm(x).to(
            x.dtype
        )  # under autocast it is float32, and each map would make it short again


class DatapointAttention(nn.Module):
    """Rows of a table attend to rows: (batch, n, d, e) as n tokens of width d·e, a residual block with pre-norm.

        R = W x + attention(norm(x)),  out = R + mlp(norm(R))

    `kernel` is any of `kq.Attention`, and `attention` holds its other options. `rows` is "full", every row to every
    row, or "induced", through `points` learned tokens, whose cost grows with n and not with n². With `published`, the
    layer is that of the released code: keys and values are of x as it stands, not of norm(x), scores are divided by
    the root of the whole width d·e in place of a head's, norms have an eps of 1e-12, and W begins at random, not as
    the identity.

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
        count = points if rows == "induced" else None
        self.block = _Block(columns * embedding, heads, dropout, published, count, kernel=kernel, **attention)

    def forward(
        self,
        x: Float[Tensor, "batch n d e"],
        memory: Memory | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n d e"]:
        """Every row attends to every row of x; with a `memory`, to the rows that it holds and to itself alone."""
        _check(x, self.columns, self.embedding)
        options = {} if memory is None else {"memory": memory, "alone": True}
        return self.block(x.flatten(2), seen=seen, **options).view(x.shape)

    def memory(self, x: Float[Tensor, "batch m d e"], seen: list[Tensor] | None = None) -> Memory:
        """What rows that come later attend to, in the place of x; of an induced layer, `seen` is what points saw.

        >>> layer, x = kq.DatapointAttention(3, 8, heads=2), torch.randn(1, 20, 3, 8)
        >>> later = layer(torch.randn(1, 5, 3, 8), memory=layer.memory(x))
        >>> later.shape
        torch.Size([1, 5, 3, 8])
        """
        _check(x, self.columns, self.embedding)
        options = {"seen": seen} if self.rows == "induced" else {}
        return self.block.memory(x.flatten(2), **options)


class AttributeAttention(nn.Module):
    """Columns of a table attend to columns, within each row: (batch, n, d, e) as batch·n sequences of d tokens.

    Otherwise as `DatapointAttention`; the order of columns does not matter either.

    >>> AttributeAttention(embedding=8, heads=2)(torch.randn(1, 20, 3, 8)).shape
    torch.Size([1, 20, 3, 8])
    """

    def __init__(
        self,
        embedding: int,
        heads: int,
        kernel: str = "general",
        dropout: float = 0.0,
        published: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_count("embedding", embedding, least=1)
        self.embedding = embedding
        self.block = _Block(embedding, heads, dropout, published, None, kernel=kernel, **attention)

    def forward(self, x: Float[Tensor, "batch n d e"]) -> Float[Tensor, "batch n d e"]:
        """Every entry of a row attends to every entry of it."""
        _check(x, x.shape[2] if x.ndim == 4 else 0, self.embedding)
        rows = x.flatten(0, 1)
        out = self.block(rows) if len(rows) <= MOST else torch.cat([self.block(part) for part in rows.split(MOST)])
        return out.view(x.shape)


class DatapointEncoder(nn.Module):
    """`depth` layers, rows to rows and columns to columns in turn, rows first; with `rows="none"` columns alone.

    Other options are those of `kq.DatapointAttention`; `column_kernel` is the kernel between columns, where that is to
    be another one. With `thrifty` nothing within a layer is kept for backward: it is computed again.

    >>> model = DatapointEncoder(columns=3, embedding=8, depth=4, heads=2)
    >>> [type(layer).__name__ for layer in model.layers[:2]]
    ['DatapointAttention', 'AttributeAttention']
    >>> table, later = torch.randn(1, 20, 3, 8), torch.randn(1, 5, 3, 8)
    >>> model(later, memories=model.memories(table)).shape
    torch.Size([1, 5, 3, 8])
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
        kernel: str = "general",
        column_kernel: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count("depth", depth, least=1)
        check_choice("rows", rows, ROWS)
        self.thrifty = thrifty
        layers: list[nn.Module] = []
        for number in range(depth):
            if number % 2 == 0 and rows != "none":
                layers.append(DatapointAttention(columns, embedding, heads, kernel, rows, points, **options))
            else:
                layers.append(AttributeAttention(embedding, heads, column_kernel or kernel, **options))
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        x: Float[Tensor, "batch n d e"],
        memories: list[Memory] | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n d e"]:
        """All layers; with `memories`, one a layer of rows, each row of x attends to those and to itself alone."""
        at = 0
        for layer in self.layers:
            if isinstance(layer, AttributeAttention) or memories is None:
                x = self._run(layer, x)
            else:
                x = layer(x, memories[at], seen)
                at += 1
        return x

    @torch.no_grad()
    def memories(self, x: Float[Tensor, "batch m d e"], seen: list[Tensor] | None = None) -> list[Memory]:
        """What later rows attend to in every layer of rows, when the rows of x attend to each other."""
        found = []
        for layer in self.layers:
            if isinstance(layer, DatapointAttention):
                found.append(layer.memory(x, seen))
            x = layer(x)
        return found

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if not (self.thrifty and torch.is_grad_enabled()):
            return layer(x)
        return checkpoint(layer, x, use_reentrant=False)


def _check(x: Tensor, columns: int, embedding: int) -> None:
    if x.ndim != 4 or x.shape[2:] != (columns, embedding):
        expected = f"(batch, n, {columns or 'd'}, {embedding})"
        raise ValueError(f"x must be {expected}, got {tuple(x.shape)}")
