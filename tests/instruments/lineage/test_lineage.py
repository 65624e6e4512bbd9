"""`kq.lineage`: kinship that is known, and models that have none."""

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.forms import Rope
from keyquery.instruments.lineage.evidence import JUMP, best_paths, matched, p_value
from keyquery.instruments.lineage.fingerprint import in_halves
from keyquery.instruments.lineage.weight_change import inversions, weight_change
from keyquery.instruments.look.compare import difference

WIDTH, DEPTH, HEADS = 64, 4, 4


def decoder(seed):
    torch.manual_seed(seed)
    model = kq.Decoder(WIDTH, depth=DEPTH, heads=HEADS)
    for module in attentions(model):  # so that a head is its weights
        for linear in (module.query, module.key):
            if linear.bias is not None:
                torch.nn.init.zeros_(linear.bias)
    return model


@pytest.fixture(scope="module")
def base():
    return decoder(0)


def attentions(model):
    return [module for module in model.modules() if isinstance(module, kq.Attention)]


def changed(model, change):
    """A copy whose query and key weights of each layer are replaced by change(query, key), each (heads, r, d)."""
    model = copy.deepcopy(model)
    for module in attentions(model):
        query, key = (weight.data.view(HEADS, -1, WIDTH) for weight in (module.query.weight, module.key.weight))
        for weight, new in zip((query, key), change(query.clone(), key.clone()), strict=True):
            weight.copy_(new)
    return model


def rotated_heads(query, key):
    turn = torch.linalg.qr(torch.randn(HEADS, query.shape[1], query.shape[1])).Q
    return 3 * turn @ query, turn @ key / 3


def fine_tuned(query, key):
    step = torch.randn(HEADS, query.shape[1], 2) @ torch.randn(2, WIDTH)
    return query + 0.2 * step * query.norm() / step.norm(), key


def eight_bits(query, key):
    return [
        (w / w.abs().amax(-1, keepdim=True) * 127).round() / 127 * w.abs().amax(-1, keepdim=True) for w in (query, key)
    ]


def other_order(query, key):
    return query.flip(0), key.flip(0)


@pytest.mark.parametrize(
    ("change", "label"),
    [(fine_tuned, "fine-tuned"), (eight_bits, "requantised"), (rotated_heads, "disguised"), (other_order, "disguised")],
)
def test_kin(base, change, label):
    torch.manual_seed(1)
    reading = kq.lineage(base, changed(base, change))
    assert reading.label == label
    assert all(test["p"] < 1e-6 and test["path"] == list(range(DEPTH)) for test in reading.tests)


@pytest.mark.parametrize(("change", "label"), [(fine_tuned, "fine-tuned"), (eight_bits, "requantised")])
def test_frozen_layers_do_not_decide_the_label(base, change, label):
    """Three of four layers are unchanged, as after tuning the last layer alone."""
    torch.manual_seed(0)
    other, whole = copy.deepcopy(base), changed(base, change)
    attention = [attentions(model) for model in (other, whole)]
    attention[0][-1].load_state_dict(attention[1][-1].state_dict())
    reading = kq.lineage(base, other)
    assert reading.label == label  # which is not identical, though one layer alone has changed
    assert any("12 of 16 heads have the same QK form" in reason for reason in reading.reasons)


@pytest.mark.parametrize("place", [3, 40])
def test_a_large_dimension_at_the_same_place_is_no_evidence(base, place):
    """Trained models have outlier dimensions; two unrelated ones may share a place."""

    def outlier(model):
        size = torch.ones(WIDTH)
        size[place] = 30.0
        return changed(model, lambda query, key: (query * size, key * size))

    reading = kq.lineage(outlier(base), outlier(decoder(1)))
    assert reading.label == "unrelated"
    assert all(test["p"] > 1e-3 for test in reading.tests)


def test_rotated_residual_stream(base):
    """Only the basis-free test sees it."""
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
    reading = kq.lineage(base, changed(base, lambda query, key: (query @ turn, key @ turn)))
    free, shared = reading.tests
    assert reading.label == "disguised"
    assert free["p"] < 1e-6
    assert shared["p"] > 1e-3


@pytest.mark.slow
def test_other_seed_is_unrelated(base):
    labels = [kq.lineage(base, decoder(seed)).label for seed in range(1, 6)]
    assert labels == ["unrelated"] * 5


