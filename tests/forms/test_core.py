"""The Gram matrix that a form keeps, and what is computed from it, against dense float64 algebra."""

import pytest
import torch

import keyquery as kq


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
