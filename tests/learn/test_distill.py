"""kq.distill: a primal layer from a softmax one, and an honest reading of what it kept."""

import pytest
import torch
from torch import nn

import keyquery as kq


def correlated(batch, n, dim):
    """Tokens that share a mean and a few directions, as real ones do."""
    mix = torch.randn(5, dim, dtype=torch.float64)
    return torch.randn(batch, n, 4, dtype=torch.float64) @ mix[:4] + mix[4]


def teacher(**options):
    torch.manual_seed(1)
    layer = kq.Attention(16, 2, **options).double().eval()
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.2)
    return layer


def test_what_is_kept_is_measured_on_the_sequences_left_out():
    layer, data = teacher(), correlated(12, 30, 16)
    found = kq.distill(layer, data, rank=6)
    truth, ours = layer(data[-3:]), found.layer(data[-3:])
    spread = (truth - truth.mean((0, 1))).square().sum()
    assert found.reading.kept == pytest.approx(1 - ((truth - ours).square().sum() / spread).item())
    assert found.reading.provenance["held_out"] == 3
    assert len(found.reading.heads) == 2
    assert kq.Reading.load(found.reading.to_json()) == found.reading


def test_fitted_weights_keep_more_than_drawn_ones():
    layer, data = teacher(), correlated(16, 30, 16)
    drawn = kq.PrimalAttention(16, 2, 6).double()
    held = data[-4:]
    truth = layer(held)
    spread = (truth - truth.mean((0, 1))).square().sum()
    before = 1 - ((truth - drawn(held)).square().sum() / spread).item()
    kept = {fixed: kq.distill(layer, data, rank=6, data_dependent=not fixed).reading.kept for fixed in (False, True)}
    assert kept[False] > max(0, before)
    assert kept[True] > 0.3


def test_a_layer_that_a_primal_one_can_be_is_kept_whole():
    """Heads that look at their own token alone give a linear map of it, which cosine features of unit vectors hold."""
    layer = kq.Attention(8, 1, bias=False).double().eval()
    layer.query.weight.data = layer.key.weight.data = 60 * torch.eye(8).double()
    data = nn.functional.normalize(torch.randn(8, 3, 8, dtype=torch.float64), dim=-1)
    data = torch.linalg.qr(data.mT)[0].mT  # orthonormal tokens: no token attends to another
    found = kq.distill(layer, data, rank=8, data_dependent=False)
    assert found.reading.kept > 1 - 1e-4
    assert all(kept > 1 - 1e-4 for kept in found.reading.heads)


def test_the_softmax_layer_is_left_as_it_was():
    layer, data = teacher(), correlated(4, 20, 16)
    before = layer(data)
    student = kq.distill(layer, data, rank=3).layer
    assert torch.equal(layer(data), before)
    assert not layer.output._forward_pre_hooks
    student.train()
    (student(data).sum() + student.regularizer()).backward()
    assert layer.query.weight.grad is None
    assert student.query_key.weight.grad is not None


@pytest.mark.parametrize(
    "options", [{"kernel": "skew"}, {"kv_heads": 1}, {"bias": False}, {"rope": kq.Rope(8)}, {"dropout": 0.1}]
)
def test_every_kernel_of_softmax_attention_gives_its_queries_and_keys(options):
    layer, data = teacher(**options), correlated(6, 20, 16)
    found = kq.distill(layer, data, rank=3, features="elu")
    assert found.reading.kept <= 1
    query, key = found.layer.query_key(data).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
    of_teacher = layer.queries_and_keys(data)  # before RoPE
    assert torch.allclose(query @ key.mT, of_teacher[0] @ of_teacher[1].mT)


def test_torch_attention_gives_the_same_layer():
    theirs, data = nn.MultiheadAttention(16, 2, batch_first=True).double().eval(), correlated(6, 20, 16)
    ours = kq.Attention(16, 2).double().eval()
    state = {"output.weight": theirs.out_proj.weight, "output.bias": theirs.out_proj.bias}
    for number, name in enumerate(("query", "key", "value")):
        state[f"{name}.weight"] = theirs.in_proj_weight.chunk(3)[number]
        state[f"{name}.bias"] = theirs.in_proj_bias.chunk(3)[number]
    ours.load_state_dict(state)
    torch.manual_seed(0)
    one = kq.distill(theirs, data, rank=3)
    torch.manual_seed(0)
    other = kq.distill(ours, data, rank=3)
    assert one.reading.kept == pytest.approx(other.reading.kept)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("layer", "tokens", "options", "error", "words"),
    [
        (
            kq.Attention(16, 2),
            (2, 10, 16),
            {},
            ValueError,
            "at least 3 sequences, for fitting, validation and test, got 2",
        ),
        (kq.Attention(16, 2), (4, 10, 8), {}, ValueError, "d = 16"),
        (kq.Attention(16, 2), (4, 10, 16), {"rank": 9}, ValueError, "rank must be at most 8"),
        (kq.Attention(16, 2), (4, 10, 16), {"bias": False}, TypeError, "multiple values .* 'bias'"),
        (kq.Attention(16, 2, head_dim=4), (4, 10, 16), {}, ValueError, "heads · head_dim = width, got 2 of 4 in 16"),
        (kq.Attention(16, 2, dropout=0.1), (4, 10, 16), {}, ValueError, "in training mode with dropout"),
        (nn.MultiheadAttention(16, 2, dropout=0.1), (4, 10, 16), {}, ValueError, "in training mode with dropout"),
        (nn.Linear(3, 3), (4, 10, 16), {}, ValueError, "Linear has no known attention module"),
        (nn.Sequential(*(nn.MultiheadAttention(16, 2) for _ in range(2))).eval(), (4, 10, 16), {}, ValueError, "has 2"),
        ("attention", (4, 10, 16), {}, TypeError, r"must be a torch\.nn\.Module"),
    ],
)
def test_bad_input(layer, tokens, options, error, words):
    with pytest.raises(error, match=words):
        kq.distill(layer, torch.randn(tokens), **{"rank": 3, **options})
