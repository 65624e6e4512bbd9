"""Several arena models as one batched computation: every weight has a leading dimension of models.

The layers are stated in plain torch, so that many small models share each kernel launch. `primal` and `general` equal
`Classifier`; the two others are the layer as released: it ignores padding, samples tokens among all positions, has
√Λ as its parameter, and averages J over samples and heads before squaring it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, normalize, pad, relu, scaled_dot_product_attention

from keyquery.learn.layers.primal.reference import evenly, take
from keyquery_studies.common.stacked import Weights, embed, linear, norm, split_heads, within
from keyquery_studies.primal.model import DEPTH, DROPOUT, HEADS, WIDTH, Classifier, start_as_published

# "released": the released layer in our model; "released, all positions": pooled over padding as well, as it was.
# The last two sample tokens where the other layer does.
STACKED = (
    "general",
    "primal",
    "released",
    "released, all positions",
    "primal, sampling padding",
    "released, sampling real tokens",
)


def released(attention: str) -> bool:
    """Whether an attention is the layer as released."""
    return attention.startswith("released")


def initial(attention: str, seed: int, sizes: tuple[int, int, int], primal: Mapping[str, Any] | None) -> Weights:
    """The weights of one model; `sizes` are vocabulary, length and classes."""
    torch.manual_seed(seed)
    model = Classifier("general" if attention == "general" else "primal", *sizes, primal)
    start_as_published(model)
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    if released(attention):
        for name, weight in weights.items():
            if name.endswith("directions"):  # orthogonal heads, not columns, whose length is 1/√rank
                weights[name] = torch.stack([nn.init.orthogonal_(torch.empty(weight.shape[1:])) for _ in range(2)])
            elif name.endswith("log_lambda"):
                weights[name] = torch.rand(weight.shape)  # √Λ
    return weights


def losses(
    weights: Weights,
    attention: str,
    eta: float,
    tokens: Integer[Tensor, "models batch n"],
    labels: Integer[Tensor, "models batch"],
    training: bool = True,
    cuts: Sequence[int] = (),
) -> tuple[Float[Tensor, " models"], Float[Tensor, "models batch classes"]]:
    """Cross-entropy with the regularizer, and logits, of every model on its own sequences.

    `cuts` save softmax the padding: sequences sorted by length are divided into as many groups, and each is cut.
    """
    models, batch, n = tokens.shape
    mask = tokens > 0
    x = embed(weights["tokens.weight"], tokens) + weights["places"][:, None, :n]
    x = dropout(x, DROPOUT, training).flatten(1, 2)  # (models, batch · n, width)
    penalty = x.new_zeros(models)
    for block in range(DEPTH):
        own = within(weights, f"body.blocks.{block}.")
        attend = partial(_released if released(attention) else _primal, everywhere=samples_padding(attention))
        if attention == "general":
            attend = partial(_softmax, cuts=cuts, training=training)
        mixed, error = attend(within(own, "attention."), norm(own, "attention_norm", x), mask)
        x = x + dropout(mixed, DROPOUT, training)
        hidden = gelu(linear(own, "mlp.0", norm(own, "mlp_norm", x)))
        x = x + dropout(linear(own, "mlp.2", hidden), DROPOUT, training)
        penalty = penalty + eta * error / DEPTH
    x = norm(weights, "body.norm", x).unflatten(1, (batch, n))
    pooled = x.mean(2) if attention == "released, all positions" else _mean(x, mask)
    logits = linear(weights, "head.2", relu(linear(weights, "head.0", pooled))).float()
    each = cross_entropy(logits.flatten(0, 1), labels.flatten().long(), reduction="none").unflatten(0, (models, batch))
    return each.mean(1) + penalty, logits


def _softmax(
    own: Weights, x: Tensor, mask: Bool[Tensor, "models batch n"], training: bool, cuts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    query, key, value = (split_heads(linear(own, name, x), mask.shape[1:], HEADS) for name in ("query", "key", "value"))
    rate, real = DROPOUT if training else 0.0, mask.flatten(0, 1)
    if cuts:
        order, groups = real.sum(1).argsort(), []
        for rows, cut in zip(order.tensor_split(len(cuts)), cuts, strict=True):
            q, k, v = (part[rows, :, :cut] for part in (query, key, value))
            mixed = scaled_dot_product_attention(q, k, v, real[rows, None, None, :cut], dropout_p=rate)
            groups.append(pad(mixed, (0, 0, 0, real.shape[1] - cut)))
        mixed = torch.cat(groups)[order.argsort()]
    else:
        mixed = scaled_dot_product_attention(query, key, value, real[:, None, None], dropout_p=rate)
    return linear(own, "output", mixed.transpose(1, 2).reshape(x.shape)), x.new_zeros(len(mask))


def samples_padding(attention: str) -> bool:
    """Whether tokens are sampled among all positions, as released, or among real tokens."""
    return attention in ("released", "released, all positions", "primal, sampling padding")


def _sampled(
    own: Weights, x: Tensor, mask: Bool[Tensor, "models batch n"], everywhere: bool
) -> tuple[Float[Tensor, "sequences rows d"], Bool[Tensor, "sequences rows"]]:
    """Evenly spaced tokens of every sequence, and which of them are real."""
    n, real, rows = mask.shape[-1], mask.flatten(0, 1), own["directions"].shape[3]
    x = x.unflatten(1, mask.shape[1:]).flatten(0, 1)
    if everywhere:
        place = torch.linspace(0, n - 1, min(rows, n), device=x.device).int()
        return x[:, place], real[:, place]
    places, used = evenly(n, rows, real, x.device)
    assert used is not None
    return take(x, places) * used.unsqueeze(-1), used


def _primal(
    own: Weights, x: Tensor, mask: Bool[Tensor, "models batch n"], everywhere: bool = False
) -> tuple[Tensor, Tensor]:
    """As in `kq.PrimalAttention`: padding is 0, and J is squared per sample and head."""
    real = mask.flatten(0, 1)
    x = x * mask.flatten(1, 2).unsqueeze(-1)
    sample, used = _sampled(own, x, mask, everywhere)
    scores = [score * real[:, None, :, None] for score in _scores(own, x, sample, mask)]
    energy = sum((score.square().sum(-2).unflatten(0, mask.shape[:2]) for score in scores), start=x.new_zeros(()))
    counts = mask.sum(-1)[..., None].clamp(min=1)
    halves = (energy * own["log_lambda"].exp()[:, None]).sum(-1) / counts / 2  # (models, batch, heads)
    rows = _products(own)[..., : sample.shape[1]]  # (models, heads, rows)
    trace = torch.einsum("mbr,mhr->mbh", used.unflatten(0, mask.shape[:2]).to(rows.dtype), rows)
    out = _merged(own, scores, mask) * mask.flatten(1, 2).unsqueeze(-1)
    return out, (halves - trace).square().mean((1, 2))


def _products(own: Weights) -> Float[Tensor, "models heads rows"]:
    """The diagonal of WeWrᵀ; not by `prod`, whose gradient waits for the GPU, which a CUDA graph cannot."""
    one, other = own["directions"].unbind(1)
    return (one * other).sum(-1)


def _released(
    own: Weights, x: Tensor, mask: Bool[Tensor, "models batch n"], everywhere: bool = True
) -> tuple[Tensor, Tensor]:
    """As released: no padding, tokens sampled among all positions, J averaged over samples and heads, then squared."""
    sample, _ = _sampled(own, x, mask, everywhere)
    scores = _scores(own, x, sample, mask)
    energy = torch.stack([score.square().mean(-2).unflatten(0, mask.shape[:2]).mean(1) for score in scores]).sum(0)
    halves = (energy * own["log_lambda"].square()).sum(-1).mean(-1) / 2
    trace = _products(own)[..., : sample.shape[1]].sum(-1).mean(-1)
    return _merged(own, scores, mask), (halves - trace).square()


def _scores(own: Weights, x: Tensor, sample: Tensor, mask: Tensor) -> list[Tensor]:
    """e = φ(q)f(X)ᵀWe and r = φ(k)f(X)ᵀWr, (models · batch, heads, n, rank), in float32."""
    rows = sample.shape[1]
    source = sample.unflatten(-1, (HEADS, -1)).unflatten(0, mask.shape[:2])
    both = [split_heads(part, mask.shape[1:], HEADS) for part in linear(own, "query_key", x).chunk(2, -1)]
    scores = []
    for part, directions in zip(both, own["directions"].unbind(1), strict=True):
        weights = torch.einsum("mbrhp,mhrs->mbhps", source, directions[:, :, :rows]).flatten(0, 1)
        scores.append((normalize(part.float(), dim=-1) @ weights).float())
    return scores


def _merged(own: Weights, scores: list[Tensor], mask: Tensor) -> Tensor:
    """The linear map of [e; r] of every head, and the output projection."""
    both = torch.cat(scores, -1).unflatten(0, mask.shape[:2]).permute(0, 1, 3, 2, 4).flatten(1, 3)
    mixed = linear(own, "concat", both).reshape(len(mask), -1, WIDTH)
    return linear(own, "output", mixed)


def _mean(x: Float[Tensor, "models batch n d"], mask: Bool[Tensor, "models batch n"]) -> Tensor:
    """The mean over real tokens."""
    real = mask.unsqueeze(-1)
    return (x * real).sum(2) / real.sum(2)
