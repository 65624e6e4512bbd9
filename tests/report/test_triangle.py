"""The triangle: where heads stand in it, by hand, and what its pictures hold."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import keyquery as kq
from keyquery.instruments.geometry import Look
from keyquery.printable import printable
from keyquery.report import picture_bytes
from keyquery.report.colours import DEPTHS, depth_colour
from keyquery.report.triangle import LEFT, SIDE, TOP, barycentric, dots, radius, svg

TALL = math.sqrt(3) / 2
SVG = "{http://www.w3.org/2000/svg}"


def look(*shares, layers=1, name="a model"):
    """A look of one layer after another, each with one head of the shares given; a number is a raw symmetry."""
    heads = []
    for layer, share in enumerate(shares):
        on_data, symmetry = None, 0.0
        if isinstance(share, tuple):
            parts = zip(("reciprocal", "directional", "popularity", "position"), share, strict=True)
            on_data = {"symmetry": 0.0, **dict(parts)}
        else:
            symmetry = share
        figures = {"symmetry": symmetry, "effective_rank": 1.0, "directionality": 0.0}
        place = {"layer": layer, "head": 0, "name": f"{layer}.0", "verdict": "general"}
        heads.append({**place, "raw": figures, "folded": figures, "on_data": on_data})
    rows = [{"layer": head["layer"], "raw": head["raw"]} for head in heads]
    return Look(model={"name": name, "layers": len(rows), "width": 8}, layers=rows, heads=heads)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((1, 0, 0), (0, 0)),
        ((0, 1, 0), (1, 0)),
        ((0, 0, 1), (0.5, TALL)),
        ((1 / 3, 1 / 3, 1 / 3), (0.5, TALL / 3)),
        ((0.5, 0.5, 0), (0.5, 0)),
        ((0.5, 0, 0.5), (0.25, TALL / 2)),
        ((0, 0.5, 0.5), (0.75, TALL / 2)),
        ((0.75, 0.25, 0), (0.25, 0)),
        ((0.2, 0.2, 0.2), (0.5, TALL / 3)),  # the position share of 0.4 is taken out
        ((0.1, 0, 0.3), (0.375, 0.75 * TALL)),
        ((0, 0, 0), (0.5, TALL / 3)),
    ],
)
def test_where_shares_stand(shares, expected):
    assert barycentric(*shares) == pytest.approx(expected)


def test_dots_have_place_depth_and_position():
    found = dots(look((1.0, 0.0, 0.0, 0.0), (0.25, 0.25, 0.0, 0.5), (0.0, 0.0, 1.0, 0.0)))
    assert [(dot.x, pytest.approx(dot.y)) for dot in found] == [(0, 0), (0.5, 0), (0.5, TALL)]
    assert [dot.depth for dot in found] == [0, 0.5, 1]
    assert [dot.position for dot in found] == [0, 0.5, 0]
    assert found[1].title == "layer 1, head 0: reciprocal 25%, directional 25%, position 50%"


def test_without_data_heads_stand_between_two_corners():
    found = dots(look(1.0, 0.0, -1.0, 0.5))
    assert [dot.x for dot in found] == [0, 0.5, 1, 0.25]
    picture = svg(look(1.0, 0.0))
    assert "keyquery look MODEL --text FILE" in picture
    assert "follows the crowd" not in picture
    assert "keyquery look MODEL --text FILE" not in svg(look((1.0, 0.0, 0.0, 0.0)))


def test_circles_are_drawn_where_the_shares_stand():
    picture = ElementTree.fromstring(svg(look((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.4, 0.6))))
    circles = {kind: [c for c in picture.iter(f"{SVG}circle") if c.get("class") == kind] for kind in ("dot", "ring")}
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in circles["dot"]]
    assert places == [
        (pytest.approx(LEFT + SIDE / 2, abs=0.06), pytest.approx(TOP + SIDE * TALL, abs=0.06)),
        (pytest.approx(LEFT + SIDE / 2, abs=0.06), pytest.approx(TOP, abs=0.06)),
    ]
    assert [c.get("fill") for c in circles["dot"]] == [DEPTHS[0], DEPTHS[-1]]
    assert float(circles["ring"][0].get("r")) == pytest.approx(radius(0.6), abs=0.06)
    assert circles["dot"][1].find(f"{SVG}title").text == "layer 1, head 0: popularity 40%, position 60%"


def test_a_rings_area_beyond_the_dot_is_as_the_share():
    areas = [radius(share) ** 2 - radius(0) ** 2 for share in (0.25, 0.5, 1.0)]
    assert areas == pytest.approx([areas[2] / 4, areas[2] / 2, areas[2]])


def test_two_looks_stand_side_by_side_or_are_joined():
    one, other = look((1.0, 0.0, 0.0, 0.0)), look((0.0, 1.0, 0.0, 0.0))
    apart = ElementTree.fromstring(svg(one, other))
    width = float(ElementTree.fromstring(svg(one)).get("width"))
    assert float(apart.get("width")) == 2 * width
    joined = ElementTree.fromstring(svg(one, other, joined=True))
    assert float(joined.get("width")) == width
    arrows = [g for g in joined.iter(f"{SVG}g") if g.get("class") == "arrow"]
    assert len(arrows) == 1
    shaft, tip = (path.get("d") for path in arrows[0].iter(f"{SVG}path"))
    assert shaft.startswith(f"M{LEFT} ")  # from the reciprocal corner
    assert tip.startswith(f"M{LEFT + SIDE} ")  # to the directional one
    with pytest.raises(ValueError, match="the same heads"):
        svg(one, look((1.0, 0, 0, 0), (1.0, 0, 0, 0)), joined=True)
    with pytest.raises(ValueError, match="the same heads"):
        svg(one, look(0.5), joined=True)
    with pytest.raises(ValueError, match="arrows join two looks, got 1"):
        svg(one, joined=True)


def test_names_are_texts():
    picture = svg(look((1.0, 0.0, 0.0, 0.0), name='</text><script>alert("1")</script>'))
    assert "<script>" not in picture
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert '</text><script>alert("1")</script>' in texts


def test_depth_is_ordered_by_lightness():
    def lightness(colour):
        linear = [((c / 255 + 0.055) / 1.055) ** 2.4 for c in bytes.fromhex(colour[1:])]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    steps = [lightness(depth_colour(i / 20)) for i in range(21)]
    assert steps == sorted(steps, reverse=True)
    # Seen on white and on GitHub's black: at least 1.5 times lighter or darker than either.
    assert all((1.05 / (step + 0.05)) > 1.5 and (step + 0.05) / (lightness("#0d1117") + 0.05) > 1.5 for step in steps)


@pytest.mark.parametrize(("ending", "start"), [(".svg", b"<svg"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_picture_files(tmp_path, ending, start):
    both = kq.compare(look((1.0, 0.0, 0.0, 0.0)), look((0.2, 0.3, 0.1, 0.4)))
    for joined in (False, True):
        path = tmp_path / f"heads{joined}{ending}"
        path.write_bytes(picture_bytes(path, both, joined=joined))
        assert path.read_bytes().startswith(start)
    assert picture_bytes(tmp_path / f"weights{ending}", look(0.5, 0.1))


def test_a_picture_leaves_the_notebook_interactive(monkeypatch):
    """As the backend of notebooks, which comes with the first figure; a later one is shown only if this lasts."""
    matplotlib = pytest.importorskip("matplotlib")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    subplots, size = pyplot.subplots, matplotlib.rcParams["font.size"]

    def first(*args, **kwargs):
        matplotlib.interactive(True)
        return subplots(*args, **kwargs)

    monkeypatch.setattr(pyplot, "subplots", first)
    try:
        assert not matplotlib.is_interactive()
        look((0.5, 0.5, 0.0, 0.0)).plot()
        assert matplotlib.is_interactive()
        assert matplotlib.rcParams["font.size"] == size
    finally:
        matplotlib.interactive(False)


def test_figures_for_papers():
    figure = look((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.4, 0.6)).plot()
    points, rings = figure.axes[0].collections
    assert points.get_offsets().tolist() == [[0.5, 0.0], [0.5, pytest.approx(TALL)]]
    assert len(rings.get_offsets()) == 1
    image = look(0.5, -0.5).plot().axes[0].images[0].get_array()  # without data: the map
    assert image.tolist() == [[0.5], [-0.5]]
    assert look((1.0, 0, 0, 0)).plot("map").axes[0].images
    with pytest.raises(ValueError, match="what must be one of 'triangle', 'map', got 'triangel'; did you mean"):
        look(0.5).plot("triangel")
    with pytest.raises(ValueError, match="'reading' has no picture"):
        kq.Reading().plot()


def test_cross_attention_is_left_out_and_said():
    both = look((1.0, 0.0, 0.0, 0.0), 0.5)
    assert len(dots(both)) == 1
    assert "1 cross-attention heads left out" in svg(both)


def test_a_real_look():
    pytest.importorskip("transformers")
    from keyquery.testing.families import tiny_model

    reading = kq.look(tiny_model("llama"), inputs=[{"input_ids": torch.randint(3, 60, (2, 8))}], length=8)
    for dot, head in zip(dots(reading), reading.heads, strict=True):
        data = head["on_data"]
        assert dot.y / TALL == pytest.approx(data["popularity"] / (1 - data["position"]))
    assert svg(reading).count('class="dot"') == len(reading.heads)


@pytest.mark.parametrize("name", ["bell\x07", "a\x1b[31m", "$\\frac{$", "costs $5 or $6"])
def test_any_name_can_be_drawn(name):
    reading = kq.look(torch.nn.MultiheadAttention(8, 2), name=name)
    picture = picture_bytes(Path("heads.svg"), reading)
    assert ElementTree.fromstring(picture) is not None  # well-formed
    pytest.importorskip("matplotlib")
    figure = reading.plot("map")
    figure.canvas.draw()
    assert printable(name) in [text.get_text() for text in figure.findobj() if hasattr(text, "get_text")]
