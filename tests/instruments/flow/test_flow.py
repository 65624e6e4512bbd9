"""Flow of tensors against known answers, and against sums over pairs, one by one, in float64."""

import numpy as np
import pytest
import torch

import keyquery as kq

LABELS = ["image"] * 12 + ["text"] * 8
N = len(LABELS)
CROSS = torch.tensor([[a != b for b in LABELS] for a in LABELS])
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
UNIFORM = torch.full((4, 4), 0.25)
SHORT = ["a", "a", "b", "b"]


def softmax(*shape, seed=0, allowed=None):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return scores.softmax(-1) if allowed is None else scores.masked_fill(~allowed, -1e9).softmax(-1) * allowed


def uniform(allowed):
    return allowed.double() / allowed.sum(-1, keepdim=True).clamp(min=1)


def within(t):
    """Attention that stays in its modality, uniform there, but for a share t that is spread over the other one."""
    return (1 - t) * uniform(~CROSS) + t * uniform(CROSS)


def pairs(attention, labels, out=(), live=None):
    """Shares of mass by (from, to), added up pair by pair, over what is not left out."""
    mass = {}
    for i, query in enumerate(labels):
        for j, key in enumerate(labels):
            if query not in out and key not in out and (live is None or (live[i] and live[j])):
                mass[key, query] = mass.get((key, query), 0.0) + float(attention[i, j])
    return {pair: amount / sum(mass.values()) for pair, amount in mass.items()}


def test_uniform_attention_is_the_null_level():
    reading = kq.flow(torch.full((10, 10), 0.1, dtype=torch.float64), ["image"] * 5 + ["text"] * 3 + ["sound"] * 2)
    assert reading.raw == pytest.approx(1 - 0.25 - 0.09 - 0.04, abs=1e-14)
    assert reading.directed["sound", "image"] == pytest.approx(0.1, abs=1e-14)
    for name in ("raw", "residual", "rollout", "net"):
        assert reading.of(name, corrected=True) == pytest.approx(0, abs=1e-14)
    for count in (2, 3, 9):  # no token of uniform attention is a sink, also where the first get much of it
        mask = CAUSAL[:count, :count]
        assert kq.flow(uniform(mask), ["a", *["b"] * (count - 1)], mask=mask).sink_mass == pytest.approx(0, abs=1e-6)
    assert reading.symmetry == pytest.approx(1)
    assert reading.reciprocity is None  # nothing varies
    assert kq.flow(within(0.0), LABELS).symmetry is None  # nothing crosses


REAL = torch.tensor([position not in (3, 15) for position in range(N)])
BOTH = torch.stack([CAUSAL, torch.ones(N, N, dtype=torch.bool)])


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("mask", [None, CAUSAL.triu(-4), REAL, BOTH], ids=["none", "window", "real", "by head"])
def test_every_reading_against_sums_over_pairs(mask, counted):
    labels = ["special", *LABELS[1:-2], "special", "sound"]
    allowed = torch.ones(N, N, dtype=torch.bool) if mask is None else mask & mask[:, None] if mask.ndim == 1 else mask
    allowed = allowed.expand(2, N, N)  # of each head
    attention, live = softmax(3, 2, N, N, seed=1, allowed=allowed), allowed[0].any(1)
    reading = kq.flow(attention, labels, mask=mask, counted=counted)
    out = () if counted else ("special",)
    rolled = {"shares": torch.eye(N).double(), "chance": torch.eye(N).double()}
    for layer in range(3):
        for kind, means in (("shares", attention[layer].mean(0)), ("chance", uniform(allowed).mean(0))):
            rolled[kind] = (means + torch.eye(N)) / 2 @ rolled[kind]
            assert blocks(reading, kind, "rollout", (layer,)) == pytest.approx(pairs(rolled[kind], labels, out, live))
            for head in range(2):
                map_ = attention[layer, head] if kind == "shares" else uniform(allowed[head])
                expected = {"raw": pairs(map_, labels, out, live)}
                expected["residual"] = pairs((map_ + torch.eye(N)) / 2, labels, out, live)
                for name, shares in expected.items():
                    assert blocks(reading, kind, name, (layer, head)) == pytest.approx(shares, abs=1e-12)
        lost = [i for i in range(N) if labels[i] in out]
        kept = [i for i in range(N) if labels[i] not in out and live[i]]
        away = attention[layer][:, kept][..., lost].sum((-1, -2)) / attention[layer][:, kept].sum((-1, -2))
        assert reading.special[layer] == pytest.approx(away.tolist(), abs=1e-12)


