"""Attention of any other module is seen, and replaced, in torch functions: classes of one's own, and torch's."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

import keyquery as kq
from tests.listening.models import (
    REPLACEMENTS,
    CausalSelfAttention,
    Core,
    Residual,
    assert_as_it_was,
    assert_one_sentence,
    assert_replaced,
    formula,
    randomised,
    snapshot,
)


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


HIDDEN = torch.tensor([[False] * 5, [False, False, False, True, True], [False, True, False, False, True]])
TORCH = {
    "plain": ({}, {}),
    "without weights": ({}, {"need_weights": False}),
    "tokens first": ({"batch_first": False}, {}),
    "weights of heads": ({}, {"average_attn_weights": False}),
    "padding": ({}, {"key_padding_mask": HIDDEN, "need_weights": False}),
    "additive mask": ({"batch_first": False}, {"attn_mask": torch.randn(12, 5, 5, dtype=torch.float64)}),
    "causal and padding": (
        {},
        {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True, "key_padding_mask": HIDDEN},
    ),
    "causal, fused": (
        {},
        {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True, "need_weights": False},
    ),
    "other widths": ({"kdim": 6, "vdim": 7}, {}),
    "further keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": HIDDEN}),
}


def torch_attention(name):
    options, arguments = TORCH[name]
    layer = randomised(nn.MultiheadAttention(16, 4, **{"batch_first": True, **options}))
    x = double(3, 5, 16)
    inputs = (x, double(3, 5, 6), double(3, 5, 7)) if "kdim" in options else (x, x, x)
    inputs = inputs if layer.batch_first else tuple(x.transpose(0, 1).contiguous() for x in inputs)
    return layer, lambda: layer(*inputs, **arguments)


@pytest.mark.parametrize("name", TORCH)
def test_multihead_attention(name):
    layer, run = torch_attention(name)
    plain, weights = run()
    with torch.no_grad(), kq.listen(layer) as calls:
        out, _ = run()
    assert torch.equal(out, plain)
    (call,) = calls
    assert (call.heads, call.scale, call.is_cross) == (4, 0.5, name == "other widths")
    assert call.is_causal == name.startswith("causal")
    joined = linear(call.output().transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(joined, plain if layer.batch_first else plain.transpose(0, 1), atol=1e-10, rtol=1e-9)
    if weights is not None:
        mine = call.weights() if weights.ndim == 4 else call.weights().mean(1)
        torch.testing.assert_close(mine, weights, atol=1e-12, rtol=1e-9)
    if "key_padding_mask" in TORCH[name][1]:
        assert torch.equal(call.real[:, :5], ~HIDDEN)
    else:
        assert call.real is None


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("name", TORCH)
def test_multihead_attention_goes_on_with_what_was_replaced(name, replacement):
    layer, run = torch_attention(name)

    def project(x):
        out = linear(x, layer.out_proj.weight, layer.out_proj.bias)
        return out if layer.batch_first else out.transpose(0, 1)

    assert_replaced(replacement, layer, layer, project, lambda: run()[0])


def test_returned_weights_are_those_of_replaced_scores():
    layer, run = torch_attention("weights of heads")
    with torch.no_grad(), kq.listen(layer, lambda call: {"scores": 0 * call.scores()}):
        torch.testing.assert_close(run()[1], torch.full((3, 4, 5, 5), 0.2, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_torch_encoder_is_seen_on_its_fast_path_and_given_back():
    """In eval mode without gradients torch runs a whole layer as one kernel, and packs padded rows."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, x = randomised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)), double(3, 5, 16)
    hidden = HIDDEN.clone().sort(-1).values
    before = snapshot(model)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=hidden)
        with kq.listen(model) as calls:
            out = model(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(out[~hidden], plain[~hidden])
    assert [call.name for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(torch.equal(call.real, ~hidden) and torch.equal(call.real_queries, ~hidden) for call in calls)
    assert_as_it_was(model, before)


def test_encoder_and_decoder_of_torch():
    """Each side has its own padding; the decoder is causal, and attends to the encoder."""
    model = randomised(nn.Transformer(16, 4, 1, 1, 32, batch_first=True))
    source, target = double(3, 5, 16), double(3, 4, 16)
    masks = {
        "src_key_padding_mask": HIDDEN,
        "memory_key_padding_mask": HIDDEN,
        "tgt_key_padding_mask": HIDDEN[:, 1:].flip(1) & torch.tensor([False, True, True, True]),
        "tgt_mask": torch.ones(4, 4).triu(1).bool(),
    }
    with torch.no_grad(), kq.listen(model) as calls:
        model(source, target, **masks)
    encoder, decoder, cross = calls
    assert [call.is_cross for call in calls] == [False, False, True]
    assert [call.is_causal for call in calls] == [False, True, False]
    assert torch.equal(encoder.real, ~HIDDEN)
    assert torch.equal(decoder.real, ~masks["tgt_key_padding_mask"])
    assert torch.equal(cross.real, ~HIDDEN)
    assert torch.equal(cross.real_queries, ~masks["tgt_key_padding_mask"])
    assert cross.scores().shape == (3, 4, 4, 5)
    assert (cross.weights()[HIDDEN[:, None, None].expand(3, 4, 4, 5)] == 0).all()


def written_out(q, k, v):
    """As in minGPT."""
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return (q @ k.transpose(-2, -1) * 0.5).masked_fill(future, -torch.inf).softmax(-1) @ v


def scaled_queries(q, k, v):
    """As in timm."""
    return (q * 0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def fused(q, k, v):
    return scaled_dot_product_attention(q, k, v, dropout_p=0.0)


def tokens_first(q, k, v):
    """Heads after tokens, operands as a list: as in many tutorials."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    attention = torch.softmax(torch.einsum("nqhd,nkhd->nhqk", [q, k]) / 2, dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [attention, v]).transpose(1, 2)


RELATIVE = torch.linspace(-1, 1, 50, dtype=torch.float64).reshape(2, 5, 5).tril()
SLOPES = torch.arange(5.0, dtype=torch.float64) / 4


def relative_bias(q, k, v):
    """As in x-transformers: sim = einsum · scale, a bias, masked_fill with −finfo.max."""
    sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.5 + RELATIVE
    sim = sim.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.finfo(sim.dtype).max)
    return torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1, dtype=sim.dtype), v)


def bias_by_baddbmm(q, k, v):
    """Batch and heads in one dimension: as in BLOOM."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(4 * SLOPES.expand(len(q), 5, 5), q, k.mT, beta=0.25, alpha=0.5)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, 2))


def scaled_then_shifted(q, k, v):
    q = q * 0.5
    q += 1.0  # in place: q is no multiple of what it was
    return (q @ k.mT).softmax(-1) @ v


def shifted_after_it_was_scaled(q, k, v):
    half = q * 0.5
    q.add_(1)
    return (half @ k.mT).softmax(-1) @ v


def keys_first(q, k, v):
    return (k @ q.mT * 0.5).softmax(-2).mT @ v


def subtracted(q, k, v):
    return torch.sub(torch.ones(5, 5).double(), q @ k.mT, alpha=0.5).softmax(-1) @ v


def hidden_before_it_is_scaled(q, k, v):
    return ((q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9) / 2).softmax(-1) @ v


def shared_keys(q, k, v):
    return scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def fused_after_scaling(q, k, v):
    return scaled_dot_product_attention(q * 0.5, k, v, scale=1.0)


def fused_additive_mask(q, k, v):
    return scaled_dot_product_attention(q, k, v, torch.arange(5.0).double().expand(5, 5))


def fused_three_dimensions(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).unflatten(0, (3, 2))


OWN = (written_out, scaled_queries, fused, tokens_first, relative_bias, bias_by_baddbmm)
MOVED = (scaled_then_shifted, shifted_after_it_was_scaled)  # whose queries are changed in place
CORES = (*OWN, *MOVED, keys_first, subtracted, hidden_before_it_is_scaled, shared_keys)
CORES += (fused_after_scaling, fused_additive_mask, fused_three_dimensions)
CAUSAL = (written_out, relative_bias, hidden_before_it_is_scaled, fused_three_dimensions)
BIASES = {subtracted: torch.ones(()).double(), fused_additive_mask: 4 * SLOPES}
BIASES |= {relative_bias: RELATIVE, bias_by_baddbmm: SLOPES}


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_queries_and_keys_are_those_of_the_product(core):
    """Whatever is done before and after it: scale · q·k + bias is what enters the softmax."""
    model, x = randomised(Residual(Core(core), Core(core))), double(3, 5, 8)
    first = model.attentions[0]
    with torch.no_grad():
        plain = model(x)
        with kq.listen(model) as calls:
            assert torch.equal(model(x), plain)
        returned, (query, key, _) = first(x), first.sides(x)
    assert [(call.name, call.layer) for call in calls] == [("attentions.0", 0), ("attentions.1", 1)]
    call = calls[0]
    torch.testing.assert_close(formula(call, {}).transpose(1, 2).flatten(2), returned, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(call.output(), formula(call, {}), atol=1e-12, rtol=1e-10)
    if core in BIASES:
        torch.testing.assert_close(call.bias, BIASES[core].expand(call.bias.shape))
    else:
        assert call.bias is None
    if core not in MOVED:
        assert call.scale == pytest.approx(-0.5 if core is subtracted else 0.5)
        torch.testing.assert_close(call.query, query)
        torch.testing.assert_close(call.key, key[:, :1] if core is shared_keys else key)
    assert (call.heads, call.key_heads, call.is_cross) == (2, 1 if core is shared_keys else 2, False)
    assert call.is_causal == (core in CAUSAL)


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("core", OWN, ids=lambda core: core.__name__)
def test_code_of_ones_own_goes_on_with_what_was_replaced(core, replacement):
    model, x = randomised(Residual(Core(core), Core(core))), double(3, 5, 8)
    assert_replaced(replacement, model, model.attentions[0], lambda out: out, lambda: model(x))


def dropped(q, k, v):
    return nn.functional.dropout((q @ k.mT / 2).softmax(-1), 1.0) @ v


@pytest.mark.parametrize("replacement", ["query", "scores", "bias"])
def test_dropout_stays(replacement):
    """Dropout of everything leaves nothing."""
    model, x = randomised(Residual(Core(dropped))), double(3, 5, 8)
    with kq.listen(model, REPLACEMENTS[replacement]):
        assert torch.equal(model(x), x)


def mixed_heads(q, k, v):
    weights = (q @ k.mT / 2).softmax(-1)
    return torch.einsum("hg,bgnm->bhnm", torch.tensor([[0.6, 0.4], [0.3, 0.7]]).double(), weights) @ v


def test_weights_that_are_changed_after_the_softmax_are_seen_and_not_replaced():
    model, x = randomised(Residual(Core(mixed_heads))), double(3, 5, 8)
    with kq.listen(model) as calls:
        plain = model(x)
    (call,) = calls
    scores = call.query @ call.key.mT / 2
    torch.testing.assert_close(call.weights(), scores.softmax(-1))
    with pytest.raises(ValueError, match="no value is known") as error:
        call.output()
    assert_one_sentence(error)
    before = snapshot(model)
    for name in ("query", "scores", "value"):
        tensor = getattr(call, name) if name == "query" else call.scores() if name == "scores" else call.query
        with (
            pytest.raises((RuntimeError, ValueError), match="after the softmax") as error,
            kq.listen(model, lambda call, name=name, tensor=tensor: {name: tensor}),
        ):
            model(x)
        assert_one_sentence(error)
        assert_as_it_was(model, before)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("replacement", ["query", "wider", "value", "bias", "scores", "output"])
@pytest.mark.parametrize("core", [written_out, fused])
def test_gradients_flow_through_what_was_replaced(core, replacement):
    model = randomised(Residual(Core(core)))
    x = (0.3 * double(1, 5, 8)).requires_grad_()
    parameter = next(model.parameters())

    def run(x, weight):
        with kq.listen(model, REPLACEMENTS[replacement]):
            return torch.func.functional_call(model, {next(iter(dict(model.named_parameters()))): weight}, (x,))

    assert torch.autograd.gradcheck(run, (x, parameter), fast_mode=True)


def test_softmaxes_that_are_no_attention_are_not_seen():
    class Router(nn.Module):
        """A mixture of experts: a softmax over a product with weights."""

        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Parameter(torch.randn(16, 3)), nn.ModuleList(nn.Linear(16, 16) for _ in "abc")

        def forward(self, x):
            shares = (x @ self.gate).softmax(-1)
            return sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    model = randomised(Residual(Router(), CausalSelfAttention(), Router()))
    with kq.listen(model) as calls:
        model(double(2, 5, 16))
    assert [call.name for call in calls] == ["attentions.1"]


def test_what_does_not_fit_is_told_as_such_where_scores_are_a_product_in_python():
    """Torch turns a TypeError that is raised in an operator into one about its operands."""
    model, x = randomised(Residual(Core(written_out))), double(1, 5, 8)
    before = snapshot(model)
    with (
        pytest.raises(RuntimeError, match="on_call must return None or a dict"),
        kq.listen(model, lambda call: call.query),
    ):
        model(x)
    with pytest.raises(TypeError, match="positional arguments"), kq.listen(model):
        model(x, x)
    assert_as_it_was(model, before)


def hidden_again(q, k, v):
    """Weights of hidden keys set to 0 once more, as in CPM-Ant."""
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1).masked_fill(future, 0.0) @ v


def heads_first(q, k, v):
    """Weights whose heads are moved before they meet values, as in Gemma 3n."""
    weights = (q @ k.mT).softmax(-1).transpose(0, 1).flatten(0, 1)
    return torch.bmm(weights, v.transpose(0, 1).flatten(0, 1)).unflatten(0, (2, -1)).transpose(0, 1)


def in_two_parts(q, k, v):
    """Weights of some keys, then of the others, as in Pegasus-X."""
    weights = (q @ k.mT).softmax(-1)
    return weights[..., :2] @ v[..., :2, :] + weights[..., 2:] @ v[..., 2:, :]


@pytest.mark.parametrize("attend", [hidden_again, heads_first, in_two_parts])
def test_values_are_those_that_the_weights_meet_or_are_not_known(attend):
    model, x = randomised(Core(attend)), double(2, 5, 8)
    expected = model(x)
    with kq.listen(model, lambda call: {"output": call.output()} if call.value is not None else None):
        assert torch.allclose(model(x), expected)
    with kq.listen(model) as calls:
        model(x)
    assert [call.value is None for call in calls] == [attend in (heads_first, in_two_parts)]
    assert calls[0].weights().sum(-1).allclose(torch.ones((), dtype=torch.float64))
