"""Forms whose geometry is known in closed form."""

import copy
import pickle

import pytest
import torch

import keyquery as kq


def dense_form(matrix):
    return kq.Form(torch.eye(len(matrix), dtype=matrix.dtype), matrix)


@pytest.mark.parametrize(("rank", "dim"), [(2, 9), (5, 9), (12, 9), (64, 768)])
def test_tied_factors_are_symmetric_and_psd(rank, dim):
    query = torch.randn(rank, dim, dtype=torch.float64)
    form = kq.Form(query, query.clone())
    assert float(form.symmetry) == 1
    assert float(form.skew_values().max()) <= 1e-12
    assert float(form.symmetric_eigenvalues().min()) >= -1e-12 * float(form.symmetric_eigenvalues().max())
    assert float(form.positive_share) == pytest.approx(1, abs=1e-12)
    assert tuple(map(int, form.signature())) == (min(rank, dim), 0, dim - min(rank, dim))
    assert not form.skew.dense().any()
    assert form.nearest("psd").rank == min(rank, dim)


@pytest.mark.parametrize("shape", [(2, 7), (9, 7), (3, 2, 7)])
def test_a_zero_form_has_no_nan(shape):
    form = kq.Form(torch.zeros(shape), torch.randn(shape))
    batch = torch.zeros(shape[:-2], dtype=torch.float64)
    for number in (form.symmetry, form.norm2, form.trace(), form.effective_rank(), form.stable_rank()):
        assert torch.equal(number, batch)
    assert torch.equal(form.column_directionality(), batch)
    assert torch.equal(form.positive_share, batch)
    positive, negative, zero = form.signature()
    assert not positive.any()
    assert not negative.any()
    assert bool((zero == 7).all())
    assert not form.symmetric_eigenvalues().any()
    covariance, mean = torch.eye(7), torch.ones(7)
    assert all(not share.any() for share in form.shares(covariance, mean))


def test_columns_that_stand_out_make_directionality_negative():
    matrix = torch.ones(30, 30, dtype=torch.float64)
    matrix[:, 3] = 50
    assert float(dense_form(matrix).column_directionality()) == -1
    assert float(dense_form(matrix.mT).column_directionality()) == 1
    assert float(dense_form(matrix).column_directionality(kind="norms")) == -1
    form = kq.Form(*torch.randn(2, 3, 60, dtype=torch.float64))
    assert torch.equal(form.column_directionality(), form.column_directionality(gamma=2.0))


def test_a_weight_changed_in_place_is_measured_again():
    query, key = torch.randn(2, 3, 20)
    form = kq.Form(query, key)
    before = form.norm2
    query.mul_(2)
    torch.testing.assert_close(form.norm2, 4 * before)


def test_a_returned_spectrum_may_be_changed():
    form = kq.Form(*torch.randn(2, 3, 20))
    before = form.symmetric_eigenvalues().clone()
    form.symmetric_eigenvalues().zero_(), form.gram().zero_()
    assert torch.equal(form.symmetric_eigenvalues(), before)
    assert form.gram().any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda form: pickle.loads(pickle.dumps(form))])
def test_a_copy_does_not_keep_old_numbers(copied):
    query, key = torch.randn(2, 3, 20)
    query.mul_(1), key.mul_(1)
    form = kq.Form(query, key)
    before = form.norm2
    other = copied(form)
    other.query.mul_(3)
    torch.testing.assert_close(other.norm2, 9 * before)


def test_numbers_on_data_are_not_rounded_to_the_dtype_of_the_factors():
    query, key = (torch.randn(2, 4, 20).to(torch.bfloat16)).unbind()
    covariance = torch.cov(torch.randn(20, 60, dtype=torch.float64))
    short, long = kq.Form(query, key).on(covariance), kq.Form(query.double(), key.double()).on(covariance)
    for name in ("trace", "row_norms", "column_directionality", "symmetric_eigenvalues"):
        torch.testing.assert_close(getattr(short, name)(), getattr(long, name)(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(short.svd().values, short.singular_values())
    torch.testing.assert_close(short.eigh().values, short.symmetric_eigenvalues())


def test_works_under_inference_mode():
    query, key = torch.randn(2, 3, 20)
    expected = kq.Form(query, key).symmetry
    with torch.inference_mode():
        assert torch.equal(kq.Form(query.clone(), key.clone()).symmetry, expected)
