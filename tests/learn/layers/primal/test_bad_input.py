"""What a primal layer refuses, and in which words."""

import pytest
import torch

import keyquery as kq
from keyquery.learn.layers.primal import Random


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 5}, "rank must be at most 4, the number of features per head"),
        ({"heads": 3}, "3 does not divide 8"),
        ({"eta": -0.1}, "eta must be at least 0, got -0.1"),
        ({"eta": float("nan")}, "eta must be finite"),
        ({"features": "cosin"}, "did you mean 'cosine'"),
        ({"features": torch.nn.Linear(5, 4)}, "features must take vectors of 4, the width of a head"),
        ({"loss": "kvsd"}, "did you mean 'ksvd'"),
        ({"init": "random"}, "init must be one of"),
        ({"impl": "cuda"}, "impl must be one of"),
        ({"init": "ksvd"}, r"data \(batch, n, dim\) and init=\"ksvd\" must be used together"),
        ({"data": torch.zeros(1, 5, 8)}, "must be used together"),
    ],
)
def test_bad_construction(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        kq.PrimalAttention(**{"dim": 8, "heads": 2, "rank": 2, **options})


def test_a_rank_above_that_of_the_data():
    with pytest.raises(ValueError, match="rank must be between 1 and 2, got 3"):
        kq.PrimalAttention(8, 2, 3, init="ksvd", data=torch.randn(1, 2, 8))
    flat = torch.randn(1, 30, 1) * torch.ones(8)
    with pytest.raises(ValueError, match="rank must be at most 1, the rank of the kernel of head 0 on data, got 3"):
        kq.PrimalAttention(8, 2, 3, init="ksvd", data=flat, bias=False)
    kq.PrimalAttention(8, 2, 4, features=Random(4, 12))  # wider features allow more


def test_fewer_tokens_than_rows_are_fine():
    layer = kq.PrimalAttention(8, 2, 3)
    assert layer(torch.randn(2, 1, 8)).isfinite().all()
    assert layer.regularizer().isfinite()
    assert len(layer.ksvd().heads) == 4


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"mask": torch.ones(2, 5)}, TypeError, "mask must be bool"),
        ({"mask": [[True]]}, TypeError, "mask must be bool, True for real tokens, got list"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, r"mask must be \(2, 5\), got \(2, 4\)"),
        ({"mask": torch.ones(2, 5, 5, dtype=torch.bool)}, ValueError, r"mask must be \(2, 5\)"),
        ({"offsets": torch.tensor([0, 5])}, ValueError, "with offsets, x must be"),
    ],
)
def test_bad_calls(options, error, complaint):
    with pytest.raises(error, match=complaint):
        kq.PrimalAttention(8, 2, 2)(torch.zeros(2, 5, 8), **options)


@pytest.mark.unchecked
@pytest.mark.parametrize("call", ["forward", "step", "start"])
@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (torch.zeros(1, 5, 8, dtype=torch.float64), "x must be torch.float32, as the layer is, got torch.float64"),
        (torch.zeros(1, 5, 8, dtype=torch.bfloat16), "x must be torch.float32, as the layer is, got torch.bfloat16"),
        (torch.zeros(1, 5, 8, dtype=torch.int64), "x must be a floating-point tensor, got torch.int64"),
        ([[[0.0] * 8]], "x must be a floating-point tensor, got list"),
    ],
)
def test_a_wrong_dtype_is_named(call, x, complaint):
    layer = kq.PrimalAttention(8, 2, 2)
    with pytest.raises(TypeError, match=complaint):
        getattr(layer, call)(x)
    with torch.autocast("cpu", torch.bfloat16):  # which converts all floats but float64
        if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 and call != "start":
            getattr(layer, call)(x)
        elif call != "start":
            with pytest.raises(TypeError, match=complaint):
                getattr(layer, call)(x)


@pytest.mark.unchecked
def test_a_double_layer_takes_no_short_x_even_under_autocast():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"x must be torch\.float64"):
        kq.PrimalAttention(8, 2, 2).double()(torch.zeros(1, 5, 8))


@pytest.mark.unchecked
def test_a_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"x must be \(batch, n, 8\), got \(2, 5, 9\)"):
        kq.PrimalAttention(8, 2, 2)(torch.zeros(2, 5, 9))


def test_what_needs_a_forward_first():
    for name in ("regularizer", "ksvd"):
        with pytest.raises(RuntimeError, match=f"{name} needs the last forward pass: call the layer first"):
            getattr(kq.PrimalAttention(8, 2, 2), name)()


def test_a_state_of_another_batch():
    layer = kq.PrimalAttention(8, 2, 2)
    _, state = layer.step(torch.zeros(2, 1, 8))
    with pytest.raises(ValueError, match="state has a batch of 2, but x has 3"):
        layer.step(torch.zeros(3, 1, 8), state)
    with pytest.raises(
        ValueError, match=r"state must be of this layer, with shape \(2, 2, 4, 2, 2\), got \(2, 2, 2, 4, 2\)"
    ):
        kq.PrimalAttention(8, 4, 2).step(torch.zeros(2, 1, 8), state)
    with pytest.raises(ValueError, match="x must hold at least one token"):
        layer.step(torch.zeros(2, 0, 8), state)


def test_data_that_are_not_finite():
    x = torch.randn(1, 9, 8)
    x[0, 4] = torch.nan
    layer = kq.PrimalAttention(8, 2, 2)
    with pytest.raises(ValueError, match="x must be finite, got 8 NaN"):
        layer.start(x)
    layer(x)
    with pytest.raises(RuntimeError, match="the queries or keys of the last forward pass were not finite"):
        layer.ksvd()
    layer.start(x, mask=~x.isnan().any(-1))  # padding may hold anything
