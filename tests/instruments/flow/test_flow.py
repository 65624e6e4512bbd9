"""Flow against known answers and against sums over pairs, one by one, in float64."""

import numpy as np
import pytest
import torch

import keyquery as kq

SEEN, SAID = 12, 8
LABELS = ["image"] * SEEN + ["text"] * SAID
N = SEEN + SAID
CROSS = torch.tensor([[a != b for b in LABELS] for a in LABELS])


def softmax(*shape, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)


def within(t):
    """Attention that stays in its modality, uniform there, but for a share t that is spread over the other one."""
    own = (~CROSS).double() / (~CROSS).sum(1, keepdim=True)
    other = CROSS.double() / CROSS.sum(1, keepdim=True)
    return (1 - t) * own + t * other


def pairs(attention, labels, out=(), weight=None, allowed=None):
    """Mass by (from, to), added up pair by pair, over what is not left out."""
    found = {}
    for i, query in enumerate(labels):
        for j, key in enumerate(labels):
            if query in out or key in out or (allowed is not None and not allowed[i, j]):
                continue
            amount = float(attention[i, j]) * (1.0 if weight is None else float(weight[j]))
            found[key, query] = found.get((key, query), 0.0) + amount
    total = sum(found.values())
    return {pair: amount / total for pair, amount in found.items()}


def crossed(found):
    return sum(share for (source, target), share in found.items() if source != target)


def even(allowed):
    return allowed.double() / allowed.sum(-1, keepdim=True).clamp(min=1)


def rolled(maps):
    """Products of ½A + ½I, heads averaged, up to each layer."""
    out, product = [], torch.eye(maps.shape[-1], dtype=torch.float64)
    for layer in maps:
        product = (layer.mean(0) / 2 + torch.eye(maps.shape[-1], dtype=torch.float64) / 2) @ product
        out.append(product)
    return out


def test_attention_within_modalities_is_no_flow():
    reading = kq.flow(within(0.0), LABELS)
    assert reading.raw == 0
    assert reading.residual == 0
    assert reading.rollout == 0
    assert reading.symmetry is None
    assert reading.corrected == pytest.approx(-2 * SEEN * SAID / N**2, abs=1e-15)


def test_uniform_attention_is_chance():
    reading = kq.flow(torch.full((N, N), 1 / N, dtype=torch.float64), LABELS)
    assert reading.raw == pytest.approx(0.48, abs=1e-14)
    assert reading.raw == pytest.approx(2 * SEEN * SAID / N**2, abs=1e-14)
    for name in ("raw", "residual", "rollout"):
        assert reading.of(name, corrected=True) == pytest.approx(0, abs=1e-14)
    assert reading.symmetry == pytest.approx(1)
    assert reading.reciprocity is None  # nothing varies


def test_three_modalities_have_one_less_the_squares_of_their_shares():
    labels = ["image"] * 5 + ["text"] * 3 + ["sound"] * 2
    reading = kq.flow(torch.full((10, 10), 0.1, dtype=torch.float64), labels)
    assert reading.raw == pytest.approx(1 - 0.25 - 0.09 - 0.04, abs=1e-14)
    assert reading.directed["sound", "image"] == pytest.approx(0.1, abs=1e-14)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 1.0])
def test_a_mixture_gives_the_share_that_crosses(t):
    reading = kq.flow(within(t), LABELS)
    assert reading.raw == pytest.approx(t, abs=1e-14)
    assert reading.residual == pytest.approx(t / 2, abs=1e-14)
    assert reading.rollout == pytest.approx(t / 2, abs=1e-14)
    assert reading.directed["text", "image"] == pytest.approx(t * SEEN / N, abs=1e-14)
    assert reading.directed["image", "text"] == pytest.approx(t * SAID / N, abs=1e-14)


def test_the_order_of_tokens_within_a_modality_changes_nothing():
    attention, values = softmax(2, 3, N, N), torch.randn(2, 3, N, 4, dtype=torch.float64)
    order = torch.cat([torch.randperm(SEEN), SEEN + torch.randperm(SAID)])
    plain = kq.flow(attention, LABELS, values=values)
    moved = kq.flow(attention[..., order, :][..., order], LABELS, values=values[..., order, :])
    for name in ("raw", "residual", "weighted", "rollout", "corrected", "symmetry", "reciprocity"):
        assert np.allclose(getattr(plain, name), getattr(moved, name), atol=1e-14)


def test_any_order_of_modalities_gives_the_same():
    attention, order = softmax(3, N, N), torch.randperm(N)
    moved = kq.flow(attention[:, order][:, :, order], [LABELS[place] for place in order])
    plain = kq.flow(attention, LABELS)
    assert np.allclose(moved.raw, plain.raw, atol=1e-14)
    assert np.allclose(moved.directed["text", "image"], plain.directed["text", "image"], atol=1e-14)


