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
from keyquery.testing import check_kernel, kernels

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


@pytest.mark.slow
def test_a_rotary_layer_keeps_its_promises_when_it_is_compiled():
    check_kernel(kq.Attention(12, heads=2, kernel="rbf", rope=ROPES["half"]), "aot_eager")


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


ALL = {f"{kernel}-{rope}": kq.Attention(12, 2, kernel=kernel, rope=ROPES[rope]) for kernel in KERNELS for rope in ROPES}
ALL |= {f"{kernel}-grouped": grouped(kernel) for kernel in GROUPED}
ALL |= {f"{kernel}-{dims} turned": partial(kernel, dims) for kernel, dims in PARTIAL}


@pytest.mark.slow
@pytest.mark.parametrize("layer", ALL.values(), ids=ALL)
def test_all_pairs_compile(layer):
    kernels.compiles(layer, "aot_eager")


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


def test_structure_would_be_lost_if_rotary_pairs_were_not_kept():
    """The check tells a D that is not tied within rotary pairs from one that is."""
    layer = kq.Attention(8, 2, kernel="symmetric", rope=kq.Rope(4)).double()
    layer.shape.rope = None
    layer.shape.gain = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
    with pytest.raises(AssertionError, match="not symmetric"):
        kernels._structure(layer, "untied")


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


def test_pairwise_contains_the_others():
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    for kernel in ("symmetric", "psd", "skew", "split"):
        layer = kq.Attention(8, 2, kernel=kernel).double()
        for weight in layer.parameters():
            nn.init.normal_(weight)
        wide = kq.Attention(8, 2, kernel="pairwise").double()
        wide.load_state_dict({k: v for k, v in layer.state_dict().items() if "shape" not in k}, strict=False)
        # C of each head, row by row: what the kernel makes of unit vectors.
        wide.shape.matrix.data = layer.shape(torch.eye(4, dtype=torch.float64).expand(2, 4, 4))
        assert torch.allclose(wide(x), layer(x), atol=1e-12)


def test_one_projection_saves_a_quarter_of_the_parameters():
    count = {k: sum(p.numel() for p in kq.Attention(512, 8, kernel=k).parameters()) for k in ("general", "psd")}
    assert count["psd"] / count["general"] == pytest.approx(0.75, abs=1e-3)


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


def test_rbf_far_away_is_the_same_with_padding_a_cache_or_offsets():
    layer, x = kq.Attention(32, 4, kernel="rbf"), torch.randn(2, 12, 32) + 1e3
    whole = layer(x, is_causal=True)
    cache = kq.Cache()
    steps = torch.cat([layer(part, is_causal=True, cache=cache) for part in x.split((5, 1, 6), 1)], 1)
    near = 1e-5 * whole.abs().max()
    assert (steps - whole).abs().max() < near
    padded = torch.cat((torch.full((2, 3, 32), torch.nan), x), 1)
    real = (torch.arange(15) >= 3).expand(2, 15)
    assert (layer(padded, mask=real, is_causal=True)[:, 3:] - whole).abs().max() < near
    packed = layer(x.flatten(0, 1), is_causal=True, offsets=torch.tensor([0, 12, 24]))
    assert (packed.unflatten(0, (2, 12)) - whole).abs().max() < near


def test_rbf_leaks_no_future_token():
    layer, x = kq.Attention(32, 4, kernel="rbf"), torch.randn(1, 12, 32) + 1e3
    other = x.clone()
    other[:, 5:] = 1e4
    assert torch.equal(layer(x, is_causal=True)[:, :5], layer(other, is_causal=True)[:, :5])


def test_rbf_has_the_gradient_of_its_formula():
    layer, x = kq.Attention(8, 2, kernel="rbf").double(), torch.randn(1, 5, 8, dtype=torch.float64)
    key = layer.queries_and_keys(x)[1]
    apart = -(key.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1) / 2
    weights = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    by_formula = torch.autograd.grad(((apart * layer.scale).softmax(-1) * weights).sum(), layer.key.weight)[0]
    by_layer = torch.autograd.grad((layer.maps(x) * weights).sum(), layer.key.weight)[0]
    torch.testing.assert_close(by_layer, by_formula)


