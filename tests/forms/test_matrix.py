"""A Form used as the matrix M: what users of a factored matrix expect, against dense algebra.

The expectations are those of the tests of TransformerLens's FactoredMatrix (constructor, products with vectors,
matrices and factored matrices, multiples, indexing, SVD, norm, eigenvalues); written anew for Form.
"""

import numpy as np
import pytest
import torch

import keyquery as kq

BATCHES = [(), (2,), (2, 3)]


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rectangular(batch=(), rank=3, rows=5, columns=7):
    """A form M (*batch, rows, columns) and M itself, computed by numpy."""
    query, key = drawn(*batch, rank, rows), drawn(*batch, rank, columns, seed=1)
    return kq.Form(query, key), np.swapaxes(query.numpy(), -1, -2) @ key.numpy()


def same(result, expected):
    """A form or tensor equals a numpy array, in shape and values."""
    dense = result.dense() if isinstance(result, kq.Form) else result
    np.testing.assert_allclose(dense.numpy(), expected, rtol=1e-10, atol=1e-10)
    assert tuple(result.shape) == np.shape(expected)


def test_products_on_data_are_those_of_the_weighted_form():
    form = kq.Form(*drawn(2, 3, 5)).on(torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64)))
    same(form @ drawn(5), form.dense().numpy() @ drawn(5).numpy())
    same(form[1:3, 2:], form.dense().numpy()[1:3, 2:])
    same(form[4, 0], form.dense().numpy()[4, 0])


def test_a_product_takes_the_wider_dtype():
    form = kq.Form(torch.eye(2, 3), torch.eye(2, 3))
    assert (form @ torch.ones(3, dtype=torch.float64)).dtype == torch.float64
    assert (form @ kq.Form(torch.eye(2, 3).double(), torch.eye(2, 3).double())).dtype == torch.float64


def test_numpy_arrays_are_factors_and_forms_become_arrays():
    form, dense = rectangular(())
    np.testing.assert_array_equal(np.asarray(form), form.dense().numpy())
    assert np.array(form, dtype=np.float32).dtype == np.float32
    same(form @ np.eye(dense.shape[1]), dense)
    same(np.eye(dense.shape[0]) @ form, dense)
    same(form[::-1], dense[::-1])
    same(form[:, 4:1:-2], dense[:, 4:1:-2])
    with pytest.raises(ValueError, match="has no array of its own"):
        np.asarray(form, copy=False)


@pytest.mark.parametrize("rank", [2, 9])
@pytest.mark.parametrize("batch", BATCHES)
def test_products_are_those_of_the_matrix_and_of_the_smallest_rank(rank, batch):
    form, dense = rectangular(batch, rank)
    right, left = drawn(2, 1, 7, 4) if len(batch) < 2 else drawn(7, 4), drawn(6, 5)
    same(form @ drawn(7), dense @ drawn(7).numpy())
    same(drawn(5) @ form, np.einsum("d,...de->...e", drawn(5), dense))
    same(form @ right, dense @ right.numpy())
    same(left @ form, left.numpy() @ dense)
    assert (form @ right).rank == min(rank, 7)
    for other_rank in (1, 4, 8):
        other, its_dense = rectangular(batch[-1:], other_rank, rows=7, columns=4)
        same(form @ other, dense @ its_dense)
        assert (form @ other).rank == min(rank, other_rank, 7)


INDICES = [
    (0,),
    (slice(1, 4),),
    ([0, 3],),
    (torch.tensor([4, 0, 0]),),
    (slice(None), -1),
    (1, 2),
    (1, slice(2, 6)),
    (slice(None, None, 2), 3),
    (Ellipsis, 1),
    (Ellipsis, slice(1, 4), slice(2, 6)),
    (1, Ellipsis, 2),
    (np.int64(2), torch.tensor(3)),
    (torch.tensor([True, False, True, False, False]), slice(None)),
]
BATCHED = [
    (0,),
    (slice(None), slice(1, 3)),
    (1, 2, 3, 4),
    (slice(None), 1, slice(None), -1),
    (Ellipsis, 4, 6),
    (None, Ellipsis, slice(1, 4), slice(None)),
    (torch.tensor([1, 0]), Ellipsis, 1),
    (torch.tensor([[True, False, True], [False, True, False]]), 1),
    ([1, 0], slice(None), 1),
    (torch.tensor([1, 0]), torch.tensor([2, 0])),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("index", [*((1, 2, *index) for index in INDICES), *BATCHED], ids=str)
def test_an_index_is_that_of_the_dense_array(index, shared):
    query, key = drawn(2, 3, 4, 5), drawn(2, 1 if shared else 3, 4, 7, seed=1)
    same(kq.Form(query, key)[index], (query.mT @ key)[index].numpy())


def test_rows_and_columns_are_chosen_each_on_its_own():
    form, dense = rectangular()
    same(form[[0, 1], [2, 4, 6]], dense[np.ix_([0, 1], [2, 4, 6])])
    for index in INDICES:
        same(form[index], torch.from_numpy(dense)[index].numpy())


UNFIT = [5, (0, 7), (0, 0, 0), (Ellipsis, Ellipsis), (Ellipsis, 0, 0, 0), (0, None, 0), slice(3, 3), True, "a"]


@pytest.mark.parametrize("index", [*UNFIT, torch.ones(5, 7) > 0], ids=str)
def test_an_index_that_does_not_fit_is_refused(index):
    with pytest.raises(IndexError, match=r"does not fit the shape \(5, 7\) of this form"):
        rectangular()[0][index]


def test_nothing_of_the_size_of_the_matrix_is_formed(monkeypatch):
    """Only `dense` forms M: products and slices of a wide form allocate factors."""
    form = kq.Form(*torch.randn(2, 2, 3000))
    largest = []
    matmul = torch.Tensor.__matmul__

    def watched(left, right):
        out = matmul(left, right)
        largest.append(out.numel() if isinstance(out, torch.Tensor) else 0)
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    _ = form @ form, form @ torch.ones(3000), form[5], form[:10, 7:], form @ torch.ones(3000, 4), form.eigvals()
    assert 0 < max(largest) <= 2 * 3000


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rank", [3, 9])
def test_singular_vectors_are_cached_and_rebuild_the_matrix(batch, rank):
    form, dense = rectangular(batch, rank)
    u, s, v = form.U, form.S, form.V
    np.testing.assert_allclose((u * s.unsqueeze(-2)) @ v.mT, dense, atol=1e-10)
    np.testing.assert_allclose(s, np.linalg.svd(dense, compute_uv=False)[..., : s.shape[-1]], atol=1e-10)
    for vectors in (u, v):
        eye = torch.eye(s.shape[-1], dtype=torch.float64).expand(*batch, -1, -1)
        torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=0, atol=1e-10)
    assert form.U is u
    assert form.V is v
    form.query.mul_(2)
    torch.testing.assert_close(form.S, 2 * s)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rank", [2, 12])
