"""Attention between datapoints (NPT): across the rows of a table, then across its columns.

A table is (batch, n, d, e): n rows, d columns, embedding size e per entry. All layers are equivariant to row order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from keyquery.layers.attention import Attention
from keyquery.layers.blocks import PLACE
from keyquery.layers.fused import extend, joint_linear
from keyquery.support.checks import check_choice, check_count

ROWS = ("full", "induced", "none")
BATCH = 32768  # largest batch of the fused kernels
SHORT = 32  # keys up to which unfused attention is faster on a GPU, since fused tiles have 64 or 128 keys
CELLS = 2**20  # scores per block on a CPU, so that they fit into its cache


class Memory(NamedTuple):
    """Keys and values of the support set."""

    key: Float[Tensor, "batch heads m r"]
    value: Float[Tensor, "batch heads m r"]


class Between(Attention):
    """Unmasked `kq.Attention` that also does cross-attention.

    With `full_scale` scores are divided by √dim, not by √r. `cross` marks layers whose keys never come from the
    vectors of the queries, for the analyses of heads.
    """

    def __init__(self, dim: int, heads: int, full_scale: bool = False, cross: bool = False, **options: Any) -> None:
        for name in ("rope", "kv_heads"):
            if options.get(name) is not None:
                raise ValueError(f"{name} must be None for attention between datapoints, got {options[name]!r}")
        super().__init__(dim, heads, **options)
        self.full_scale, self.kind = full_scale, "cross" if cross else "self"

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
        """x attends to `source` (default: x), or to a precomputed `memory`.

        With `alone`, each token of x attends to the memory and to itself only, with its key from `source`: the output
        does not depend on the other tokens of x. The weights, averaged over heads, (batch, n, m), with `alone`
        (batch, n, m + 1), are appended to `seen`.
        """
        if memory is not None and alone:
            own = self.memory(x if source is None else source)
            return self._output(self._apart(self.queries(x), memory, own, seen))
        if memory is not None or source is not None:
            query = self.queries(x)
            memory = self.memory(x if source is None else source) if memory is None else memory
        else:
            query, *both = self._project(x)
            memory = Memory(*both)
        if seen is not None:
            seen.append(self._scores(query, memory.key).softmax(-1).mean(1))
        return self._output(self._mixed(query, *memory))

    def queries(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch heads n r"]:
        """Queries only."""
        if self.query is not None:
            return self._heads(self.query(x), self.heads)
        assert self.shape is not None
        return self.shape(self._heads(self.key(x), self.heads))

    def memory(self, x: Float[Tensor, "batch m dim"]) -> Memory:
        """Keys and values of x."""
        return self.memory_and_others(x)[0]

    def memory_and_others(
        self, x: Float[Tensor, "batch m dim"], *others: nn.Module
    ) -> tuple[Memory, list[Float[Tensor, "batch m _"]]]:
        """Keys and values of x, and its images under other linear maps, in one matrix product."""
        key, value, *rest = joint_linear(x, (self.key, self.value, *others))
        return Memory(self._heads(key, self.heads), self._heads(value, self.heads)), rest

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "batch heads n r"]:
        """Attention output; fused, except where there is no fused kernel or it is slower."""
        share = self.dropout if self.training else 0.0
        unfused = key.shape[-2] <= SHORT if query.is_cuda else share > 0
        if not unfused or torch.compiler.is_compiling():
            return self._attend(query, key, value, None, None, False)[0]
        parts = extend(query, key, value, self._key_norm(key))
        return _in_blocks(*parts, self.scale, share)[..., : value.shape[-1]]

    def _scores(self, query: Tensor, key: Tensor) -> Float[Tensor, "batch heads n m"]:
        scores = query @ key.mT
        for term in self._key_norm(key):
            scores = scores + term.unsqueeze(-2)
        return scores * self.scale

    def _apart(self, query: Tensor, memory: Memory, own: Memory, seen: list[Tensor] | None) -> Tensor:
        """Attention of each query to the memory and its own key, which comes last."""
        beside = (query * own.key).sum(-1, keepdim=True)
        for term in self._key_norm(own.key):
            beside = beside + term.unsqueeze(-1)
        weights = torch.cat((self._scores(query, memory.key), beside * self.scale), -1).softmax(-1)
        if seen is not None:
            seen.append(weights.mean(1))
        return weights[..., :-1] @ memory.value + weights[..., -1:] * own.value


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float, share: float) -> Tensor:
    """dropout(softmax(scale·q kᵀ)) v; if large, per head and block of queries, whose scores backward computes again."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dropout((query * scale @ key.mT).softmax(-1), share) @ value

    n, m = query.shape[-2], key.shape[-2]
    if n * m <= CELLS or query.is_cuda:
        return attend(query, key, value)
    heads = [
        torch.cat([checkpoint(attend, block, k, v, use_reentrant=False) for block in q.split(max(CELLS // m, 1))])
        for q, k, v in zip(*(part.flatten(0, -3) for part in (query, key, value)), strict=True)
    ]
    return torch.stack(heads).unflatten(0, query.shape[:-2])


class Induced(nn.Module):
    """Attention through inducing points: `points` learned tokens attend to all rows, and rows attend to them.

    The cost is linear in the number of rows, and the layer is equivariant to row order (primal attention is not).
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
        """x attends to the inducing points after they attended to `source`, or to those of a `memory`.

        `alone` has no effect, since x does not reach the points of a memory. The weights are appended to `seen`.
        """
        memory = self.memory(x if source is None else source) if memory is None else memory
        return self.spread(x, memory=memory, seen=seen)

    def memory(self, x: Float[Tensor, "batch m dim"], seen: list[Tensor] | None = None) -> Memory:
        """Keys and values of the inducing points after they attended to x; appends weights (batch, p, m) to `seen`."""
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
        self.attention_norm = nn.LayerNorm(dim, eps, **place)  # with `published`, of queries only
        self.attention: Between | Induced
        self.attention = Between(dim, heads, **options) if points is None else Induced(dim, heads, points, **options)
        self.residual = nn.Linear(dim, dim, **place)
        if not published:
            nn.init.eye_(self.residual.weight)
            nn.init.zeros_(self.residual.bias)
        self.mlp_norm = nn.LayerNorm(dim, eps, **place)
        wide, back = nn.Linear(dim, 4 * dim, **place), nn.Linear(4 * dim, dim, **place)
        self.mlp = nn.Sequential(wide, nn.GELU(), nn.Dropout(dropout), back)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        r, options = self._residual(x, options)
        r = r + self.dropout(self.attention(self._normed(x), **options))
        return r + self.dropout(self.mlp(self.mlp_norm(r)))

    def _residual(self, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """W x, and the options of attention with its source, or its keys and values, which are maps of x as well."""
        if not self.published:
            return self.residual(x), options
        if options.get("memory") is not None or not isinstance(self.attention, Between):
            return self.residual(x), {"source": x, **options}
        memory, (r,) = self.attention.memory_and_others(x, self.residual)
        return r, {**options, "memory": memory}

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
        self.columns = columns
        self.embedding = embedding
        self.rows = rows
        count = points if rows == "induced" else None
        self.block = _Block(columns * embedding, heads, dropout, published, count, kernel=kernel, **attention)

    def forward(
        self,
        x: Float[Tensor, "batch n d e"],
        memory: Memory | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n d e"]:
        """Each row attends to all rows of x; with a `memory`, to the rows of the memory and to itself only."""
        _check(x, self.columns, self.embedding)
        options = {} if memory is None else {"memory": memory, "alone": True}
        return self.block(x.flatten(2), seen=seen, **options).view(x.shape)

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
    """Attention across columns, within each row: (batch, n, d, e) as batch·n sequences of d tokens.

    Otherwise as `DatapointAttention`; equivariant to the order of columns.
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
        """Each entry attends to all entries of its row."""
        _check(x, x.shape[2] if x.ndim == 4 else 0, self.embedding)
        rows = x.flatten(0, 1)
        out = self.block(rows) if len(rows) <= BATCH else torch.cat([self.block(part) for part in rows.split(BATCH)])
        return out.view(x.shape)


class DatapointEncoder(nn.Module):
    """`depth` layers, alternating attention across rows and across columns; with `rows="none"` columns only.

    `thrifty` is activation checkpointing; `column_kernel` is `kernel` by default, other options are those of
    `kq.DatapointAttention`.
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
        """Apply all layers; with `memories`, one per row layer, each row of x attends to those and to itself only."""
        unread = iter(memories or ())
        for layer in self.layers:
            if isinstance(layer, AttributeAttention) or memories is None:
                x = self._run(layer, x)
            else:
                x = layer(x, next(unread), seen)
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

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if not (self.thrifty and torch.is_grad_enabled()):
            return layer(x)
        return checkpoint(layer, x, use_reentrant=False)


def _check(x: Tensor, columns: int, embedding: int) -> None:
    if x.ndim != 4 or x.shape[2:] != (columns, embedding):
        expected = f"(batch, n, {columns or 'd'}, {embedding})"
        raise ValueError(f"x must be {expected}, got {tuple(x.shape)}")
