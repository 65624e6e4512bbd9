"""Encoder and Decoder: stacks of pre-norm transformer blocks with any attention kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keyquery.kinds import LAYERS, imported
from keyquery.layers.attention import Attention
from keyquery.layers.cache import Cache
from keyquery.layers.kernels import KERNELS
from keyquery.support.checks import check_choice, check_count

PLACE = ("device", "dtype")


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)); options as those of `Encoder`."""

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        primal: Any = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        placed: dict[str, Any] = {name: attention.get(name) for name in PLACE}
        self.attention_norm = nn.LayerNorm(dim, **placed)
        self.attention: nn.Module
        if attention.get("kernel") == "primal":
            self.attention = _primal(dim, heads, primal, attention)
        elif primal is not None:
            raise ValueError(f'primal is for kernel="primal" or "primal+", not {attention.get("kernel", "general")!r}')
        else:
            self.attention = Attention(dim, heads, dropout=dropout, **attention)
        self.mlp_norm = nn.LayerNorm(dim, **placed)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden, **placed), nn.GELU(), nn.Linear(hidden, dim, **placed))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "batch n dim"], **options: Any) -> Float[Tensor, "batch n dim"]:
        """Apply the block; `options` go to its attention."""
        options = {name: value for name, value in options.items() if value is not None}
        x = x + self.dropout(self.attention(self.attention_norm(x), **options))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def _primal(dim: int, heads: int, primal: Any, others: Mapping[str, Any]) -> nn.Module:
    layer = imported(LAYERS["primal"])
    placed = {name: others[name] for name in PLACE if name in others}
    if unknown := sorted(others.keys() - {*PLACE, "kernel"}):
        raise ValueError(f"kernel 'primal' takes its options in primal, and does not support {', '.join(unknown)}")
    known = [name for name in signature(layer).parameters if name not in ("dim", "heads")]
    if primal is not None and not isinstance(primal, Mapping):
        raise TypeError(f'primal must be a dict of options, such as {{"rank": 8}}, got {primal!r}')
    for name in primal or {}:
        check_choice("an option in primal", name, known)
    if primal is None or "rank" not in primal:
        raise ValueError('kernels "primal" and "primal+" need a rank: pass primal={"rank": …}')
    built: nn.Module = layer(dim, heads, **{**placed, **primal})
    return built


class Encoder(nn.Module):
    """Transformer encoder: pre-norm blocks with bidirectional attention, and a final LayerNorm.

    Parameters
    ----------
    dim, depth, heads
        Width, number of blocks, heads per block.
    kernel
        Any kernel of `kq.Attention`; "primal": `kq.PrimalAttention` in every block; "primal+": in the last block only.
        Default: "general".
    **attention
        `hidden`: width of the MLP (default: 4·dim). `dropout`: on attention weights and residual branches (default: 0).
        `primal`: options of `kq.PrimalAttention`, such as {"rank": 8}; required for "primal" and "primal+". Others are
        those of `kq.Attention`.

    See Also
    --------
    Decoder : the same with causal attention.

    Examples
    --------
    >>> kq.Encoder(32, depth=2, heads=4, kernel="psd")(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    >>> model = kq.Encoder(32, depth=2, heads=4, kernel="primal+", primal={"rank": 8})
    >>> [type(block.attention).__name__ for block in model.blocks]
    ['Attention', 'PrimalAttention']
    """

    is_causal = False

    def __init__(self, dim: int, depth: int, heads: int, kernel: str = "general", **attention: Any) -> None:
        super().__init__()
        check_count("depth", depth, least=1)
        check_choice("kernel", kernel, (*KERNELS, "primal", "primal+"))
        if kernel == "primal+":
            last = {name: attention.pop(name) for name in ("primal",) if name in attention}
            last |= {name: attention[name] for name in ("hidden", "dropout", *PLACE) if name in attention}
            blocks = [Block(dim, heads, **attention) for _ in range(depth - 1)]
            blocks.append(Block(dim, heads, kernel="primal", **last))
        else:
            blocks = [Block(dim, heads, kernel=kernel, **attention) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim, device=attention.get("device"), dtype=attention.get("dtype"))

    def forward(
        self,
        x: Float[Tensor, "batch n dim"],
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Float[Tensor, "batch n dim"]:
        """Apply all blocks to x (batch, n, dim).

        `mask` and `positions` are those of `kq.Attention`; `caches` holds one `kq.Cache` per block.
        """
        per_block = [None] * len(self.blocks) if caches is None else caches
        if len(per_block) != len(self.blocks):
            raise ValueError(f"caches must hold one per block, {len(self.blocks)}, got {len(per_block)}")
        for block, cache in zip(self.blocks, per_block, strict=True):
            x = block(x, mask=mask, is_causal=self.is_causal, positions=positions, cache=cache)
        return self.norm(x)


class Decoder(Encoder):
    """Transformer decoder: an `Encoder` with causal attention.

    Parameters
    ----------
    dim, depth, heads, kernel, **attention
        As in `Encoder`.

    See Also
    --------
    Cache : keys and values, for generation.

    Examples
    --------
    >>> kq.Decoder(32, depth=2, heads=4, kernel="split")(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """

    is_causal = True
