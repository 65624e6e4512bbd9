"""The law of depth against width: its reported figures, its inverse, its interval and its verdicts."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.special import lambertw
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.learn.depth.depth import Law, count
from keyquery.learn.depth.show import KNOWN
from keyquery.pages import terminal
from keyquery.proof.families import tiny_model

budgets = st.floats(320_000, 1e15)
run = CliRunner().invoke


@pytest.mark.parametrize(
    ("options", "layers", "width"),
    [
        ({"layers": 70}, 70, 7510),
        ({"width": 768}, 29, 768),
        ({"layers": 24, "width": 1024}, 32, 887),
    ],
)
def test_shapes_of_the_law(options, layers, width):
    reading = kq.depth(**options)
    assert (reading.layers, reading.width) == (layers, width)
    assert math.log(reading.exact[1]) == pytest.approx(5.039 + 0.0555 * reading.exact[0])
    assert tuple(map(round, kq.depth(params=1.03e12).exact)) == (95, 30060)  # as reported


@given(budgets)
def test_a_budget_comes_back(params):
    reading = kq.depth(params=params)
    expected = lambertw(2 * 0.0555 * params / 12 / math.exp(2 * 5.039)).real / (2 * 0.0555)
    assert reading.exact[0] == pytest.approx(expected, rel=1e-9)
    assert count(*reading.exact) == pytest.approx(params, rel=1e-9)
    assert kq.depth(params=count(*reading.exact)).exact == pytest.approx(reading.exact, rel=1e-9)


@pytest.mark.parametrize(("params", "layers", "error"), [(1e8, 24.1, 0.57), (1.74e11, 80.5, 1.76)])
def test_the_interval_is_that_of_drawn_laws(params, layers, error):
    rng = np.random.default_rng(0)
    a, b = rng.normal(5.039, 0.030, 20_000), rng.normal(0.0555, 0.0013, 20_000)
    drawn = lambertw(2 * b * params / 12 / np.exp(2 * a)).real / (2 * b)
    reading = kq.depth(params=params, law=Law(a_error=0.030, b_error=0.0013))
    assert reading.exact[0] == pytest.approx(layers, abs=0.05)
    assert reading.interval["layers"] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), rel=0.004)
    assert np.diff(reading.interval["layers"]) / (2 * 1.96) == pytest.approx(error, rel=0.02)
    for depth, width in zip(reading.interval["layers"], reading.interval["width"][::-1], strict=True):
        assert count(depth, width) == pytest.approx(params)


@given(budgets)
def test_the_shapes_that_are_advised_are_balanced(params):
    reading = kq.depth(params=params)
    assert kq.depth(width=reading.width, layers=reading.layers).verdict == "balanced"
    usable = reading.usable
    assert usable["heads"] * usable["head_dim"] == usable["width"]
    assert usable["params"] == 12 * usable["layers"] * usable["width"] ** 2
    assert usable["params"] == pytest.approx(params, rel=0.12)


@given(st.integers(1, 150), st.integers(200, 20_000))
def test_a_verdict_says_on_which_side_of_the_law_a_shape_is(layers, width):
    reading = kq.depth(width=width, layers=layers)
    gap = math.log(width) - 5.039 - 0.0555 * layers
    if reading.verdict == "balanced":
        assert abs(layers - reading.exact[0]) < 0.1 * reading.exact[0] + 1
    else:
        assert abs(layers - reading.exact[0]) > 0.1 * reading.exact[0]
        assert (gap > 0) == (reading.verdict == "depth-efficient")


@pytest.mark.parametrize("shape", [(12, 768), (96, 12288), (24, 2048), (60, 600)])
def test_what_is_saved_at_most_is_what_the_largest_shape_of_the_law_within_leaves(shape):
    layers, width = shape
    grid = np.linspace(1, layers, 200_001)
    widths = np.exp(5.039 + 0.0555 * grid)
    largest = (12 * grid * widths**2)[widths <= width].max()
    reading = kq.depth(width=width, layers=layers)
    assert reading.params - reading.saves == pytest.approx(largest, rel=1e-3)
    assert reading.params - reading.saves == pytest.approx(count(*reading.contained), abs=1)
    assert reading.contained[0] <= layers
    assert reading.contained[1] <= width
    assert kq.depth(width=555, layers=23).saves == 0
    narrow = kq.depth(width=140, layers=30)
    assert (narrow.verdict, narrow.saves, narrow.contained) == ("depth-inefficient", None, None)


def test_few_tokens_bound_the_width():
    free, bound = kq.depth(params=1e8), kq.depth(params=1e8, vocabulary=256)
    assert (bound.width, bound.embedding_rank) == (256, 256)
    assert count(*bound.exact) == pytest.approx(1e8)
    assert bound.exact[0] > free.exact[0]
    assert any("embeddings of rank 256" in note for note in bound.notes)
    assert bound.usable["width"] <= 256
    assert kq.depth(params=1e8, vocabulary=50_000).exact == free.exact
    for params in np.geomspace(1e7, 3e7, 20):  # also where layers are rounded down
        found = kq.depth(params=params, vocabulary=256)
        assert max(found.width, found.usable["width"]) <= 256
    shape = kq.depth(width=1138, layers=36, vocabulary=256)
    assert shape.verdict == "depth-efficient"
    assert kq.depth(width=1138, layers=36).verdict == "balanced"
    assert shape.contained == [36, 256]


def test_theory_is_of_the_shape_and_extrapolation_is_told():
    reading = kq.depth(width=729, layers=4)
    assert reading.threshold == pytest.approx(6)
    assert reading.separation["two_tokens"] == pytest.approx(math.log(math.comb(729 + 40, 40), 3))
    assert kq.depth(params=1e9).notes == []
    assert kq.depth(params=1e12).notes == ["the law was fitted on 6 to 48 layers: at 95 it is extrapolated"]
    assert kq.depth(width=5000, layers=96).notes[0].endswith("at 66 and 96 it is extrapolated")
    assert kq.depth(params=1e9).interval is None  # no error of the published fit is checked


def test_a_model_is_read_by_its_shapes():
    reading = kq.depth(model=kq.models.DECODER)
    assert reading.shape == {"layers": 4, "width": 128, "heads": 4, "name": "decoder"}
    assert reading.params == 12 * 4 * 128**2
    assert reading.embedding_rank == 4096
    assert reading.notes == ["the law was fitted on 6 to 48 layers: at 2 and 4 it is extrapolated"]
    narrow = torch.nn.Module()
    narrow.body, narrow.tokens = kq.Encoder(192, depth=2, heads=4), torch.nn.Embedding(1000, 64)
    assert kq.depth(model=narrow).embedding_rank == 64


def test_a_live_model_and_blocks_that_are_not_as_the_law_counts():
    layer = torch.nn.TransformerEncoderLayer(192, 4, dim_feedforward=8 * 192, batch_first=True)
    reading = kq.depth(model=torch.nn.TransformerEncoder(layer, 3))
    assert (reading.shape["layers"], reading.shape["width"]) == (3, 192)
    assert reading.notes[-1] == "its blocks have 2,211,840 parameters, the law counts 12·L·d² = 1,327,104"
    usual = torch.nn.TransformerEncoderLayer(192, 4, dim_feedforward=4 * 192, batch_first=True)
    assert len(kq.depth(model=torch.nn.TransformerEncoder(usual, 3)).notes) == 1
    with pytest.raises(ValueError, match="not in one stack"):
        kq.depth(model=torch.nn.Transformer(8, 2, 1, 1, batch_first=True))


@pytest.mark.parametrize("family", ["albert", "deepseek"])  # a shared block, and two kernels a layer
def test_layers_are_counted_as_the_config_does(family):
    pytest.importorskip("transformers", reason="the tiny models need the extra hf")
    model = tiny_model(family)
    found = kq.read(model)
    assert found.depth() == model.config.num_hidden_layers
    assert found.embedding_shape == tuple(model.get_input_embeddings().weight.shape)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pass exactly one of: params, a shape"),
        ({"params": 1e9, "width": 768}, "pass exactly one of"),
        ({"params": 1e5}, r"at least 318,828 parameters, one layer of the law \(163 wide\), got 100,000"),
        ({"params": -1}, "params must be above 0 and at most 1e18, got -1"),
        ({"params": math.nan}, "params must be finite, got nan"),
        ({"width": 0}, "width must be between 1 and 10000000, got 0"),
        ({"layers": 0}, "layers must be between 1 and 10000000, got 0"),
        ({"width": 100}, "the law has no such shape: its widths are 164 to 10,000,000, got 100 for -7.82 layers"),
        ({"layers": 500}, "the law has no such shape: .* got 1.738.* for 500 layers"),
        ({"width": 64, "layers": 2}, "got 98,304"),
        ({"params": 1e9, "vocabulary": 1}, "vocabulary must be at least 2, got 1"),
        ({"width": 512, "vocabulary": 256}, "its widths are 164 to 256, got 512"),
    ],
)
def test_bad_input_is_told(options, words):
    with pytest.raises(ValueError, match=words):
        kq.depth(**options)


def test_a_reading_comes_back_from_json():
    for reading in (kq.depth(params=1.3e9), kq.depth(width=768, layers=12, vocabulary=300)):
        assert kq.Reading.load(reading.to_json()) == reading
    (row,) = reading.records()
    assert (row["shape_layers"], "layers_low" in row) == (12, False)
    own = kq.depth(width=768, layers=12, law=Law(a_error=0.01, b_error=0.001))
    assert own.records()[0]["layers_low"] == own.interval["layers"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 768, "layers": 12}, ["depth-efficient: more depth would pay", "between none and 71.9 million"]),
        ({"params": 1.3e9}, ["1.3 billion parameters: 42 layers of width 1,606"]),
        ({"model": kq.models.DECODER}, ["the law does not cover such a narrow shape"]),
    ],
)
def test_what_is_shown(options, words):
    page = io.StringIO()
    terminal.show(kq.depth(**options), Console(width=100, file=page))
    assert all(word in page.getvalue() for word in [*words, "Kaplan"])
    assert max(map(len, page.getvalue().splitlines())) <= 100


def test_the_picture():
    pytest.importorskip("matplotlib")
    figure = kq.depth(width=12288, layers=96).plot()
    (axis,) = figure.axes
    said = {text.get_text() for text in axis.texts}
    assert set(KNOWN) - said == {"GPT-3 175B"}  # told in the legend instead
    legend = {text.get_text() for text in figure.legends[0].texts}
    assert "GPT-3 175B: 96 × 12,288, depth-inefficient" in legend
    assert "shape by the law: 80 × 13,461" in legend
    fitted = next(line for line in axis.lines if line.get_label() == "law, fitted range")
    assert np.exp(5.039 + 0.0555 * fitted.get_xdata()) == pytest.approx(fitted.get_ydata())
    assert (fitted.get_xdata()[0], fitted.get_xdata()[-1]) == (6, 48)
    assert len(kq.depth(params=1e8, vocabulary=256).plot().figure.legends[0].texts) == 2


def test_the_command(tmp_path):
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--picture", str(tmp_path / "a.svg")]
    done = run(cli.app, ["depth", "--params", "1.3e9", *files])
    assert done.exit_code == 0, done.output
    assert kq.Reading.load(tmp_path / "a.json") == kq.depth(params=1.3e9)
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")
    judged = run(cli.app, ["depth", "--width", "2048", "--layers", "24"])
    assert "depth-efficient" in judged.output
    assert "decoder" in run(cli.app, ["depth", str(kq.models.DECODER)]).output
    refused = run(cli.app, ["depth"])
    assert "give a parameter budget (--params 1.3e9), a shape" in str(refused.exception)
