"""Attention whose kernel has a structure by construction: symmetric, PSD, skew, or split between the two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import linear

from keyquery.forms import Form, Rope
from keyquery.forms.shares import Visible, shares
from keyquery.layers.cache import Cache
from keyquery.layers.fused import attend
from keyquery.layers.kernels import GROUPED, make
from keyquery.layers.packing import Packing
from keyquery.support.checks import check_count


class Attention(nn.Module):
    """Self-attention with scores (C z(x))·z(y)/√r, z = Wx, where `kernel` says what C may be.

    | kernel | queries and keys | for all values of the parameters |
    |---|---|---|
    | general | q = Wq x, k = Wk x | any M |
    | symmetric | q = D z, k = z | M = Mᵀ, may be indefinite |
    | psd | q = k = z | M ⪰ 0 |
    | rbf | q = k = z, score −½‖q − k‖²/√r | translation-invariant |
    | skew | q = Jᵀz, k = z | M = −Mᵀ |
    | split | `symmetric_dims` of each head symmetric, the rest skew | M = S + A, capacity set by hand |
    | pairwise | q = Pᵀz, k = z, P a matrix for each head | contains the four above it but rbf |

    With `rope` the same holds for score(i, j) and score(j, i) under rotation. A `symmetric_dims` that is a float is a
    share of the head. `kv_heads` below `heads` groups queries, for the kernels whose heads then stay different.

    >>> layer = kq.Attention(64, heads=4, kernel="symmetric")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> layer.form().symmetry.min() > 1 - 1e-12
    tensor(True)
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kernel: str = "general",
        bias: bool = True,
        dropout: float = 0.0,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        rope: Rope | None = None,
        symmetric_dims: int | float = 0.5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.kernel = dim, heads, kernel
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.dropout, self.rope = dropout, rope
        self.head_dim = _head_dim(dim, heads, self.kv_heads, head_dim, dropout, rope)
        with torch.device(torch.get_default_device() if device is None else device):
            self.shape = make(kernel, heads, self.head_dim, symmetric_dims, rope)
        if self.kv_heads != heads and kernel not in GROUPED:
            raise ValueError(
                f"kernel {kernel!r} cannot share keys among heads: they would be identical. kv_heads must be {heads}"
            )
        options = {"bias": bias, "device": device, "dtype": dtype}
        inner, shared = heads * self.head_dim, self.kv_heads * self.head_dim
        self.query = nn.Linear(dim, inner, **options) if kernel == "general" else None
        self.key = nn.Linear(dim, shared, **options)
        self.value = nn.Linear(dim, shared, **options)
        self.output = nn.Linear(inner, dim, **options)
        if dtype is not None and self.shape is not None:
            self.shape.to(dtype)

    @property
    def notes(self) -> tuple[str, ...]:
        """What its form leaves out."""
        return ("the norm of the key, which an rbf kernel takes off, is in no form",) if self.kernel == "rbf" else ()

    @property
    def scale(self) -> float:
        """What scores are multiplied by, 1/√r."""
        return self.head_dim**-0.5

    def forward(
        self,
        x: Float[Tensor, "*batch n dim"],
        mask: Bool[Tensor, ...] | None = None,
        is_causal: bool = False,
        positions: Shaped[Tensor, ...] | None = None,
        cache: Cache | None = None,
        offsets: Int[Tensor, " ends"] | None = None,
    ) -> Float[Tensor, "*batch n out"]:
        """Attend within each sequence of x (batch, n, dim).

        `mask` (batch, n) is True for real tokens; (batch, n, m) or (batch, heads, n, m) is True where query n may
        attend to key m. With `is_causal` both hold. `positions` (n,) or (batch, n) turn the rotary planes; without
        them tokens stand one after the other, behind those of the `cache`. With `offsets`, x (total, dim) holds
        sequences one after the other: sequence s is x[offsets[s]:offsets[s + 1]].
        """
        if offsets is not None:
            return self._packed(x, offsets, mask, is_causal, positions, cache)
        real, visible = self._check(x, mask, positions, cache)
        if real is not None:
            x = x.where(real.unsqueeze(-1), 0.0)  # what padding holds, NaN also, must not reach gradients either
        query, key, value = self._rotated(x, positions, 0 if cache is None else cache.length)
        if cache is not None:
            key, value, real = cache.append(self, key, value, real)
        return self._output(*self._attend(query, key, value, real, visible, is_causal))

    def _packed(self, x: Tensor, offsets: Tensor, mask: Any, is_causal: bool, positions: Any, cache: Any) -> Tensor:
        if x.ndim != 2 or mask is not None or cache is not None:
            raise ValueError("with offsets, x must be (total, dim), and neither mask nor cache may be given")
        packing = Packing(offsets, len(x))
        x = x.unsqueeze(0)
        self._check(x, None, positions, None)
        parts = self._rotated(x, packing.positions if positions is None else positions, 0)
        rows, tokens = [], []
        for group in packing.groups():
            query, key, value = map(group.unpack, parts)
            out, _ = self._attend(query, key, value, group.real, None, is_causal)
            rows.append(group.pack(out))
            tokens.append(group.tokens)
        if not rows:
            return x.squeeze(0)  # no token at all
        back = torch.cat(tokens).argsort()
        return self._output(torch.cat(rows, 1)[:, back].unsqueeze(0)).squeeze(0)

    def _rotated(self, x: Tensor, positions: Tensor | None, old: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two turned to their positions."""
        query, key, value = self._project(x)
        if self.rope is None:
            return query, key, value
        if positions is None:
            positions = torch.arange(old, old + x.shape[1], device=x.device)
        at = positions.unsqueeze(-2) if positions.ndim == 2 else positions
        return self.rope.rotate(query, at), self.rope.rotate(key, at), value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, visible: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        query, key = self._centred(query, key, real)
        dropout = self.dropout if self.training else 0.0
        return attend(query, key, value, self.scale, real, visible, is_causal, self._key_norm(key), dropout)

    def _output(self, out: Tensor, seen: Tensor | None = None) -> Tensor:
        """Heads together; a query that sees nothing in any head gives 0, without the bias."""
        joined = self.output(out.transpose(1, 2).flatten(2))
        return joined if seen is None else joined.where(seen.any(1), 0.0)

    def maps(
        self,
        x: Float[Tensor, "batch n dim"],
        mask: Bool[Tensor, ...] | None = None,
        is_causal: bool = False,
        positions: Shaped[Tensor, ...] | None = None,
    ) -> Float[Tensor, "batch heads n n"]:
        """The attention on x: in row i, what token i takes of each token; options as those of the layer's call.

        >>> kq.Attention(8, 2).maps(torch.randn(1, 5, 8)).sum(-1).allclose(torch.ones(()))
        True
        """
        return torch.cat(list(self.each_map(x, mask, is_causal, positions)), 1)

    def each_map(
        self,
        x: Float[Tensor, "batch n dim"],
        mask: Bool[Tensor, ...] | None = None,
        is_causal: bool = False,
        positions: Shaped[Tensor, ...] | None = None,
    ) -> Iterator[Float[Tensor, "batch 1 n n"]]:
        """`maps`, one head after the other, so that no more than one need be in memory.

        >>> sum(1 for head in kq.Attention(8, 2).each_map(torch.randn(1, 5, 8)))
        2
        """
        real, visible = self._check(x, mask, positions, None)
        if real is not None:
            x = x.where(real.unsqueeze(-1), 0.0)
        query, key, _ = self._rotated(x, positions, 0)
        query, key = self._centred(query, key, real)
        terms = self._key_norm(key)
        # Values that tell the tokens apart come out as the weights they were taken with.
        apart = torch.eye(x.shape[1], dtype=key.dtype, device=key.device).expand(len(x), 1, -1, -1)
        for head in range(self.heads):
            mine, its = slice(head, head + 1), slice(shared := head * self.kv_heads // self.heads, shared + 1)
            seen = visible if visible is None or visible.shape[1] == 1 else visible[:, mine]
            few = tuple(term[:, its] for term in terms)
            yield attend(query[:, mine], key[:, its], apart, self.scale, real, seen, is_causal, few)[0]

    def queries_and_keys(self, x: Float[Tensor, "batch n dim"]) -> tuple[Tensor, Tensor]:
        """Queries (batch, heads, n, r) and keys (batch, kv_heads, n, r), before any rotation."""
        key = self._heads(self.key(x), self.kv_heads)
        if self.query is not None:
            return self._heads(self.query(x), self.heads), key
        assert self.shape is not None
        return self.shape(self._repeated(key)), key

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, by one matrix product over x."""
        maps = [part for part in (self.query, self.key, self.value) if part is not None]
        if any(type(part) is not nn.Linear or part._forward_hooks or part._forward_pre_hooks for part in maps):
            # Somebody has replaced a projection or listens to it: each must be called.
            return *self.queries_and_keys(x), self._heads(self.value(x), self.kv_heads)
        bias = None if self.key.bias is None else torch.cat([part.bias for part in maps])
        out = linear(x, torch.cat([part.weight for part in maps]), bias)
        *own, key, value = out.split([part.out_features for part in maps], -1)
        key, value = self._heads(key, self.kv_heads), self._heads(value, self.kv_heads)
        if own:
            return self._heads(own[0], self.heads), key, value
        assert self.shape is not None
        return self.shape(self._repeated(key)), key, value

    def form(self) -> Form:
        """The kernel as a Form: batch (heads,), or (kv_heads, heads that share one) where queries are grouped.

        For `rbf` it is the metric WᵀW.
        """
        key = self.key.weight.unflatten(0, (self.kv_heads, self.head_dim))
        if self.query is not None:
            query = self.query.weight.unflatten(0, (self.heads, self.head_dim))
        else:
            assert self.shape is not None
            query = self.shape(self._repeated(key.mT)).mT
        return self._grouped(query, key)

    def output_form(self) -> Form:
        """Each head's output map W_O W_V, from the token looked at to what is written, with the batch of `form`."""
        out = self.output.weight.mT.unflatten(0, (self.heads, self.head_dim))
        value = self.value.weight.unflatten(0, (self.kv_heads, self.head_dim))
        return self._grouped(out, value)

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Biases of queries (heads, r) and keys (kv_heads, r)."""
        if self.key.bias is None:
            return None, None
        key = self.key.bias.unflatten(0, (self.kv_heads, self.head_dim))
        if self.query is not None:
            return self.query.bias.unflatten(0, (self.heads, self.head_dim)), key
        assert self.shape is not None
        return self.shape(self._repeated(key.unsqueeze(-2))).squeeze(-2), key

    def parts(
        self, x: Float[Tensor, "batch n dim"], mask: Bool[Tensor, "batch n"] | None = None, is_causal: bool = False
    ) -> dict[str, Float[Tensor, " heads"]]:
        """Shares of the variance of each head's scores on x by part, in closed form (tokens independent), and symmetry.

        What `keyquery look` gives with pairs="independent", of this layer and its own input; the layer is not run.

        >>> shares = kq.Attention(8, 2, kernel="psd").parts(torch.randn(4, 16, 8))
        >>> bool(shares["skew"].max() < 1e-12)
        True
        """
        self._check(x, mask, None, None)
        if mask is not None and (mask.ndim != 2 or not bool(mask.any())):
            raise ValueError("mask must be (batch, n) here, with at least one real token")
        if x.shape[0] * x.shape[1] == 0:
            raise ValueError(f"x must hold tokens, got {tuple(x.shape)}")
        with torch.no_grad():
            query, key = self.queries_and_keys(x)
            key = key.repeat_interleave(self.heads // self.kv_heads, 1)
            if self.kernel == "rbf":  # what an rbf kernel takes off is a dimension of the key where the query has 1
                query, key = query.double(), key.double()  # squares of long keys would be rounded
                query = torch.cat((query, torch.ones_like(query[..., :1])), -1)
                key = torch.cat((key, key.square().sum(-1, keepdim=True) / -2), -1)
            joint = torch.cat((query, key), -1).transpose(0, 1).flatten(1, 2).double().cpu()
            joint = joint if mask is None else joint[:, mask.flatten().cpu()]
            mean = joint.mean(1)
            covariance = (joint - mean.unsqueeze(1)).mT @ (joint - mean.unsqueeze(1)) / joint.shape[1]
            return shares(mean, covariance, self.scale, Visible(x.shape[1], is_causal), self.rope)

    def extra_repr(self) -> str:
        """What a print of the module says."""
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"{self.dim}, heads={self.heads}{grouped}, kernel={self.kernel!r}, head_dim={self.head_dim}"

    def _grouped(self, query: Tensor, key: Tensor) -> Form:
        if self.kv_heads == self.heads:
            return Form(query, key)
        return Form(query.unflatten(0, (self.kv_heads, -1)), key.unsqueeze(1))

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, self.head_dim)).transpose(1, 2)

    def _repeated(self, key: Tensor) -> Tensor:
        """One z for each query head, (..., heads, n, r)."""
        return key if self.kv_heads == self.heads else key.repeat_interleave(self.heads // self.kv_heads, -3)

    def _centred(self, query: Tensor, key: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys of an rbf kernel less the first real key of their sequence.

        ‖q − k‖ does not see it, but q·k − ½‖k‖² would lose small differences of long vectors. The first key is seen
        before all others and stays the first in a cache. It has no gradient, since nothing depends on it.
        """
        if self.kernel != "rbf" or key.shape[-2] == 0:
            return query, key
        if real is None:
            first = key[..., :1, :]
        else:
            first = key.gather(-2, real.int().argmax(-1)[:, None, None, None].expand(*key.shape[:2], 1, key.shape[-1]))
        first = first.detach()
        return query - first, key - first

    def _key_norm(self, key: Tensor) -> tuple[Tensor, ...]:
        """−½‖k‖² of an rbf kernel, as a high and a low part that keep its precision in short floats."""
        if self.kernel != "rbf":
            return ()
        exact = key.float().square().sum(-1) / -2 if key.dtype != torch.float64 else key.square().sum(-1) / -2
        high = exact.to(key.dtype)
        return high, (exact - high).to(key.dtype)

    def _check(
        self, x: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which tokens are real (batch, n), and which keys each query may see (batch, 1 or heads, n, m)."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (batch, n, {self.dim}), got {tuple(x.shape)}")
        batch, n = x.shape[:2]
        if cache is not None:
            if not isinstance(cache, Cache):
                raise TypeError(f"cache must be a kq.Cache, got {type(cache).__name__}")
            cache.check(self, batch)
        if positions is not None:
            shape = tuple(getattr(positions, "shape", ()))
            if shape not in ((n,), (batch, n)):
                raise ValueError(f"positions must be a tensor ({n},) or ({batch}, {n}), got {shape}")
        if mask is None:
            return None, None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(
                f"mask must be bool, True where attention may go, got {getattr(mask, 'dtype', type(mask).__name__)}"
            )
        m = n if cache is None else cache.length + n
        if mask.shape == (batch, n):
            return mask, None
        if mask.shape == (batch, n, m):
            return None, mask.unsqueeze(1)
        if mask.shape == (batch, self.heads, n, m):
            return None, mask
        raise ValueError(
            f"mask must be ({batch}, {n}), ({batch}, {n}, {m}) or ({batch}, {self.heads}, {n}, {m}), "
            f"got {tuple(mask.shape)}"
        )


def _head_dim(dim: int, heads: int, kv_heads: int, head_dim: int | None, dropout: float, rope: Rope | None) -> int:
    """The width of a head, all counts checked."""
    for name, value in (("dim", dim), ("heads", heads), ("kv_heads", kv_heads)):
        check_count(name, value, least=1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads: {kv_heads} does not divide {heads}")
    if head_dim is None:
        if dim % heads:
            raise ValueError(f"heads must divide dim unless head_dim is given: {heads} does not divide {dim}")
        head_dim = dim // heads
    check_count("head_dim", head_dim, least=1)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be from 0 to below 1, got {dropout}")
    if rope is not None and not isinstance(rope, Rope):
        raise TypeError(f"rope must be a kq.Rope or None, got {type(rope).__name__}")
    if rope is not None and rope.dims > head_dim:
        raise ValueError(f"rope turns {rope.dims} dimensions, but a head has {head_dim}")
    return head_dim
