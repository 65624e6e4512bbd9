"""What a Form refuses: each error names the argument, what was given and what was expected."""

import pytest
import torch

import keyquery as kq

pytestmark = pytest.mark.unchecked

GOOD = torch.ones(2, 4)
BATCH = kq.Form(torch.ones(3, 2, 4), GOOD)
NAN = torch.where(torch.eye(2, 4) > 0, torch.nan, 1.0)
SMALL_BLOCK = torch.diag(torch.tensor([1e9, 1e9, 1e-9, -1e-9], dtype=torch.float64))


def psd():
    return kq.Form(GOOD, GOOD)


# What is said, and the call; the words of checks of shapes, counts and choices are those of `support.checks`.
VALUE_ERRORS = {
    "query must have shape (..., r, d), got (4,)": lambda: kq.Form(torch.ones(4), GOOD),
    "key must have shape (..., r, e) with r = 2": lambda: kq.Form(GOOD, torch.ones(3, 4)),
    "must broadcast, got query (3,) and key (5,)": lambda: kq.Form(torch.ones(3, 2, 4), torch.ones(5, 2, 4)),
    "key must be finite, got 2 NaN or infinite of 8": lambda: kq.Form(GOOD, NAN),
    "got 'symetric'; did you mean 'symmetric'?": lambda: psd().nearest("symetric"),
    "rank must be between 1 and 4, got 0": lambda: psd().nearest("psd", rank=0),
    "the rank of a skew form must be even, got 3": lambda: psd().nearest("skew", rank=3),
    "k must be between 1 and 4, got 0": lambda: psd().eigh(0),
    "k is 1, but there is nothing to choose from": lambda: kq.Form(GOOD[:1, :1], GOOD[:1, :1]).skew_planes(1),
    "kind must be one of 'excess', 'norms'": lambda: psd().column_directionality(kind="excesses"),
    "x must have shape (..., d) with d = 4": lambda: psd().scores(torch.ones(3, 5)),
    "got x (5,) and y (5,) and form (3,)": lambda: BATCH.scores(torch.ones(5, 7, 4)),
    "covariance must be symmetric": lambda: psd().on(torch.arange(16.0).reshape(4, 4)),
    "covariance must be positive semi-definite, got one with an eigenvalue of -1": lambda: psd().on(torch.eye(4) - 0.5),
    "mean must have shape (d,) with d = 4": lambda: psd().shares(torch.eye(4), torch.ones(3)),
    "query_bias must have shape (..., r)": lambda: psd().shares(torch.eye(4), torch.ones(4), query_bias=torch.ones(3)),
    "basis must have shape (..., d, e) with d = 4": lambda: psd().change_basis(torch.eye(5)),
    "forms of width 4 and 5 cannot be added": lambda: psd() + kq.Form(torch.ones(2, 5), torch.ones(2, 5)),
    "must broadcast, got scale (5,) and form (3,)": lambda: BATCH * torch.ones(5),
    "scale must be finite, got nan": lambda: psd() * float("nan"),
    "scale must be finite, got 1 NaN or infinite of 3": lambda: BATCH / torch.tensor([1.0, 0.0, 2.0]),
    "gram must be symmetric": lambda: kq.Form.from_gram(torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
    "eigenvalue of -1": lambda: kq.Form.from_gram(torch.stack((torch.zeros(4, 4), torch.eye(4) - 0.5))),
    "eigenvalue of -1e-09": lambda: kq.Form.from_gram(SMALL_BLOCK),
    "this form has no batch to sum over": lambda: psd().sum(),
    "rope rotates 4 dimensions, but the head has 2": lambda: psd().at(1, kq.Rope(4)),
    "dims must be even": lambda: kq.Rope(3),
    "base must be positive, got 0.0": lambda: kq.Rope(2, base=0.0),
}
BITS = "must be a floating-point tensor of at least 16 bits, got dtype torch"
TYPE_ERRORS = {
    "query must be a torch.Tensor of shape (..., r, d), got list": lambda: kq.Form([[1.0]], GOOD),
    f"query {BITS}.int64": lambda: kq.Form(GOOD.long(), GOOD),
    f"query {BITS}.float8_e4m3fn": lambda: kq.Form(GOOD.to(torch.float8_e4m3fn), GOOD),
    f"target {BITS}.int64": lambda: psd().to(torch.int64),
    f"scale {BITS}.complex64": lambda: psd() * torch.tensor(1j),
    "offset must be a number, got Tensor": lambda: psd().at(torch.arange(4.0), kq.Rope(2)),
    "rope must be a Rope, got int": lambda: psd().at(1, 2),
    "rank must be an integer, got 1.5": lambda: psd().nearest("psd", rank=1.5),
    "unsupported operand": lambda: psd() + 1,
}


@pytest.mark.parametrize("words", VALUE_ERRORS)
def test_value_errors(words):
    with pytest.raises(ValueError) as caught:
        VALUE_ERRORS[words]()
    assert words in str(caught.value)


@pytest.mark.parametrize("words", TYPE_ERRORS)
def test_type_errors(words):
    with pytest.raises(TypeError) as caught:
        TYPE_ERRORS[words]()
    assert words in str(caught.value)


def test_distance_of_a_form_that_is_not_psd():
    with pytest.raises(ValueError, match=r"1 of 1 are not: up to 0\.75 of their ‖M‖² is skew"):
        kq.Form(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])).distance(torch.ones(2), torch.zeros(2))


HALF = torch.full((2, 4), 6e4, dtype=torch.float16)
HALVES = {
    "a multiple of the form": lambda form: form * 2,
    "a multiple of the form ": lambda form: form * torch.tensor(2),
    "the form in this basis": lambda form: form.change_basis(4 * torch.eye(4)),
    "the rotated form": lambda form: form.at(0.5, kq.Rope(2, factor=2.0)),
    "the form with this bias": lambda form: form.with_bias(torch.full((2,), 1e5), None),
    "the sum of queries": lambda form: kq.Form(HALF.expand(3, 2, 4), HALF).sum(),
    "the form": lambda form: kq.Form(1e3 * HALF.float(), GOOD).to(torch.float16),
}


@pytest.mark.parametrize("what", HALVES)
def test_what_overflows_a_short_dtype_is_refused(what):
    with pytest.raises(OverflowError) as caught:
        HALVES[what](kq.Form(HALF, HALF))
    range_of = "is beyond the range of float16, ±6.6e+04: convert to a wider dtype first"
    assert str(caught.value) == f"{what.strip()} {range_of}"


def test_a_gram_matrix_off_by_rounding_is_taken():
    x = torch.randn(2, 30, 8, dtype=torch.float64)
    gram = x[0].mT @ x[0]
    for dtype in (torch.float32, torch.bfloat16):
        rounded = gram.to(dtype) * (1 + torch.finfo(dtype).eps * torch.randn(8, 8)).to(dtype)
        expected = kq.Form.from_gram(gram).singular_values()
        error = (kq.Form.from_gram(rounded).singular_values() - expected).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * expected.max()
    few = torch.randn(3, 8)  # of rank 3: five eigenvalues are rounding
    assert torch.isfinite(kq.Form.from_gram(few.mT @ few).norm2)
    assert not kq.Form.from_gram(torch.zeros(2, 4, 4)).norm2.any()
