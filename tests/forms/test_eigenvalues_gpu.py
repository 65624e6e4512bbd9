"""Eigenvalues of symmetric and skew matrices by the kernel for a GPU: those of LAPACK."""

import pytest
import torch

pytest.importorskip("triton")
from keyquery.forms.core import eigenvalues as of_any_device
from keyquery.forms.eigenvalues_gpu import eigenvalues


def test_symmetric_and_skew_matrices_in_one_batch():
    square = torch.randn(3, 3, dtype=torch.float64)
    symmetric, skew = square + square.mT, square - square.mT
    values = eigenvalues(torch.stack((symmetric, skew)), torch.tensor([1.0, -1.0]).double())
    torch.testing.assert_close(values[0], torch.linalg.eigvalsh(symmetric), rtol=0, atol=1e-13)
    expected = torch.linalg.svdvals(skew)
    torch.testing.assert_close(values[1].abs().sort(descending=True).values, expected, rtol=0, atol=1e-13)


def test_a_matrix_of_blocks_whose_pivots_vanish():
    block = torch.zeros(1, 4, 4, dtype=torch.float64)
    block[0, 0, 0], block[0, 2, 3], block[0, 3, 2] = 3.0, 2.0, 2.0
    torch.testing.assert_close(eigenvalues(block), torch.tensor([[-2.0, 0.0, 2.0, 3.0]]).double(), rtol=0, atol=1e-15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [32, 100, 128, 256, 512])
def test_on_a_gpu_as_cusolver(size):
    square = torch.randn(16, size, size, dtype=torch.float64, device="cuda")
    symmetric = square + square.mT
    expected = torch.linalg.eigvalsh(symmetric)
    torch.testing.assert_close(of_any_device(symmetric), expected, rtol=0, atol=1e-13 * float(expected.abs().max()))
