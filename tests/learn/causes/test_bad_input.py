"""What cannot be attention, a text or a choice is told in one sentence."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.proof.families import tiny_model

GOOD = torch.eye(4)
NAN = torch.eye(4)
NAN[2, 1] = float("nan")


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("attention", "sentence"),
    [
        (torch.full((3, 3), 0.5), r"rows of attention must sum to 1, within 0\.0001; row 0 of head 0 sums to 1\.5"),
        (torch.tensor([[1.5, -0.5], [0.0, 1.0]]), r"attention must not be negative, got -0\.5 in row 0 of head 0"),
        (NAN, "attention must be finite, got 1 NaN or infinite of 16 values"),
        (torch.full((2, 3), 1 / 3), r"attention must be \(n, n\) or \(heads, n, n\) of one text, got \(2, 3\)"),
        (torch.zeros(0, 0), "attention must not be empty"),
        (np.ones(3), r"attention must have shape \(\.\.\., n, n\), got \(3,\)"),
        (torch.eye(3) * (1 - 2e-4), r"row 0 of head 0 sums to 0\.9998"),
        (torch.eye(3, dtype=torch.long), "attention must be a"),
        (5, "attention must be a"),
    ],
)
def test_what_is_no_attention(attention, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        kq.causes(attention)


@pytest.mark.unchecked
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
        ({"nodes": "abc"}, "nodes must be an integer, got 'abc'"),
        ({"head": 1.5}, "head must be an integer, got 1.5"),
        ({"causal": "yes"}, "causal must be True, False or None, got 'yes'"),
        ({"causal": True, "selection": True}, "causal=True and selection exclude each other"),
    ],
)
def test_bad_choices(options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        kq.causes(GOOD, **options)


def test_a_model_needs_something_to_run_on():
    layer, words = kq.Attention(8, 2), "some words"
    for attention, options, error, sentence in (
        (layer, {}, ValueError, "a model needs either text or inputs"),
        (
            layer,
            {"inputs": torch.zeros(1, 3, 8)},
            TypeError,
            "inputs must be a mapping of argument names .*, got Tensor",
        ),
        (tiny_model("bert"), {"text": words}, ValueError, "text needs a tokenizer"),
        (kq.models.ENCODER, {"text": words, "layer": 4}, ValueError, "layer must be between -4 and 3, got 4"),
        (kq.models.ENCODER, {"text": " ship" * 400}, ValueError, "the text has 400 tokens, and .* takes at most 256"),
    ):
        with pytest.raises(error, match=sentence):
            kq.causes(attention, **options)


@pytest.mark.unchecked
def test_positions_may_be_tensors():
    near = GOOD.double().expand(3, 4, 4) * (1 - 0.9e-4)  # rows may miss one by a little
    reading = kq.causes(near, nodes=torch.tensor([0, 2]), head=np.array([1, 2]))
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
