"""A hand-built two-layer attention-only induction circuit, of whose paths exactly one is not zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import keyquery as kq

transformers = pytest.importorskip("transformers")
WORDS, LENGTH = 8, 12
SHARP = 60.0
IDS = torch.tensor([[3, 1, 4, 6, 5, 2, 3, 1, 4, 6, 5, 2]])
WIDTH = 2 * (WORDS + LENGTH + WORDS)
# Subspaces: the token, its position, and the token before it. Every direction e has a twin −e, so that all vectors have
# mean 0 and LayerNorm only scales.
TOKEN, PLACE, BEFORE = (slice(a, b) for a, b in ((0, 8), (8, 20), (20, 28)))


def _twins(matrix):
    return torch.cat((matrix, -matrix), -1)


def circuit():
    """The model."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=1, n_inner=4, attn_implementation="eager"
    )
    model, half = transformers.GPT2Model(config).eval(), WIDTH // 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "ln_" in name and "weight" in name else 0.0)
        model.wte.weight.copy_(_twins(torch.eye(WORDS, half)))
        places = torch.zeros(LENGTH, half)
        places[:, PLACE] = torch.eye(LENGTH)
        model.wpe.weight.copy_(_twins(places))
        first, second = (block.attn.c_attn.weight for block in model.h)
        rows = torch.arange(half)[PLACE]
        first[rows, rows] = SHARP  # the query of position i is e_i
        first[rows[:-1], WIDTH + rows[1:]] = SHARP  # the key of position i is e_(i + 1)
        token = torch.arange(half)[TOKEN]
        first[token, 2 * WIDTH + token] = 1.0  # values are tokens
        before = torch.arange(half)[BEFORE]
        model.h[0].attn.c_proj.weight[token, before] = 1.0  # written as the token before
        model.h[0].attn.c_proj.weight[token, half + before] = -1.0
        second[token, token] = SHARP  # the query is the token
        second[before, WIDTH + token] = SHARP  # the key is the token before
    return model


def test_the_one_path_of_an_induction_circuit_is_found_and_followed_to_the_token_before():
    query = 8  # the second 4; what followed the first 4, at 2, is at 3
    reading = kq.attribute(circuit(), inputs={"input_ids": IDS}, head="1.0", query=query, depth=2)
    assert reading.key == 3
    assert reading.weight > 0.9
    table = np.array(reading.table["raw"])
    entry = reading.sources.index("token embedding"), reading.sources.index("0.0")
    assert reading.score > 1
    assert table[entry] == pytest.approx(reading.score, rel=1e-5)
    table[entry] = 0
    assert np.abs(table).max() < 1e-6 * reading.score
    [path] = [path for path in reading.paths if path["side"] == "key"]
    assert (path["source"], path["contribution"]) == ("0.0", pytest.approx(reading.score, rel=1e-5))
    assert path["relative"] == pytest.approx(reading.by_source("key")["0.0"], rel=1e-6)
    step = path["steps"][0]
    assert step["position"] == 2
    assert step["weight"] > 0.99
    assert step["origins"][0]["source"] == "token embedding"
    assert step["origins"][0]["contribution"] == pytest.approx(path["contribution"], rel=1e-3)
    total = sum(step["contribution"] for step in path["steps"]) + path["rest"]
    assert total == pytest.approx(path["contribution"], rel=1e-6)


def test_all_pairs_have_that_path():
    reading = kq.attribute(circuit(), inputs={"input_ids": IDS}, head="1.0")
    assert reading.by_source("key")["0.0"] == pytest.approx(1, abs=1e-5)
    assert reading.by_source("query")["token embedding"] == pytest.approx(1, abs=1e-5)
    assert all(pair["key_source"] == "0.0" for pair in reading.pairs)