def test_metrics_of_a_rectangular_form(batch, rank):
    form, dense = rectangular(batch, rank)
    values = np.linalg.svd(dense, compute_uv=False)
    assert (form.ndim, form.dim, form.rank, form.key_dim) == (dense.ndim, 5, rank, 7)
    same(form.T, np.swapaxes(dense, -1, -2))
    np.testing.assert_allclose(form.norm(), np.linalg.norm(dense, axis=(-2, -1)))
    np.testing.assert_allclose(form.norm2, (dense**2).sum((-2, -1)))
    np.testing.assert_allclose(form.singular_values(), values[..., : min(rank, 5)], atol=1e-10)
    np.testing.assert_allclose(form.stable_rank(), (values**2).sum(-1) / values[..., 0] ** 2)
    np.testing.assert_allclose(form.row_norms(), np.linalg.norm(dense, axis=-1))
    np.testing.assert_allclose(form.column_norms(), np.linalg.norm(dense, axis=-2))
    same(form + form, 2 * dense)
    x, y = drawn(4, 5), drawn(6, 7)
    np.testing.assert_allclose(form.scores(x, y), x.numpy() @ dense @ y.numpy().T, atol=1e-10)
    assert "d=5×7" in repr(form)


@pytest.mark.parametrize("rank", [2, 4, 6, 9])
@pytest.mark.parametrize("batch", BATCHES)
def test_eigvals_are_those_of_the_matrix(rank, batch):
    form, dense = rectangular(batch, rank, rows=6, columns=6)
    expected = np.linalg.eigvals(dense)
    order = np.argsort(-np.abs(expected), axis=-1)[..., : min(rank, 6)]
    expected = np.take_along_axis(expected, order, -1)
    values = form.eigvals()
    assert values.dtype == torch.complex128
    # Conjugate pairs have one magnitude: they are compared as sorted sets.
    for own, other in zip(values.reshape(-1, values.shape[-1]).numpy(), expected.reshape(-1, values.shape[-1]), strict=True):  # fmt: skip  # noqa: E501
        np.testing.assert_allclose(np.sort_complex(own.round(9)), np.sort_complex(other.round(9)), atol=1e-8)
    np.testing.assert_allclose(values.sum(-1).real, form.trace(), atol=1e-9)


@pytest.mark.unchecked
def test_products_that_do_not_fit_are_refused():
    form, _ = rectangular()
    for product, words in (
        (lambda: form @ torch.ones(6), "the right factor must have shape"),
        (lambda: torch.ones(6) @ form, "the left factor must have shape"),
        (lambda: form @ form, "forms of 5 × 7 and 5 × 7 cannot be multiplied"),
        (lambda: form + rectangular(rows=7)[0], "forms of width 5 × 7 and 7 cannot be added"),
        (lambda: rectangular((2,))[0] @ rectangular((3,), rows=7)[0], "leading dimensions must broadcast"),
        (lambda: form * torch.ones(7), "a tensor scales each form of the batch"),
    ):
        with pytest.raises(ValueError, match=words):
            product()
    with pytest.raises(TypeError, match="unsupported operand"):
        form @ "a"


def test_what_is_shared_stays_shared_when_forms_are_taken_out():
    query, key = drawn(3, 4, 2, 9), drawn(3, 1, 2, 9, seed=1)
    grouped = kq.Form(query, key)
    assert grouped[1:].key.shape == (2, 1, 2, 9)
    assert grouped[0].key.shape == (1, 2, 9)
    for form in (grouped, kq.Form(query, key[0, 0]), kq.Form(query[:1], drawn(3, 4, 2, 9))):
        for index in (slice(1, None), -1, slice(None, 2)):
            same(form[index], form.dense()[index].numpy())


@pytest.mark.unchecked
def test_what_needs_one_space_is_refused_for_two():
    form, _ = rectangular()
    words = "needs queries and keys of one width, got 5 and 7"
    for call in (
        lambda: form.symmetric_eigenvalues(),
        lambda: form.skew,
        lambda: form.eigvals(),
        lambda: form.on(torch.eye(5)),
        lambda: form.nearest("psd"),
        lambda: form.gram(),
        lambda: form.scores(torch.ones(5)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
