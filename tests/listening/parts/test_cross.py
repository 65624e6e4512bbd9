"""Cross-attention on data: queries and keys as in the model, and parts against brute force."""

import pytest
import torch

import keyquery as kq
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.on_data import score_variances
from keyquery.listening.parts.pairs import ScoredPairs, watch_pairs
from keyquery.listening.parts.shares import score_shares
from keyquery.listening.parts.variance import ScoreVariance
from keyquery.proof.families import tiny_inputs, tiny_model

MODELS = ["t5", "bart", "whisper"]


def inputs(name, model, rows):
    """Batches of different texts; encoder and decoder lengths differ, and one source is padded."""
    torch.manual_seed(0)
    example = tiny_inputs(name, model)
    if "input_features" in example:
        shape = (rows, *example["input_features"].shape[1:])
        return {"input_features": torch.randn(shape), "decoder_input_ids": torch.randint(3, 60, (rows, 5))}
    mask = torch.ones(rows, 8, dtype=torch.long)
    mask[0, 6:] = 0
    ids = torch.randint(3, 60, (rows, 8))
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": torch.randint(3, 60, (rows, 5))}


def observed(model, heads, batch):
    pairs = {}

    def keep(layer, pair):
        if layer.kind == "cross":
            pairs.setdefault(layer.index, pair)

    with watch_pairs(model, heads, keep, cross=True) as run:
        out = run({**batch, "output_attentions": True})
    return pairs, out


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_model(name):
    model = tiny_model(name)
    heads, batch = kq.read(model), inputs(name, model, 3)
    pairs, out = observed(model, heads, batch)
    crossed = [layer for layer in heads if layer.kind == "cross"]
    assert len(out.cross_attentions) == len(crossed) > 0
    for layer, expected in zip(crossed, out.cross_attentions, strict=True):
        pair = pairs[layer.index]
        scores = (pair.query @ pair.key.mT).masked_fill(~pair.real_key[:, None, None], -torch.inf)
        torch.testing.assert_close(scores.softmax(-1), expected, rtol=1e-4, atol=1e-5)


def brute_force(pairs, mean_query, mean_key):
    """Squares of the parts, centred per query over its keys, summed over sequences, by loops: (heads, parts)."""
    heads = pairs.query.shape[1]
    sums = torch.zeros(heads, 4, dtype=torch.float64)
    total = torch.zeros(heads, dtype=torch.float64)
    for row in range(len(pairs.query)):
        keys = pairs.real_key[row]
        for head in range(heads):
            q, k = pairs.query[row, head].double(), pairs.key[row, head][keys].double()
            q0, k0 = mean_query[head], mean_key[head]
            parts = [(q - q0) @ (k - k0).T, q0[None] @ (k - k0).T, (q - q0) @ k0[:, None], q0[None] @ k0[:, None]]
            parts = [part.expand(len(q), len(k)) - part.expand(len(q), len(k)).mean(-1, keepdim=True) for part in parts]
            sums[head] += torch.stack([part.square().sum() for part in parts])
            total[head] += sum(parts).square().sum()
    return sums, total


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_parts_with_means_over_all_positions_by_brute_force(name):
    model = tiny_model(name)
    heads, batch = kq.read(model), inputs(name, model, 6)
    pairs, _ = observed(model, heads, batch)
    sums = score_variances(model, [batch], heads, lambda batches: batches)
    for index, pair in pairs.items():
        assert sums[index].is_cross
        assert not sums[index].by_position
        real = pair.real_key[:, None, :, None]
        mean_query = pair.query.double().mean((0, 2))
        mean_key = (pair.key.double() * real).sum((0, 2)) / real.sum((0, 2))
        squares, total = brute_force(pair, mean_query, mean_key)
        products = torch.stack(list(sums[index].products.values()))[:, 0].sum(0)  # (heads, parts, parts)
        given = products.diagonal(dim1=-2, dim2=-1)[:, [0, 2, 3, 4]]  # pairwise, popularity, query_only, position
        torch.testing.assert_close(given, squares, rtol=1e-3, atol=1e-6 * float(total.max()))
        torch.testing.assert_close(products.sum((-2, -1)), total, rtol=1e-3, atol=1e-6 * float(total.max()))
        assert products[:, 1].abs().max() < 1e-5 * total.max()  # nothing is skew, but for rounding


def simulated(sequences, rank=3, n=4, m=6):
    """Queries and keys with known means by position, and contents of known variance; shares are then known."""
    generator = torch.Generator().manual_seed(3)
    mean_query, mean_key = torch.randn(1, n, rank, generator=generator), torch.randn(1, m, rank, generator=generator)
    query = mean_query + 0.8 * torch.randn(sequences, 1, n, rank, generator=generator)
    key = mean_key + 0.5 * torch.randn(sequences, 1, m, rank, generator=generator)
    spread = mean_key[0] - mean_key[0].mean(0)  # keys centred per query
    expected = {
        "symmetric": 0.64 * 0.25 * rank * n * (m - 1),  # kept for pairwise
        "popularity": 0.25 * float(mean_query.square().sum()) * (m - 1),
        "query_only": 0.64 * n * float(spread.square().sum()),
        "position": float((mean_query[0] @ spread.T).square().sum()),
    }
    total = sum(expected.values())
    return (query, key), {name: value / total for name, value in expected.items()}


@pytest.mark.slow
def test_means_by_position_give_the_known_shares_without_bias():
    (query, key), expected = simulated(800)
    half, n, m = 400, query.shape[2], key.shape[2]
    means, key_means = PositionMeans(4), PositionMeans(4)
    for of_side, x in ((means, query), (key_means, key)):
        positions, real = torch.arange(x.shape[2]).expand(half, -1), torch.ones(half, x.shape[2], dtype=torch.bool)
        of_side.add(x[:half], x[:half], positions, real, torch.arange(half) % 4)
    sums = ScoreVariance(means, key_means=key_means)
    for start in range(half, 2 * half, 100):
        real = [torch.ones(100, size, dtype=torch.bool) for size in (n, m)]
        positions, seen = [torch.arange(size)[None] for size in (n, m)], torch.ones(1, 1, n, m, dtype=torch.bool)
        part = ScoredPairs(query[start : start + 100], key[start : start + 100], *positions, seen, *real)
        sums.add(part, list(range(start, start + 100)))
    shares = score_shares(sums)
    for name, share in expected.items():
        value, error, _ = shares.estimates[name]
        assert abs(float(value) - share) < 4 * float(error) < 0.1, name
    assert float(shares.estimates["skew"].value) == pytest.approx(0, abs=1e-12)
