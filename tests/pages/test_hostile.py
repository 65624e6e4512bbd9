"""Every page of the house, with markup in every text that its reading holds: it is shown, and nothing is run."""

import re
from pathlib import Path

import pytest

from keyquery import pages
from tests.conftest import CHROMIUM
from tests.pages.kinds import reading

ASSETS = Path(pages.__file__).parent / "assets"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("name", ["roles", "causes", "transport"])
def test_a_script_that_got_in_would_not_run(name, browser, tmp_path):
    """The policy is a second wall: here the first is broken on purpose."""
    text = pages.page(reading(name))
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


def test_the_policy_comes_before_anything_else_and_the_shell_brings_nothing_of_its_own():
    shell = (ASSETS / "shell.html").read_text()
    policy = shell.index('<meta http-equiv="Content-Security-Policy" content="{{policy}}">')
    assert policy < min(shell.index(part) for part in ("<title", "<style", "{{figures}}", "{{script}}", "{{data}}"))
    assert not re.search(r"\son\w+=|style=|javascript:|https?:|<(link|base|img|iframe)", shell)
    assert [path.name for path in ASSETS.glob("*.html")] == ["shell.html"]


def test_no_script_writes_markup_or_asks_for_anything():
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|\bfetch\(|XMLHttp|\bimport\("
    for script in ASSETS.glob("*.js"):
        assert not (found := re.search(ways, script.read_text())), f"{script.name}: {found}"
    html = pages.page(reading("look"))
    assert set(re.findall(r"https?:[^\s\"')]*", html)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(link|img|iframe|object|embed|base|form)\b|@import|url\(|\bsrc=(?!x )", html)
