"""The checks that tests run under: they see wrong shapes, also after right ones, and leave out nothing but repeats."""

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from jaxtyping._decorator import jaxtyped  # not the one that the tests have put in its place

from tests.shapes import checked, once_for_each_shape


def product(x: Float[torch.Tensor, "n d"], y: Float[torch.Tensor, "d m"], wrong: bool) -> Float[torch.Tensor, "n m"]:
    return (x @ y).mT if wrong else x @ y


def test_every_combination_of_shapes_is_checked_once():
    calls = []

    def watched(*args):
        calls.append(len(args))
        return jaxtyped(product, typechecker=checked)(*args)

    call = once_for_each_shape(product, watched)
    for _ in range(3):
        assert call(torch.ones(2, 3), torch.ones(3, 4), False).shape == (2, 4)
    assert len(calls) == 1
    assert call(torch.ones(5, 3), torch.ones(3, 4), False).shape == (5, 4)
    assert len(calls) == 2
    for _ in range(2):  # an error is none of those that are left out
        with pytest.raises(TypeCheckError, match="return value"):
            call(torch.ones(2, 3), torch.ones(3, 4), True)
        with pytest.raises(TypeCheckError, match="parameters"):
            call(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 4), False)
        with pytest.raises(TypeCheckError, match="parameters"):
            call(torch.ones(2, 4), torch.ones(3, 4), False)