def test_residual_is_half_and_directions_add_up():
    reading = kq.flow(softmax(4, 2, N, N), LABELS)
    assert np.allclose(reading.residual, np.array(reading.raw) / 2, atol=1e-14)
    for name in ("raw", "residual", "rollout"):
        found = reading.directed_of(name)
        crossing = [np.array(share) for (source, target), share in found.items() if source != target]
        assert np.allclose(sum(crossing), reading.of(name), atol=1e-14)
        assert np.allclose(sum(map(np.array, found.values())), 1, atol=1e-14)


def masks():
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    window = causal.triu(-4)
    real = torch.ones(N, dtype=torch.bool)
    real[[3, 15]] = False
    return {"none": None, "causal": causal, "window": window, "real": real}


@pytest.mark.parametrize("left_out", [True, False])
@pytest.mark.parametrize("name", masks())
def test_every_reading_against_sums_over_pairs(name, left_out):
    labels = ["special", *LABELS[1:-2], "special", "sound"]
    mask = masks()[name]
    allowed = torch.ones(N, N, dtype=torch.bool) if mask is None else mask
    allowed = allowed & allowed[:, None] if allowed.ndim == 1 else allowed
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 2, N, N, generator=generator, dtype=torch.float64)
    attention = scores.masked_fill(~allowed, -1e9).softmax(-1) * allowed
    values = torch.randn(3, 2, N, 5, generator=generator, dtype=torch.float64)
    output = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    carried = (values @ output).norm(dim=-1)
    reading = kq.flow(
        attention, labels, values=values, output=output.expand(3, 2, 5, 7), mask=mask, counted=not left_out
    )
    out = ("special",) if left_out else ()
    live = allowed.any(1)
    products, chances = rolled(attention), rolled(even(allowed).expand(3, 1, N, N))
    for layer in range(3):
        for kind, maps in (("shares", products), ("chance", chances)):
            found = pairs(maps[layer], labels, out, allowed=live[:, None] & live)
            assert crossed_of(reading, kind, "rollout", (layer,)) == pytest.approx(crossed(found), abs=1e-12)
        for head in range(2):
            one, weight = attention[layer, head], carried[layer, head]
            for kind, map_ in (("shares", one), ("chance", even(allowed))):
                beside = (map_ + torch.eye(N).double()) / 2
                cases = {"raw": (map_, None), "residual": (beside, None), "weighted": (map_, weight)}
                for said, (rows, by) in cases.items():
                    found = pairs(rows, labels, out, by, live[:, None] & live)
                    assert crossed_of(reading, kind, said, (layer, head)) == pytest.approx(crossed(found), abs=1e-12)
                    if kind == "shares":
                        for pair, share in found.items():
                            told = reading.directed_of(said)[pair]
                            assert told[layer][head] == pytest.approx(share, abs=1e-12)
            lost = [i for i in range(N) if labels[i] == "special"]
            kept = [i for i in range(N) if labels[i] != "special" and live[i]]
            away = float(one[kept][:, lost].sum() / one[kept].sum()) if left_out else 0.0
            assert reading.special[layer][head] == pytest.approx(away, abs=1e-12)


def crossed_of(reading, kind, name, place):
    blocks = np.array(getattr(reading, kind)[name])[place]
    return blocks.sum() - np.trace(blocks)


def test_a_mask_for_each_head_has_a_chance_for_each_head():
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    both = torch.stack([causal, torch.ones(N, N, dtype=torch.bool)])
    attention = torch.stack([even(causal), even(both[1])])
    reading = kq.flow(attention, LABELS, mask=both)
    assert np.allclose(reading.corrected, 0, atol=1e-14)
    assert reading.raw[0] != pytest.approx(reading.raw[1], abs=1e-3)
    alone = [kq.flow(attention[head], LABELS, mask=both[head]).raw for head in range(2)]
    assert np.allclose(reading.raw, alone, atol=1e-14)
    assert reading.of("rollout", corrected=True) == pytest.approx(0, abs=1e-14)


def test_reciprocal_flow_is_told_from_one_way_flow():
    # A symmetric map looks back exactly; of a causal one nothing does.
    raw = torch.rand(N, N, dtype=torch.float64)
    mutual = raw + raw.mT
    for _ in range(400):  # rows that sum to 1, and still symmetric
        scale = mutual.sum(1).rsqrt()
        mutual = mutual * scale[:, None] * scale
    mutual = mutual / mutual.sum(1, keepdim=True)
    reading = kq.flow(mutual, LABELS)
    assert reading.symmetry == pytest.approx(1, abs=1e-9)
    assert reading.reciprocity == pytest.approx(1, abs=1e-9)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    past = softmax(N, N).masked_fill(~causal, 0)
    reading = kq.flow(past / past.sum(1, keepdim=True), LABELS, mask=causal)
    assert reading.symmetry == 0
    assert reading.reciprocity is None


