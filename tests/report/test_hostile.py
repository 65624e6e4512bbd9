"""Every page of the house, with markup in every text that its reading holds: it is shown, and nothing is run."""

import json
import re
from pathlib import Path

import pytest
import torch

import keyquery as kq
from keyquery import pages
from keyquery.reading import Reading
from tests.report.conftest import CHROMIUM
from tests.report.readings import EVIL, tiny

ASSETS = Path(pages.__file__).parent / "old"
# Texts that the page takes for names of its own, not for something to show.
OWN = {"kind", "schema", "units", "mark_i", "mark_j", "method", "verdict", "unit", "graphs"}


def spoiled(value, by=EVIL):
    """Plain data with markup behind every text; keys stay."""
    if isinstance(value, dict):
        return {name: item if name in OWN else spoiled(item, by) for name, item in value.items()}
    if isinstance(value, list):
        return [spoiled(item, by) for item in value]
    return value + by if isinstance(value, str) else value


def looked():
    return tiny("bert")[2]


def graphed():
    attention = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0.3, 0.3, 0.4, 0], [0, 0, 0, 1.0]])
    return kq.causes(attention.expand(2, 4, 4), tokens=["one", "two", "three", "four"])


def transported():
    torch.manual_seed(0)
    return kq.transport(torch.rand(3, 8, 2), labels=["a", "b"] * 4)


READINGS = {
    "look": looked,
    "comparison": lambda: kq.compare(looked(), looked()),
    "causes": graphed,
    "transport": transported,
}


def hostile(name):
    return Reading.load(json.dumps(spoiled(READINGS[name]().to_dict())))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("name", READINGS)
def test_markup_in_every_text_of_a_reading_is_shown_as_text(name, visit):
    pytest.importorskip("transformers")
    tab = visit(hostile(name))
    assert "<script>window.hurt" in tab.locator("h1").inner_text()
    for summary in tab.locator("summary").all():
        summary.click()
    assert tab.evaluate("window.hurt") is None
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() <= 2  # its data and its own


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("name", ["look", "causes", "transport"])
def test_a_script_that_got_in_would_not_run(name, browser, tmp_path):
    """The policy is a second wall: here the first is broken on purpose."""
    pytest.importorskip("transformers")
    text = pages.page(READINGS[name]())
    broken = text.replace("</header>", '</header><script>window.hurt = 1</script><img src=x onerror="window.hurt = 1">')
    assert broken != text
    (tmp_path / "page.html").write_text(broken)
    tab = browser.new_page()
    told = []
    tab.on("console", lambda message: told.append(message.text))
    tab.goto((tmp_path / "page.html").as_uri())
    assert tab.evaluate("window.hurt") is None
    assert any("Content Security Policy" in text for text in told)
    tab.close()


def test_the_policy_comes_before_anything_else_and_bodies_bring_nothing_of_their_own():
    shell = (ASSETS / "shell.html").read_text()
    policy = shell.index('<meta http-equiv="Content-Security-Policy" content="{{policy}}">')
    assert policy < min(shell.index(part) for part in ("<title", "<style", "{{body}}", "{{embedded}}"))
    bodies = sorted(ASSETS.glob("*.html"))
    assert len(bodies) >= 7
    for body in bodies:
        text = body.read_text()
        assert not re.search(r"\son\w+=|style=|javascript:|https?:", text), body.name
        assert body.name == "shell.html" or not re.search(r"<(script|style|meta|link|base)", text), body.name


def test_no_script_of_the_house_writes_markup():
    for script in ASSETS.glob("*.js"):
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script.read_text()
        )
        assert not found, f"{script.name}: {found}"


def test_a_table_in_a_notebook_shows_texts_as_texts():
    class Named(Reading, kind="named for a test"):
        pass

    made = Named(provenance={})
    object.__setattr__(made, "records", lambda: [{EVIL: EVIL}])
    assert EVIL not in made._repr_html_()
    assert made._repr_html_().count("&lt;/script&gt;") == 4