# Forms and parts of live layers


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_form_gives_the_scores(kernel):
    layer = kq.Attention(8, 2, kernel=kernel, bias=False).double()
    for weight in layer.parameters():
        nn.init.normal_(weight)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    query, key = layer.queries_and_keys(x)
    assert torch.allclose(layer.form().scores(x[0]), (query @ key.mT)[0], atol=1e-12)


def test_hooks_and_replaced_projections_are_heard():
    layer, x, heard = kq.Attention(8, 2), torch.randn(1, 5, 8), []
    expected = layer(x)
    layer.key.register_forward_pre_hook(lambda module, args: heard.append(args[0]))
    assert torch.allclose(layer(x), expected, atol=1e-6)
    assert torch.equal(heard[0], x)
    replaced = kq.Attention(8, 2)
    replaced.value = nn.Sequential(replaced.value, nn.ReLU())
    assert not torch.allclose(replaced(x), layer(x))


def test_dropout_is_off_outside_training():
    layer, x = kq.Attention(8, 2, dropout=0.5), torch.randn(1, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_autocast_runs_in_short_floats():
    layer, x = kq.Attention(16, 2, kernel="split"), torch.randn(1, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), layer(x), atol=0.05)


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


def test_an_empty_chunk_changes_nothing():
    layer, x = kq.Attention(8, 2), torch.randn(1, 5, 8)
    real, cache = torch.tensor([[True, True, False, True, True]]), kq.Cache()
    parts = [(x[:, a:b], real[:, a:b]) for a, b in ((0, 2), (2, 2), (2, 5))]
    out = torch.cat([layer(part, mask=mask, is_causal=True, cache=cache) for part, mask in parts], 1)
    assert torch.allclose(out[real], layer(x, mask=real, is_causal=True)[real], atol=1e-6)


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


@pytest.mark.parametrize("kernel", ["general", "psd", "symmetric"])
def test_heads_of_one_dimension_have_a_form(kernel):
    assert kq.Attention(4, 4, kernel=kernel, head_dim=1).form().symmetry.shape == (4,)


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
    ("options", "error", "complaint"),
    [
        ({"mask": torch.ones(2, 5)}, TypeError, "mask must be bool"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, r"mask must be \(2, 5\)"),
        ({"mask": torch.ones(2, 3, 5, 5, dtype=torch.bool)}, ValueError, r"got \(2, 3, 5, 5\)"),
        ({"positions": torch.arange(4)}, ValueError, r"positions must be a tensor \(5,\)"),
    ],
)
def test_bad_calls(options, error, complaint):
    with pytest.raises(error, match=complaint):
        kq.Attention(8, 2)(torch.zeros(2, 5, 8), **options)


@pytest.mark.unchecked
def test_a_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"x must be \(batch, n, 8\), got \(2, 5, 9\)"):
        kq.Attention(8, 2)(torch.zeros(2, 5, 9))


def test_a_cache_of_another_layer_is_refused():
    one, cache = kq.Attention(8, 2), kq.Cache()
    one(torch.zeros(1, 3, 8), cache=cache)
    with pytest.raises(ValueError, match="belongs to another layer"):
        copy.deepcopy(one)(torch.zeros(1, 1, 8), cache=cache)
    with pytest.raises(ValueError, match="batch of 1, but the input has 2"):
        one(torch.zeros(2, 1, 8), cache=cache)


@pytest.mark.unchecked
def test_things_that_are_no_tensors_are_named():
    layer, x = kq.Attention(8, 2), torch.zeros(1, 5, 8)
    with pytest.raises(TypeError, match=r"mask must be bool.*got list"):
        layer(x, mask=[[True] * 5])
    with pytest.raises(ValueError, match="positions must be a tensor"):
        layer(x, positions=[0, 1, 2, 3, 4])
    with pytest.raises(TypeError, match=r"cache must be a kq\.Cache, got dict"):
        layer(x, cache={})
    with pytest.raises(TypeError, match=r"int32 or int64, got torch\.uint8"):
        layer(x[0], offsets=torch.tensor([0, 3, 2, 5], dtype=torch.uint8))


def test_offsets_must_cover_the_row():
    for offsets in ([0, 3], [1, 5], [0, 4, 3, 5]):
        with pytest.raises(ValueError, match="offsets must rise from 0 to the 5"):
            kq.Attention(8, 2)(torch.zeros(5, 8), offsets=torch.tensor(offsets))
