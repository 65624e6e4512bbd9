"""On data, the parts of a score add up to what the model gives to its softmax, whatever positions add to it."""

from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of the extra hf")

import keyquery as kq
from keyquery.listening.parts.on_data import position_means, rotation, score_terms
from keyquery.listening.parts.pairs import watch_pairs
from keyquery.listening.parts.variance import ScoreVariance
from keyquery.listening.softmaxes import captured
from keyquery.proof.models import build, tiny_configs


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("dinov3_vit", {"pixel_values": torch.randn(1, 3, 48, 64)}),
        ("deberta-v2", {"input_ids": torch.randint(5, 90, (1, 9))}),
        pytest.param("sam_vision_model", {"pixel_values": torch.randn(1, 3, 256, 256)}, marks=pytest.mark.slow),
    ],
)
def test_parts_add_up_to_the_scores_of_the_model(name, batch):
    model = build(next(tiny_configs(name))).float()
    heads = kq.read(model)
    pairs_of = {}
    with captured(model) as capture:
        model(**batch)
    with watch_pairs(model, heads, lambda layer, pairs: pairs_of.setdefault(layer.index, pairs)) as run:
        run(batch)
    means = position_means(model, [batch], heads)
    for layer, event in zip(heads, capture.events, strict=True):
        pairs = pairs_of[layer.index]
        query, key, positions = pairs.query[0], pairs.key[0], pairs.positions[0]
        bias = partial(heads.pair_bias, layer)
        sums = ScoreVariance(means[layer.index], rotation(layer, [batch]), bias, score_terms(heads, layer))
        (mean_query, mean_key), _ = sums._means_at((positions, positions), query, key, (0, 0, 0, 0))
        parts, _ = sums._parts(query, key, mean_query, mean_key, (positions, positions), slice(0, layer.heads))
        total = parts[:, 0] + parts[:, 2:].sum(1)  # swapped pairs are no part of the score
        theirs = event.scores.reshape(-1, *total.shape)[0]
        torch.testing.assert_close(total, theirs.float(), atol=2e-4, rtol=1e-4)
