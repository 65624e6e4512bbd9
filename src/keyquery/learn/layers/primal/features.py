"""Feature maps φ of queries and keys, for the kernel ⟨φ(q), φ(k)⟩."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.learn.layers.primal.inputs import without_autocast
from keyquery.support.checks import check_choice, check_count

FEATURES = ("cosine", "elu", "random")
FUSED = ("cosine", "elu", "given")  # computed by the implementation; "given": computed by a module
ZERO = 1e-24  # ‖z‖² below which a vector has no direction: its features, and their gradients, are 0


class Random(nn.Module):
    """Positive random features of the exponential kernel: E⟨φ(q), φ(k)⟩ = exp(q·k/√p).

    φ(z) = exp(Ωz' − ‖z'‖²/2)/√width with z' = z/p^¼ and fixed random rows of Ω, orthogonal in blocks of p, which lowers
    the variance. They are part of the state dict.

    Parameters
    ----------
    dims
        Width p of queries and keys.
    width
        Number of features.
    device, dtype
        Of Ω. Default: those of torch.

    Examples
    --------
    >>> phi = Random(8, width=4096)
    >>> q, k = torch.full((8,), 0.3), torch.full((8,), 0.2)
    >>> bool((phi(q) @ phi(k) / (q @ k / 8**0.5).exp() - 1).abs() < 0.1)
    True
    """

    omega: Tensor

    def __init__(self, dims: int, width: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_count("dims", dims, least=1)
        check_count("width", width, least=1)
        options = {"device": device, "dtype": dtype}
        blocks = []
        for _ in range(-(-width // dims)):
            block = orthogonal_(torch.empty(dims, dims, **options))
            blocks.append(block * torch.randn(dims, dims, **options).norm(dim=1, keepdim=True))
        self.register_buffer("omega", torch.cat(blocks)[:width])

    def forward(self, z: Float[Tensor, "*batch dims"]) -> Float[Tensor, "*batch width"]:
        """φ(z), computed in at least float32."""
        width, dims = self.omega.shape
        exact = torch.promote_types(z.dtype, torch.float32)
        with without_autocast(z):
            scaled = z.to(exact) * dims**-0.25
            exponent = scaled @ self.omega.to(exact).mT - scaled.square().sum(-1, keepdim=True) / 2
        return (exponent.exp() / math.sqrt(width)).to(z.dtype)


def make(features: str | nn.Module, dims: int, **place: Any) -> tuple[str, nn.Module | None, int]:
    """The name of a feature map for the implementation, the module that computes it, if any, and its width."""
    if not isinstance(features, nn.Module):
        check_choice("features", features, FEATURES)
        if features != "random":
            return features, None, dims
        features = Random(dims, dims, **place)
    own = next((t for t in (*features.parameters(), *features.buffers()) if t.is_floating_point()), torch.zeros(()))
    try:
        width = features(torch.zeros(1, dims, dtype=own.dtype, device=own.device)).shape[-1]
    except RuntimeError as error:
        raise ValueError(f"features must take vectors of {dims}, the width of a head: {error}") from error
    return "given", features, width


@torch.no_grad()
def orthogonal_(matrix: Tensor) -> Tensor:
    """Fill a matrix with orthonormal columns (or rows), also in half precision, for which torch has no QR."""
    exact = torch.empty(matrix.shape, dtype=torch.promote_types(matrix.dtype, torch.float32), device=matrix.device)
    return matrix.copy_(nn.init.orthogonal_(exact))
