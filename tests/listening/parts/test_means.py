"""Moments of queries and keys are those of all tokens together, without padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import keyquery as kq
from keyquery.listening import Moments, joint_moments, queries_and_keys
from tests.listening.models import entered


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 99), shift=st.sampled_from([0, 1e4])
)
def test_moments_of_pieces_are_those_of_the_whole(sizes, seed, shift):
    x = torch.randn(2, sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + shift
    moments = Moments()
    for piece in x.split(sizes, dim=1):
        moments.update(piece)
    if sum(sizes) == 0:
        with pytest.raises(ValueError, match="no activations"):
            _ = moments.mean
        return
    assert moments.count == sum(sizes)
    torch.testing.assert_close(moments.mean, x.mean(1))
    expected = torch.stack([torch.cov(part.mT, correction=0).reshape(3, 3) for part in x])
    torch.testing.assert_close(moments.covariance, expected, rtol=1e-6, atol=1e-6)


def encoder():
    torch.manual_seed(3)
    layers = [nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1) for _ in range(2)]
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """Takes tokens and a mask, as transformers models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 16), encoder()

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        return x


def batch():
    ids = torch.randint(0, 20, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    return {"input_ids": ids, "attention_mask": mask}


def test_noise_in_padding_changes_nothing():
    model, data = Encoder(), batch()
    noisy = {**data, "input_ids": torch.where(data["attention_mask"].bool(), data["input_ids"], 7)}
    heads = kq.read(model)
    clean, disturbed = (joint_moments(model, [d], heads)[1] for d in (data, noisy))
    torch.testing.assert_close(clean.covariance, disturbed.covariance)
    assert clean.count == 9


def test_the_covariance_of_queries_and_keys_is_the_gram_of_the_form_on_data():
    model, data = Encoder(), batch()
    heads = kq.read(model)
    moments = joint_moments(model, [data], heads)[1]
    x = entered(model, data, "layers.1.self_attn")
    on = heads[1].form.on(torch.cov(x.mT, correction=0))
    torch.testing.assert_close(moments.covariance, on.gram(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        kq.Form.from_gram(moments.covariance).symmetric_eigenvalues(), on.symmetric_eigenvalues(), rtol=1e-4, atol=1e-4
    )


def test_a_module_that_is_not_called_is_named():
    class Half(Encoder):
        def forward(self, input_ids, attention_mask):
            return self.layers[0](self.embed(input_ids))

    with pytest.raises(ValueError, match=r"layers\.1\.self_attn was never called"):
        joint_moments(Half(), [batch()], kq.read(Half()))


def test_sequence_first_attention_is_turned_round():
    model, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    heads = kq.read(model)
    query, _ = queries_and_keys(model, {"query": x, "key": x, "value": x}, heads)[0]
    expected = heads[0].project(x.transpose(0, 1))[0].flatten(1, 2).transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(query, expected)