def blocks(reading, kind, name, place):
    values = np.array(getattr(reading, kind)[name])[place]
    names = list(enumerate(reading.modalities))
    return {(key, query): values[q, k] for k, key in names for q, query in names}


def test_symmetry_and_reciprocity_are_those_of_the_block_across():
    near = (torch.arange(N)[:, None] - torch.arange(N)).abs() < 9
    near[2] = torch.arange(N) < 14  # sees further than it is seen
    attention = softmax(N, N, allowed=near)
    reading, across = kq.flow(attention, LABELS, mask=near), attention * CROSS
    assert reading.symmetry == pytest.approx(float(torch.trace(across @ across) / across.square().sum()), abs=1e-13)
    ways = (near & near.mT)[:12, 12:]
    expected = np.corrcoef(attention[:12, 12:][ways], attention[12:, :12].mT[ways])[0, 1]
    assert reading.reciprocity == pytest.approx(expected, abs=1e-12)
    one_way = kq.flow(softmax(N, N, allowed=CAUSAL), LABELS, mask=CAUSAL)
    assert (one_way.symmetry, one_way.reciprocity) == (0, None)


def test_reciprocity_is_that_within_pairs_of_modalities():
    # Over all pairs at once it would have another sign, that of which modalities attend to each other.
    labels = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    odd = torch.rand(12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 0.5
    scores = 2 * (odd - odd.mT)
    scores[:4, 4:8] += 3
    scores[4:8, :4] += 3
    attention = scores.softmax(-1)
    spans = {"a": slice(0, 4), "b": slice(4, 8), "c": slice(8, 12)}
    ways = [(spans[a], spans[b]) for a, b in (("a", "b"), ("a", "c"), ("b", "c"))]
    expected = np.mean([np.corrcoef(attention[i, j].flatten(), attention[j, i].mT.flatten())[0, 1] for i, j in ways])
    assert kq.flow(attention, labels).reciprocity == pytest.approx(expected, abs=1e-12)
    cross = torch.tensor([[a != b for b in labels] for a in labels])
    assert expected < -0.5 < 0 < np.corrcoef(attention[cross], attention.mT[cross])[0, 1]


def test_heads_are_ranked_net_of_sinks():
    # Head 0 gives all to one patch, head 1 nearly all to a special token, head 2 really looks across.
    labels = ["special", *LABELS[1:]]
    heads = torch.zeros(3, N, N, dtype=torch.float64)
    heads[0] = 0.05 / N
    heads[0, :, 5] += 0.95
    heads[1, :, 0] = 0.97
    heads[1] += 0.03 * CROSS / CROSS.sum(1, keepdim=True)
    heads[2] = within(0.7)
    reading = kq.flow(heads, labels, keep=3)
    assert np.argmax(reading.corrected) == 1  # of what the special token leaves, everything crosses
    assert [row["head"] for row in reading.maps] == [2, 1, 0]
    for head, sinks in enumerate([[5], [], []]):
        kept = list(range(1, N))
        keys = [j for j in kept if j not in sinks]
        paid = float(heads[head][kept].sum())
        crossing, total = (
            [float((map_ * part)[kept][:, keys].sum()) for part in (CROSS, torch.ones(N, N))]
            for map_ in (heads[head], torch.full((N, N), 1 / N, dtype=torch.float64))
        )
        expected = crossing[1] / paid * (crossing[0] / crossing[1] - total[0] / total[1])
        assert reading.of("net", corrected=True)[head] == pytest.approx(expected, abs=1e-12)
        assert reading.sink_mass[head] == pytest.approx(1 - crossing[1] / paid, abs=1e-12)
    assert kq.flow(heads[0], LABELS, sink=1).net == pytest.approx(kq.flow(heads[0], LABELS).raw, abs=1e-12)


def test_leading_dimensions_stay_and_texts_may_have_labels_of_their_own():
    layers = [softmax(2, 3, N, N, seed=seed) for seed in range(4)]
    both = [LABELS, LABELS[::-1]]
    reading = kq.flow(layers, both)
    assert (np.shape(reading.raw), np.shape(reading.rollout)) == ((4, 2, 3), (4, 2))
    assert np.allclose(reading.raw, kq.flow(torch.stack(layers), both).raw)
    for text, labels in enumerate(both):
        alone = kq.flow(torch.stack([layer[text] for layer in layers]), labels)
        for name in ("raw", "residual", "symmetry", "rollout"):
            assert np.allclose(np.array(getattr(reading, name))[:, text], getattr(alone, name), atol=1e-14)
    assert reading.counts == {"image": [12, 12], "text": [8, 8]}
    rows = reading.records()
    assert (len(rows), rows[-1]["layer"], rows[-1]["text"], rows[-1]["head"]) == (24, 3, 1, 2)
    assert rows[-1]["text to image"] == pytest.approx(reading.directed["text", "image"][3][1][2])


def test_what_models_return_is_taken_as_it_is():
    layers = tuple(softmax(1, 3, N, N, seed=seed) for seed in range(2))
    reading = kq.flow(layers, LABELS)
    assert np.shape(reading.raw) == (2, 3)
    assert np.allclose(reading.raw, kq.flow(torch.cat(layers), LABELS).raw)
    assert kq.flow(layers[0][0].numpy(), torch.tensor([0] * 12 + [1] * 8)).modalities == ["0", "1"]
    averaged = kq.flow([layer[0].mean(0) for layer in layers], LABELS)
    assert np.allclose(averaged.rollout, reading.rollout, atol=1e-14)
    assert sorted(averaged.records()[0])[:2] == ["image to text", "layer"]
    half = layers[0][0].bfloat16()
    exact = half.double() / half.double().sum(-1, keepdim=True)
    assert np.allclose(kq.flow(half, LABELS).raw, kq.flow(exact, LABELS).raw, atol=torch.finfo(half.dtype).eps)


def test_the_strongest_heads_are_kept():
    shares = [[0.1, 0.6, 0.3], [0.7, 0.2, 0.4]]
    attention = torch.stack([torch.stack([within(t) for t in row]) for row in shares])
    reading = kq.flow(attention, LABELS, keep=3)
    assert np.allclose(reading.raw, shares)
    assert [(row["layer"], row["head"]) for row in reading.maps] == [(1, 0), (0, 1), (1, 2)]
    block = next(row for row in reading.maps[0]["blocks"] if (row["from"], row["to"]) == ("text", "image"))
    assert np.allclose(block["map"], attention[1, 0, :12, 12:], rtol=1e-3)
    assert [len(kq.flow(attention, LABELS, keep=count).maps) for count in (0, 50)] == [0, 6]
    assert kq.Reading.load(reading.to_json()) == reading


def test_a_sink_that_every_query_sees_is_gone_without_popularity():
    scores = torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sunk = scores.clone()
    sunk[:, 3] += 6
    readings = [kq.flow(values.softmax(-1), LABELS, keep=1) for values in (scores, sunk)]
    maps = [np.array(reading.without_popularity(0, 0)[0]["map"]) for reading in readings]
    np.testing.assert_allclose(*(rows / rows.sum(-1, keepdims=True) for rows in maps), rtol=1e-2)
    assert (readings[1].maps[0]["blocks"][0]["from"], np.shape(maps[0])) == ("image", (8, 12))


def test_under_a_causal_mask_queries_behind_the_keys_have_popularity():
    mask = CAUSAL[:6, :6]
    attention = softmax(6, 6, allowed=mask)
    reading = kq.flow(attention, ["image"] * 3 + ["text"] * 3, mask=mask, keep=1)
    rows = attention[2:, :3].log()
    expected = (rows - rows.mean(-1, keepdim=True)).mean(0)
    np.testing.assert_allclose(reading.maps[0]["popularity"][:3], expected, rtol=1e-3)
    with pytest.raises(ValueError, match="popularity of text is undefined: fewer than two queries see all of it"):
        reading.without_popularity(0, 0)
    with pytest.raises(ValueError, match=r"the maps of head 0\.3 were not kept: raise keep"):
        reading.without_popularity(0, 3)


@pytest.mark.parametrize(
    ("attention", "labels", "options", "sentence"),
    [
        (UNIFORM, ["a", "b"], {}, "modality has 2 labels, but the attention has 4 tokens"),
        (UNIFORM, ["a", "a", "special", "a"], {}, "two labels besides 'special', got only 'a', 'special'"),
        (UNIFORM, [["a", "b"], ["a"]], {}, "modality must be one row of labels, or one row per text"),
        (UNIFORM, [SHORT, SHORT], {}, "modality has 2 rows of labels, but the attention has 1 texts"),
        (UNIFORM, None, {}, "modality is required with a tensor: one label per token"),
        (2 * UNIFORM, SHORT, {}, "rows of attention must sum to 1, within 0.0001; row 0 of head 0 sums to 2"),
        (-UNIFORM, SHORT, {}, "attention must not be negative, got -0.25 in row 0 of head 0"),
        (UNIFORM * torch.nan, SHORT, {}, "attention must be finite"),
        (UNIFORM[:2], SHORT, {}, r"attention must be \(..., n, n\), of tokens to the same tokens, got \(2, 4\)"),
        ([UNIFORM, torch.eye(3)], SHORT, {}, r"must have one shape, got \(4, 4\) and \(3, 3\)"),
        ((None, None), SHORT, {}, r"attention contains no maps: .*attn_implementation='eager'"),
        (UNIFORM, SHORT, {"mask": REAL[:3]}, r"mask must be \(4,\) or \(..., 4, 4\), got \(3,\)"),
        (UNIFORM, SHORT, {"mask": CAUSAL[:4, :4]}, "attention must be 0 where mask is False"),
        (UNIFORM, SHORT, {"mask": CAUSAL[:4, :4].expand(2, 4, 4)}, r"mask has leading dimensions \(2,\), but .* \(\)"),
        (UNIFORM, SHORT, {"tokens": ["a"]}, "tokens must be a list of 4 strings, one per token"),
        (UNIFORM, SHORT, {"sink": 1.5}, "sink must be above 0 and at most 1"),
        (UNIFORM, SHORT, {"keep": -1}, "keep must be at least 0, got -1"),
        (UNIFORM, SHORT, {"text": "some words"}, "inputs, text, image and processor need a model"),
    ],
)
def test_what_cannot_be_measured(attention, labels, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        kq.flow(attention, labels, **options)


def test_wrong_types_and_names():
    for labels in ("abcd", {"a": 1}, [], 7):
        with pytest.raises(TypeError, match="modality must be one label per token"):
            kq.flow(UNIFORM, labels)
    with pytest.raises(TypeError, match="mask must be bool, True where attention may go"):
        kq.flow(UNIFORM, SHORT, mask=torch.ones(4, 4))
    reading = kq.flow(UNIFORM, SHORT)
    assert reading.weighted is None
    with pytest.raises(ValueError, match="reading must be one of 'raw', 'residual', 'net', 'rollout', got 'weighted'"):
        reading.directed_of("weighted")
