"""check_form itself: it must fail where a form lies."""

import pytest
import torch

import keyquery as kq
from keyquery.forms.core import Core
from keyquery.testing import check_form


class Wrong(kq.Form):
    """A form whose core is off in one small place."""

    def core(self):
        right = super().core()
        return Core(right.query, right.half + 1e-7, right.lift, right.unit)


def test_a_slightly_wrong_core_is_found():
    query, key = torch.randn(2, 3, 9, dtype=torch.float64)
    check_form(kq.Form(query, key))
    with pytest.raises(AssertionError, match="norm2: off by"):
        check_form(Wrong(query, key))


@pytest.mark.parametrize(
    "name",
    ["symmetric_eigenvalues", "skew_values", "singular_values", "row_norms", "effective_rank", "svd", "signature"],
)
def test_each_wrong_number_is_found(name, monkeypatch):
    form = kq.Form(*torch.randn(2, 3, 9, dtype=torch.float64))
    right = getattr(form, name)()
    wrong = type(right)(*(t + 1 for t in right)) if isinstance(right, tuple) else right * (1 + 1e-6)
    monkeypatch.setattr(kq.Form, name, lambda self: wrong)
    with pytest.raises(AssertionError, match=name):
        check_form(form)
