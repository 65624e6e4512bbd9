"""The KV cache of an attention layer."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class Cache:
    """KV cache of one attention layer, bound to the first layer that writes to it.

    See Also
    --------
    Attention : takes it as `cache=`.
    Decoder : takes one per block as `caches=`.

    Examples
    --------
    >>> layer, cache = kq.Attention(8, 2), kq.Cache()
    >>> _ = layer(torch.zeros(1, 5, 8), is_causal=True, cache=cache)
    >>> cache.length
    5
    """

    def __init__(self) -> None:
        self._owner: nn.Module | None = None
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return 0 if self._key is None else self._key.shape[-2]

    def check(self, layer: nn.Module, batch: int) -> None:
        """Raise if the cache is used by another layer or holds another batch size."""
        if self._owner is not None and self._owner is not layer:
            raise ValueError("this cache belongs to another layer: use one cache per layer")
        if self._key is not None and self._key.shape[0] != batch:
            raise ValueError(f"this cache holds a batch of {self._key.shape[0]}, but the input has {batch}")

    def append(
        self,
        layer: nn.Module,
        key: Float[Tensor, "batch heads n r"],
        value: Float[Tensor, "batch heads n v"],
        mask: Bool[Tensor, "batch n"] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append new tokens; returns all keys and values, and the mask of real tokens (None: all are real)."""
        old = self.length
        if mask is not None or self._mask is not None:
            every = torch.ones(key.shape[0], max(old, key.shape[-2]), dtype=torch.bool, device=key.device)
            before = every[:, :old] if self._mask is None else self._mask
            self._mask = torch.cat((before, every[:, : key.shape[-2]] if mask is None else mask), 1)
        self._owner = layer
        self._key = key if self._key is None else torch.cat((self._key, key), -2)
        self._value = value if self._value is None else torch.cat((self._value, value), -2)
        return self._key, self._value, self._mask
