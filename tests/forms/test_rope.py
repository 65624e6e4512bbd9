"""Rotary positions, in a sequence and on a grid: M(Δ) against rotated queries and keys, one position at a time."""

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from keyquery.forms.rope import AxialRope, Layout, energies


def rotate_by_hand(vector, position, dims, base, interleaved, factor):
    """Each pair as a complex number, turned by position·base^(−2i/dims)."""
    out = list(vector)
    for i in range(dims // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2)
        turned = complex(vector[a], vector[b]) * cmath.exp(1j * position * base ** (-2 * i / dims)) * factor
        out[a], out[b] = turned.real, turned.imag
    return out


@given(
    dims=st.sampled_from([2, 4, 6]),
    interleaved=st.booleans(),
    factor=st.sampled_from([1.0, 1.3]),
    base=st.sampled_from([10000.0, 50.0]),
    positions=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_scores_at_an_offset_are_those_of_the_rotated_model(dims, interleaved, factor, base, positions):
    query, key = torch.randn(2, 6, 9, dtype=torch.float64)
    x, y = torch.randn(2, 9, dtype=torch.float64)
    at_query, at_key = positions
    q = rotate_by_hand((query @ x).tolist(), at_query, dims, base, interleaved, factor)
    k = rotate_by_hand((key @ y).tolist(), at_key, dims, base, interleaved, factor)
    rope = kq.Rope(dims, base=base, interleaved=interleaved, factor=factor)
    score = float(kq.Form(query, key).at(at_key - at_query, rope).scores(x, y))
    assert score == pytest.approx(math.fsum(a * b for a, b in zip(q, k, strict=True)), rel=1e-9, abs=1e-9)


ROPES = {
    "half": kq.Rope(4, base=50.0),
    "interleaved": kq.Rope(4, base=50.0, interleaved=True),
    "partial, with a factor": kq.Rope(2, base=50.0, factor=1.3),
}


@pytest.mark.parametrize("rope", ROPES)
@given(offset=st.integers(-20, 20), seed=st.integers(0, 100))
def test_energies_at_an_offset_are_those_of_the_form_there(rope, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    form = kq.Form(*torch.randn(2, 2, 4, 20, dtype=torch.float64, generator=generator))
    at = energies(form.gram(), ROPES[rope], torch.tensor([float(offset)]))
    there, back = form.at(offset, ROPES[rope]), form.at(-offset, ROPES[rope])
    torch.testing.assert_close(at.there[0], there.norm2)
    torch.testing.assert_close(at.contents_symmetry()[0], there.symmetry)
    plus, minus = (there + back.mT) / 2, (there - back.mT) / 2
    expected = (plus.norm2 - minus.norm2) / (plus.norm2 + minus.norm2)
    torch.testing.assert_close(at.exchange_symmetry()[0], expected)


# On a grid: scores depend on rows and columns alone, in whatever order tokens stand.


def axial(layout, pairs=4, **unplaced):
    frequencies = torch.linspace(1, 0.1, pairs, dtype=torch.float64)
    return AxialRope(
        kq.Rope(2 * pairs, frequencies=frequencies), torch.tensor([1, 2] * (pairs // 2)), layout, **unplaced
    )


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(start=3), Layout(merge=2), Layout(merge=2, window=2), Layout(merge=2, window=1)]
)
def test_every_token_of_a_grid_stands_once(layout):
    places = layout.coordinates([(2, 4, 6)]) - torch.tensor([layout.start] * 3)
    expected = {(t, r, c) for t in range(2) for r in range(4) for c in range(6)}
    assert {tuple(map(int, place)) for place in places} == expected
    assert len(places) == len(expected)


def test_windows_of_blocks_stand_together():
    order = Layout(merge=2, window=2).coordinates([(1, 4, 6)])[:, 1:]
    first, last = order[:16], order[16:]  # windows of 4 × 4 and of 4 × 2 tokens
    assert int(first[:, 1].max()) == 3
    assert int(last[:, 1].min()) == 4
    assert order[:4].int().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_scores_are_functions_of_both_offsets():
    """Brute force: the same two vectors at all pairs of places score alike where rows and columns differ alike."""
    layout = Layout(merge=2)
    rope, places = axial(layout).on([(1, 4, 4)]), layout.coordinates([(1, 4, 4)]).int().tolist()
    query, key = torch.randn(2, 8, dtype=torch.float64)
    at = torch.arange(16)
    scores = rope.rotate(query.expand(16, 8), at) @ rope.rotate(key.expand(16, 8), at).mT
    seen = {}
    for i, (_, row, column) in enumerate(places):
        for j, (_, other, beside) in enumerate(places):
            own = seen.setdefault((other - row, beside - column), scores[i, j])
            assert torch.isclose(own, scores[i, j])
    assert len({round(float(value), 9) for value in seen.values()}) > 40  # 49 offsets


def test_one_axis_is_plain_rope():
    plain = kq.Rope(8, frequencies=torch.linspace(1, 0.1, 4))
    rope = AxialRope(plain, torch.full((4,), 2)).on([(1, 1, 7)])
    x, at = torch.randn(7, 8, dtype=torch.float64), torch.arange(7)
    torch.testing.assert_close(rope.rotate(x, at), plain.rotate(x, at))
    torch.testing.assert_close(rope.back(rope.rotate(x, at), at), x)


def test_tokens_without_a_place_keep_their_angles():
    learned = torch.randn(1, 4)
    rope = axial(Layout(), before=learned, after=torch.zeros(2, 4)).on([(1, 2, 2)])
    angles = rope.angles(torch.arange(7))
    torch.testing.assert_close(angles[0], learned[0].double())
    assert not angles[5:].any()


def test_centred_coordinates_are_those_of_patches():
    rows = Layout(centred=True).coordinates([(1, 4, 2)])[::2, 1]
    torch.testing.assert_close(rows, 2 * math.pi * torch.tensor([-0.75, -0.25, 0.25, 0.75], dtype=torch.float64))


def test_grids_are_those_of_the_inputs():
    assert Layout(patch=4).sizes({"pixel_values": torch.zeros(2, 3, 8, 12)}) == [(1, 2, 3)]
    assert Layout(patch=4).sizes({"image_grid_thw": torch.tensor([[1, 4, 6], [2, 2, 2]])}) == [(1, 4, 6), (2, 2, 2)]
    assert Layout(patch=4).sizes({"input_ids": torch.zeros(1, 3)}) is None
    assert Layout(cut=3).sizes({}) == [(1, 3, 3)]
    with pytest.raises(ValueError, match="is not made of blocks of 2 × 2"):
        Layout(merge=2).coordinates([(1, 3, 4)])