def test_layers_pruned_and_stacked(base):
    def with_layers(*layers):
        model = copy.deepcopy(base)
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == DEPTH)
        kept = [copy.deepcopy(blocks[layer]) for layer in layers]
        del blocks[:]
        blocks.extend(kept)
        return model

    for layers in ((0, 2, 3), (0, 1, 2, 1, 2, 3)):
        reading = kq.lineage(base, with_layers(*layers))
        assert reading.label == "pruned or stacked"
        assert all(test["path"] == list(layers) for test in reading.tests)


def test_merge(base):
    other = decoder(7)
    merged = copy.deepcopy(base)
    for own, second in zip(merged.parameters(), other.parameters(), strict=True):
        own.data.mul_(0.7).add_(second.data, alpha=0.3)
    reading = kq.lineage(base, merged, [other])
    assert reading.label == "merged"
    assert [row["weight"] for row in reading.merge] == pytest.approx([0.7, 0.3], abs=1e-4)


def test_models_that_cannot_be_compared(base):
    assert kq.lineage(base, kq.Decoder(48, depth=2, heads=2)).label == "cannot tell"
    broken = changed(base, lambda query, key: (query * math.nan, key))
    with pytest.raises(ValueError, match="must be finite, got 4096 NaN"):
        kq.lineage(base, broken)


def test_best_path_is_the_best_of_all():
    z = np.random.default_rng(0).normal(size=(3, 4)) * 3

    def total(path):
        jumps = sum(after != before + 1 for before, after in itertools.pairwise(path))
        return sum(z[source, layer] for layer, source in enumerate(path)) - JUMP * jumps

    every = list(itertools.product(range(3), repeat=4))
    values, paths = best_paths(z[None])
    assert values[0] == pytest.approx(max(map(total, every)))
    assert values[0] == pytest.approx(total(paths[0]))


@pytest.mark.parametrize("shape", [(5, 5), (3, 5), (5, 3)])
def test_matched_is_the_best_of_all_assignments(shape):
    similarity = np.random.default_rng(0).normal(size=shape)
    ours, theirs = shape
    copies = -(-theirs // ours)
    every = itertools.permutations(range(ours * copies), theirs)
    best = max(sum(similarity[own % ours, head] for head, own in enumerate(heads)) for heads in every)
    assert sum(similarity[own, head] for head, own in enumerate(matched(similarity))) == pytest.approx(best)


def test_rounding_keeps_the_order_and_a_change_of_equal_size_does_not():
    old = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    rounded = (old / old.amax(-1, keepdim=True) * 7).round()
    assert inversions(old, rounded) == 0
    assert inversions(rounded, old) == 0  # nor where it is undone
    change = (rounded / 7 * old.amax(-1, keepdim=True) - old).flip(0)
    assert inversions(old, old + change) > 0.1 * old.numel()


def test_change_of_each_head_is_that_of_the_float64_comparison(base):
    torch.manual_seed(2)
    pair = kq.read(base), kq.read(changed(base, fine_tuned))
    rows = weight_change(*pair).rows
    exact = difference(*pair)["rows"]
    for name in ("change", "symmetric", "skew"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in exact], rel=1e-4)


def test_interleaved_rope_rows_are_put_in_halves():
    layer = kq.read(kq.models.DECODER)[0]
    dims = layer.weights.query.shape[2]
    order = torch.arange(dims).reshape(2, -1).T.flatten()  # as llama.cpp stores them
    stored = dataclasses.replace(layer.weights, query=layer.weights.query[:, :, order])
    interleaved = dataclasses.replace(layer, weights=stored, rope=Rope(dims, interleaved=True))
    assert torch.equal(in_halves(interleaved)[0], layer.weights.query)


def test_records_name_layers_as_the_checkpoint_does():
    """Cross-attention layers count, though no test compares them."""
    torch.manual_seed(0)
    model = torch.nn.Transformer(32, 2, 3, 3, 32, batch_first=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.layers[1].self_attn.in_proj_weight[:64] *= 1 + 0.1 * torch.rand(64, 1)
    reading = kq.lineage(model, other)
    labels = kq.read(model).labels()
    moved = {labels[row["layer"]] for row in reading.records() if row["change"]}
    assert moved == {"decoder 1"}
    assert {labels[row["layer"]].split()[0] for row in reading.records()} == {"encoder", "decoder"}


def test_the_null_of_spectra_grows_with_layers():
    p = [p_value("basis-free", 3.0, layers) for layers in (3, 4, 8, 32)]
    assert p[0] == p[1] < p[2] < p[3]
    assert p_value("shared basis", 3.0, 32) == p_value("shared basis", 3.0)
