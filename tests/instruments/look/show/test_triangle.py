"""The triangle: where heads stand in it, by hand, and what its pictures hold."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.triangle import BUBBLE, LEFT, SIDE, TOP, barycentric, dots, filled, region, svg
from keyquery.pages import picture_bytes
from keyquery.pages.colours import DEPTHS, depth_colour
from keyquery.support.printable import printable

TALL = math.sqrt(3) / 2
SVG = "{http://www.w3.org/2000/svg}"


DATA = {"from": "novels.txt", "tokens": 20_000, "sequences": 156, "length": 128, "longest": 128}


def look(*shares, name="a model", half=None):
    """A look of one layer after another, each with one head of the shares given; a number is a raw symmetry.

    Shares are symmetric, skew, popularity, position; intervals of all are `half` to both sides.
    """
    heads = []
    for layer, share in enumerate(shares):
        on_data, symmetry = None, 0.0
        if isinstance(share, tuple):
            symmetric, skew, popularity, position = share
            on_data = dict(zip(PARTS, (symmetric, skew, popularity, 0.0, position), strict=True))
            if half is not None:
                on_data["intervals"] = {part: [value - half, value + half] for part, value in on_data.items()}
            on_data |= {"symmetry": 0.0, "interaction": 0.0}
        else:
            symmetry = share
        metrics = {"symmetry": symmetry, "effective_rank": 1.0, "column_directionality": 0.0}
        about = {"layer": layer, "head": 0, "name": f"{layer}.0", "label": "mixed", "evidence": "estimated"}
        heads.append({**about, "raw": metrics, "folded": metrics, "on_data": on_data})
    rows = [{"layer": head["layer"], "raw": head["raw"]} for head in heads]
    data = {"data": DATA} if any(head["on_data"] for head in heads) else {}
    return Look(model={"name": name, "layers": len(rows), "width": 8}, layers=rows, heads=heads, provenance=data)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((1, 0, 0), (0, 0)),
        ((0, 0, 1), (0.5, TALL)),
        ((0.5, 0, 0.5), (0.25, TALL / 2)),
        ((0, 0.5, 0.5), (0.75, TALL / 2)),
        ((0.2, 0.2, 0.2), (0.5, TALL / 3)),  # the position share of 0.4 is taken out
        ((0.1, 0, 0.3), (0.375, 0.75 * TALL)),
        ((0, 0, 0), (0.5, TALL / 3)),
        ((0.2, -0.01, 0), (0, 0)),  # an estimate below 0 counts as 0
    ],
)
def test_where_shares_stand(shares, expected):
    assert barycentric(*shares) == pytest.approx(expected)


def test_dots_have_place_depth_and_what_is_filled():
    placed = dots(look((1.0, 0.0, 0.0, 0.0), (0.25, 0.25, 0.0, 0.5), (0.0, 0.0, 1.0, 0.0)))
    expected = [(0, 0, 0, 1), (0.5, 0, 0.5, 0.5), (0.5, TALL, 1, 1)]
    assert [(dot.x, dot.y, dot.depth, dot.filled) for dot in placed] == [pytest.approx(row) for row in expected]
    assert placed[1].title == "layer 1, head 0: mixed; symmetric 25%, skew 25%, position 50%"


def test_without_data_heads_stand_between_two_corners():
    placed = dots(look(1.0, 0.0, -1.0, 0.5))
    assert [(dot.x, dot.filled) for dot in placed] == [(0, 1), (0.5, 1), (1, 1), (0.25, 1)]
    heights = [dot.y for dot in placed]
    assert heights == sorted(heights, reverse=True)  # the first layer on top
    assert 0 < heights[-1] < heights[0] < TALL
    picture = svg(look(1.0, 0.0))
    assert "keyquery look MODEL --text FILE" in picture
    assert "popularity" not in picture.split("</style>")[1]
    assert "weights only" in picture
    assert "keyquery look MODEL --text FILE" not in svg(look((1.0, 0.0, 0.0, 0.0)))


def circles_of(picture, kind):
    return [c for c in ElementTree.fromstring(picture).iter(f"{SVG}circle") if c.get("class") == kind]


def test_circles_are_drawn_where_the_shares_stand():
    picture = svg(look((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.4, 0.6)))
    for kind in ("dot", "bubble"):
        assert [(float(c.get("cx")), float(c.get("cy"))) for c in circles_of(picture, kind)] == [
            (pytest.approx(LEFT + SIDE / 2, abs=0.06), pytest.approx(TOP + SIDE * TALL, abs=0.06)),
            (pytest.approx(LEFT + SIDE / 2, abs=0.06), pytest.approx(TOP, abs=0.06)),
        ]
    assert [c.get("fill") for c in circles_of(picture, "dot")] == [DEPTHS[0], DEPTHS[-1]]
    heads = [g for g in ElementTree.fromstring(picture).iter(f"{SVG}g") if g.get("class") == "head"]
    assert heads[1].find(f"{SVG}title").text == "layer 1, head 0: mixed; popularity 40%, position 60%"
    assert "novels.txt: 128-token windows, 156 sequences" in picture
    both = ElementTree.fromstring(svg(kq.compare(look((1.0, 0, 0, 0)), look((1.0, 0, 0, 0), 0.5))))
    assert float(both.get("width")) == 2 * float(ElementTree.fromstring(picture).get("width"))
    assert "1 cross-attention heads omitted" in "".join(both.itertext())


def test_a_head_of_positions_is_an_empty_bubble():
    """Its popularity of 1 % is not to be read as what the head is."""
    picture = svg(look((0.0, 0.0, 0.01, 0.99), (0.0, 0.0, 1.0, 0.0)))
    empty, full = (float(c.get("r")) for c in circles_of(picture, "dot"))
    assert full == BUBBLE
    assert empty**2 == pytest.approx(0.01 * full**2, abs=0.2)  # its area is as the share
    faint, strong = (float(c.get("stroke-opacity")) for c in circles_of(picture, "bubble"))
    assert faint < strong / 2
    shares = dict(zip(PARTS, (0.2, -0.02, 0.2, 0.1, 0.3), strict=True))
    assert filled(shares) == pytest.approx(0.5)  # of what is above 0, and query_only counts with position


def test_a_region_is_the_ellipse_of_the_intervals():
    """Against points drawn from the three shares, and by hand on an edge."""
    shares, half = (0.2, 0.3, 0.1), (0.01, 0.02, 0.005)
    data = dict(zip(PARTS, shares, strict=False))
    data["intervals"] = {part: [s - h, s + h] for part, s, h in zip(PARTS, shares, half, strict=False)}
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor(shares) + torch.randn(4000, 3, generator=generator) * torch.tensor(half) / 1.96
    outline = pytest.importorskip("matplotlib.path").Path(region(data))
    inside = outline.contains_points([barycentric(*row) for row in drawn.tolist()])
    assert inside.mean() == pytest.approx(0.95, abs=0.015)
    assert region({**data, "intervals": {**data["intervals"], "skew": None}}) == []
    assert svg(look((0.3, 0.3, 0.4, 0.0), half=0.1)).count('class="region"') == 1
    assert 'class="region"' not in svg(look((0.3, 0.3, 0.4, 0.0), half=0.001))  # within the bubble


def test_a_region_ends_at_the_border():
    data = {"symmetric": 0.01, "skew": 0.0, "popularity": 0.02, "intervals": {}}
    data["intervals"] = {part: [-0.05, 0.1] for part in ("symmetric", "skew", "popularity")}
    for x, y in region(data):
        assert -1e-9 <= y <= TALL + 1e-9
        assert y / math.sqrt(3) - 1e-9 <= x <= 1 - y / math.sqrt(3) + 1e-9


def test_depth_is_ordered_by_lightness_and_seen_on_white_and_black():
    colours = [bytes.fromhex(colour[1:]) for colour in (*(depth_colour(i / 20) for i in range(21)), "#0d1117")]
    linear = ((torch.tensor([list(colour) for colour in colours]) / 255 + 0.055) / 1.055) ** 2.4
    *steps, black = (linear @ torch.tensor([0.2126, 0.7152, 0.0722]) + 0.05).tolist()
    assert steps == sorted(steps, reverse=True)
    assert all(1.05 / step > 1.5 and step / black > 1.5 for step in steps)


@pytest.mark.parametrize(("ending", "start"), [(".svg", b"<svg"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_picture_files(tmp_path, ending, start):
    both = kq.compare(look((1.0, 0.0, 0.0, 0.0)), look((0.2, 0.3, 0.1, 0.4)))
    for reading in (both, look(0.5, 0.1)):
        assert picture_bytes(tmp_path / f"heads{ending}", reading).startswith(start)


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
    points, rims = figure.axes[0].collections
    assert points.get_offsets().tolist() == rims.get_offsets().tolist() == [[0.5, 0.0], [0.5, pytest.approx(TALL)]]
    assert points.get_sizes().tolist() == pytest.approx([rims.get_sizes()[0], 0.4 * rims.get_sizes()[0]])
    assert "128-token windows" in " ".join(text.get_text() for text in figure.axes[0].texts)
    assert len(look((0.5, 0.5, 0.0, 0.0), half=0.1).plot().axes[0].patches) == 1  # the 95 % region
    image = look(0.5, -0.5).plot().axes[0].images[0].get_array()  # without data: the map
    assert image.tolist() == [[0.5], [-0.5]]
    assert look((1.0, 0, 0, 0)).plot("map").axes[0].images
    with pytest.raises(ValueError, match="what must be one of 'auto', 'triangle', 'map', got 'triangel'; did you mean"):
        look(0.5).plot("triangel")
    with pytest.raises(ValueError, match="'reading' has no figure"):
        kq.Reading().plot()


@pytest.mark.parametrize("name", ["a\x1b[31m", "$\\frac{$", "</text><script>alert(1)</script>"])
def test_any_name_can_be_drawn(name):
    reading = kq.look(torch.nn.MultiheadAttention(8, 2), name=name)
    picture = picture_bytes(Path("heads.svg"), reading)
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]  # well-formed
    assert printable(name) in texts
    pytest.importorskip("matplotlib")
    figure = reading.plot("map")
    figure.canvas.draw()
    assert printable(name) in [text.get_text() for text in figure.findobj() if hasattr(text, "get_text")]
