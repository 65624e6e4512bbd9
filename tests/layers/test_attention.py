"""kq.Attention: every kernel keeps its promises, and `check_kernel` notices when one does not."""

import copy
import shutil

import pytest
import torch
from torch import nn
from torch.nn.functional import multi_head_attention_forward

import keyquery as kq
from keyquery.layers.kernels import KERNELS
from keyquery.layers.packing import Packing
from keyquery.testing import check_kernel

ROPES = {"none": None, "half": kq.Rope(6), "interleaved": kq.Rope(6, interleaved=True)}
GROUPED = ("general", "symmetric", "pairwise")
PARTIAL = (("symmetric", 2), ("skew", 2), ("psd", 4), ("pairwise", 4))


def grouped(kernel):
    return kq.Attention(16, heads=4, kv_heads=2, kernel=kernel, rope=kq.Rope(4))


def partial(kernel, dims):
    return kq.Attention(10, heads=3, head_dim=6, kernel=kernel, bias=False, rope=kq.Rope(dims))


# Nearly all of a check is the time to compile. Every kernel is traced as one graph here, a plain layer is compiled by
# the examples of check_kernel, and the rest by slow tests.


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.few(10)
def test_every_kernel_keeps_its_promises(kernel, rope):
    check_kernel(kq.Attention(12, heads=2, kernel=kernel, rope=ROPES[rope]), None)


@pytest.mark.unchecked
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.few(2)
def test_every_kernel_is_one_graph(kernel):
    layer, x = kq.Attention(12, heads=2, kernel=kernel, rope=ROPES["half"]), torch.randn(2, 5, 12)
    torch._dynamo.reset()  # graphs of other tests count against its limit
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, is_causal=True), layer(x, is_causal=True), atol=1e-5)


@pytest.mark.parametrize("kernel", GROUPED)
def test_grouped_queries(kernel):
    layer = grouped(kernel)
    check_kernel(layer, backend=None)
    for weight in layer.parameters():
        nn.init.normal_(weight)
    form = layer.form()
    assert form.batch == (2, 2)
    assert not torch.allclose(form[0, 0].dense(), form[0, 1].dense())  # heads of a group differ


