"""Primal-Attention: attention through the asymmetric kernel SVD, linear in the number of tokens."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.layers.triton_support import no_kernels
from keyquery.learn.layers.primal import reference
from keyquery.learn.layers.primal.objective import LOSSES, Batch, PrimalReading, penalty, spectrum
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count, check_number

IMPLEMENTATIONS = ("auto", "reference", "triton")
# Largest head width and rank of the Triton kernel.
WIDEST = {torch.float16: 128, torch.bfloat16: 128, torch.float32: 64}


class PrimalAttention(nn.Module):
    """Primal-Attention: attention in the primal form of the asymmetric kernel SVD, linear in the number of tokens.

        e = W_e|Xᵀφ(q),  r = W_r|Xᵀφ(k),  output = Linear([e; r]),  W_e|X = f(X)ᵀWe,  W_r|X = f(X)ᵀWr   (p × rank)

    f(X) is each head's slice of min(10·rank, n) evenly spaced tokens.

    Parameters
    ----------
    dim, heads, rank
        Width, heads, and rank s of the KSVD per head.
    features
        Feature map φ: "cosine" (q/‖q‖) or "elu" (elu + 1). Default: "cosine".
    data_dependent
        If False, We and Wr are used directly, and no tokens are mixed. Default: True.
    loss
        "paper": J², which is 0 at the KSVD of K = Φ_q f(X)ᵀf(X) Φ_kᵀ and at many other points; "ksvd": a
        reconstruction error whose only minimum is the KSVD. Default: "paper".
    eta
        Weight of the loss. Default: 0.1.
    impl
        "auto" (Triton on a GPU where it can, else the reference), "triton" or "reference". Default: "auto".
    bias, device, dtype
        Of the projections. Default: True, and those of torch.

    See Also
    --------
    regularizer : the loss of all primal layers of a model.
    ksvd : the decomposition.

    Examples
    --------
    >>> layer = kq.PrimalAttention(64, heads=4, rank=8)
    >>> out, loss = layer(torch.randn(2, 100, 64), return_loss=True)
    >>> out.shape, loss.shape
    (torch.Size([2, 100, 64]), torch.Size([]))
    """

    promises = ("causal", "padding", "gradients", "round_trip", "compiles")  # what check_kernel tests

    def __init__(
        self,
        dim: int,
        heads: int,
        rank: int,
        features: str = "cosine",
        data_dependent: bool = True,
        loss: str = "paper",
        eta: float = 0.1,
        impl: str = "auto",
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads), ("rank", rank)):
            check_count(name, value)
        if dim % heads:
            raise ValueError(f"heads must divide dim: {heads} does not divide {dim}")
        if rank > dim // heads:
            raise ValueError(f"rank must be at most {dim // heads}, the width of a head, got {rank}")
        check_number("eta", eta)
        if eta < 0:
            raise ValueError(f"eta must be at least 0, got {eta}")
        check_choice("features", features, reference.FEATURES)
        check_choice("loss", loss, LOSSES)
        check_choice("impl", impl, IMPLEMENTATIONS)
        factory = {"device": device, "dtype": dtype}
        self.dim, self.heads, self.rank, self.head_dim = dim, heads, rank, dim // heads
        self.features, self.data_dependent, self.loss, self.eta, self.impl = features, data_dependent, loss, eta, impl
        rows = 10 * rank if data_dependent else self.head_dim
        self.query_key = nn.Linear(dim, 2 * dim, bias, **factory)
        self.directions = nn.Parameter(torch.empty(2, heads, rows, rank, **factory))
        # With inputs of unit variance scores have unit variance at initialisation, and J ≈ rank·Λ: Λ = 1/rank makes it
        # 1, so that J² does not dominate the loss of the task. The other loss is relative.
        start = -math.log(rank) if loss == "paper" else 0.0
        self.log_lambda = nn.Parameter(torch.full((heads, rank), start, **factory))
        self.concat = nn.Linear(2 * rank, self.head_dim, **factory)
        self.output = nn.Linear(dim, dim, bias, **factory)
        for matrix in self.directions.data.flatten(0, 1):  # columns are orthogonal within each head
            exact = matrix.to(torch.promote_types(matrix.dtype, torch.float32))  # torch has no QR of shorter floats
            matrix.copy_(nn.init.orthogonal_(exact))
        self._loss: Tensor | None = None

    @property
    def we(self) -> Float[Tensor, "heads rows s"]:
        """We (a view)."""
        return self.directions[0]

    @property
    def wr(self) -> Float[Tensor, "heads rows s"]:
        """Wr (a view)."""
        return self.directions[1]

    def forward(
        self,
        x: Float[Tensor, "batch n dim"],
        mask: Bool[Tensor, "batch n"] | None = None,
        is_causal: bool = False,
        return_loss: bool = False,
    ) -> Float[Tensor, "batch n dim"] | tuple[Float[Tensor, "batch n dim"], Float[Tensor, ""]]:
        """Attend within each sequence of x (batch, n, dim); `mask` (batch, n) is True for real tokens, others give 0.

        With `is_causal`, token i sees tokens ≤ i. With `return_loss`, also eta · mean over samples and heads of J², or
        of the reconstruction error; J is squared before averaging, so that heads do not cancel, and empty samples are
        ignored.
        """
        _check_tokens(x, mask, self.dim)
        x = x if mask is None else x.where(mask.unsqueeze(-1), 0.0)
        run = self._causal if is_causal and self.data_dependent else self._bidirectional
        heads, batch = run(x, mask)
        self._loss = self.eta * penalty(batch, self.loss)
        out = self._merged(heads)
        out = out if mask is None else out.where(mask.unsqueeze(-1), 0.0)
        return (out, self._loss) if return_loss else out

    def regularizer(self) -> Float[Tensor, ""]:
        """The loss of the last forward pass; of a layer that is called several times per step, see `return_loss`."""
        if self._loss is None:
            raise RuntimeError("the layer was not called: its regularizer needs a forward pass")
        trains = self.training and torch.is_grad_enabled() and any(weight.requires_grad for weight in self.parameters())
        if trains and not self._loss.requires_grad:
            raise RuntimeError(
                "regularizer has no gradient: the last forward pass ran under torch.no_grad() or a checkpoint with "
                "use_reentrant=True; use use_reentrant=False, or call it under torch.no_grad() for the value only"
            )
        return self._loss

    @torch.no_grad()
    def ksvd(self, x: Float[Tensor, "batch n dim"], mask: Bool[Tensor, "batch n"] | None = None) -> PrimalReading:
        """Spectrum of the kernel on x, J, KKT residual and overlaps with the singular subspaces.

        >>> layer = kq.PrimalAttention(16, heads=2, rank=3)
        >>> reading = layer.ksvd(torch.randn(1, 50, 16))
        >>> len(reading.heads), len(reading.heads[0]["spectrum"])
        (2, 8)
        """
        phi, sample = self.kernel_parts(x, mask)
        if not phi.isfinite().all():
            raise ValueError("x has queries or keys that are not finite: ksvd is undefined")
        tokens = phi.new_full((len(x),), x.shape[1]) if mask is None else mask.sum(1).to(phi.dtype)
        directions, used = self.directions.double(), None
        weights = directions.unsqueeze(1)
        if sample is not None:
            _, used = reference.evenly(x.shape[1], directions.shape[2], mask, x.device)
            directions = directions[:, :, : sample.shape[2]]
            weights = sample.mT @ directions.unsqueeze(1)
        weights, grams = weights.expand(-1, len(x), -1, -1, -1), phi.mT @ phi
        energy = (grams @ weights * weights).sum(-2)  # Σeᵢₗ² = wₗᵀGwₗ
        batch = Batch(tokens, directions, self.log_lambda.double(), energy, used, weights, grams, sample)
        least = math.sqrt(torch.finfo(self.directions.dtype).eps)
        facts = {name: getattr(self, name) for name in ("features", "data_dependent", "loss", "eta")}
        facts["tensors"] = digests(dict(self.named_parameters()))
        return PrimalReading(rank=self.rank, heads=spectrum(batch, least), provenance=provenance(**facts))

    @torch.no_grad()
    def kernel_parts(
        self, x: Float[Tensor, "batch n dim"], mask: Bool[Tensor, "batch n"] | None = None
    ) -> tuple[Float[Tensor, "2 batch heads n p"], Float[Tensor, "batch heads rows p"] | None]:
        """φ(q), φ(k) and f(X) (None for the identity), in float64, of the kernel K = Φ_q f(X)ᵀf(X) Φ_kᵀ.

        >>> phi, sample = kq.PrimalAttention(16, heads=2, rank=3).kernel_parts(torch.randn(1, 50, 16))
        >>> phi.shape, sample.shape
        (torch.Size([2, 1, 2, 50, 8]), torch.Size([1, 2, 30, 8]))
        """
        _check_tokens(x, mask, self.dim)
        qk, sample, _ = self._projected(x if mask is None else x.where(mask.unsqueeze(-1), 0.0), mask)
        phi = reference.features(qk, mask, self.features, torch.float64)
        return phi, None if sample is None else sample.transpose(1, 2).double()

    def extra_repr(self) -> str:
        """For the repr of the module."""
        kind = "" if self.data_dependent else ", data_dependent=False"
        return f"{self.dim}, heads={self.heads}, rank={self.rank}{kind}, loss={self.loss!r}, eta={self.eta}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loss": None}  # without the graph of the last forward pass

    def _bidirectional(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Batch]:
        qk, sample, used = self._projected(x, mask)
        with _without_autocast(x):
            directions = self.directions if sample is None else self.directions[:, :, : sample.shape[1]]
            short = directions.to(qk.dtype)
            weights = (
                short.unsqueeze(1).expand(-1, len(x), -1, -1, -1) if sample is None else reference.weigh(sample, short)
            )
            mix, grams = self._mix(), None
            if self._uses_kernel(qk):
                from keyquery.learn.layers.primal import kernel  # imports triton, an optional dependency

                heads, energy = kernel.attend(qk, weights, mix, mask)
            else:
                phi = reference.features(qk, mask, self.features, torch.promote_types(qk.dtype, torch.float32))
                heads, energy = reference.attend(phi, weights, mix)
                grams = phi.mT @ phi if self.loss == "ksvd" else None
        rows = None if sample is None else sample.transpose(1, 2)
        batch = Batch(_count(x, mask), directions, self.log_lambda, energy, used, weights, grams, rows)
        return heads.to(qk.dtype), batch

    def _causal(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Batch]:
        if self.loss == "ksvd" or self.impl == "triton":
            raise ValueError('causal attention has no loss="ksvd" and no impl="triton"')
        qk = self.query_key(x).unflatten(-1, (2, self.heads, -1))
        with _without_autocast(x):
            dtype = torch.promote_types(qk.dtype, torch.float32)
            phi = reference.features(qk, mask, self.features, dtype)
            keys = x.unflatten(-1, (self.heads, -1)).transpose(1, 2).to(dtype)
            scores, seen = reference.causal_scores(phi, keys, self.directions.to(dtype), mask)
            heads = torch.cat((scores[0], scores[1]), -1) @ self._mix().to(dtype).flatten(0, 1)
        used = torch.arange(self.directions.shape[2], device=x.device) < seen.unsqueeze(1)
        batch = Batch(_count(x, mask), self.directions, self.log_lambda, scores.square().sum(-2), used)
        return heads.transpose(1, 2).to(qk.dtype), batch

    def _projected(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q and k, f(X) (batch, rows, heads, p) with unused rows 0, in one dtype, and which rows are used."""
        qk = self.query_key(x).unflatten(-1, (2, self.heads, -1))
        if not self.data_dependent:
            return qk, None, None
        positions, used = reference.evenly(x.shape[1], self.directions.shape[2], mask, x.device)
        sample = reference.take(x, positions).to(qk.dtype).unflatten(-1, (self.heads, -1))
        return qk, sample if used is None else sample * used[..., None, None], used

    def _uses_kernel(self, qk: Tensor) -> bool:
        if self.impl == "reference" or (self.impl == "auto" and not qk.is_cuda):
            return False
        reason, widest, width = no_kernels(qk), WIDEST.get(qk.dtype, 0), max(self.head_dim, self.rank)
        if reason is None and (self.features != "cosine" or self.loss != "paper"):
            reason = f'computes features="cosine" and loss="paper", not {self.features!r} and {self.loss!r}'
        if reason is None and width > widest:
            reason = f"supports heads of up to {widest} features in {qk.dtype}, not {width}"
        if reason is not None and self.impl == "triton":
            raise RuntimeError(f'impl="triton" {reason}; impl="auto" uses the reference there')
        return reason is None

    def _mix(self) -> Float[Tensor, "2 s v"]:
        """Cₑ and Cᵣ of the map of [e; r]; the identity if it must be called as a module."""
        if _untouched(self.concat):
            return self.concat.weight.unflatten(1, (2, self.rank)).permute(1, 2, 0)
        eye = torch.eye(2 * self.rank, dtype=self.directions.dtype, device=self.directions.device)
        return eye.unflatten(0, (2, self.rank))

    def _merged(self, heads: Float[Tensor, "batch n heads v"]) -> Float[Tensor, "batch n dim"]:
        if not _untouched(self.concat):
            heads = self.concat(heads)
        elif self.concat.bias is not None:
            heads = heads + self.concat.bias.to(heads.dtype)
        return self.output(heads.flatten(2))