def test_symmetry_and_reciprocity_are_those_of_the_block_across():
    attention = softmax(N, N)
    across = attention * CROSS
    reading = kq.flow(attention, LABELS)
    expected = float(torch.trace(across @ across) / across.square().sum())
    assert reading.symmetry == pytest.approx(expected, abs=1e-13)
    even_part, odd_part = (across + across.mT) / 2, (across - across.mT) / 2
    energies = [float(part.square().sum()) for part in (even_part, odd_part)]
    assert reading.symmetry == pytest.approx((energies[0] - energies[1]) / sum(energies), abs=1e-13)
    there, back = attention[:SEEN, SEEN:], attention[SEEN:, :SEEN].mT
    expected = np.corrcoef(there.flatten(), back.flatten())[0, 1]
    assert reading.reciprocity == pytest.approx(expected, abs=1e-12)


def test_reciprocity_counts_only_pairs_that_may_look_both_ways():
    near = (torch.arange(N)[:, None] - torch.arange(N)).abs() < 9
    near[2] = torch.arange(N) < 14  # looks further than it is looked at
    attention = softmax(N, N).masked_fill(~near, 0)
    attention = attention / attention.sum(1, keepdim=True)
    ways = (near & near.mT)[:SEEN, SEEN:]
    there, back = attention[:SEEN, SEEN:][ways], attention[SEEN:, :SEEN].mT[ways]
    expected = np.corrcoef(there, back)[0, 1]
    assert kq.flow(attention, LABELS, mask=near).reciprocity == pytest.approx(expected, abs=1e-12)


def three():
    """Three modalities whose pairs look at each other unlike much, and where whoever is looked at looks away."""
    labels = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    generator = torch.Generator().manual_seed(3)
    odd = torch.rand(12, 12, generator=generator, dtype=torch.float64) - 0.5
    scores = 2 * (odd - odd.mT)
    scores[:4, 4:8] += 3
    scores[4:8, :4] += 3
    return labels, scores.softmax(-1)


def test_reciprocity_is_that_within_pairs_of_modalities():
    # By hand. Over all pairs at once it would have another sign, that of which modalities look at each other.
    labels, attention = three()
    found, sizes = [], []
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        mine, its = ([i for i, label in enumerate(labels) if label == name] for name in (one, other))
        there, back = attention[mine][:, its].flatten(), attention[its][:, mine].mT.flatten()
        found.append(np.corrcoef(there, back)[0, 1])
        sizes.append(there.numel())
    expected = np.average(found, weights=sizes)
    assert kq.flow(attention, labels).reciprocity == pytest.approx(expected, abs=1e-12)
    cross = torch.tensor([[a != b for b in labels] for a in labels])
    assert expected < -0.5
    assert np.corrcoef(attention[cross], attention.mT[cross])[0, 1] > 0
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))  # whichever modality comes first
    moved = kq.flow(attention[order][:, order], [labels[place] for place in order])
    assert moved.reciprocity == pytest.approx(expected, abs=1e-12)


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
    raw = np.array(reading.corrected)
    assert raw.argmax() == 1  # of what the special token leaves, everything crosses
    assert [one["head"] for one in reading.maps] == [2, 1, 0]
    for head, sinks in enumerate([[5], [], []]):
        kept = list(range(1, N))
        keys = [j for j in kept if j not in sinks]
        paid = float(heads[head][kept].sum())
        even_ = torch.full((N, N), 1 / N, dtype=torch.float64)
        crossing, all_ = (
            [float((map_ * part)[kept][:, keys].sum()) for part in (CROSS, torch.ones(N, N))]
            for map_ in (heads[head], even_)
        )
        expected = crossing[1] / paid * (crossing[0] / crossing[1] - all_[0] / all_[1])
        assert reading.of("net", corrected=True)[head] == pytest.approx(expected, abs=1e-12)
        assert reading.sink_mass[head] == pytest.approx(1 - crossing[1] / paid, abs=1e-12)
    assert kq.flow(heads[0], LABELS, sink=1).net == pytest.approx(kq.flow(heads[0], LABELS).raw, abs=1e-12)


@pytest.mark.parametrize("sink", [0, 1.5, -1])
def test_a_sink_is_a_share(sink):
    with pytest.raises(ValueError, match=r"sink must be above 0 and at most 1"):
        kq.flow(within(0.5), LABELS, sink=float(sink))


