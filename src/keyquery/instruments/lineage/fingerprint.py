"""What is kept of a model for comparisons: spectra of each head, which no change of basis alters, and a random sketch.

Of each head's M, with norms and biases folded in: singular values of M, positive and negative eigenvalues of S,
singular values of A, and with RoPE the energy of each rotated plane. The sketch G₁ᵀ M G₂, with random G, keeps inner
products of forms: ⟨G₁ᵀ M G₂, G₁ᵀ N G₂⟩ ≈ s²·⟨M, N⟩.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Form
from keyquery.support.progress import Progress, silent

SKETCH = 16  # s: a sketch has s² numbers per head
PERMUTATIONS = 24  # of the model's dimensions, for the null of shared-basis similarity


@dataclass(frozen=True, eq=False)
class LayerPrint:
    """The heads of one layer: spectra relative to ‖M‖, energies of RoPE planes, and sketches of M/‖M‖."""

    index: int  # among all attention layers of the checkpoint
    dim: int
    spectra: Float[Tensor, "heads 4 r"]  # σ(M), λ₊(S), λ₋(S), σ(A): each descending, filled with zeros
    planes: Float[Tensor, "heads planes"] | None
    sketch: Float[Tensor, "heads cells"]
    permuted: Float[Tensor, "permutations heads cells"] | None = None  # sketches with the dimensions permuted
    weights: Float[Tensor, " entries"] | None = None  # sketch of Wq and Wk themselves, linear in the weights


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """All self-attention layers of a model, and digests of the tensors that were read."""

    name: str
    layers: Sequence[LayerPrint]
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return sum(len(layer.spectra) for layer in self.layers)


def fingerprint(heads: Heads, permutations: int = 0, progress: Progress | None = None) -> Fingerprint:
    """The fingerprint of a model; with `permutations`, also sketches under a null of permuted dimensions.

    >>> heads = kq.read(kq.Attention(8, 2))
    >>> fingerprint(heads).layers[0].spectra.shape
    torch.Size([2, 4, 4])
    """
    layers: list[LayerPrint] = []
    digests: dict[str, str] = {}
    for layer in (progress or silent)(heads, f"reading {heads.model['name']}", len(heads)):
        if layer.kind == "self":
            layers.append(_print(layer, permutations))
        heads.recorded(digests)
    if not layers:
        raise ValueError(f"{heads.model['name']} has no self-attention layer to compare")
    return Fingerprint(str(heads.model["name"]), layers, dict(digests))


def _print(layer: Layer, permutations: int) -> LayerPrint:
    form = layer.folded
    form = Form(form.query.flatten(0, -3), form.key.expand_as(form.query).flatten(0, -3)) if form.batch else form[None]
    norm = form.norm().clamp(min=1e-300)
    spectra = (spectra_of(form) / norm[:, None, None]).float()
    sketch, permuted = _sketches(form, norm, permutations)
    return LayerPrint(layer.index, form.dim, spectra, _planes(layer, form, norm), sketch, permuted, _linear(layer))


def spectra_of(form: Form) -> Float[Tensor, "heads 4 r"]:
    """Singular values of M, positive and absolute negative eigenvalues of S, singular values of A, one per pair."""
    r = form.rank
    eigenvalues = form.symmetric_eigenvalues()
    rows = (
        form.singular_values(),
        eigenvalues.clamp(min=0).sort(descending=True).values,
        (-eigenvalues).clamp(min=0).sort(descending=True).values,
        form.skew_values()[..., ::2],
    )
    return torch.stack([_filled(row, r) for row in rows], -2)


def _filled(row: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(row[..., :width], (0, max(width - row.shape[-1], 0)))


def _planes(layer: Layer, form: Form, norm: Tensor) -> Float[Tensor, "heads planes"] | None:
    """‖Q_pᵀ K_p‖/‖M‖ of each plane p that RoPE rotates."""
    if layer.rope is None or layer.rope.dims < 8:
        return None
    dims = layer.rope.dims
    order = torch.arange(dims).reshape(-1, 2) if layer.rope.interleaved else torch.arange(dims).reshape(2, -1).T
    query, key = (factor[:, order].double() for factor in (form.query, form.key))  # (heads, planes, 2, d)
    square = ((query @ query.mT) * (key @ key.mT)).sum((-2, -1))
    return (square.clamp(min=0).sqrt() / norm[:, None]).float()


def _projections(dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + dim)
    first, second = torch.randn(2, dim, SKETCH, generator=generator).unbind(0)
    return first, second


def _sketches(form: Form, norm: Tensor, permutations: int) -> tuple[Tensor, Tensor | None]:
    first, second = _projections(form.dim)
    generator = torch.Generator().manual_seed(form.dim)
    orders = [torch.arange(form.dim), *(torch.randperm(form.dim, generator=generator) for _ in range(permutations))]
    query, key = (factor.float() for factor in (form.query, form.key))
    left = query @ torch.cat([first[order] for order in orders], 1)  # (heads, r, orders·s)
    right = key @ torch.cat([second[order] for order in orders], 1)
    left, right = (side.unflatten(-1, (len(orders), SKETCH)).movedim(-2, 0) for side in (left, right))
    cells = (left.mT @ right).flatten(-2) / norm.float()[None, :, None] / SKETCH
    return cells[0], cells[1:] if permutations else None


def _linear(layer: Layer) -> Float[Tensor, " entries"]:
    """A sketch of the weights, in which merged weights are sums: each projected on `SKETCH` random directions."""
    sides = in_halves(layer)
    return torch.cat([(side.float() @ _projections(side.shape[-1], 1)[0]).flatten() for side in sides])


def in_halves(layer: Layer) -> tuple[Float[Tensor, "groups shared r d"], Float[Tensor, "groups 1 r d"]]:
    """Wq and Wk with the planes of RoPE in the order of halves: files that interleave them (GGUF) become comparable."""
    query, key = layer.weights.query, layer.weights.key
    if layer.rope is None or not layer.rope.interleaved:
        return query, key
    order = torch.arange(query.shape[2])
    order[: layer.rope.dims] = torch.arange(layer.rope.dims).reshape(-1, 2).T.flatten()
    return query[:, :, order], key[:, :, order]
