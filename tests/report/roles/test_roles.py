"""Roles in the terminal, as a figure and on pages: the numbers are those of the reading, colours those of the roles."""

import dataclasses
import re

import numpy as np
import pytest

import keyquery as kq
from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.roles import Roles
from keyquery.pages.colours import ROLES as TONES
from keyquery.pages.colours import ROLES_DARK
from keyquery.pages.document import page
from keyquery.report.look.roles import roles_of
from keyquery.report.roles.terminal import role_table, roles_lines
from tests.report.conftest import CHROMIUM
from tests.report.readings import EVIL, crowd

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def scored(score, null=0.05, clears=True):
    return {"score": score, "low": score - 0.02, "high": score + 0.02, "null": null, "sequences": 32, "clears": clears}


def heads_of(layers, heads):
    """Every role in turn, and every ninth head without one."""
    rows = []
    for layer in range(layers):
        for head in range(heads):
            number = (layer * heads + head) % (len(ROLES) + 1)
            role = ROLES[number] if number < len(ROLES) else None
            scores = {name: {"random": scored(0.8 if name == role else 0.01 * (1 + head))} for name in ROLES}
            scores["retrieval"] = {"needle": scores["retrieval"]["random"]}
            scores["sink"]["text"] = scored(0.9 if role == "sink" else 0.1)
            place = {"layer": layer, "head": head, "name": f"layers.{layer}.{head}", "kind": "self"}
            rows.append({**place, "role": role, "roles": [role] if role else [], "scores": scores})
    return rows


@pytest.fixture(scope="module")
def reading():
    facts = {"least": 0.3, "error": 0.05, "length": 128, "data": ["random", "needle", "text"]}
    model = {"name": "every role", "layers": 3}
    return Roles(model=model, heads=heads_of(3, 6), notes=["a note"], provenance=facts)


@pytest.fixture(scope="module")
def look(reading):
    plain = crowd(3, 6, 4, 4, rotary=True)
    heads = [
        {**head, "roles": {key: row[key] for key in ("role", "roles", "scores")}}
        for head, row in zip(plain.heads, reading.heads, strict=True)
    ]
    return dataclasses.replace(plain, heads=heads, provenance={**plain.provenance, "roles": {"least": 0.3}})


def rows_of(table):
    return list(zip(*(list(column.cells) for column in table.columns), strict=True))


def test_the_table_has_a_row_per_role_with_its_heads_and_their_half_widths(reading):
    rows = {row[0]: row for row in rows_of(role_table(reading.heads, reading.model))}
    assert list(rows) == [role.replace("_", "-") for role in ROLES]
    _, count, data, null, strongest = rows["previous-token"]
    assert (count, str(data), null) == ("2", "random", "0.05")
    assert str(strongest) == "0.3 0.80 ±0.02, 2.0 0.80 ±0.02"
    assert str(rows["sink"][2]) == "text"
    assert str(rows["sink"][4]).startswith("1.1 0.90")


def test_the_lines_say_where_how_and_by_which_rule(reading):
    words = "\n".join(str(line) for line in roles_lines(reading))
    assert "repeated random tokens (32 sequences)" in words
    assert "exceeds its null level by at least 0.3" in words
    assert "Bonferroni" in words
    assert "Note: a note." in words


def test_a_layer_counts_the_roles_of_its_heads():
    heads = [{"roles": {"role": role}} for role in ("sink", "induction", "sink", None)]
    assert roles_of(heads) == "2 sink, induction"


def test_colours_are_distinct_and_every_role_has_one_per_background():
    assert tuple(TONES) == tuple(ROLES_DARK) == ROLES
    assert len(set(TONES.values())) == len(set(ROLES_DARK.values())) == len(ROLES)


