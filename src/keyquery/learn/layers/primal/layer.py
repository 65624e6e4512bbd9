"""Primal-Attention: attention through the asymmetric kernel SVD, linear in the number of tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keyquery.layers.packing import Packing
from keyquery.learn.layers.primal.causal import Prefix, prefix_scores
from keyquery.learn.layers.primal.dispatch import IMPLEMENTATIONS, choose, fused
from keyquery.learn.layers.primal.features import make, orthogonal_
from keyquery.learn.layers.primal.inputs import as_autocast, check_tokens, clean, count, untouched, without_autocast
from keyquery.learn.layers.primal.objective import LOSSES, Batch, Last, mean_over_samples, objective, reconstruction
from keyquery.learn.layers.primal.output import merge, mixing
from keyquery.learn.layers.primal.reference import features as reference_features
from keyquery.learn.layers.primal.sample import evenly, project, take, weigh
from keyquery.learn.layers.primal.spectrum import PrimalReading, solve, spectrum, with_grams
from keyquery.learn.layers.primal.whole import at_once, fits
from keyquery.reading import digests, provenance
from keyquery.support.checks import check_choice, check_count, check_float, check_number

NOT_CAUSAL = 'impl="triton" does not support causal attention; impl="auto" uses the reference'
Source = tuple[Tensor, Tensor]  # tokens, and the indices of those in f(X)


class PrimalAttention(nn.Module):
    """Primal-Attention: attention in the primal form of the asymmetric kernel SVD, linear in the number of tokens.

        e = W_e|Xᵀφ(q),  r = W_r|Xᵀφ(k),  output = Linear([e; r]),  W_e|X = f(X)ᵀWe,  W_r|X = f(X)ᵀWr   (p × rank)

    f(X) is each head's slice of min(10·rank, n) evenly spaced tokens.

    Parameters
    ----------
    dim, heads, rank
        Width, heads, and rank s of the KSVD per head.
    features
        Feature map φ: "cosine" (q/‖q‖), "elu" (elu + 1), "random" (positive random features of the exponential
        kernel), or a module. Default: "cosine".
    data_dependent
        If False, We and Wr are used directly, and no tokens are mixed. Default: True.
    loss
        "paper": J², which is 0 at the KSVD of K = Φ_q f(X)ᵀf(X) Φ_kᵀ and at many other points; "ksvd": a
        reconstruction error whose only minimum is the KSVD. Default: "paper".
    eta
        Weight of `regularizer()`. Default: 0.1.
    init, data
        "orthogonal", or "ksvd": the exact KSVD of `data` (batch, n, dim). Default: "orthogonal".
    impl
        "auto" (Triton on a GPU, else the reference), "triton" or "reference". Default: "auto".
    bias, device, dtype
        Of the projections. Default: True, and those of torch.

    See Also
    --------
    regularizer : the loss of all primal layers of a model.
    ksvd : the decomposition.

    Examples
    --------
    >>> layer = kq.PrimalAttention(64, heads=4, rank=8)
    >>> out = layer(torch.randn(2, 100, 64))
    >>> out.shape, layer.regularizer().shape
    (torch.Size([2, 100, 64]), torch.Size([]))
    """

    promises = ("causal", "padding", "packed", "gradients", "round_trip", "compiles")  # what check_kernel tests

    def __init__(
        self,
        dim: int,
        heads: int,
        rank: int,
        features: str | nn.Module = "cosine",
        data_dependent: bool = True,
        loss: str = "paper",
        eta: float = 0.1,
        init: str = "orthogonal",
        impl: str = "auto",
        data: Float[Tensor, "batch n dim"] | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads), ("rank", rank)):
            check_count(name, value, least=1)
        if dim % heads:
            raise ValueError(f"heads must divide dim: {heads} does not divide {dim}")
        check_number("eta", eta)
        if eta < 0:
            raise ValueError(f"eta must be at least 0, got {eta}")
        check_choice("loss", loss, LOSSES)
        check_choice("init", init, ("orthogonal", "ksvd"))
        check_choice("impl", impl, IMPLEMENTATIONS)
        if (init == "ksvd") != (data is not None):
            raise ValueError('data (batch, n, dim) and init="ksvd" must be used together')
        place = {"device": device, "dtype": dtype}
        self.dim, self.heads, self.rank, self.head_dim = dim, heads, rank, dim // heads
        self.data_dependent, self.loss, self.eta, self.impl = data_dependent, loss, eta, impl
        self.feature, self.features, self.width = make(features, self.head_dim, **place)
        if rank > self.width:
            raise ValueError(f"rank must be at most {self.width}, the number of features per head, got {rank}")
        rows = 10 * rank if data_dependent else self.width
        self.query_key = nn.Linear(dim, 2 * dim, bias, **place)
        self.directions = nn.Parameter(torch.empty(2, heads, rows, rank, **place))
        # With inputs of unit variance scores have unit variance at initialisation, and J ≈ rank·Λ: Λ = 1/rank makes it
        # 1, so that J² does not dominate the loss of the task. The other loss is relative.
        start = -math.log(rank) if loss == "paper" else 0.0
        self.log_lambda = nn.Parameter(torch.full((heads, rank), start, **place))
        self.concat = nn.Linear(2 * rank, self.head_dim, **place)
        self.output = nn.Linear(dim, dim, bias, **place)
        for matrix in self.directions.data.flatten(0, 1):  # columns are orthogonal within each head
            orthogonal_(matrix)
        self._last = Last()
        if data is not None:
            self.start(data)

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
        x: Float[Tensor, "*batch n dim"],
        mask: Bool[Tensor, "batch n"] | None = None,
        is_causal: bool = False,
        offsets: Int[Tensor, " ends"] | None = None,
    ) -> Float[Tensor, "*batch n dim"]:
        """Attend within each sequence of x (batch, n, dim); `mask` (batch, n) is True for real tokens, others give 0.

        With `is_causal`, token i sees tokens ≤ i. With `offsets`, x (total, dim) is packed: sequence s is
        x[offsets[s]:offsets[s + 1]].
        """
        if offsets is not None:
            return self._packed(x, mask, is_causal, offsets)
        self._check(x, mask)
        out, batch = self._attend(x, mask, is_causal)
        self._keep(batch)
        return out

    def regularizer(self) -> Float[Tensor, ""]:
        """eta · mean over samples and heads of J², or of the reconstruction error, of the last forward pass.

        J is squared before averaging, so that heads do not cancel; empty samples are ignored. A layer that is called
        several times per training step needs one call of this after each; a missed one warns. After a forward pass
        without gradients this raises in training mode and returns a plain number in `eval()`.
        """
        batches = self._batches("regularizer")
        if hasattr(self.directions, "full_tensor"):  # a DTensor, of which torch loads the compiler
            raise RuntimeError(
                "regularizer needs the weights of the last forward pass, which have been resharded: pass "
                "reshard_after_forward=False to fully_shard for this layer"
            )
        if self.loss == "ksvd" and batches and batches[0].weights is None:
            raise RuntimeError(
                'loss="ksvd" does not support causal attention, and the last forward pass was causal (is_causal=True '
                'or step): use loss="paper" or is_causal=False'
            )
        if self.training and torch.is_grad_enabled() and not self._last.graph:
            raise RuntimeError(
                "regularizer has no gradient: the last forward pass ran under torch.no_grad() or a checkpoint with "
                "use_reentrant=True; use use_reentrant=False, or call it under torch.no_grad() for the value only"
            )
        self._last.warn_if_missed()
        if len(batches) == 1 and (loss := batches[0].loss) is not None:
            return loss if batches[0].eta == self.eta else loss * (self.eta / batches[0].eta)
        error = objective if self.loss == "paper" else reconstruction
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._last.graph), without_autocast(self.directions):
            each = [error(batch, self.directions, self.log_lambda) for batch in batches]
            each = [value.square() for value in each] if self.loss == "paper" else each
            return self.eta * mean_over_samples(batches, each).to(self.directions.device)

    def ksvd(self) -> PrimalReading:
        """Spectrum of the kernel, J, KKT residual and overlaps with the singular subspaces, of the last forward pass.

        >>> layer = kq.PrimalAttention(16, heads=2, rank=3, init="ksvd", data=torch.randn(1, 50, 16))
        >>> _ = layer(torch.randn(1, 50, 16))
        >>> len(layer.ksvd().heads), len(layer.ksvd().heads[0]["spectrum"])
        (2, 8)
        """
        batches = self._batches("ksvd")
        if batches and batches[0].weights is None:
            raise RuntimeError(
                "the last forward pass was causal, and the KSVD is defined for non-causal attention only"
            )
        batches = tuple(with_grams(batch, self.heads, self.feature, self.impl) for batch in batches)
        if not all((batch.energy if batch.grams is None else batch.grams).isfinite().all() for batch in batches):
            raise RuntimeError("the queries or keys of the last forward pass were not finite: ksvd is undefined")
        heads = spectrum(batches, self.directions, self.log_lambda)
        named = self.feature if self.features is None else type(self.features).__name__
        facts = {"features": named, "data_dependent": self.data_dependent, "loss": self.loss, "eta": self.eta}
        facts["tensors"] = digests(dict(self.named_parameters()))
        return PrimalReading(rank=self.rank, heads=heads, provenance=provenance(**facts))

    @torch.no_grad()
    def start(self, x: Float[Tensor, "batch n dim"], mask: Bool[Tensor, "batch n"] | None = None) -> None:
        """Set We, Wr and Λ to the exact KSVD of x; for one sequence EΛRᵀ is the best rank-s approximation of K.

        It is exact for these tokens and this length only: with another length, rows of We are paired with other tokens.

        >>> layer, x = kq.PrimalAttention(16, heads=2, rank=3).double(), torch.randn(1, 50, 16).double()
        >>> layer.start(x)
        >>> _ = layer(x)
        >>> all(head["residual"] < 1e-9 and head["left"] > 1 - 1e-9 for head in layer.ksvd().heads)
        True
        """
        self._check(x, mask)
        x, real = clean(x, mask)
        check_float("x", x, "batch n dim", dim=self.dim)
        phi, sample = self.kernel_parts(x, real)
        shown = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real
        directions, log_lambda = solve(phi, sample, shown, self.rank)
        self.directions.zero_()  # rows beyond the length of x contribute nothing
        self.directions[:, :, : directions.shape[2]] = directions.to(self.directions)
        self.log_lambda.copy_(log_lambda)

    @torch.no_grad()
    def kernel_parts(
        self, x: Float[Tensor, "batch n dim"], real: Bool[Tensor, "batch n"] | None = None
    ) -> tuple[Float[Tensor, "2 batch heads n p"], Float[Tensor, "batch heads rows p"] | None]:
        """φ(q), φ(k) and f(X) (None for the identity), in float64, of the kernel K = Φ_q f(X)ᵀf(X) Φ_kᵀ.

        >>> phi, sample = kq.PrimalAttention(16, heads=2, rank=3).kernel_parts(torch.randn(1, 50, 16))
        >>> phi.shape, sample.shape
        (torch.Size([2, 1, 2, 50, 8]), torch.Size([1, 2, 30, 8]))
        """
        qk, _, used, source = self._weights(x, real)
        phi, _ = reference_features(qk, real, self.feature, torch.float64)
        if source is None:
            return phi, None
        sample = take(*source).unflatten(-1, (self.heads, -1)).transpose(1, 2).double()
        return phi, sample if used is None else sample * used[:, None, :, None]

    def step(
        self,
        x: Float[Tensor, "batch n dim"],
        state: Prefix | None = None,
        mask: Bool[Tensor, "batch n"] | None = None,
    ) -> tuple[Float[Tensor, "batch n dim"], Prefix]:
        """Causal decoding of the next token or tokens: their outputs, and the new state.

        Tokens whose `mask` (batch, n) is False give 0 and do not change the state: prompts may be left-padded.

        >>> layer, x = kq.PrimalAttention(16, heads=2, rank=3), torch.randn(1, 5, 16)
        >>> first, state = layer.step(x[:, :4])
        >>> last, state = layer.step(x[:, 4:], state)
        >>> torch.allclose(torch.cat((first, last), 1), layer(x, is_causal=True), atol=1e-5)
        True
        """
        self._check(x, mask)
        if x.shape[1] == 0:
            raise ValueError("x must hold at least one token")
        empty = self._empty(x)
        state = empty if state is None else state
        if len(state.seen) != len(x):
            raise ValueError(f"state has a batch of {len(state.seen)}, but x has {len(x)}")
        if state.total.shape != empty.total.shape:
            shapes = tuple(empty.total.shape), tuple(state.total.shape)
            raise ValueError(f"state must be of this layer, with shape {shapes[0]}, got {shapes[1]}")
        if self.data_dependent and self.impl == "triton":
            raise RuntimeError(NOT_CAUSAL)
        if self.data_dependent:
            out, batch, after = self._causal(*clean(x, mask), state)
        else:
            out, batch = self._attend(x, mask, False)
            after = state._replace(seen=state.seen + (x.shape[1] if mask is None else mask.sum(1)))
        self._keep(batch)
        return out, after

    def extra_repr(self) -> str:
        """For the repr of the module."""
        kind = "" if self.data_dependent else ", data_dependent=False"
        return f"{self.dim}, heads={self.heads}, rank={self.rank}{kind}, loss={self.loss!r}, eta={self.eta}"

    def _attend(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Batch]:
        x, real = clean(x, mask)
        if is_causal and self.data_dependent and x.shape[1]:
            if self.impl == "triton":
                raise RuntimeError(NOT_CAUSAL)
            return self._causal(x, real, self._empty(x))[:2]
        if real is None and fits(self, x):
            return at_once(self, x)
        qk, weights, used, source = self._weights(x, real)
        # Gram matrices cost as much as the rest of the forward pass: computed on demand if the loss does not need them.
        gram = self.loss == "ksvd" or not (torch.is_grad_enabled() and weights.requires_grad)
        out, energy, grams = fused(
            qk, weights, mixing(self.concat, self.directions), real, self.feature, self.impl, gram
        )
        sample, rows = None, None
        if source is not None:
            rows = source[1].shape[-1]
            sample = take(*source).unflatten(-1, (self.heads, -1)) if gram else None
        batch = Batch(count(x, real), used, energy, weights, grams, sample, rows)
        return merge(out, self.concat, self.output, real), batch

    def _weights(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Source | None]:
        """φ or q and k (batch, n, 2, heads, p), W_e|X and W_r|X (2, batch, heads, p, s), used rows, indices of f(X)."""
        if not self.data_dependent:
            weights = self.directions.unsqueeze(1).expand(-1, len(x), -1, -1, -1)
            return self._featured(self.query_key(x)), weights, None, None
        place, used = evenly(x.shape[1], self.directions.shape[2], real, x.device)
        directions = self.directions[:, :, : place.shape[-1]]
        x, directions = as_autocast(x, directions)
        impl = choose(self.impl, x, max(self.width, self.rank, self.head_dim))
        if self.width == self.head_dim and untouched(self.query_key):
            weight, bias = as_autocast(self.query_key.weight, self.query_key.bias)
            flat, weights = project(x, weight, bias, place, directions, used, impl)
            return self._featured(flat), weights, used, (x, place)
        qk = self._featured(self.query_key(x))
        source = x if self.width == self.head_dim else qk[:, :, 1].flatten(2)
        return qk, weigh(source, place, directions, used, impl), used, (source, place)

    def _empty(self, x: Tensor) -> Prefix:
        """The state before the first token."""
        shape = (2, len(x), self.heads, self.width, self.rank)
        total = torch.zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        return Prefix(total, torch.zeros(len(x), dtype=torch.long, device=x.device))

    def _causal(self, x: Tensor, real: Tensor | None, state: Prefix) -> tuple[Tensor, Batch, Prefix]:
        inputs = (self._featured(self.query_key(x)), x, real, *state)
        if torch.is_grad_enabled():  # activation checkpointing of the scores
            outputs = checkpoint(self._prefix, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            outputs = self._prefix(*inputs)
        out, energy, total, seen = outputs
        used = torch.arange(self.directions.shape[2], device=x.device) < seen.unsqueeze(1)
        return merge(out, self.concat, self.output, real), Batch(count(x, real), used, energy), Prefix(total, seen)

    def _prefix(
        self, qk: Tensor, x: Tensor, real: Tensor | None, total: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Heads' outputs (batch, n, heads, ·), Σe² and Σr², and the state after the last token, in at least float32."""
        with without_autocast(x):
            phi, _ = reference_features(qk, real, self.feature, total.dtype)
            keys = phi[1]
            if self.width == self.head_dim:
                keys = x.unflatten(-1, (self.heads, -1)).transpose(1, 2).to(total.dtype)
            directions = self.directions.to(total.dtype)
            scores, after = prefix_scores(phi, keys, directions, real, Prefix(total, seen))
            mix = mixing(self.concat, self.directions).to(total.dtype)
            out = torch.cat((scores[0], scores[1]), -1) @ mix.flatten(0, 1)
        return out.transpose(1, 2).to(qk.dtype), scores.square().sum(-2), *after

    def _packed(self, x: Tensor, mask: Tensor | None, is_causal: bool, offsets: Tensor) -> Tensor:
        if x.ndim != 2 or mask is not None:
            raise ValueError("with offsets, x must be (total, dim), and mask must be None")
        self._check(x.unsqueeze(0), None)
        rows, tokens, batches = [x[:0]], [offsets[:0].long()], []
        for group in Packing(offsets, len(x)).groups():
            out, batch = self._attend(group.unpack(x[None, None]).squeeze(1), group.real, is_causal)
            rows.append(group.pack(out.unsqueeze(1)).squeeze(0))
            tokens.append(group.tokens)
            batches.append(batch._replace(numbers=group.numbers))
        self._keep(*batches)
        return torch.cat(rows)[torch.cat(tokens).argsort()]

    def _featured(self, qk: Tensor) -> Tensor:
        """(batch, n, 2·dim) as (batch, n, 2, heads, p), with the feature map applied if it is a module."""
        qk = qk.unflatten(-1, (2, self.heads, self.head_dim))
        return qk if self.features is None else self.features(qk)

    def _keep(self, *batches: Batch) -> None:
        self._last.keep(batches, self.training, self.directions, self.log_lambda)

    def _batches(self, method: str) -> tuple[Batch, ...]:
        needs = f"{method} needs the last forward pass"
        if not self._last.called:
            raise RuntimeError(f"{needs}: call the layer first")
        if self._last.changed():
            raise RuntimeError(f"{needs}, and weights have changed since: call the layer again")
        if any(batch.energy.device != self.directions.device for batch in self._last.batches):
            raise RuntimeError(f"{needs}, and weights have moved to another device since, or a replica ran it")
        return self._last.batches

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        check_tokens(x, mask, self.dim, self.directions.dtype)
