"""Roles in the terminal, as a figure and on pages: the numbers are those of the reading, colours those of the roles."""

import dataclasses
import re

import numpy as np
import pytest

from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.show import lines as roles_lines
from keyquery.instruments.roles.show import role_table
from keyquery.pages.colours import ROLES as TONES
from keyquery.pages.colours import ROLES_DARK
from keyquery.pages.document import page
from tests.conftest import CHROMIUM
from tests.pages.readings import crowd, data_of, measure_of, roles


@pytest.fixture(scope="module")
def reading():
    return roles()


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
    words = "\n".join(str(line) for line in roles_lines(reading))
    assert "repeated random tokens (32 sequences)" in words
    assert "exceeds its null level by at least 0.3" in words
    assert "Note: a note." in words


def test_colours_are_distinct_and_every_role_has_one_per_background():
    assert tuple(TONES) == tuple(ROLES_DARK) == ROLES
    assert len(set(TONES.values())) == len(set(ROLES_DARK.values())) == len(ROLES)


def test_the_figure_shows_the_number_of_each_role(reading):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    image = reading.plot().axes[0].images[0].get_array()
    named = np.array([np.nan if h["role"] is None else ROLES.index(h["role"]) for h in reading.heads]).reshape(3, 6)
    assert np.array_equal(np.ma.filled(image, np.nan), named, equal_nan=True)
    pyplot.close("all")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "king"}, r"heads\[0\].roles must be a list of roles"),
        ({"scores": 3}, r"heads\[0\].scores must be an object"),
        ({"scores": {"sink": {"text": {"score": 0.5}}}}, r"heads\[0\].scores.sink.text.null must be a number"),
        ({"scores": {"sink": {"moon": {}}}}, r"heads\[0\].scores.sink must be the scores of a role"),
        ({"layer": "one"}, r"heads\[0\].layer must be an integer, got 'one'"),
    ],
)
def test_a_file_with_wrong_fields_is_refused(reading, look, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(reading, heads=[{**reading.heads[0], **change}])
    if "layer" not in change:
        head = {**look.heads[0], "roles": {**look.heads[0]["roles"], **change}}
        with pytest.raises(ValueError, match=message.replace(r"heads\[0\]", r"heads\[0\].roles")):
            dataclasses.replace(look, heads=[head])


def test_the_page_has_the_scores_of_every_head_and_opens_on_the_strongest(reading):
    data = data_of(page(reading))
    named = measure_of(data, "role")
    roles_of_heads = [named["names"][value].replace("-", "_") for value in named["values"]]
    assert roles_of_heads == [head["role"] or "none" for head in reading.heads]
    sink = measure_of(data, "role.sink.text")
    assert sink["values"] == [head["scores"]["sink"]["text"]["score"] for head in reading.heads]
    assert sink["low"] == pytest.approx([score - 0.02 for score in sink["values"]], abs=1e-3)
    assert set(sink["null"]) == {0.05}
    keys = [measure["key"] for measure in data["tabs"][0]["frame"]["measures"]]
    assert keys.index("role.sink.text") < keys.index("role.sink.random")  # what decides comes first
    assert data["tabs"][0]["state"] == {"at": "0.0", "map": "role"}


def tones(tab, what=".cell[data-at]"):
    script = "all => all.map(one => [one.dataset.at, one.style.getPropertyValue('--tone')])"
    return dict(tab.locator(what).evaluate_all(script))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_map_and_triangle_of_a_look_take_the_colours_of_roles(visit, look):
    tab = visit(look)
    assert tab.locator(".triangle .painted").count() == 0
    tab.locator('.of-map button:text-is("role")').click()
    expected = {f"{h['layer']}.{h['head']}": h["roles"]["role"] for h in look.heads}
    assert tones(tab) == {at: f"var(--role-{role})" if role else "var(--middle)" for at, role in expected.items()}
    fills = tab.locator(".triangle .head").evaluate_all(
        "all => all.map(one => [one.dataset.head, getComputedStyle(one.querySelector('.dot')).fill])"
    )
    colours = {at: "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", fill)) for at, fill in fills}
    assert {at: colours[at] for at, role in expected.items() if role} == {
        at: TONES[role] for at, role in expected.items() if role
    }
    assert tab.locator(".triangle .depths").is_hidden()
    tab.locator('.of-map button:text-is("parts")').click()
    assert tab.locator(".triangle .painted").count() == 0
    assert tab.locator(".triangle .depths").is_visible()
    tab = visit(look, "#1.1?map=role.sink.text")
    assert "sink, text 0.90 (0.88 to 0.92), null 0.05" in tab.locator('.cell[data-at="1.1"]').get_attribute("title")
    assert tab.locator('[data-block=roles] [data-bar="sink"]').text_content() == "0.90 (0.88 to 0.92), null 0.05, text"
    assert tab.locator("[data-block=roles] .name.sure").all_inner_texts() == ["sink"]
    assert tab.locator("[data-block=roles] em.small").get_attribute("title") == "random: 0.80"
