"""Attention whose QK form is structured by construction: symmetric, PSD, skew, or split between the two."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from keyquery.forms import Form, Rope
from keyquery.layers.cache import Cache
from keyquery.layers.fused import attend
from keyquery.layers.kernels import GROUPED, checked_head_dim, make
from keyquery.layers.packing import Packing


class Attention(nn.Module):
    """Multi-head self-attention with a structured kernel: scores xᵀMy/√r, M = QᵀK constrained by `kernel`.

    | kernel | queries and keys, z = Wx | for all parameter values |
    |---|---|---|
    | general | q = Wq x, k = Wk x | M unconstrained |
    | symmetric | q = D z, k = z | M = Mᵀ, may be indefinite |
    | psd | q = k = z | M ⪰ 0 |
    | rbf | q = k = z, score −½‖q − k‖²/√r | translation-invariant |
    | skew | q = Jᵀz, k = z | M = −Mᵀ |
    | split | `symmetric_dims` dimensions per head symmetric, the rest skew | M = S + A, ranks chosen |
    | pairwise | q = Pᵀz, k = z, P one r×r matrix per head | contains symmetric, psd, skew and split |

    With `rope` the same relation holds between score(i, j) and score(j, i).

    Parameters
    ----------
    dim, heads
        Width of the input, and number of query heads.
    kernel
        One of the table. Default: "general".
    bias
        Bias of the projections. Default: True.
    dropout
        On the attention weights. Default: 0.
    head_dim
        r. Default: dim / heads.
    kv_heads
        Fewer than `heads` for GQA/MQA; only for kernels whose heads stay distinct. Default: heads.
    rope
        `kq.Rope`. Default: None.
    symmetric_dims
        For "split": dimensions per head, or a share of them if a float. Default: 0.5.
    device, dtype
        Of the parameters. Default: those of torch.

    See Also
    --------
    Encoder, Decoder : stacks of blocks.
    Form : the QK form that `form()` returns.

    Examples
    --------
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
        self.dim = dim
        self.heads = heads
        self.kernel = kernel
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.dropout, self.rope = dropout, rope
        self.head_dim = checked_head_dim(dim, heads, self.kv_heads, head_dim, dropout, rope)
        with torch.device(torch.get_default_device() if device is None else device):
            self.shape = make(kernel, heads, self.head_dim, symmetric_dims, rope)
        if self.kv_heads != heads and kernel not in GROUPED:
            raise ValueError(
                f"kernel {kernel!r} does not support GQA, since heads that share keys would be identical: "
                f"kv_heads must be {heads}"
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
        """What `form()` does not contain."""
        return ("the key-norm term −½‖k‖² of the rbf kernel is not in the form",) if self.kernel == "rbf" else ()

    @property
    def scale(self) -> float:
        """The factor on the scores, 1/√r."""
        return self.head_dim**-0.5

    def forward(
        self,
        x: Float[Tensor, "*batch n dim"],
        mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        positions: Shaped[Tensor, "..."] | None = None,
        cache: Cache | None = None,
        offsets: Int[Tensor, " ends"] | None = None,
    ) -> Float[Tensor, "*batch n out"]:
        """Attend within each sequence of x (batch, n, dim).

        Parameters
        ----------
        x
            Tokens (batch, n, dim), or packed (total, dim) with `offsets`.
        mask
            (batch, n), True for real tokens; or (batch, n, m) or (batch, heads, n, m), True where query n may attend
            to key m. Combined with `is_causal`.
        is_causal
            Default: False.
        positions
            RoPE positions (n,) or (batch, n). Default: consecutive, after the tokens in `cache`.
        cache
            Keys and values of earlier tokens, extended in place.
        offsets
            For packed sequences: sequence s is x[offsets[s]:offsets[s + 1]].
        """
        if offsets is not None:
            return self._packed(x, offsets, mask, is_causal, positions, cache)
        real, visible = self._check(x, mask, positions, cache)
        if real is not None:
            x = x.where(real.unsqueeze(-1), 0.0)  # NaN in padding must not reach outputs or gradients
        query, key, value = self._rotated(x, positions, 0 if cache is None else cache.length)
        if cache is not None:
            key, value, real = cache.append(self, key, value, real)
        return self._output(*self._attend(query, key, value, real, visible, is_causal))

    def _packed(self, x: Tensor, offsets: Tensor, mask: Any, is_causal: bool, positions: Any, cache: Any) -> Tensor:
        if x.ndim != 2 or mask is not None or cache is not None:
            raise ValueError("with offsets, x must be (total, dim), and mask and cache must be None")
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
            return x.squeeze(0)  # no tokens
        back = torch.cat(tokens).argsort()
        return self._output(torch.cat(rows, 1)[:, back].unsqueeze(0)).squeeze(0)

    def _rotated(self, x: Tensor, positions: Tensor | None, old: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, with queries and keys rotated to their positions."""
        query, key, value = self._project(x)
        if self.rope is None:
            return query, key, value
        if positions is None:
            positions = torch.arange(old, old + x.shape[1], device=x.device)
        positions = positions.unsqueeze(-2) if positions.ndim == 2 else positions
        return self.rope.rotate(query, positions), self.rope.rotate(key, positions), value

    attend_by: Any = None  # set while `kq.listen` sees, or changes, its attention

    def _attend(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        return self.attend(*inputs) if self.attend_by is None else self.attend_by(*inputs)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, visible: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output of all heads (batch, heads, n, r), and which queries see any key (None: all)."""
        query, key = self._centred(query, key, real)
        dropout = self.dropout if self.training else 0.0
        return attend(query, key, value, self.scale, real, visible, is_causal, self._key_norm(key), dropout)

    def _output(self, out: Tensor, seen: Tensor | None = None) -> Tensor:
        """Merge the heads; a query without visible keys in any head gives 0, without the bias."""
        joined = self.output(out.transpose(1, 2).flatten(2))
        return joined if seen is None else joined.where(seen.any(1), 0.0)

    def maps(
        self,
        x: Float[Tensor, "batch n dim"],
        mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        positions: Shaped[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "batch heads n n"]:
        """Attention weights on x, row i of query i; arguments as in `forward`."""
        real, visible = self._check(x, mask, positions, None)
        if real is not None:
            x = x.where(real.unsqueeze(-1), 0.0)
        query, key, _ = self._rotated(x, positions, 0)
        query, key = self._centred(query, key, real)
        # With the identity as values, the output is the attention weights.
        identity = torch.eye(x.shape[1], dtype=key.dtype, device=key.device).expand(len(x), self.kv_heads, -1, -1)
        return attend(query, key, identity, self.scale, real, visible, is_causal, self._key_norm(key))[0]

    def queries_and_keys(self, x: Float[Tensor, "batch n dim"]) -> tuple[Tensor, Tensor]:
        """Queries (batch, heads, n, r) and keys (batch, kv_heads, n, r), before RoPE."""
        key = self._heads(self.key(x), self.kv_heads)
        if self.query is not None:
            return self._heads(self.query(x), self.heads), key
        assert self.shape is not None
        return self.shape(self._repeated(key)), key

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return *self.queries_and_keys(x), self._heads(self.value(x), self.kv_heads)

    def form(self) -> Form:
        """The QK form of each head: batch (heads,), or (kv_heads, queries per kv head) under GQA; for `rbf` WᵀW."""
        key = self.key.weight.unflatten(0, (self.kv_heads, self.head_dim))
        if self.query is not None:
            query = self.query.weight.unflatten(0, (self.heads, self.head_dim))
        else:
            assert self.shape is not None
            query = self.shape(self._repeated(key.mT)).mT
        return self._grouped(query, key)

    def output_form(self) -> Form:
        """The OV circuit W_O W_V of each head, with the batch of `form`."""
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

    def extra_repr(self) -> str:
        """For the repr of the module."""
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
        """Queries and keys of an rbf kernel minus the first real key of their sequence.

        ‖q − k‖ is unchanged, and q·k − ½‖k‖² keeps small differences of long vectors. The first key is visible to all
        and stays first in a cache. It needs no gradient, since the output does not depend on it.
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
        """−½‖k‖² of an rbf kernel, as a high and a low part, which keep its precision in half precision."""
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
