"""Series as users have them: the same whatever their container, and what is said of bad ones."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from keyquery.learn.data.series import Series
from keyquery.learn.inputs.sequences import axes_of, columns_of, padded, restored_statistics, series_of, statistics

NAN = float("nan")
RNG = np.random.default_rng(0)
LONG, SHORT = RNG.normal(size=(5, 2)), RNG.normal(size=(3, 2))
GAPS = np.where(RNG.random((5, 2)) < 0.3, NAN, LONG)
MASKED = np.ma.masked_array(np.where(np.isnan(GAPS), 1e6, GAPS), np.isnan(GAPS))
RAGGED = np.empty(2, dtype=object)
RAGGED[:] = [LONG, SHORT]


@pytest.mark.parametrize(
    ("X", "axis", "expected"),
    [
        ([LONG.tolist(), SHORT.tolist()], 1, [LONG, SHORT]),
        (Series((LONG, SHORT), None, ()), 2, [LONG, SHORT]),  # whose axis is known
        (RAGGED, 1, [LONG, SHORT]),
        ([torch.from_numpy(LONG), pd.DataFrame(SHORT)], 1, [LONG, SHORT]),
        (np.stack((LONG, GAPS)), 1, [LONG, GAPS]),
        (torch.from_numpy(np.stack((LONG, GAPS))), 1, [LONG, GAPS]),
        (np.stack((LONG.T, GAPS.T)), 2, [LONG, GAPS]),
        ([LONG.T, SHORT.T], 2, [LONG, SHORT]),
        (LONG, 2, [row[:, None] for row in LONG]),  # of one dim
        (LONG.tolist(), 1, [row[:, None] for row in LONG]),
        ([torch.tensor([1.5, 2.0]).bfloat16()], 1, [np.array([[1.5], [2.0]])]),
        ([MASKED], 1, [GAPS]),
        (MASKED[None], 1, [GAPS]),
        ([pd.DataFrame(GAPS).astype("Float64")], 1, [GAPS]),
        ([[None, 1, pd.NA]], 1, [np.array([[NAN], [1.0], [NAN]])]),
    ],
    ids=str,
)
def test_containers_of_the_same_series(X, axis, expected):
    series = series_of(X, axis)
    assert len(series) == len(expected)
    for values, truth in zip(series, expected, strict=True):
        np.testing.assert_array_equal(values, truth, strict=True)


def test_frames_of_polars_are_series():
    polars = pytest.importorskip("polars")
    lists = polars.Series([row.tolist() for row in LONG])
    for same in (polars.DataFrame(LONG), lists, [polars.DataFrame({"x": row}) for row in LONG]):
        assert np.array_equal(np.stack(series_of(same))[..., 0], LONG)
    with pytest.raises(TypeError, match=r"lazy frame, whose rows are not known yet: pass X.collect\(\)"):
        series_of(polars.DataFrame(LONG).lazy())


@pytest.mark.parametrize(
    ("X", "kind", "said"),
    [
        (LONG[0], ValueError, r"or a list of series, got shape \(2,\). Reshape your data"),
        (np.ones((2, 3, 4, 5)), ValueError, r"or a list of series, got shape \(2, 3, 4, 5\)"),
        (Path("series.ts"), ValueError, "or a list of series, got .*Path"),
        (np.ones((4, 0)), ValueError, r"X has no values: 0 feature\(s\) \(shape=\(4, 0\)\) while a minimum of 1"),
        ([], ValueError, r"X holds no series: found 0 sample\(s\)"),
        ([1.0, 2.0], ValueError, r"series 0 of X .* got shape \(\): a single series must be passed as \[X\]"),
        ([np.ones((3, 2, 1)), SHORT], ValueError, r"series 0 of X must be \(length, dims\) or \(length,\), got shape"),
        ([[1.0, 2.0], []], ValueError, r"series 1 of X has no values: .* in shape \(0, 1\)"),
        ([[1.0, 2.0], [NAN, NAN]], ValueError, "series 1 of X has no values: all are NaN"),
        ([[1.0, 2.0], [np.inf, 0.0]], ValueError, "series 1 of X holds infinity"),
        ([LONG, np.ones((3, 1))], ValueError, "the dims of the first, 2; series 1 has 1$"),
        ([np.ones((2, 9)), np.ones((2, 7))], ValueError, r"series 1 has 7; if .* \(dims, length\), .* set axis=2"),
        (np.full((2, 3), "NaT", "M8[s]"), ValueError, r"nor dates and times: .* got datetime64\[s\]"),
        (LONG + 1j, ValueError, "Complex data not supported"),
        ([["a", "b"]], ValueError, "could not convert string to float"),
        (torch.eye(3).to_sparse(), TypeError, r"X is a sparse matrix; dense data is required: use X.to_dense\(\)"),
    ],
    ids=str,
)
def test_what_is_no_series_is_told(X, kind, said):
    with pytest.raises(kind, match=said):
        series_of(X)


def test_names_of_columns_and_depth():
    frames = [pd.DataFrame(part, columns=["heat", "wind"]) for part in (LONG, SHORT)]
    assert columns_of(frames) == ["heat", "wind"]
    assert columns_of([]) is columns_of([LONG]) is columns_of(LONG) is None
    with pytest.raises(ValueError, match=r"columns of the first, \['heat', 'wind'\]; series 1 has \['wind', 'heat'\]"):
        columns_of([frames[0], frames[1][["wind", "heat"]]])
    assert [axes_of(x) for x in (1.0, LONG, [LONG], [[1.0]], [])] == [0, 2, 3, 2, 0]


def test_values_are_standardised_by_what_is_there():
    series = [np.array([[1.0, NAN], [NAN, NAN], [3.0, 7.0]]), np.array([[5.0, 7.0]])]
    mean, scale = statistics(series)
    assert mean.tolist() == [3.0, 7.0]
    assert np.allclose(scale, [np.sqrt(8 / 3), 1.0])  # what does not vary is left as it is
    values, real = padded(series, mean, scale)
    assert real.tolist() == [[True, False, True], [True, False, False]]
    gaps = torch.tensor([[False, True], [True, True], [False, False]])
    assert (values[0][gaps] == 0).all()
    assert torch.allclose(values[0, :, 0], torch.tensor([-2.0, 0.0, 0.0]) / np.sqrt(8 / 3))
    with pytest.raises(ValueError, match="X holds values too large to be standardised"):
        statistics([np.array([[1e200], [-1e200]])])


@pytest.mark.parametrize(
    ("mean", "scale", "said"), [(NAN, 1.0, "NaN or infinity"), (0.0, 0.0, r"\(dims,\), and scale")]
)
def test_statistics_that_no_fit_wrote_are_refused(mean, scale, said):
    with pytest.raises(ValueError, match=said):
        restored_statistics({"mean": torch.tensor([mean]), "scale": torch.tensor([scale])}, "dims")


def test_batches_are_of_series_of_nearly_one_length():
    lengths = [3, 40, 4, 33, 2, 64, 3, 400]
    data = padded([np.ones((length, 1)) for length in lengths], np.zeros(1), np.ones(1))
    groups = [group.tolist() for group in data.alike(3)]
    assert sorted(index for group in groups for index in group) == list(range(8))
    for group in groups:
        assert len(group) <= 3
        assert max(lengths[index] for index in group) <= 2 * min(lengths[index] for index in group)
    assert data.take(torch.tensor([0, 2])).values.shape == (2, 4, 1)
