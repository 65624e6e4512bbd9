"""Changes of a part against the dial, against resampling from itself, and against sums that they must keep."""

import pytest
import torch
from keyquery_studies.circuit.prefix import Prefix
from keyquery_studies.circuit.score_changes import Change, changeable, shuffled

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.intervene.dial.means import Means


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return kq.Decoder(16, depth=2, heads=2, rope=kq.Rope(8)).eval()


@pytest.fixture(scope="module")
def means(model):
    return Means(model, [{"x": torch.randn(40, 6, 16, generator=torch.Generator().manual_seed(1))}], "position")


def tokens(seed):
    return torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_left_out_is_what_the_dial_leaves(model, means, part):
    x = tokens(2)
    with torch.no_grad():
        with kq.dial(model, **{part: 0}, heads="1.1", data=means):
            expected = model(x)
        with changeable(model, {"position": means}) as changes:
            changes.set(Change(1, 1, part))
            assert torch.allclose(model(x), expected, atol=1e-5)
            changes.set(None)
            assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_resampled_from_the_same_sequence_changes_nothing(model, means, part):
    x = tokens(3)
    with torch.no_grad():
        before = model(x)
        with changeable(model, {"position": means}) as changes:
            with changes.recording():
                model(x)
            changes.set(Change(0, 0, part, "resample"))
            assert torch.allclose(model(x), before, atol=1e-6)
            with changes.recording():
                model(tokens(4))
            changes.set(Change(0, 0, part, "resample"))
            moved = (model(x) - before).abs().max()
    # Position has no content: another sequence has the same.
    assert moved < 1e-5 if part == "position" else moved > 1e-3


def test_a_random_part_keeps_the_values_of_every_row_within_what_a_query_sees():
    part = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    other = shuffled(part)
    for row in range(5):
        assert torch.equal(other[:, row, : row + 1].sort(-1).values, part[:, row, : row + 1].sort(-1).values)
    assert not torch.equal(other, part)


def test_the_model_is_restored(model, means):
    x = tokens(5)
    with torch.no_grad():
        before = model(x)
        with changeable(model, {"position": means}) as changes:
            changes.set(Change(0, 1, "skew", "random"))
            assert not torch.allclose(model(x), before, atol=1e-4)
        assert torch.equal(model(x), before)


def test_blocks_below_a_change_need_not_be_run_again(model, means):
    x = tokens(6)
    prefix = Prefix(model)
    with torch.no_grad(), changeable(model, {"position": means}) as changes:
        with prefix.kept({1}):
            model(x)
        changes.set(Change(1, 0, "symmetric"))
        whole = model(x)
        with prefix.skipped(1):
            assert torch.equal(model(torch.zeros_like(x)), whole)
        assert torch.equal(model(x), whole)
