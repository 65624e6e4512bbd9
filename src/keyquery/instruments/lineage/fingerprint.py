"""What is kept of a model for comparisons: spectra of each head, which no change of basis alters, and a random sketch.

Of each head's M, with norms and biases folded in: gaps between neighbouring singular values of M, positive and negative
eigenvalues of S, and singular values of A, relative to the local mean gap; with RoPE, the energy of each rotated plane
relative to its neighbours. The sketch G₁ᵀ M G₂, with random G, keeps inner products of forms:
⟨G₁ᵀ M G₂, G₁ᵀ N G₂⟩ ≈ s²·⟨M, N⟩; before, all dimensions of the stream are scaled to equal size in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Form
from keyquery.support.progress import Progress, silent

SKETCH = 16  # s: a sketch has s² numbers per head
SMOOTH = 7  # neighbouring gaps whose mean is the local mean
LARGEST = 3.0  # gaps are clipped there, relative to the local mean
ROWS = 64  # of weights whose squares fit into a cache
PERMUTATIONS = 24  # of the model's dimensions, for the null of shared-basis similarity


@dataclass(frozen=True, eq=False)
class LayerPrint:
    """The heads of one layer; gaps and planes less their mean over its heads, over their spread in the model."""

    index: int  # among all attention layers of the checkpoint
    dim: int
    width: int  # of a head
    gaps: Float[Tensor, "heads 4 gaps"]  # of σ(M), λ₊(S), λ₋(S), σ(A)
    planes: Float[Tensor, "heads planes"] | None
    sketch: Float[Tensor, "heads cells"]  # of M/‖M‖, with dimensions of equal size
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
        return sum(len(layer.gaps) for layer in self.layers)


def fingerprint(
    heads: Heads, permutations: int = 0, progress: Progress | None = None, *, linear: bool = False
) -> Fingerprint:
    """The fingerprint of a model, with sketches under permuted dimensions, and of the weights if `linear`."""
    layers: list[LayerPrint] = []
    digests = heads.recorded()
    for layer in (progress or silent)(heads, f"reading {heads.model['name']}", len(heads)):
        if layer.kind == "self":
            layers.append(_print(layer, permutations, linear))
    if not layers:
        raise ValueError(f"{heads.model['name']} has no self-attention layer to compare")
    return Fingerprint(str(heads.model["name"]), _standardised(layers), dict(digests))


def _standardised(layers: Sequence[LayerPrint]) -> list[LayerPrint]:
    """Independent trainings share the mean of a layer and the spread of a feature: neither is evidence."""
    standardised = list(layers)
    for name in ("gaps", "planes"):
        widths = {None if (rows := getattr(layer, name)) is None else rows.shape[1:] for layer in standardised}
        if len(widths) > 1 or None in widths:
            continue
        centred = [getattr(layer, name) - getattr(layer, name).mean(0) for layer in standardised]
        spread = torch.cat(centred).std(0, correction=0).clamp(min=1e-9)
        standardised = [
            replace(layer, **{name: rows / spread}) for layer, rows in zip(standardised, centred, strict=True)
        ]
    return standardised


def _print(layer: Layer, permutations: int, linear: bool) -> LayerPrint:
    form = layer.folded
    form = form if form.batch else form[None]
    norm = form.norm().clamp(min=1e-300)
    energies = _planes(layer, form)
    planes = None if energies is None else _relative((energies / norm.unsqueeze(-1)).flatten(0, -2)).float()
    sketch, permuted = _sketches(form, norm.flatten(), permutations)
    weights = _linear(layer) if linear else None
    values = gaps(spectra(form)).flatten(0, -3).float()
    return LayerPrint(layer.index, form.dim, form.rank, values, planes, sketch, permuted, weights)


def spectra(form: Form) -> Float[Tensor, "*heads 4 r"]:
    """Singular values of M, positive and absolute negative eigenvalues of S, singular values of A, one per pair."""
    symmetric = form.symmetric_eigenvalues()
    positive, negative = ((sign * symmetric).clamp(min=0).sort(descending=True).values for sign in (1, -1))
    rows = (form.singular_values(), positive, negative, form.skew_values()[..., ::2])
    r = form.rank
    filled = [torch.nn.functional.pad(row[..., :r], (0, max(r - row.shape[-1], 0))) for row in rows]
    return torch.stack(filled, -2)


def _planes(layer: Layer, form: Form) -> Float[Tensor, "*heads planes"] | None:
    """‖Q_pᵀ K_p‖ of each plane p that RoPE rotates: ‖QᵀK‖² = Σ (QQᵀ)∘(KKᵀ), over the two rows of a plane."""
    if layer.rope is None or layer.rope.dims < 8:
        return None
    dims = layer.rope.dims
    order = torch.arange(dims).reshape(-1, 2).T if layer.rope.interleaved else torch.arange(dims).reshape(2, -1)
    square = torch.zeros(())
    sides = [(factor.float() @ factor.float().mT).double() for factor in (form.query, form.key)]
    for one, two in ((0, 0), (0, 1), (1, 1)):
        products = [side[..., order[one], order[two]] for side in sides]
        square = square + (1 + (one != two)) * products[0] * products[1]
    return square.clamp(min=0).sqrt()


def gaps(values: Float[Tensor, "*batch r"]) -> Float[Tensor, "*batch gaps"]:
    """Gaps between the logarithms of neighbouring values, relative to the local mean gap, less 1."""
    logs = values.double().clamp(min=values.double().amax(-1, keepdim=True) * 1e-7).clamp(min=1e-300).log()
    return _relative(logs[..., :-1] - logs[..., 1:])


def _relative(rows: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    if rows.shape[-1] < 2:
        return torch.zeros_like(rows)
    width = min(SMOOTH, rows.shape[-1] // 2 * 2 - 1)
    padded = torch.nn.functional.pad(rows.flatten(0, -2)[:, None], (width // 2, width // 2), mode="reflect")
    local = torch.nn.functional.avg_pool1d(padded, width, 1).view(rows.shape)
    return (rows / local.clamp(min=1e-12)).clamp(max=LARGEST) - 1


def _projections(dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + dim)
    first, second = torch.randn(2, dim, SKETCH, generator=generator).unbind(0)
    return first, second


def _sketches(form: Form, norm: Tensor, permutations: int) -> tuple[Tensor, Tensor | None]:
    first, second = _projections(form.dim)
    generator = torch.Generator().manual_seed(form.dim)
    orders = [torch.arange(form.dim), *(torch.randperm(form.dim, generator=generator) for _ in range(permutations))]
    query, key = (factor.float() for factor in (form.query, form.key))
    scale = _equalising(query, key).unsqueeze(-1)
    left = query @ torch.cat([first[order] * scale for order in orders], 1)  # (*heads, r, orders·s)
    right = key @ torch.cat([second[order] * scale for order in orders], 1)
    left, right = (side.unflatten(-1, (len(orders), SKETCH)).movedim(-2, 0) for side in (left, right))
    cells = (left.mT @ right).flatten(-2).flatten(1, -2)  # groups and the queries that share a key
    cells = cells / norm.float().unsqueeze(-1) / SKETCH
    return cells[0], cells[1:] if permutations else None


def _equalising(query: Tensor, key: Tensor) -> Float[Tensor, " d"]:
    """By what each dimension of the stream is multiplied, so that all have the same share in a layer's weights.

    Trained models have a few dimensions far larger than all others. Two unrelated ones may have one at the same place,
    which a null of few permutations does not see.
    """
    squares = torch.zeros_like(query.flatten(0, -2)[0])
    for rows in (query, key):
        for block in rows.flatten(0, -2).split(ROWS):
            squares += block.square().sum(0)
    size = squares.sqrt()
    return size.mean() / size.clamp(min=1e-3 * float(size.mean()) + 1e-30)


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
