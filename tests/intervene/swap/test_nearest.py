"""The nearest structured kernel against dense eigenvalues, brute force, and heads that have the structure already."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.intervene.swap.nearest import nearest
from keyquery.layers.kernels import KERNELS, Diagonal, Pairwise, Split

R, D, DOUBLE = 4, 11, torch.float64
STRUCTURED = [kernel for kernel in KERNELS if kernel != "general"]
ROPES = {
    "none": None,
    "half": kq.Rope(R, base=7.0),
    "interleaved": kq.Rope(R, base=7.0, interleaved=True),
    "partial": kq.Rope(2, base=7.0, factor=1.2),
}
SPLIT = {"none": 2, "half": 2, "interleaved": 2}


def head(seed=0, heads=2):
    """Random [Wq; Wk] of some heads."""
    return torch.randn(heads, 2 * R, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def cases():
    return [
        (kernel, rope)
        for kernel in STRUCTURED
        for rope in ROPES
        if not (kernel == "split" and rope == "partial")  # a split kernel rotates whole heads
    ]


def attention(kernel, rope, weights, fit, bias=None):
    """kq.Attention whose z is mix·[q; k]."""
    layer = kq.Attention(
        D, len(weights), kernel, head_dim=R, rope=rope, symmetric_dims=2, bias=bias is not None, dtype=DOUBLE
    )
    with torch.no_grad():
        layer.key.weight.copy_((fit.mix @ weights).flatten(0, 1))
        if bias is not None:
            layer.key.bias.copy_((fit.mix @ bias.unsqueeze(-1)).flatten())
        if isinstance(layer.shape, (Diagonal, Split)):
            layer.shape.gain.copy_(fit.core)
        if isinstance(layer.shape, Pairwise):
            layer.shape.matrix.copy_(fit.core)
    return layer


def scores(query, key, rope, x, y, offset=0.0):
    query, key = x @ query.mT, y @ key.mT
    return (query if rope is None else rope.rotate(query, 0.0)) @ (key if rope is None else rope.rotate(key, offset)).mT


def dense(query, key, rope, offset):
    """M at an offset, d×d."""
    every = torch.eye(D, dtype=DOUBLE)
    return scores(query, key, rope, every, every, offset)


def planes(weights, rope):
    """conj(q_p)·k_p of every plane, d×d complex, and the d×d form of what is not rotated."""
    out = []
    for p in range(rope.dims // 2):
        a, b = (2 * p, 2 * p + 1) if rope.interleaved else (p, p + rope.dims // 2)
        query, key = (torch.complex(weights[:, a + s], weights[:, b + s]) for s in (0, R))
        out.append(query.conj().unsqueeze(-1) * key.unsqueeze(-2))
    rest = weights[:, rope.dims : R].mT @ weights[:, R + rope.dims :]
    return torch.stack(out, 1), rest


def kept_of(whole, kernel, rank, symmetric):
    """‖M̂‖² of the nearest structured form of a rank, from the eigenvalues of dense parts; complex or real."""
    part = torch.linalg.eigvalsh((whole + whole.mH) / 2)
    sizes = part.abs().sort(descending=True).values.square()
    skew = torch.linalg.eigvalsh((1j * (whole - whole.mH)) / 2).clamp(min=0).square().flip(-1)
    if kernel in ("psd", "rbf"):
        return part.flip(-1)[..., :rank].clamp(min=0).square().sum(-1)
    symmetric = {"symmetric": rank, "skew": 0}.get(kernel, symmetric)
    # A real skew form has its eigenvalues ±iμ in pairs; a complex plane takes one of them.
    turns = (rank - symmetric) if whole.is_complex() else (rank - symmetric) // 2
    return sizes[..., :symmetric].sum(-1) + (1 if whole.is_complex() else 2) * skew[..., :turns].sum(-1)


@pytest.mark.parametrize("kernel", [kernel for kernel in STRUCTURED if kernel != "pairwise"])
@pytest.mark.parametrize("symmetric", [0, 2, 4])
def test_it_keeps_what_dense_eigenvalues_say_can_be_kept(kernel, symmetric):
    weights = head()
    whole = weights[:, :R].mT @ weights[:, R:]
    fit = nearest(kernel, weights @ weights.mT, symmetric_dims=symmetric)
    expected = 1 - kept_of(whole, kernel, R, symmetric) / whole.square().sum((-2, -1))
    torch.testing.assert_close(fit.lost, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", ["psd", "symmetric", "skew"])
@pytest.mark.parametrize("name", ["half", "interleaved", "partial"])
def test_under_rotation_it_keeps_what_complex_eigenvalues_say_can_be_kept(kernel, name):
    rope, weights = ROPES[name], head()
    turned, rest = planes(weights, rope)
    size = rope.factor**4 / 2
    kept = size * kept_of(turned, kernel, 1, 0).sum(-1)
    total = size * turned.abs().square().sum((-3, -2, -1)) + rest.square().sum((-2, -1))
    if rope.dims < R:
        kept = kept + kept_of(rest, kernel, R - rope.dims, 0)
    fit = nearest(kernel, weights @ weights.mT, rope)
    torch.testing.assert_close(fit.lost, 1 - kept / total, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kernel", "name"), cases())
def test_the_layer_has_the_error_that_is_reported(kernel, name):
    """Dense forms of the finished layer; under rotation, the mean over many angles of every plane."""
    rope, weights = ROPES[name], head()
    if rope is not None:  # frequencies whose turns all cancel within 64 offsets
        frequencies = 2 * torch.pi * torch.tensor([8.0, 1.0], dtype=DOUBLE)[: rope.dims // 2] / 64
        rope = kq.Rope(rope.dims, 1.0, rope.interleaved, frequencies, rope.factor)
    fit = nearest(kernel, weights @ weights.mT, rope, SPLIT.get(name, 0))
    layer = attention(kernel, rope, weights, fit)
    error = total = 0.0
    form = layer.form()
    for offset in range(64) if rope is not None else [0]:
        old = dense(weights[:, :R], weights[:, R:], rope, offset)
        new = dense(form.query, form.key, rope, offset).detach()
        error, total = error + (old - new).square().sum((-2, -1)), total + old.square().sum((-2, -1))
    torch.testing.assert_close(fit.lost, error / total, rtol=1e-9, atol=1e-12)


def structured(kernel, rope, seed=3):
    """A layer that has a structure, with biases, and its own [Wq; Wk] and [bq; bk]."""
    torch.manual_seed(seed)
    layer = kq.Attention(D, 2, kernel, head_dim=R, rope=rope, symmetric_dims=2, dtype=DOUBLE)
    for weight in layer.parameters():
        nn.init.normal_(weight)
    if kernel == "pairwise" and rope is not None:  # what commutes with rotations
        fit = nearest(kernel, torch.eye(2 * R, dtype=DOUBLE).expand(2, -1, -1), rope)
        layer.shape.matrix.data.copy_(fit.core)
    form, biases = layer.form(), layer.biases()
    return layer, torch.cat((form.query, form.key), -2).detach(), torch.cat(biases, -1).detach()


@pytest.mark.parametrize(("kernel", "name"), cases())
def test_a_head_that_has_the_structure_is_reproduced(kernel, name):
    rope = ROPES[name]
    layer, weights, bias = structured(kernel, rope)
    fit = nearest(kernel, weights @ weights.mT, rope, SPLIT.get(name, 0))
    again = attention(kernel, rope, weights, fit, bias)
    again.value.load_state_dict(layer.value.state_dict())
    again.output.load_state_dict(layer.output.state_dict())
    x = torch.randn(3, 6, D, dtype=DOUBLE)
    assert fit.lost.max() < 1e-20
    torch.testing.assert_close(again(x), layer(x), rtol=1e-10, atol=1e-10)


def test_factors_that_depend_on_each_other_and_heads_of_nothing():
    """Fewer directions than 2r, as where tokens are few or query and key are tied."""
    weights = head()
    weights[:, R:] = weights[:, :R].flip(1)
    weights[:, 1] = weights[:, 0]
    for kernel in STRUCTURED:
        fit = nearest(kernel, weights @ weights.mT, symmetric_dims=2)
        assert fit.mix.isfinite().all()
        nothing = nearest(kernel, torch.zeros(1, 2 * R, 2 * R, dtype=DOUBLE), symmetric_dims=2)
        assert nothing.mix.abs().max() == 0
        assert nothing.lost.max() == 0
