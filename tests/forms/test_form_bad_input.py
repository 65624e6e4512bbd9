"""Each error names the argument, what was given and what was expected."""

import numpy as np
import pytest
import torch

import keyquery as kq

pytestmark = pytest.mark.unchecked

GOOD = torch.ones(2, 4)


def psd():
    return kq.Form(GOOD, GOOD)


VALUE_ERRORS = {
    "query of one dimension": (
        lambda: kq.Form(torch.ones(4), GOOD),
        "query must have shape (..., r, d), got (4,)",
    ),
    "ranks that differ": (
        lambda: kq.Form(GOOD, torch.ones(3, 4)),
        "key must have shape (..., r, e) with r = 2, got (3, 4)",
    ),
    "batches that do not broadcast": (
        lambda: kq.Form(torch.ones(3, 2, 4), torch.ones(5, 2, 4)),
        "leading dimensions must broadcast, got query (3,) and key (5,)",
    ),
    "rank 0": (
        lambda: kq.Form(torch.ones(0, 4), torch.ones(0, 4)),
        "query must not be empty: expected (..., r, d), got (0, 4)",
    ),
    "NaN": (
        lambda: kq.Form(GOOD, torch.where(torch.eye(2, 4) > 0, torch.nan, 1.0)),
        "key must be finite, got 2 NaN or infinite of 8 values",
    ),
    "infinity": (
        lambda: kq.Form(GOOD * torch.inf, GOOD),
        "query must be finite, got 8 NaN or infinite of 8 values",
    ),
    "unknown kernel": (
        lambda: psd().nearest("symetric"),
        "kernel must be one of 'symmetric', 'psd', 'skew', got 'symetric'; did you mean 'symmetric'?",
    ),
    "nearest of rank 0": (lambda: psd().nearest("psd", rank=0), "rank must be between 1 and 4, got 0"),
    "odd skew rank": (
        lambda: psd().nearest("skew", rank=3),
        "the rank of a skew form must be even, got 3",
    ),
    "k beyond the rank": (lambda: psd().svd(3), "k must be between 1 and 2, got 3"),
    "k of 0": (lambda: psd().eigh(0), "k must be between 1 and 4, got 0"),
    "planes": (lambda: psd().skew_planes(3), "k must be between 1 and 2, got 3"),
    "unknown column_directionality": (
        lambda: psd().column_directionality(kind="excesses"),
        "kind must be one of 'excess', 'norms', got 'excesses'; did you mean 'excess'?",
    ),
    "tokens of another width": (
        lambda: psd().scores(torch.ones(3, 5)),
        "x must have shape (..., d) with d = 4, got (3, 5)",
    ),
    "covariance of another width": (
        lambda: psd().on(torch.eye(3)),
        "covariance must have shape (d, d) with d = 4, got (3, 3)",
    ),
    "covariance that is not symmetric": (
        lambda: psd().on(torch.arange(16.0).reshape(4, 4)),
        "covariance must be symmetric, got a matrix that differs from its transpose",
    ),
    "covariance of negative variance": (
        lambda: psd().on(-torch.eye(4)),
        "covariance must be positive semi-definite, got one with an eigenvalue of -1",
    ),
    "covariance that is not PSD": (
        lambda: psd().on(torch.eye(4) - 0.5),
        "covariance must be positive semi-definite, got one with an eigenvalue of -1",
    ),
    "mean of another width": (
        lambda: psd().shares(torch.eye(4), torch.ones(3)),
        "mean must have shape (d,) with d = 4, got (3,)",
    ),
    "query bias of another rank": (
        lambda: psd().shares(torch.eye(4), torch.ones(4), query_bias=torch.ones(3)),
        "query_bias must have shape (..., r) with r = 2, got (3,)",
    ),
    "key bias of another rank": (
        lambda: psd().with_bias(None, torch.ones(4)),
        "key_bias must have shape (..., r) with r = 2, got (4,)",
    ),
    "basis of another width": (
        lambda: psd().change_basis(torch.eye(5)),
        "basis must have shape (..., d, e) with d = 4, got (5, 5)",
    ),
    "forms of other widths": (
        lambda: psd() + kq.Form(torch.ones(2, 5), torch.ones(2, 5)),
        "forms of width 4 and 5 cannot be added",
    ),
    "tokens whose batch does not fit": (
        lambda: kq.Form(torch.ones(3, 2, 4), torch.ones(3, 2, 4)).scores(torch.ones(5, 7, 4)),
        "leading dimensions must broadcast, got x (5,) and y (5,) and form (3,)",
    ),
    "forms of batches that do not fit": (
        lambda: kq.Form(torch.ones(3, 2, 4), GOOD) + kq.Form(torch.ones(5, 2, 4), GOOD),
        "leading dimensions must broadcast, got left (3,) and right (5,)",
    ),
    "scales that do not fit": (
        lambda: kq.Form(torch.ones(3, 2, 4), GOOD) * torch.ones(5),
        "leading dimensions must broadcast, got scale (5,) and form (3,)",
    ),
    "a scale of NaN": (lambda: psd() * float("nan"), "scale must be finite, got nan"),
    "scales of NaN": (
        lambda: psd() * torch.tensor(torch.nan),
        "scale must be finite, got 1 NaN or infinite of 1 values",
    ),
    "scales of infinity": (
        lambda: kq.Form(torch.ones(3, 2, 4), GOOD) / torch.tensor([1.0, 0.0, 2.0]),
        "scale must be finite, got 1 NaN or infinite of 3 values",
    ),
    "a Gram matrix that is not symmetric": (
        lambda: kq.Form.from_gram(torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
        "gram must be symmetric, got a matrix that differs from its transpose",
    ),
    "a Gram matrix that is indefinite": (
        lambda: kq.Form.from_gram(torch.tensor([[1.0, 2.0], [2.0, 1.0]])),
        "gram must be positive semi-definite, got one with an eigenvalue of -1",
    ),
    "one Gram matrix of many that is indefinite": (
        lambda: kq.Form.from_gram(torch.stack((torch.eye(4), torch.zeros(4, 4), torch.eye(4) - 0.5))),
        "gram must be positive semi-definite, got one with an eigenvalue of -1",
    ),
    "a Gram matrix whose small block is indefinite": (
        lambda: kq.Form.from_gram(torch.diag(torch.tensor([1e9, 1e9, 1e-9, -1e-9], dtype=torch.float64))),
        "gram must be positive semi-definite, got one with an eigenvalue of -1e-09",
    ),
    "an offset of NaN": (lambda: psd().at(float("nan"), kq.Rope(2)), "offset must be finite, got nan"),
    "a rope factor of infinity": (lambda: kq.Rope(2, factor=float("inf")), "factor must be finite, got inf"),
    "planes in one dimension": (
        lambda: kq.Form(torch.ones(1, 1), torch.ones(1, 1)).skew_planes(1),
        "k is 1, but there is nothing to choose from",
    ),
    "sum without a batch": (lambda: psd().sum(), "this form has no batch to sum over"),
    "rope wider than the head": (
        lambda: psd().at(1, kq.Rope(4)),
        "rope rotates 4 dimensions, but the head has 2",
    ),
    "odd rope": (lambda: kq.Rope(3), "dims must be even, since dimensions are rotated in pairs, got 3"),
    "rope of base 0": (lambda: kq.Rope(2, base=0.0), "base must be positive, got 0.0"),
    "rope frequencies": (
        lambda: kq.Rope(4, frequencies=torch.ones(3)),
        "frequencies must have shape (pairs,) with pairs = 2, got (3,)",
    ),
}


@pytest.mark.parametrize("case", VALUE_ERRORS)
def test_value_errors(case):
    call, words = VALUE_ERRORS[case]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == words


TYPE_ERRORS = {
    "a list": (
        lambda: kq.Form([[1.0]], GOOD),
        "query must be a torch.Tensor of shape (..., r, d), got list",
    ),
    "integers": (
        lambda: kq.Form(GOOD.long(), GOOD),
        "query must be a floating-point tensor of at least 16 bits, got dtype torch.int64",
    ),
    "complex numbers": (
        lambda: kq.Form(GOOD, GOOD.to(torch.complex64)),
        "key must be a floating-point tensor of at least 16 bits, got dtype torch.complex64",
    ),
    "eight-bit floats": (
        lambda: kq.Form(GOOD.to(torch.float8_e4m3fn), GOOD),
        "query must be a floating-point tensor of at least 16 bits, got dtype torch.float8_e4m3fn",
    ),
    "to integers": (
        lambda: psd().to(torch.int64),
        "target must be a floating-point tensor of at least 16 bits, got dtype torch.int64",
    ),
    "complex scales": (
        lambda: psd() * torch.tensor(1j),
        "scale must be a floating-point tensor of at least 16 bits, got dtype torch.complex64",
    ),
    "offsets": (lambda: psd().at(torch.arange(4.0), kq.Rope(2)), "offset must be a number, got Tensor"),
    "no rope": (lambda: psd().at(1, 2), "rope must be a Rope, got int"),
    "a base that is no number": (lambda: kq.Rope(2, base="x"), "base must be a number, got str"),
    "a rank that is no integer": (lambda: psd().nearest("psd", rank=1.5), "rank must be an integer, got 1.5"),
    "dims that are no integer": (lambda: kq.Rope(2.0), "dims must be an integer, got 2.0"),
}


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_type_errors(case):
    call, words = TYPE_ERRORS[case]
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == words


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


def test_adding_a_number_is_a_type_error():
    with pytest.raises(TypeError):
        psd() + 1
    with pytest.raises(TypeError):
        psd() * "2"


def test_numpy_integers_and_numbers_are_taken():
    assert psd().svd(np.int64(1)).values.shape == (1,)
    batched = kq.Form(torch.ones(3, 2, 4), GOOD)
    torch.testing.assert_close((np.float64(2) * batched).dense(), 2 * batched.dense())


def test_large_finite_factors_are_not_taken_for_infinite():
    huge = torch.full((2, 4), 3e38)
    assert float(kq.Form(huge, huge).symmetry) == 1
    assert torch.isfinite(kq.Form(huge, huge).symmetric.norm2)
    half = torch.full((2, 4), 6e4, dtype=torch.float16)
    assert float(kq.Form(half, half).symmetric.symmetry) == 1
