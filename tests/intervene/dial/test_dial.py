"""The dial: exact, causal, masked, cached, and undone bit for bit."""

import copy
from contextlib import ExitStack

import pytest
import torch

import keyquery as kq
from keyquery.checkpoints.family import families
from keyquery.forms.parts import PARTS
from keyquery.intervene.dial.dial import Gains
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import rewrite, sites_of
from keyquery.intervene.sites import Context, Past, Rewrite, Turn
from keyquery.proof.families import tiny_inputs, tiny_model
from tests.listening.models import rotation

TINY = sorted(name for name, family in families().items() if family.tiny)
SINGLE = ("gpt_oss",)  # whose experts know no float64


# All ones, but for so little that the scores are really taken apart and put together again.
ONES = {"symmetric": 1 + 1e-15}


def hidden(model, **inputs):
    with torch.no_grad():
        out = model(**inputs)
    return out if isinstance(out, torch.Tensor) else out[0]


def fused(name, **changes):
    """A tiny model in float64 where it can be, with fused attention where the family has it."""
    model = tiny_model(name, **changes)
    if name not in SINGLE:
        model = model.double()
    if name not in ("gemma2", "gpt_oss"):  # caps and sinks are eager
        model.set_attn_implementation("sdpa")
    return model, {
        key: value.to(next(model.parameters()).dtype) if value.is_floating_point() else value
        for key, value in tiny_inputs(name, model).items()
    }


@pytest.mark.parametrize("name", TINY)
def test_all_ones_is_the_model_and_every_part_matters(name):
    model, inputs = fused(name)
    before = hidden(model, **inputs)
    scale = float(before.abs().max())
    configs = copy.deepcopy(model.config)
    with kq.dial(model, **ONES) as dial:
        assert torch.allclose(hidden(model, **inputs), before, atol=1e-6 * scale, rtol=0)
        placed = {site.placed for site in sites_of(model).values()}
        for part in PARTS:
            if part in ("position", "query_only") and name == "deberta_v2":
                continue
            dial.turn(**{part: 0})
            change = float((hidden(model, **inputs) - before).abs().max())
            everywhere = part not in ("position", "query_only") or name == "gpt_oss"  # whose sink sees constants
            biased = all(site.turn.rope is None for site in sites_of(model).values())  # then queries do not matter
            expected = everywhere or (True in placed and not (part == "query_only" and biased))
            assert (change > 1e-4 * scale) == expected, part
    assert torch.equal(hidden(model, **inputs), before)
    assert model.config.to_dict() == configs.to_dict()
    assert model.config._attn_implementation == configs._attn_implementation


class Recorder(Rewrite):
    """A rewrite that changes nothing and keeps the means."""

    def __init__(self, heads):
        self.heads, self.means = list(range(heads)), None

    def __call__(self, call):
        self.means = call.means()
        return call.queries[..., -call.new :, :], call.keys


@pytest.mark.parametrize("name", [name for name in TINY if name not in ("albert", "deepseek")])
def test_means_of_a_batch_are_those_of_data(name):
    """So that rotations are really taken back, in every family's own layout; albert's block is called many times."""
    model, inputs = fused(name)
    data = Means(model, [inputs], "global")
    sites = sites_of(model)
    recorders = {index: Recorder(site.count) for index, site in sites.items()}
    with ExitStack() as changes:
        rewrite(model, sites, list(recorders.items()), changes)
        hidden(model, **inputs)
    for index, recorder in recorders.items():
        means = data.of(sites[index])
        for given, expected in zip(recorder.means, (means.query[0], means.key[0]), strict=True):
            assert torch.allclose(given.double(), expected, atol=1e-5, rtol=1e-4), sites[index].name


def random_call(turn, n=7, m=7, heads=3, rank=8):
    queries, keys = torch.randn(2, 2, heads, m, rank, dtype=torch.float64) + torch.randn(rank, dtype=torch.float64)
    positions = torch.stack((torch.arange(m), torch.arange(m) + 3))
    real = torch.tensor([[True] * m, [False] * 2 + [True] * (m - 2)])
    return Context(queries, keys, n, positions, positions, real, turn, True, Past(queries, keys, positions))


TURNS = {
    "none": Turn(),
    "rope": Turn(kq.Rope(8)),
    "interleaved, partial, stretched": Turn(kq.Rope(6, interleaved=True, factor=1.3)),
    "from the third on": Turn(kq.Rope(6), start=2),
}
EACH = torch.eye(5, dtype=torch.float64)


def parts_of(call, heads=(0, 1, 2)):
    """The five parts of the scores, each by a dial that has all others off."""
    scores = []
    for gains in EACH:
        query, key = Gains(heads, gains[:, None].expand(-1, len(heads)), None)(call)
        scores.append(query @ key.mT)
    return torch.stack(scores)


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_parts_are_those_of_the_definition_and_sum_to_the_scores(turn):
    call = random_call(turn)
    parts = parts_of(call)
    assert (parts.sum(0) - call.queries @ call.keys.mT).abs().max() < 1e-10
    turns = [[rotation(turn.rope, place, 8, turn.start) for place in row] for row in call.turned]
    for head in range(3):
        plain = [
            [torch.stack([turns[b][i].inverse() @ t[b, head, i] for i in range(7)]) for b in range(2)]
            for t in (call.queries, call.keys)
        ]
        means = [torch.cat((both[0], both[1][2:])).mean(0) for both in plain]  # the first two of the second are padding
        b, i, j = 1, 6, 3
        (q_i, k_i), (q_j, k_j) = ([plain[s][b][at] - means[s] for s in (0, 1)] for at in (i, j))
        between = turns[b][i].mT @ turns[b][j]
        pairs, swapped = q_i @ between @ k_j, q_j @ between @ k_i  # contents are swapped, places stay
        expected = torch.stack(
            (
                (pairs + swapped) / 2,
                (pairs - swapped) / 2,
                means[0] @ between @ k_j,
                q_i @ between @ means[1],
                means[0] @ between @ means[1],
            )
        )
        assert (parts[:, b, head, i, j] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("kernel", ["general", "rbf", "symmetric"])
def test_dialled_attention_is_softmax_of_dialled_scores(kernel):
    """By hand, in float64, for a layer with shared keys where it can have them."""
    layer = kq.Attention(12, 2, kernel=kernel, kv_heads=None if kernel == "rbf" else 1).double().eval()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    q, k = layer.queries_and_keys(x)
    k, v = (t.expand(1, 2, -1, -1)[0] for t in (k, layer._heads(layer.value(x), layer.kv_heads)))
    q = q[0]
    if kernel == "rbf":
        q, k = (
            torch.cat((q, torch.ones_like(q[..., :1])), -1),
            torch.cat((k, -k.square().sum(-1, keepdim=True) / 2), -1),
        )
    mean_q, mean_k = q.mean(1, keepdim=True), k.mean(1, keepdim=True)
    pairs = (q - mean_q) @ (k - mean_k).mT
    scores = 0.5 * (pairs + pairs.mT) / 2 + 2 * (pairs - pairs.mT) / 2 + 0.25 * mean_q @ (k - mean_k).mT
    out = (scores * layer.scale).softmax(-1) @ v
    expected = layer.output(out.transpose(0, 1).flatten(1))
    with kq.dial(layer, symmetric=0.5, skew=2, popularity=0.25):
        assert (layer(x)[0] - expected).abs().max() < 1e-12
