"""Which stretches mattered: exact where the truth is known, and drawn."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery import pages
from keyquery.learn.inputs.sequences import Padded
from keyquery.learn.series.importance import Importance, occlude
from tests.learn.series.test_classifier import SMALL, bumps


def linear(data):
    """Two classes whose log-odds are the sum of Σ t·x_t."""
    odds = (data.values[..., 0] * torch.arange(data.values.shape[1])).sum(1)
    return torch.stack((torch.zeros_like(odds), odds), 1).double().log_softmax(1)


def test_of_a_linear_model_it_is_what_a_window_holds():
    values, real = torch.randn(12, 1).abs(), torch.ones(12, dtype=torch.bool)
    relevance, width, chosen, probability = occlude(linear, Padded(values, real), stretch=1)
    held = values[:, 0] * torch.arange(12)
    assert width == 1
    assert chosen == 1
    assert torch.allclose(torch.tensor(relevance), held, atol=1e-4)
    assert probability == pytest.approx(float(torch.sigmoid(held.sum())))
    wide, *_ = occlude(linear, Padded(values, real), stretch=4)  # windows at 0, 2, 4, …, the last ones cut off
    windows = [held[first : first + 4].sum() for first in range(0, 12, 2)]
    expected = [np.mean([w for i, w in enumerate(windows) if 2 * i <= t < 2 * i + 4]) for t in range(12)]
    assert np.allclose(wide, expected, atol=1e-4)


def test_windows_are_left_out_a_few_at_a_time():
    values, real = torch.randn(400, 1).abs(), torch.ones(400, dtype=torch.bool)
    real[100:200] = False
    values[~real] = 0
    sizes, seen = [], []

    def watch(items, what, total):
        seen.extend([what, total])
        return items

    def counted(data):
        sizes.append(len(data.values))
        return linear(data)

    relevance, *_ = occlude(counted, Padded(values, real), 1, watch)
    assert np.allclose(relevance, values[:, 0] * torch.arange(400), rtol=1e-3, atol=1e-3)
    assert sum(sizes) == 1 + 300  # as it is, and without each token that is there
    assert seen == ["occluding windows", len(sizes) - 1]
    assert max(sizes) <= 16


def test_it_is_a_reading():
    X, y, _ = bumps(4, seed=4)
    X[1][2] = np.nan
    reading = kq.SeriesClassifier(**SMALL, epochs=1).fit(X, y).importance(X)
    assert kq.Reading.load(reading.to_json()) == reading
    assert len(reading.to_frame()) == sum(map(len, X))
    assert reading.series[1]["values"][2] == [None, None]


def drawn(values, columns=None, **facts):
    values = np.asarray(values, dtype=float)
    row = {"values": np.where(np.isnan(values), None, values), "relevance": np.linspace(-1, 2, len(values))}
    row |= {"stretch": 2, "predicted": "b", "probability": 0.93, **facts}
    return Importance(classes=["a", "b"], series=[row], columns=columns)


@pytest.mark.parametrize("dims", [1, 3])
def test_it_is_drawn(tmp_path, dims):
    values = np.random.default_rng(0).normal(size=(20, dims))
    values[3] = np.nan
    reading = drawn(values)
    above, below = reading.plot().axes
    assert above.get_title("left") == "predicted b (93%)"
    assert below.get_title("left") == "drop in its log-odds without the 2 steps around"
    assert len(above.lines) == dims
    shades = [patch for patch in above.patches if patch.get_alpha() is not None]
    assert len(shades) == 20
    assert [shade.get_alpha() for shade in (shades[0], shades[-1])] == pytest.approx([0.3, 0.6])
    assert shades[-1].get_facecolor()[:3] != shades[0].get_facecolor()[:3]
    assert pages.picture_bytes(tmp_path / "series.png", reading)[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="series must be between 0 and 0, got 1"):
        reading.plot(series=1)


def test_every_step_has_a_whole_bar_and_a_value_between_gaps_a_dot():
    above, below = drawn([[1.0], [np.nan], [2.0], [3.0], [np.nan], [5.0]], stretch=1).plot().axes
    _, dots = above.lines
    assert (dots.get_xdata().tolist(), dots.get_marker()) == ([0, 5], ".")
    assert below.patches[0].get_data().edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert below.get_title("left") == "drop in its log-odds without the step itself"


def test_dims_are_called_by_their_columns_and_those_left_out_are_told():
    above, _ = drawn(np.ones((4, 2)), ["heat", "wind"]).plot().axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["wind", "heat"]
    above, _ = drawn(np.ones((4, 40)), predicted="very long " * 9).plot().axes
    assert above.get_ylabel() == "first 12 of 40 dimensions"
    assert len(above.get_title("left")) < 50
