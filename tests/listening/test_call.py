"""`Call`: scores, weights and output follow from what enters them, by sums over single numbers."""

import math

import pytest
import torch
from torch import nn

from keyquery.listening.call import Call, Tokens
from tests.listening.models import REPLACEMENTS, assert_one_sentence, formula

BATCH, HEADS, N, M, WIDTH, VALUES = 2, 4, 3, 5, 6, 7


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def call_of(key_heads=HEADS, n=N, m=M, **fields):
    tokens = Tokens(torch.arange(m - n, m)[None], torch.arange(m)[None])
    tensors = double(BATCH, HEADS, n, WIDTH), double(BATCH, key_heads, m, WIDTH), double(BATCH, key_heads, m, VALUES)
    return Call(nn.Identity(), "attention", 0, *tensors, scale=0.3, tokens=fields.pop("tokens", tokens), **fields)


HIDDEN = torch.tensor([[[True, False, True, True, False]], [[True, True, False, False, False]]])[:, None]
ADDITIVE = torch.arange(5.0).double().expand(1, 1, 3, 5).masked_fill(HIDDEN[:1], -torch.inf)
CALLS = {
    "plain": {},
    "grouped": {"key_heads": 2},
    "one key head": {"key_heads": 1},
    "causal": {"causal": 2},
    "causal from the first slot": {"causal": 0},
    "boolean mask": {"attn_mask": ~HIDDEN},
    "mask and causal": {"attn_mask": ~HIDDEN | torch.eye(3, 5).bool(), "causal": 2},
    "additive mask": {"attn_mask": ADDITIVE},
    "smallest number": {"attn_mask": torch.zeros(1, 1, 3, 5).masked_fill(HIDDEN[:1], torch.finfo(torch.float32).min)},
    "minus 10,000": {"attn_mask": -1e4 * HIDDEN.double()},
    "bias by head": {"position_bias": torch.linspace(-1, 1, 60).double().reshape(1, 4, 3, 5)},
    "bias and mask": {"position_bias": torch.linspace(-1, 1, 60).reshape(1, 4, 3, 5), "attn_mask": ADDITIVE},
    "soft cap": {"softcap": 0.7, "key_heads": 2, "attn_mask": ~HIDDEN},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 1.0, 3.0]).double(), "causal": 2},
    "no key": {"attn_mask": torch.tensor([[True] * 5, [False] * 5, [True] * 5])[None, None]},
}