def regularizer(model: nn.Module) -> Float[Tensor, ""]:
    """Sum of the losses of all primal layers of a model, to be added to that of the task.

    Parameters
    ----------
    model
        Any module, after a forward pass.

    Returns
    -------
    Tensor
        A scalar; 0 if the model has no `PrimalAttention`.

    Raises
    ------
    RuntimeError
        If a primal layer has not been called, or its loss has no gradient although the layer is in training.

    Examples
    --------
    >>> model = torch.nn.Sequential(kq.PrimalAttention(16, 2, rank=3), kq.PrimalAttention(16, 2, rank=3))
    >>> loss = model(torch.randn(1, 20, 16)).square().mean() + kq.regularizer(model)
    >>> loss.backward()
    """
    losses = [layer.regularizer() for layer in model.modules() if isinstance(layer, PrimalAttention)]
    return torch.stack([loss.to(losses[0].device) for loss in losses]).sum() if losses else torch.zeros(())


def _check_tokens(x: Tensor, mask: Tensor | None, dim: int) -> None:
    """Require tokens (batch, n, dim) and a bool mask (batch, n)."""
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"x must be (batch, n, {dim}), got {tuple(x.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
        expected = f"mask must be bool {tuple(x.shape[:2])}, True for real tokens"
        raise ValueError(f"{expected}, got {mask.dtype} {tuple(mask.shape)}")


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Scores and losses are exact; there is no autocast on the meta device."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _untouched(part: nn.Module) -> bool:
    """Whether a projection is a plain Linear: a replaced or hooked one must be called."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return type(part) is nn.Linear and not any(hooks) and "forward" not in part.__dict__


def _count(x: Tensor, mask: Tensor | None) -> Tensor | int:
    """Number of tokens per sample; an int if there is no padding."""
    return x.shape[1] if mask is None else mask.sum(1).to(torch.promote_types(x.dtype, torch.float32))
