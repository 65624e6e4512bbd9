"""Forms whose geometry is known in closed form."""

import copy
import pickle

import pytest
import torch

import keyquery as kq
from keyquery.testing import check_form


@pytest.mark.parametrize(("rank", "dim"), [(2, 9), (5, 9), (12, 9), (64, 96)])
def test_tied_factors_are_symmetric_and_psd(rank, dim):
    query = torch.randn(rank, dim, dtype=torch.float64)
    form = kq.Form(query, query.clone())
    check_form(form)
    assert float(form.symmetry) == 1
    assert tuple(map(int, form.signature())) == (min(rank, dim), 0, dim - min(rank, dim))
    assert not form.skew.dense().any()
    assert form.nearest("psd").rank == min(rank, dim)


@pytest.mark.parametrize("shape", [(2, 7), (9, 7), (3, 2, 7)])
def test_a_zero_form_has_no_nan(shape):
    form = kq.Form(torch.zeros(shape), torch.randn(shape))
    check_form(form)  # which asks for zeros
    assert torch.equal(form.column_directionality(), torch.zeros(shape[:-2], dtype=torch.float64))
    assert all(not share.any() for share in form.shares(torch.eye(7), torch.ones(7)))


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
