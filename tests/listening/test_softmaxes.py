"""Softmaxes of any model: their scores are those that its attention was made by."""

import pytest
import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention

from keyquery.listening.softmaxes import captured


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.q, self.k, self.router = function, *(nn.Linear(4, 4) for _ in range(3))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def events_of(model, *args, **kwargs):
    with captured(model) as capture:
        out = model(*args, **kwargs)
    return capture.events, out


def test_every_softmax_of_products_is_captured_and_no_other():
    def odd(model, x):
        scores = torch.einsum("nd,md->nm", model.q(x), model.k(x)) / 2
        (scores * 2).softmax(-1)  # nothing is made of it
        x.new_ones(2, 5, 4) @ model.q(x)[0], torch.einsum("bnd,d->bn", x[None], model.k(x)[0])  # no pairs
        return (scores + 1).softmax(-1) @ x, model.router(x).softmax(-1)

    model, x = Calls(odd), torch.randn(5, 4)
    (event,), _ = events_of(model, x)
    product = model.q(x) @ model.k(x).mT
    torch.testing.assert_close(event.scores, product / 2 + 1)
    torch.testing.assert_close(event.unscaled()[0], product)


@pytest.mark.parametrize(
    ("shape", "key_heads", "mask", "options"),
    [
        ((2, 4, 5, 8), 4, None, {"is_causal": True}),
        ((2, 4, 5, 8), 2, None, {"enable_gqa": True, "scale": 0.3}),
        ((2, 4, 5, 8), 4, torch.randn(4, 5, 5), {}),
        ((8, 5, 8), 8, torch.rand(8, 5, 5) < 0.7, {}),
        ((2, 3, 4, 5, 8), 4, torch.rand(2, 3, 1, 5, 5) < 0.7, {}),
        ((5, 8), 1, None, {}),
    ],
)
def test_fused_attention_is_the_softmax_of_the_scores(shape, key_heads, mask, options):
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True
    query = torch.randn(shape)
    key, value = torch.randn(2, *shape[:-3], *([] if len(shape) == 2 else [key_heads]), *shape[-2:])
    model = Calls(lambda _, *args: scaled_dot_product_attention(*args, **options))
    (event,), out = events_of(model, query, key, value, mask)
    assert event.scores.shape == (*shape[:-1], shape[-2])
    if key_heads != shape[1] and len(shape) == 4:
        value = value.repeat_interleave(shape[1] // key_heads, 1)
    torch.testing.assert_close(event.scores.softmax(-1) @ value, out)
    assert bool((event.unscaled()[0] > -torch.inf).all())


@pytest.mark.parametrize("zero", [False, True])
def test_torch_attention_with_padding(zero):
    model = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=zero, add_bias_kv=zero).eval()
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    (event,), (_, weights) = events_of(model, x, x, x, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(event.scores.softmax(-1), weights)


def test_scores_of_an_indexer_end_in_a_relu():
    model, x = Calls(lambda model, x: relu(model.q(x) @ model.k(x).mT).sum(0)), torch.randn(5, 4)
    (event,), _ = events_of(model, x)
    torch.testing.assert_close(event.scores, model.q(x) @ model.k(x).mT)


def test_inputs_of_projections_come_before_the_softmax():
    model, x = Calls(lambda model, x: (model.q(x) @ model.k(x).mT).softmax(-1) @ model.router(x)), torch.randn(5, 4)
    with captured(model) as capture:
        model(x)
    (event,) = capture.events
    assert torch.equal(capture.before("q", event.time).inputs[0], x)
    assert capture.before("router", event.time) is None
    assert torch.equal(capture.after("router", event.time).out, model.router(x))