def test_the_figure_shows_the_number_of_each_role_or_one_score(reading):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    image = reading.plot().axes[0].images[0].get_array()
    named = np.array([np.nan if h["role"] is None else ROLES.index(h["role"]) for h in reading.heads]).reshape(3, 6)
    assert np.array_equal(np.ma.filled(image, np.nan), named, equal_nan=True)
    scores = reading.plot(role="sink").axes[0].images[0].get_array()
    assert scores.ravel().tolist() == [h["scores"]["sink"]["text"]["score"] for h in reading.heads]
    pyplot.close("all")
    with pytest.raises(ValueError, match="role must be one of"):
        reading.plot(role="parking")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "king"}, r"heads\[0\].roles must be a list of roles"),
        ({"scores": 3}, r"heads\[0\].scores must be an object"),
        ({"scores": {"sink": {"text": {"score": 0.5}}}}, r"heads\[0\].scores.sink.text.null must be a number"),
        ({"scores": {"sink": {"moon": {}}}}, r"heads\[0\].scores.sink must be the scores of a role"),
        ({"layer": -1}, r"heads\[0\].layer must be a small number from 0 on"),
    ],
)
def test_a_file_with_wrong_fields_is_refused(reading, look, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(reading, heads=[{**reading.heads[0], **change}])
    if "layer" not in change:
        head = {**look.heads[0], "roles": {**look.heads[0]["roles"], **change}}
        with pytest.raises(ValueError, match=message.replace(r"heads\[0\]", r"heads\[0\].roles")):
            dataclasses.replace(look, heads=[head])


def test_records_of_a_look_have_roles_and_scores(look):
    row = look.records()[0]
    assert (row["role"], row["roles"]) == ("induction", "induction")
    assert (row["induction_random"], row["induction_random_null"], row["sink_text"]) == (0.8, 0.05, 0.1)


def tones(tab, what=".cell[data-head]"):
    script = "all => all.map(one => [one.dataset.head, one.style.getPropertyValue('--tone')])"
    return dict(tab.locator(what).evaluate_all(script))


@in_browser
def test_map_and_triangle_of_a_look_take_the_colours_of_roles(visit, look):
    tab = visit(look)
    assert tab.locator(".triangle .painted").count() == 0
    tab.locator('#map button[data-focus="role"]').click()
    expected = {f"{h['layer']}.{h['head']}": h["roles"]["role"] for h in look.heads}
    assert tones(tab) == {at: f"var(--role-{role})" if role else "var(--line)" for at, role in expected.items()}
    fills = tab.locator(".triangle .head").evaluate_all(
        "all => all.map(one => [one.dataset.head, getComputedStyle(one.querySelector('.dot')).fill])"
    )
    colours = {at: "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", fill)) for at, fill in fills}
    assert {at: colours[at] for at, role in expected.items() if role} == {
        at: TONES[role] for at, role in expected.items() if role
    }
    assert tab.locator(".triangle .depths").is_hidden()
    tab.locator('#map button[data-focus="parts"]').click()
    assert tab.locator(".triangle .painted").count() == 0
    assert tab.locator(".triangle .depths").is_visible()


@in_browser
def test_a_score_colours_the_map_from_0_to_1_and_the_head_shows_interval_and_null(visit, look):
    tab = visit(look, "#1.1?map=role.sink.text")
    amounts = tab.locator(".cell[data-head]").evaluate_all(
        "all => all.map(one => parseFloat(one.style.getPropertyValue('--amount')))"
    )
    assert amounts == [round(100 * h["roles"]["scores"]["sink"]["text"]["score"]) for h in look.heads]
    assert "sink, text 0.9 (0.88 to 0.92)" in tab.locator('.cell[data-head="1.1"]').get_attribute("title")
    assert tab.locator('[data-role="sink"]').text_content() == "0.90 (0.88 to 0.92), null 0.05, text"
    tab.locator("#table summary").click()
    assert "sink" in tab.locator('tr[data-head="1.1"]').inner_text()


@in_browser
@pytest.mark.parametrize("wide", [360, pytest.param(1300, marks=pytest.mark.slow)])
def test_the_page_of_roles_fits_and_walks(visit, reading, wide):
    tab = visit(reading, "#0.3")
    tab.set_viewport_size({"width": wide, "height": 900})
    assert tab.evaluate("document.documentElement.scrollWidth") <= wide
    assert tab.locator("#chosen h2").inner_text() == "Layer 0, head 3"
    tab.locator('.cell[data-head="0.3"]').focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#chosen h2").inner_text() == "Layer 1, head 3"
    tab.locator("#map select").select_option("role.induction.random")
    assert tab.locator('.cell[data-head="0.0"]').get_attribute("title") == "0.0: induction, random 0.8"
    tab.locator("#table summary").click()
    tab.locator("#table tbody tr").first.wait_for()  # the table is built once it is open
    assert tab.locator("#table tbody tr").count() == 18


@in_browser
def test_markup_in_a_reading_of_roles_is_shown_as_text(visit, reading):
    bad = dataclasses.replace(reading, model={"name": EVIL, "layers": 3, "labels": [EVIL] * 3}, notes=[EVIL])
    tab = visit(bad)
    assert tab.evaluate("window.hurt") is None
    assert EVIL in tab.locator("#name").inner_text()


def test_pages_without_roles_have_no_button_for_them(look):
    plain = dataclasses.replace(look, heads=[{k: v for k, v in head.items() if k != "roles"} for head in look.heads])
    assert '"roles":{"role"' not in page(plain).replace(" ", "")
    assert "Roles(" in repr(kq.Reading.load(Roles(model={"name": "a", "layers": 1}, heads=heads_of(1, 2)).to_json()))