@pytest.mark.parametrize(("kernel", "dims"), PARTIAL)
@pytest.mark.few(3)
def test_partial_rotary_and_other_widths(kernel, dims):
    check_kernel(partial(kernel, dims), backend=None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_compiles_with_inductor(kernel):
    check_kernel(kq.Attention(16, heads=2, kernel=kernel, rope=kq.Rope(8)), backend="inductor")


# The check itself can fail


class Peeking(kq.Attention):
    def forward(self, x, mask=None, is_causal=False, **options):
        return super().forward(x, mask, False, **options)


class Leaking(kq.Attention):
    def forward(self, x, mask=None, *args, **options):
        return super().forward(x, None, *args, **options)


class Crooked(kq.Attention):
    def queries_and_keys(self, x):
        query, key = super().queries_and_keys(x)
        return query + 0.01 * query.roll(1, -1), key


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        (Peeking(8, 2), "looks ahead"),
        (Leaking(8, 2), "padding leaks"),
        (Crooked(8, 2, kernel="symmetric"), "not symmetric"),
        (Crooked(8, 2, kernel="skew"), "not skew"),
    ],
)
def test_the_check_notices(layer, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_kernel(layer)


# Against torch


@pytest.mark.parametrize("is_causal", [False, True])
def test_general_equals_torch(is_causal):
    layer, x = kq.Attention(12, 3).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if is_causal else None
    theirs, _ = multi_head_attention_forward(
        *(x.transpose(0, 1),) * 3,
        12,
        3,
        torch.cat([p.weight for p in (layer.query, layer.key, layer.value)]),
        torch.cat([p.bias for p in (layer.query, layer.key, layer.value)]),
        None,
        None,
        False,
        0.0,
        layer.output.weight,
        layer.output.bias,
        attn_mask=mask,
    )
    assert torch.allclose(layer(x, is_causal=is_causal), theirs.transpose(0, 1), atol=1e-12)


def test_the_key_norm_of_rbf_survives_short_floats():
    """With large keys one bfloat16 number for ‖k‖² would be off by far more than two are."""
    torch.manual_seed(0)
    layer = kq.Attention(16, 2, kernel="rbf").to(torch.bfloat16)
    x = 4 * torch.randn(1, 24, 16).to(torch.bfloat16)
    key = layer.queries_and_keys(x)[1]
    high, low = layer._key_norm(key)
    exact = key.double().square().sum(-1) / -2
    assert (high.double() + low.double() - exact).abs().max() < 0.02 * (high.double() - exact).abs().max()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("far", [1e2, 1e3, 1e4])
def test_rbf_does_not_see_where_all_tokens_are(far, is_causal):
    """Against float64 of the same rounded tokens: what is left is the rounding of their projections."""
    layer, x = kq.Attention(32, 4, kernel="rbf"), torch.randn(2, 12, 32) + far
    exact = copy.deepcopy(layer).double()
    allowed = 2e-7 * far  # 0.9 at 1e4 if scores are q·k − ½‖k‖² of uncentred vectors
    assert (layer.maps(x, is_causal=is_causal) - exact.maps(x.double(), is_causal=is_causal)).abs().max() < allowed
    out, right = layer(x, is_causal=is_causal), exact(x.double(), is_causal=is_causal)
    assert (out - right).abs().max() < 4 * allowed * right.abs().max()


# Forms and parts of live layers


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_form_gives_the_scores(kernel):
    layer = kq.Attention(8, 2, kernel=kernel, bias=False).double()
    for weight in layer.parameters():
        nn.init.normal_(weight)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    query, key = layer.queries_and_keys(x)
    assert torch.allclose(layer.form().scores(x[0]), (query @ key.mT)[0], atol=1e-12)


def test_dropout_is_off_outside_training():
    layer, x = kq.Attention(8, 2, dropout=0.5), torch.randn(1, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_no_tensor_of_queries_times_keys_is_made():
    """Peak memory with a padding mask grows with n, not with n²."""
    layer = kq.Attention(8, 1, kernel="psd")
    n = 4096
    x, real = torch.randn(1, n, 8), torch.ones(1, n, dtype=torch.bool)
    real[0, -5:] = False
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        layer(x, mask=real, is_causal=True)
    assert max(event.cpu_memory_usage for event in profile.key_averages()) < n * n


# Edges


def test_a_query_that_sees_nothing_gives_zero():
    layer, x = kq.Attention(8, 2), torch.randn(1, 4, 8)
    visible = torch.ones(1, 4, 4, dtype=torch.bool)
    visible[0, 2] = False
    out = layer(x, mask=visible)
    assert out[0, 2].abs().max() == 0
    assert out[0, 1].abs().max() > 0
    by_head = visible.unsqueeze(1).repeat(1, 2, 1, 1)
    by_head[0, 0, 2] = True  # one head sees: only the other gives nothing
    assert layer(x, mask=by_head)[0, 2].abs().max() > 0


def test_nan_in_padding_reaches_no_gradient():
    layer, x = kq.Attention(8, 2), torch.randn(1, 4, 8)
    x[0, 3] = torch.nan
    real = torch.tensor([[True, True, True, False]])
    layer(x, mask=real)[real].sum().backward()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())


def test_packed_sequences_are_padded_to_those_of_their_length_only():
    """One long sequence and many short ones: what is computed grows with the tokens, not with sequences × longest."""
    lengths = [512, *[1] * 100, 3]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    padded = sum(group.real.numel() for group in Packing(offsets, sum(lengths)).groups())
    assert padded <= 2 * sum(lengths)
    layer, x = kq.Attention(8, 2).double(), torch.randn(sum(lengths), 8, dtype=torch.float64)
    alone = torch.cat([layer(part[None])[0] for part in x.split(lengths)])
    assert torch.allclose(layer(x, offsets=offsets), alone, atol=1e-12)
    assert layer(x[:0], offsets=torch.tensor([0, 0])).shape == (0, 8)


def test_padding_is_never_seen_in_float16_either():
    layer = kq.Attention(4, 1, bias=False).half()
    for weight in (layer.query.weight, layer.key.weight, layer.value.weight, layer.output.weight):
        weight.data = torch.eye(4).half()
    layer.query.weight.data = -50 * torch.eye(4).half()
    x = torch.full((1, 3, 4), 10.0).half()  # scores of −20,000 before the scale
    out = layer(x, mask=torch.tensor([[True, True, False]]))
    assert torch.allclose(out[0, :2], x[0, :2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_devices_and_dtypes_reach_every_parameter(kernel):
    encoder = kq.Encoder(12, depth=1, heads=2, kernel=kernel, rope=ROPES["half"], device="meta", dtype=torch.float64)
    assert {(weight.device.type, weight.dtype) for weight in encoder.parameters()} == {("meta", torch.float64)}
    assert encoder(torch.empty(1, 3, 12, device="meta", dtype=torch.float64)).shape == (1, 3, 12)


# Bad input


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kernel": "symetric"}, "did you mean 'symmetric'"),
        ({"kernel": "zzz"}, "no kernel 'zzz'. Known: general, symmetric"),
        ({"kernel": "PSD"}, "did you mean 'psd'"),
        ({"kernel": "split", "symmetric_dims": float("nan")}, "share from 0 to 1"),
        ({"kernel": "skew", "head_dim": 3}, "needs an even number of dimensions, got 3"),
        ({"kernel": "split", "symmetric_dims": 1}, "leaves an odd number of skew"),
        ({"kernel": "split", "symmetric_dims": 9}, "from 0 to 4 dimensions, got 9"),
        ({"kernel": "split", "symmetric_dims": 1.5}, "share from 0 to 1"),
        ({"kernel": "split", "rope": kq.Rope(2)}, "needs all 4 dimensions"),
        ({"kernel": "psd", "kv_heads": 1}, "would be identical"),
        ({"kernel": "skew", "kv_heads": 1}, "would be identical"),
        ({"kv_heads": 3}, "does not divide"),
        ({"heads": 3}, "does not divide"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"rope": kq.Rope(6)}, "rope rotates 6"),
    ],
)
def test_bad_construction(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        kq.Attention(**{"dim": 8, "heads": 2, **options})


@pytest.mark.unchecked
def test_bad_types():
    with pytest.raises(TypeError, match=r"kq\.Rope"):
        kq.Attention(8, 2, rope=True)
    with pytest.raises(TypeError, match="symmetric_dims"):
        kq.Attention(8, 2, kernel="split", symmetric_dims="half")


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("x", "options", "error", "complaint"),
    [
        ((2, 5, 9), {}, ValueError, r"x must be \(batch, n, 8\), got \(2, 5, 9\)"),
        ((2, 5, 8), {"mask": torch.ones(2, 5)}, TypeError, "mask must be bool"),
        ((2, 5, 8), {"mask": [[True] * 5]}, TypeError, "mask must be bool.*got list"),
        ((2, 5, 8), {"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, r"mask must be \(2, 5\)"),
        ((2, 5, 8), {"mask": torch.ones(2, 3, 5, 5, dtype=torch.bool)}, ValueError, r"got \(2, 3, 5, 5\)"),
        ((2, 5, 8), {"positions": torch.arange(4)}, ValueError, r"positions must be a tensor \(5,\)"),
        ((2, 5, 8), {"positions": [0, 1, 2, 3, 4]}, ValueError, "positions must be a tensor"),
        ((2, 5, 8), {"cache": {}}, TypeError, r"cache must be a kq\.Cache, got dict"),
        ((5, 8), {"offsets": torch.tensor([0, 5], dtype=torch.uint8)}, TypeError, r"int32 or int64, got torch\.uint8"),
        ((5, 8), {"offsets": torch.tensor([0, 3])}, ValueError, "offsets must rise from 0 to the 5"),
        ((5, 8), {"offsets": torch.tensor([1, 5])}, ValueError, "offsets must rise from 0 to the 5"),
        ((5, 8), {"offsets": torch.tensor([0, 4, 3, 5])}, ValueError, "offsets must rise from 0 to the 5"),
    ],
)
def test_bad_calls(x, options, error, complaint):
    with pytest.raises(error, match=complaint):
        kq.Attention(8, 2)(torch.zeros(x), **options)


def test_a_cache_of_another_layer_is_refused():
    one, cache = kq.Attention(8, 2), kq.Cache()
    one(torch.zeros(1, 3, 8), cache=cache)
    with pytest.raises(ValueError, match="belongs to another layer"):
        copy.deepcopy(one)(torch.zeros(1, 1, 8), cache=cache)
    with pytest.raises(ValueError, match="batch of 1, but the input has 2"):
        one(torch.zeros(2, 1, 8), cache=cache)