def brute(call, b, h, i):
    """Scores, weights and output of one query, number by number."""
    shared = HEADS // call.key.shape[1]
    scores = []
    for j in range(M):
        score = call.scale * sum(
            float(call.query[b, h, i, d]) * float(call.key[b, h // shared, j, d]) for d in range(WIDTH)
        )
        if call.softcap is not None:
            score = call.softcap * math.tanh(score / call.softcap)
        for added in (call.position_bias, call.attn_mask):
            if added is not None:
                value = added.expand(BATCH, HEADS, N, M)[b, h, i, j]
                if added.dtype == torch.bool:
                    score = score if value else -math.inf
                else:
                    score = -math.inf if float(value) < -9000 else score + float(value)
        scores.append(-math.inf if call.causal is not None and j > i + call.causal else score)
    powers = [math.exp(score) for score in scores]
    total = sum(powers) + (0 if call.sinks is None else math.exp(call.sinks[h]))
    weights = [power / total if total else 0.0 for power in powers]
    output = [
        sum(weight * float(call.value[b, h // shared, j, v]) for j, weight in enumerate(weights)) for v in range(VALUES)
    ]
    return scores, weights, output


@pytest.mark.parametrize("name", CALLS)
def test_scores_weights_and_output_are_sums(name):
    call = call_of(**CALLS[name])
    everything = [brute(call, b, h, i) for b in range(BATCH) for h in range(HEADS) for i in range(N)]
    for given, wanted in zip(
        (call.scores(), call.weights(), call.output()), zip(*everything, strict=True), strict=True
    ):
        wanted = torch.tensor(wanted, dtype=torch.float64).reshape(BATCH, HEADS, N, -1)
        torch.testing.assert_close(given, wanted, atol=1e-6 if name == "bias and mask" else 1e-12, rtol=1e-7)
    for chosen in (slice(1, 3), slice(3, None)):
        for compute in (Call.scores, Call.weights, Call.output):
            torch.testing.assert_close(compute(call, chosen), compute(call)[:, chosen], atol=1e-14, rtol=1e-12)
    assert (call.heads, call.key_heads) == (HEADS, CALLS[name].get("key_heads", HEADS))


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "no key"])
def test_what_was_replaced_enters_the_output(name, replacement):
    call = call_of(**CALLS[name])
    new = REPLACEMENTS[replacement](call)
    torch.testing.assert_close(call.attend(call.check(new)), formula(call, new), atol=1e-6, rtol=1e-6)
    after = call.replaced(new)
    torch.testing.assert_close(after.output(), formula(call, new), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("replacement", ["query", "key", "wider", "bias"])
def test_scores_that_a_model_computed_itself_change_by_the_product(replacement):
    """What else the model did to its scores stays: here a term that is no bias of ours."""
    plain = call_of(causal=2)
    term = double(BATCH, HEADS, N, M)
    call = call_of(given_scores=(plain.scores() + term), key_heads=HEADS)
    call = Call(**{**vars(call), "query": plain.query, "key": plain.key, "value": plain.value})
    torch.testing.assert_close(call.bias, term.where(plain.mask, 0.0))
    new = REPLACEMENTS[replacement](call)
    kept = plain.scores() if replacement == "bias" else term + plain.scores()
    product = plain.scale * (new.get("query", plain.query) @ new.get("key", plain.key).mT - plain.query @ plain.key.mT)
    wanted = kept + product + new.get("bias", 0.0)
    torch.testing.assert_close(call.replaced(new).scores(), wanted, atol=1e-10, rtol=1e-10)


def test_scores_that_are_not_scaled_by_a_number_cannot_follow_queries():
    call = call_of(given_scores=double(BATCH, HEADS, N, M))
    call = Call(**{**vars(call), "scale": None})
    assert call.bias is None
    with pytest.raises(ValueError, match="replace its scores instead") as error:
        call.replaced({"query": call.query})
    assert_one_sentence(error)
    scores = double(BATCH, HEADS, N, M)
    assert torch.equal(call.replaced({"scores": scores}).scores(), scores)


def test_given_scores_hide_what_the_model_hid():
    """By the smallest number, which is no −∞: a query that sees no key has no weights."""
    scores = double(BATCH, HEADS, N, M)
    hidden = torch.zeros(N, M, dtype=torch.bool)
    hidden[0, 2:], hidden[1] = True, True
    call = call_of(given_scores=scores.masked_fill(hidden, -torch.finfo(torch.float64).max))
    assert torch.equal(call.scores(), scores.masked_fill(hidden, -torch.inf))
    assert torch.equal(call.mask.expand(BATCH, HEADS, N, M), (~hidden).expand(BATCH, HEADS, N, M))
    assert (call.weights()[..., 1, :] == 0).all()
    assert (call.weights()[..., 0, 2:] == 0).all()
    torch.testing.assert_close(call.weights()[..., 2, :], scores[..., 2, :].softmax(-1))


def test_half_precision_is_scored_in_single():
    call = call_of()
    half = Call(**{**vars(call), **{name: getattr(call, name).bfloat16() for name in ("query", "key", "value")}})
    wide = Call(**{**vars(call), **{name: getattr(half, name).double() for name in ("query", "key", "value")}})
    assert half.scores().dtype == torch.float32
    torch.testing.assert_close(half.scores().double(), wide.scores(), atol=1e-6, rtol=1e-6)
    for name in ("query", "output"):
        new = half.query if name == "query" else half.output()
        assert half.attend({name: new}).dtype == torch.bfloat16


CAUSAL = torch.ones(5, 5).tril().bool()[None, None]
BLOCKS = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()[None, None]
RESTARTED = torch.tensor([[0, 1, 0, 1, 2]])


@pytest.mark.parametrize(
    ("causal", "sizes", "fields", "positions"),
    [
        (True, (5, 5), {"causal": 0}, None),
        (True, (5, 5), {"attn_mask": CAUSAL}, None),
        (True, (5, 5), {"attn_mask": CAUSAL & BLOCKS}, RESTARTED),
        (True, (5, 5), {"attn_mask": CAUSAL}, RESTARTED),  # packed, and not separated
        (False, (5, 5), {"attn_mask": BLOCKS}, RESTARTED),
        (True, (5, 5), {"attn_mask": CAUSAL}, torch.tensor([[0, 1, 2, 0, 0]])),  # padding at position 0
        (False, (5, 5), {}, None),
        (True, (1, 5), {}, None),  # the last query of a cache
        (True, (2, 5), {"attn_mask": torch.ones(2, 5).tril(3).bool()[None, None]}, None),
        (False, (2, 5), {}, None),
        (False, (5, 5), {"attn_mask": CAUSAL, "is_cross": True}, None),
    ],
)
def test_causal_is_what_sees_no_later_key(causal, sizes, fields, positions):
    n, m = sizes
    keys = torch.arange(m)[None] if positions is None else positions
    call = call_of(n=n, m=m, tokens=Tokens(keys[:, m - n :], keys), **fields)
    assert call.is_causal is causal


BAD = {
    "an unknown name": (TypeError, lambda call: {"queries": call.query}),
    "a tensor": (TypeError, lambda call: call.query),
    "a number": (ValueError, lambda call: {"query": 3}),
    "fewer heads": (ValueError, lambda call: {"query": call.query[:, :1]}),
    "other tokens": (ValueError, lambda call: {"key": call.key[..., :2, :]}),
    "wider queries": (ValueError, lambda call: {"query": torch.cat((call.query, call.query), -1)}),
    "other widths": (ValueError, lambda call: {"query": call.query[..., :2], "key": call.key[..., :3]}),
    "a bias of another size": (ValueError, lambda call: {"bias": call.scores()[..., :2]}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_in_a_sentence(name):
    call = call_of(key_heads=2)
    kind, new = BAD[name]
    with pytest.raises(kind) as error:
        call.check(new(call))
    assert_one_sentence(error)