def test_no_token_of_uniform_attention_is_a_sink():
    for count in (2, 3, 4, 9):
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        labels = ["a", *["b"] * (count - 1)]
        for attention, mask in ((torch.full((count, count), 1 / count), None), (even(causal), causal)):
            assert kq.flow(attention, labels, mask=mask).sink_mass == pytest.approx(0, abs=1e-6)


def test_leading_dimensions_stay_and_texts_may_have_labels_of_their_own():
    layers = [softmax(2, 3, N, N, seed=seed) for seed in range(4)]
    turned = LABELS[::-1]
    reading = kq.flow(layers, [LABELS, turned])
    assert np.shape(reading.raw) == (4, 2, 3)
    assert np.shape(reading.rollout) == (4, 2)
    assert np.allclose(reading.raw, kq.flow(torch.stack(layers), [LABELS, turned]).raw)
    for text, labels in enumerate((LABELS, turned)):
        alone = kq.flow(torch.stack([layer[text] for layer in layers]), labels)
        for name in ("raw", "residual", "symmetry", "rollout"):
            whole = np.array(getattr(reading, name))
            assert np.allclose(whole[:, text], getattr(alone, name), atol=1e-14)
    assert reading.counts == {"image": [12, 12], "text": [8, 8]}
    rows = reading.records()
    assert (len(rows), rows[-1]["layer"], rows[-1]["text"], rows[-1]["head"]) == (24, 3, 1, 2)
    assert rows[-1]["text to image"] == pytest.approx(reading.directed["text", "image"][3][1][2])


def test_what_models_return_is_taken_as_it_is():
    layers = tuple(softmax(1, 3, N, N, seed=seed).float() for seed in range(2))
    assert np.allclose(kq.flow(layers, LABELS).raw, kq.flow(torch.cat(layers), LABELS).raw)
    assert np.shape(kq.flow(layers, LABELS).raw) == (2, 3)
    assert kq.flow(layers[0][0].numpy(), torch.tensor([0] * SEEN + [1] * SAID)).modalities == ["0", "1"]


def test_layers_may_have_their_heads_averaged_already():
    layers = softmax(3, 2, N, N)
    reading = kq.flow(list(layers.mean(1)), LABELS)
    whole = kq.flow(layers, LABELS)
    assert np.allclose(reading.rollout, whole.rollout, atol=1e-14)
    assert np.allclose(reading.raw, np.mean(whole.raw, 1), atol=1e-14)
    assert sorted(reading.records()[0])[:2] == ["image to text", "layer"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_counted_in_float64(dtype):
    attention = softmax(2, 2, N, N)
    reading = kq.flow(attention.to(dtype), LABELS)
    exact = kq.flow(attention.to(dtype).double() / attention.to(dtype).double().sum(-1, keepdim=True), LABELS)
    assert np.allclose(reading.raw, exact.raw, atol=torch.finfo(dtype).eps)


def test_norms_alone_weigh_by_what_tokens_carry():
    # Words that carry nothing send nothing; then all that arrives at words from patches is theirs alone.
    values = torch.ones(N, 1, dtype=torch.float64)
    values[SEEN:] = 0
    reading = kq.flow(within(0.25), LABELS, values=values)
    assert reading.directed_of("weighted")["text", "image"] == 0
    mass = {"stays": 0.75 * SEEN, "crosses": 0.25 * SAID}
    assert reading.weighted == pytest.approx(mass["crosses"] / sum(mass.values()), abs=1e-14)
    assert reading.raw == pytest.approx(0.25, abs=1e-14)


def test_the_strongest_heads_are_kept():
    shares = [[0.1, 0.6, 0.3], [0.7, 0.2, 0.4]]
    attention = torch.stack([torch.stack([within(t) for t in row]) for row in shares])
    reading = kq.flow(attention, LABELS, keep=3)
    assert [(one["layer"], one["head"]) for one in reading.maps] == [(1, 0), (0, 1), (1, 2)]
    block = next(one for one in reading.maps[0]["blocks"] if (one["from"], one["to"]) == ("text", "image"))
    assert np.allclose(block["map"], attention[1, 0, :SEEN, SEEN:], rtol=1e-3)
    assert len(kq.flow(attention, LABELS, keep=50).maps) == 6
    assert kq.flow(attention, LABELS).maps == []


def test_a_reading_survives_its_json():
    reading = kq.flow(softmax(2, 2, N, N), LABELS, keep=1, tokens=[f"token {place}" for place in range(N)])
    again = kq.Reading.load(reading.to_json())
    assert again == reading
    assert again.directed == reading.directed
    assert again.weighted is None
    assert len(reading.to_frame()) == 4


def test_attention_is_left_as_it_was():
    attention = softmax(2, 2, N, N)
    before = attention.clone()
    kq.flow(attention, LABELS)
    assert torch.equal(attention, before)
