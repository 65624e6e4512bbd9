"""Layers on a device, and models loaded in a dtype."""

import pytest
import torch

import keyquery as kq
from keyquery.checkpoints.layer import Layer
from keyquery.listening.inputs.load import load_model


def test_every_tensor_of_a_layer_is_read_to_the_device():
    layer = kq.read(kq.models.DECODER, device="cpu")[0]
    assert isinstance(layer, Layer)
    heads = kq.read(kq.models.DECODER)
    heads.device = torch.device("meta")  # stands in for a GPU
    moved = heads[0]
    assert moved.weights.query.is_meta
    assert moved.weights.key.is_meta
    assert moved.norm is not None
    assert moved.norm.gain.is_meta
    assert heads.embedding().is_meta
    assert not layer.weights.query.is_meta


def test_a_device_that_is_not_there_is_refused_before_the_file_is_opened():
    with pytest.raises(ValueError, match="device must be"):
        kq.read("none.safetensors", device="tpu")
    with pytest.raises(ValueError, match="dtype must be"):
        load_model("none", dtype="int8")


def test_the_shares_of_a_look_in_float64_are_those_in_float32():
    options = {"text": kq.models.TEXT, "tokens": 256, "length": 8, "layers": [0]}
    wide, own = (kq.look(kq.models.DECODER, dtype=dtype, device="cpu", **options) for dtype in ("float64", None))
    pairs = [(a["on_data"]["skew"], b["on_data"]["skew"]) for a, b in zip(wide.heads, own.heads, strict=True)]
    assert max(abs(a - b) for a, b in pairs) < 1e-4
    assert any(a != b for a, b in pairs)


def test_dtype_without_data_and_a_live_model_elsewhere_are_refused():
    with pytest.raises(ValueError, match="dtype is that of the model that runs"):
        kq.look(kq.models.DECODER, dtype="float64")
    model, _ = load_model(kq.models.DECODER)
    with pytest.raises(ValueError, match="a live model runs where it is"):
        kq.look(model, inputs={"input_ids": torch.ones(2, 4, dtype=torch.long)}, device="cpu")
