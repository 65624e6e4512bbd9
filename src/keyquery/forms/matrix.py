"""A form as the matrix M that it stands for: products, rows, columns and entries, without materialising M."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from keyquery.forms.factors import Factors
from keyquery.support.checks import check_batches, check_float, check_range

X = TypeVar("X", bound="Matrix")


class Matrix(Factors):
    """M = QᵀK (..., d, e) with the operators of a matrix; e = d unless queries and keys live in different spaces."""

    @property
    def shape(self) -> torch.Size:
        """(*batch, d, e), the shape of `dense()`."""
        return torch.Size((*self.batch, self.dim, self.key_dim))

    @property
    def ndim(self) -> int:
        """The number of dimensions of M, batch included."""
        return len(self.shape)

    @property
    def T(self: X) -> X:
        """The transpose Mᵀ of each form of the batch, as `mT`."""
        return self.mT

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`dense()` as a numpy array, for `np.asarray(form)`; half precision that numpy lacks becomes float32."""
        if copy is False:
            raise ValueError("a form has no array of its own to share: np.asarray(form) makes one")
        dense = self.dense().detach().cpu()
        array: np.ndarray = (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __matmul__(self: X, other: Any) -> Any:
        """M·v, a tensor; M·B for a matrix B or a form, a form whose rank is the smallest of the widths involved."""
        if isinstance(other, Matrix):
            return _chained(self, other)
        if not isinstance(other, (Tensor, np.ndarray)):
            return NotImplemented
        other = torch.as_tensor(other)
        check_float("the right factor", other, "... e f" if other.ndim > 1 else "e", e=self.key_dim)
        query, key, right = _in_one_dtype(self.query, self.key, other)
        if right.ndim == 1:
            return ((key @ right).unsqueeze(-2) @ query).squeeze(-2)
        check_batches(form=self.batch, right=right.shape[:-2])
        if self.rank <= self.key_dim:
            return self._plain(query, key @ right)
        return self._plain(key.mT @ query, right)  # M itself, where that is smaller than its factors

    def __rmatmul__(self: X, other: Any) -> Any:
        """vᵀM, a tensor; B·M for a matrix B, a form."""
        if not isinstance(other, (Tensor, np.ndarray)):
            return NotImplemented
        other = torch.as_tensor(other)
        check_float("the left factor", other, "... f d" if other.ndim > 1 else "d", d=self.dim)
        return self.mT @ other if other.ndim == 1 else (self.mT @ other.mT).mT

    def __getitem__(self: X, index: Any) -> Any:
        """`dense()[index]`, from the factors: a form of the batch, or rows, columns and entries of M.

        Batch dimensions come first. A number for a row or a column gives a tensor; slices and lists give a form, each
        dimension on its own.
        """
        batch, row, column = self._located(index)
        form = self._of_batch(batch)
        if isinstance(row, slice) and isinstance(column, slice) and row == column == slice(None):
            return form
        query, key = (form.query, form.key) if form._covariance is None else form.wide()
        one_row, one_column = isinstance(row, int), isinstance(column, int)
        query, key = query[..., [row] if one_row else row], key[..., [column] if one_column else column]
        if not one_row and not one_column:
            return self._plain(query.to(form.dtype), key.to(form.dtype))
        entries = (query.mT @ key).to(form.dtype)
        entries = entries.squeeze(-2) if one_row else entries
        return entries.squeeze(-1) if one_column else entries

    def _located(self, index: Any) -> tuple[tuple[Any, ...], Any, Any]:
        """The entries of an index that select from the batch, the rows and the columns."""
        entries = index if isinstance(index, tuple) else (index,)
        refusal = f"{index!r} does not fit the shape {tuple(self.shape)} of this form"
        dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
        missing = self.ndim - sum(map(_axes, entries))
        if len(dots) > 1 or missing < 0:
            raise IndexError(refusal)
        gap = dots[0] if dots else len(entries)
        filled: list[Any] = [*entries[:gap], *[slice(None)] * missing, *entries[gap + 1 :]]
        if len(filled) < 2:  # a mask over rows and columns at once
            raise IndexError(f"{refusal}: rows and columns are indexed each on its own")
        batch, row, column = filled[:-2], _number(filled[-2]), _number(filled[-1])
        row, column = (_forwards(indices, size) for indices, size in ((row, self.dim), (column, self.key_dim)))
        try:
            if sum(map(_axes, batch)) != len(self.batch):
                raise IndexError("batch, rows and columns are indexed each on its own, a new axis before them")
            torch.zeros(()).expand(self.batch)[tuple(batch)]
            for size, entry in ((self.dim, row), (self.key_dim, column)):
                chosen = torch.zeros(()).expand(size)[entry]
                if chosen.ndim > 1 or not chosen.numel():
                    raise IndexError("rows and columns are numbers, slices or lists that select something")
        except (IndexError, TypeError) as error:
            raise IndexError(f"{refusal}: {error}") from None
        return tuple(batch), row, column

    def _of_batch(self: X, batch: tuple[Any, ...]) -> X:
        """Some forms of the batch; what factors share stays shared where only numbers and slices are given."""
        if all(isinstance(entry, slice) and entry == slice(None) for entry in batch):
            return self
        if not all(isinstance(entry, (int, slice)) for entry in batch):
            expanded = (t.expand(*self.batch, *t.shape[-2:]) for t in (self._query, self._key))
            return self._with(*(t[(*batch, slice(None), slice(None))] for t in expanded))

        def part(factor: Tensor) -> Tensor:
            entries: list[int | slice] = []
            sizes = zip(reversed(batch), reversed(self.batch), factor.shape[-3::-1], strict=False)
            for entry, size, stored in sizes:
                whole = 0 if isinstance(entry, int) else slice(None)
                entries.insert(0, whole if stored < size else entry)
            return factor[tuple(entries)]

        return self._with(part(self._query), part(self._key))

    def _plain(self: X, query: Tensor, key: Tensor) -> X:
        """A form of new factors, not on data."""
        check_range("the product", query, key)
        return self._trusted(query, key)


def _chained(left: X, right: Matrix) -> X:
    """M₁M₂ = Q₁ᵀ(K₁Q₂ᵀ)K₂: the r₁×r₂ product in the middle joins the factor of smaller rank."""
    if left.key_dim != right.dim:
        raise ValueError(f"forms of {_size(left)} and {_size(right)} cannot be multiplied")
    check_batches(left=left.batch, right=right.batch)
    query, key, other_query, other_key = _in_one_dtype(left.query, left.key, right.query, right.key)
    if left.key_dim < min(left.rank, right.rank):  # the space between the two is the narrowest
        return left._plain(key.mT @ query, other_query.mT @ other_key)
    middle = key @ other_query.mT
    if left.rank <= right.rank:
        return left._plain(query, middle @ other_key)
    return left._plain(middle.mT @ query, other_key)


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def _size(form: Matrix) -> str:
    return " × ".join(map(str, form.shape[-2:]))


def _number(entry: Any) -> Any:
    """A row or column number as an int; anything else as it is."""
    single = isinstance(entry, Integral) or (isinstance(entry, (Tensor, np.ndarray)) and entry.ndim == 0)
    return int(entry) if single and not isinstance(entry, bool) else entry


def _forwards(entry: Any, size: int) -> Any:
    """A slice that runs backwards, which torch has not, as a list."""
    backwards = isinstance(entry, slice) and entry.step is not None and entry.step < 0
    return list(range(size))[entry] if backwards else entry


def _axes(entry: Any) -> int:
    """How many dimensions an entry of an index stands for: none for a new axis, several for a mask."""
    if entry is None or entry is Ellipsis:
        return 0
    array = np.asarray(entry) if isinstance(entry, Sequence) else entry
    return array.ndim if getattr(array, "dtype", None) in (torch.bool, np.dtype(bool)) and array.ndim else 1
