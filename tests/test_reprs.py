"""What Python prints of an object: a line or two that say what it is, whatever it holds."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.checkpoints.layer import Norm
from keyquery.proof.families import tiny_model

LONG = "start\x1b]0;owned\x07" + "x" * 5000


def made():
    """Objects that users hold, each with much in it."""
    model = kq.Encoder(16, depth=3, heads=4).eval()
    heads = kq.read(model)
    look = kq.look(model, name=LONG)
    yield from (heads, heads[0], heads[0].weights, look, kq.compare(look, look))
    yield from (Norm("rms", torch.ones(512)), kq.Reading(provenance={"name": LONG, "all": list(range(1000))}))
    yield from (kq.dial(model), kq.project(kq.Attention(16, heads=2), (0, 1)))
    yield kq.swap(tiny_model("bert").eval(), "symmetric")
    yield kq.NPTClassifier(random_state=0).set_params(device=LONG)
    yield kq.SeriesClassifier().set_params(epochs=np.arange(10_000))
    latent = kq.read(tiny_model("deepseek"))
    yield from (latent, latent[0], latent[0].weights)


def test_no_object_prints_more_than_two_lines():
    pytest.importorskip("transformers")
    for each in made():
        said = repr(each)
        assert len(said) <= 260, said[:300]
        assert said.isprintable(), said


def test_some_in_full():
    heads = kq.read(torch.nn.TransformerEncoderLayer(d_model=8, nhead=2))
    assert repr(heads) == "Heads(TransformerEncoderLayer: 1 layer, family torch)"
    assert repr(heads[0]) == "Layer 0(self_attn: 2 heads, 4 × 8 float32)"
    assert repr(kq.SeriesClassifier(epochs=3)) == "SeriesClassifier(epochs=3)"
