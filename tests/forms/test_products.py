"""Products by NumPy's BLAS, and the Gram matrix that a form keeps, against dense float64 algebra."""

import pytest
import torch

import keyquery as kq
from keyquery.forms.kernels.blas import square_sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batches", [((), ()), ((2, 3), (2, 3)), ((1, 3), (2, 1)), ((), (3,))])
@pytest.mark.parametrize("parts", [1, 2])
def test_lengths_of_columns_are_those_of_the_product(dtype, batches, parts):
    first, second = torch.randn(*batches[0], 4, 5, dtype=dtype), torch.randn(*batches[1], 5, 7, dtype=dtype)
    blocks = (first.double() @ second.double()).split(4 // parts, dim=-2)
    expected = torch.stack([torch.linalg.vector_norm(block, dim=-2) ** 2 for block in blocks], dim=-2)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(square_sums(first, second, parts), expected, rtol=exact, atol=exact)


def test_views_of_larger_matrices_are_summed_as_they_are():
    whole = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    first, second = whole[..., 2:, 1:4].mT, whole[..., 2:, :]
    expected = (first @ second).square().sum(-2, keepdim=True)
    torch.testing.assert_close(square_sums(first, second), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_gram_norms_and_parts_of_grouped_queries_are_the_dense_ones(dtype, size):
    query, key = (size * torch.randn(2, 3, 4, 20)).to(dtype), (torch.randn(2, 1, 4, 20) / size).to(dtype)
    form = kq.Form(query, key)
    rows = torch.cat((query.double(), key.double().expand(2, 3, -1, -1)), dim=-2)
    lengths = torch.linalg.vector_norm(rows, dim=-1)
    scale = lengths.unsqueeze(-1) * lengths.unsqueeze(-2)
    torch.testing.assert_close(form.gram() / scale, rows @ rows.mT / scale, rtol=0, atol=1e-14)
    dense = query.double().mT @ key.double()
    for name, dim in (("row_norms", -1), ("column_norms", -2)):
        expected = torch.linalg.vector_norm(dense, dim=dim)
        torch.testing.assert_close(getattr(form, name)(), expected, rtol=1e-10, atol=0)
    for sign, energy in zip((1, -1), form.core().energies, strict=True):
        expected = ((dense + sign * dense.mT) / 2).square().sum((-2, -1))
        torch.testing.assert_close(energy, expected, rtol=1e-10, atol=0)


def test_a_gram_matrix_may_be_changed_without_the_form():
    form = kq.Form(torch.randn(2, 9), torch.randn(2, 9))
    form.gram().zero_()
    assert form.gram().any()
