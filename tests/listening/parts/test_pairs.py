"""What a model really scores, against its own attention function: 12 architectures, masks, windows, own pairs."""

from dataclasses import replace
from importlib import import_module
from itertools import permutations

import pytest
import torch

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.listening.parts.means import PER_FOLD
from keyquery.listening.parts.on_data import SEQUENCES, halves, score_variances
from keyquery.listening.parts.pairs import scored_pairs
from keyquery.listening.parts.shares import score_shares
from keyquery.listening.parts.variance import FOLDS
from keyquery.proof.families import tiny_model
from tests.listening.models import rotation

ROTATING = ("llama", "qwen3", "gpt_neox", "olmo2", "mistral", "stablelm", "gemma2")
NAMES = ("gpt2", "bert", "opt", "roberta", "vit", *ROTATING)
SEEN = []


def spy(module, query, key, value, attention_mask, **rest):
    """Transformers' own eager attention; what it is given is kept: rotated queries and keys, and the mask."""
    inner = import_module(type(module).__module__).eager_attention_forward
    shared = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = rest.get("scaling") or query.shape[-1] ** -0.5
    n = query.shape[-2]
    seen = torch.ones(len(query), 1, n, n, dtype=torch.bool)
    if attention_mask is not None:
        seen = (attention_mask[..., :n] > torch.finfo(attention_mask.dtype).min / 2).expand(len(query), 1, n, n)
    SEEN.append((scale * query.double(), shared.double(), seen))
    return inner(module, query, key, value, attention_mask, **rest)


@pytest.fixture(scope="module", autouse=True)
def _register():
    utils, masks = import_module("transformers.modeling_utils"), import_module("transformers.masking_utils")
    utils.AttentionInterface.register("test_spy", spy)
    masks.AttentionMaskInterface.register("test_spy", masks.eager_mask)


def inputs(name, model, sequences):
    torch.manual_seed(3)
    if name == "vit":
        size = model.config.image_size
        return {"pixel_values": torch.randn(sequences, 3, size, size)}
    ids, mask = torch.randint(3, 60, (sequences, 9)), torch.ones(sequences, 9, dtype=torch.long)
    mask[1::3, 7:] = 0  # every third text is shorter
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


# The folds change their roles from sequence to sequence: all orders, the two ways of each counted once.
ORDERS = [order for order in permutations(range(4)) if order[0] < order[2]]


def brute_force(first, second, rope, heads):
    """Shares of every head, pair by pair, from what the model's attention was given on two halves of the data.

    A rotation belongs to its position: means of rotated queries by position are the rotated means.
    """
    (query, key, seen), (query_b, key_b, seen_b) = first, second
    n, rank = query.shape[2:]
    real, real_b = (mask.any(-2)[:, 0] for mask in (seen, seen_b))
    fold = torch.arange(len(query)) % FOLDS
    turns = torch.stack([rotation(rope, t, rank) for t in range(n)])
    means = {}
    for f in range(FOLDS):
        for side, x in (("q", query), ("k", key)):
            own = (fold == f)[:, None] & real
            means[side, f] = torch.stack([x[own[:, t]][:, :, t].mean(0) for t in range(n)], 1)
    known = torch.stack([((fold == f)[:, None] & real).sum(0) >= PER_FOLD for f in range(FOLDS)]).all(0)
    sums = torch.zeros(heads, len(PARTS), dtype=torch.float64)
    total = torch.zeros(heads, dtype=torch.float64)
    for s in range(len(query_b)):
        allowed = seen_b[s, 0] & (real_b[s] & known)[:, None] & (real_b[s] & known)[None]
        a, b, c, d = ORDERS[s % len(ORDERS)]
        ways = ((a, b), (c, d))
        for head in range(heads):
            both = []
            for one, other in ways:
                q_mean, k_mean = means["q", one][head], means["k", other][head]
                q, k = query_b[s, head] - q_mean, key_b[s, head] - k_mean
                pairs = q @ k.T
                back_q, back_k = (torch.stack([turns[t].inverse() @ x[t] for t in range(n)]) for x in (q, k))
                swapped = torch.stack(
                    [torch.stack([(turns[i] @ back_q[j]) @ (turns[j] @ back_k[i]) for j in range(n)]) for i in range(n)]
                )
                parts = [(pairs + swapped) / 2, (pairs - swapped) / 2, q_mean @ k.T, q @ k_mean.T, q_mean @ k_mean.T]
                for part in parts:
                    for i in range(n):
                        own = allowed[i]
                        part[i] = torch.where(own, part[i] - part[i][own].mean(), 0.0) if own.any() else 0.0
                both.append(parts)
            sums[head] += torch.stack([(a * b).sum() for a, b in zip(*both, strict=True)])
            total[head] += sum(both[0]).square().sum()
    return sums / total[:, None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(3)
def test_shares_are_those_of_the_models_own_scores(name):
    model = tiny_model(name).eval()
    data = [inputs(name, model, SEQUENCES // 2 + 8), {k: v.flip(0) for k, v in inputs(name, model, 20).items()}]
    heads = kq.read(model)
    sums = score_variances(model, data, heads, lambda batches: batches)
    model.set_attn_implementation("test_spy")
    captured = []
    for half in halves(data):
        runs = []
        for batch in half:
            SEEN.clear()
            with torch.no_grad():
                model(**batch)
            runs.append(list(SEEN))
        captured.append([tuple(map(torch.cat, zip(*calls, strict=True))) for calls in zip(*runs, strict=True)])
    layers = [layer for layer in heads if layer.kind == "self"]
    assert len(captured[0]) == len(layers)
    for layer, first, second in zip(layers, *captured, strict=True):
        expected = brute_force(first, second, layer.rope, min(layer.heads, 2))
        variance = sums[layer.index]
        size = torch.stack([product[0] for product in variance.products.values()]).sum(0)
        shares = size.diagonal(dim1=-2, dim2=-1) / size.sum((-2, -1))[:, None]
        assert (shares[: len(expected)] - expected).abs().max() < 2e-4, layer.name
        estimates = score_shares(variance).estimates
        assert sum(float(estimates[part].value[0]) for part in (*PARTS, "interaction")) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, 3), (False, None)])
def test_pairs_of_a_call_that_is_not_seen_are_those_that_the_layer_says(causal, window):
    layer = replace(kq.read(tiny_model("bert"))[0], causal=causal, window=window)
    pairs = scored_pairs(layer, torch.randn(2, 6, 32), None)
    seen = [[(j <= i or not causal) and (window is None or abs(i - j) < window) for j in range(6)] for i in range(6)]
    assert pairs.visible[0, 0].tolist() == seen
    assert bool(pairs.real.all())
