"""The repr of a Form and of its results: one line in a terminal, a small table in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from keyquery.forms.form import Form


PRINTED = 6  # largest tensor that is printed in full


def brief(result: Any) -> str:
    """The repr of a named tuple or dataclass: small tensors in full, others by shape."""
    names = result._fields if isinstance(result, tuple) else result.__dataclass_fields__  # type: ignore[attr-defined]
    fields = ", ".join(f"{name}={_short(getattr(result, name))}" for name in names)
    return f"{type(result).__name__}({fields})"


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() > PRINTED or value.is_meta or value.ndim > 1:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    numbers = [f"{number:.4g}" for number in value.detach().flatten().tolist()]
    return f"[{', '.join(numbers)}]" if value.ndim else numbers[0]


def line(form: Form) -> str:
    """Form(batch=(12,), r=64, d=768, float32, symmetry -0.02 … 0.03, effective rank 59.1 … 60.2)."""
    shape = [f"{name}={value}" for name, value in _shape(form).items()]
    return f"Form({', '.join(shape)}, {_dtype(form)}{''.join(f', {k} {v}' for k, v in _numbers(form).items())})"


def table(form: Form) -> str:
    """The same as an HTML table."""
    facts = {**_shape(form), "dtype": _dtype(form), **_numbers(form)}
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items())
    return f"<table><caption>Form M = QᵀK</caption>{rows}</table>"


def _shape(form: Form) -> dict[str, object]:
    batch = {"batch": tuple(form.batch)} if form.batch else {}
    return {**batch, "r": form.rank, "d": form.dim if form.dim == form.key_dim else f"{form.dim}×{form.key_dim}"}


def _dtype(form: Form) -> str:
    return str(form.dtype).removeprefix("torch.")


@torch.no_grad()
def _numbers(form: Form) -> dict[str, str]:
    if form.device.type == "meta":
        return {"on": "meta"}
    if not all(factor.isfinite().all() for factor in (form.query, form.key)):
        return {"holding": "NaN or infinite values"}
    symmetry = {"symmetry": _range(form.symmetry, "z.2f")} if form.dim == form.key_dim else {}
    return {**symmetry, "effective rank": _range(form.effective_rank(), ".1f")}


def _range(values: Tensor, spec: str) -> str:
    low, high = format(float(values.min()), spec), format(float(values.max()), spec)
    return low if low == high else f"{low} … {high}"
