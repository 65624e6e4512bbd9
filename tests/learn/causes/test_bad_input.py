"""What cannot be attention, a text or a choice is told in one sentence."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.proof.families import tiny_model

GOOD = torch.eye(4)
NAN = torch.eye(4)
NAN[2, 1] = float("nan")


@pytest.mark.parametrize(
    ("attention", "sentence"),
    [
        (torch.full((3, 3), 0.5), r"rows of attention must sum to 1, within 0\.0001; row 0 of head 0 sums to 1\.5"),
        (torch.tensor([[1.5, -0.5], [0.0, 1.0]]), r"attention must not be negative, got -0\.5 in row 0 of head 0"),
        (NAN, "attention must be finite, got 1 NaN or infinite of 16 values"),
        (torch.full((2, 3), 1 / 3), r"attention must be \(n, n\) or \(heads, n, n\) of one text, got \(2, 3\)"),
        (torch.zeros(0, 0), "attention must not be empty"),
        (np.ones(3), r"attention must have shape \(\.\.\., n, n\), got \(3,\)"),
    ],
)
def test_what_is_no_attention(attention, sentence):
    with pytest.raises(ValueError, match=sentence):
        kq.causes(attention)


def test_rows_may_miss_one_by_a_little():
    near = torch.eye(3, dtype=torch.float64) * (1 - 0.9e-4)
    assert kq.causes(near).edges == []
    with pytest.raises(ValueError, match=r"row 0 of head 0 sums to 0\.9998"):
        kq.causes(torch.eye(3) * (1 - 2e-4))


@pytest.mark.parametrize("given", [torch.eye(3, dtype=torch.long), 5])
def test_numbers_that_are_no_floats(given):
    with pytest.raises(TypeError, match="attention must be a"):
        kq.causes(given)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nodes": 5}, "nodes must be between 1 and 4, got 5"),
        ({"nodes": [0, 4]}, "nodes must be between 0 and 3, got 4"),
        ({"nodes": []}, "nodes must name at least one, got none"),
        ({"alpha": 0}, "alpha must be between 0 and 1, got 0"),
        ({"samples": 3}, "samples must be at least 4, got 3"),
        ({"method": "pc"}, "method must be one of 'icd', 'fci', got 'pc'"),
        ({"method": "fci", "rounds": 2}, 'rounds is only for method="icd"'),
        ({"head": 1}, "head must be between 0 and 0, got 1"),
        ({"tokens": ["a"]}, "tokens must be a list of 4 strings"),
        ({"layer": 0}, "text, inputs and layer need a model"),
    ],
)
def test_bad_choices(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        kq.causes(GOOD, **options)


def test_a_model_needs_something_to_run_on():
    with pytest.raises(ValueError, match="a model needs either text or inputs"):
        kq.causes(kq.Attention(8, 2))
    with pytest.raises(TypeError, match="inputs must be a mapping of argument names to tensors, got Tensor"):
        kq.causes(kq.Attention(8, 2), inputs=torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        kq.causes(tiny_model("bert"), text="some words")


@pytest.mark.parametrize("layer", [4, -5])
def test_a_layer_that_is_not_there(layer):
    with pytest.raises(ValueError, match=f"layer must be between -4 and 3, got {layer}"):
        kq.causes(kq.models.ENCODER, text="some words", layer=layer)


def test_a_text_that_is_too_long():
    with pytest.raises(
        ValueError, match="the text has 400 tokens, and LanguageModel takes at most 256: use a shorter one"
    ):
        kq.causes(kq.models.ENCODER, text=" ship" * 400)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nodes": "abc"}, "nodes must be an integer, got 'abc'"),
        ({"head": 1.5}, "head must be an integer, got 1.5"),
    ],
)
def test_what_is_no_position(options, sentence):
    with pytest.raises(TypeError, match=sentence):
        kq.causes(GOOD, **options)


@pytest.mark.unchecked
def test_positions_may_be_tensors():
    reading = kq.causes(GOOD.expand(3, 4, 4), nodes=torch.tensor([0, 2]), head=np.array([1, 2]))
    assert list(reading.nodes) == [0, 2]
    assert [graph["head"] for graph in reading.graphs] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_its_rows(dtype):
    torch.manual_seed(0)
    rounded = torch.randn(3, 40, 40).softmax(-1).to(dtype)
    assert (rounded.double().sum(-1) - 1).abs().max() > 1e-4
    assert len(kq.causes(rounded, nodes=5).graphs) == 3
    with pytest.raises(ValueError, match="rows of attention must sum to 1"):
        kq.causes(rounded * 0.98)
