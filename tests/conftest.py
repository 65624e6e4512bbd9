"""A real browser for the tests of pages."""

import json
import shutil
from collections import defaultdict

import pytest

from keyquery.pages.document import page

CHROMIUM = shutil.which("chromium")
VIEWPORT = {"width": 1200, "height": 900}


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tabs(browser):
    """Open tabs, by the options of their context: a page in a tab that is there costs a quarter of one in a new one."""
    return defaultdict(list)


@pytest.fixture
def visit(browser, tabs, tmp_path):
    """Opens the page of a reading, each of a test in a tab of its own; at the end nothing was asked, no error told."""
    used, asked, told = [], [], []
    listeners = {
        "request": lambda request: asked.append(request.url),
        "console": lambda message: told.append(message.text) if message.type in ("error", "warning") else None,
        "pageerror": lambda error: told.append(str(error)),
    }

    def free_tab(options):
        same = tabs[json.dumps(options, sort_keys=True)]
        for tab in same:
            if tab not in used:
                return tab
        same.append(browser.new_context(viewport=VIEWPORT, **options).new_page())
        return same[-1]

    def go(reading, place="", html=None, **options):
        tab = free_tab(options)
        file = tmp_path / f"{len(used)}_page.html"  # another than any before: the same would not be loaded again
        used.append(tab)
        file.write_text(html or page(reading), encoding="utf-8")
        for event, listener in listeners.items():
            tab.on(event, listener)
        tab.goto(file.as_uri() + place)
        return tab

    yield go
    for tab in used:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
        tab.goto("about:blank")  # nothing goes on in what was seen
        tab.set_viewport_size(VIEWPORT)
        tab.emulate_media(media="null")
        tab.mouse.move(0, 0)
    assert told == []
    assert all(
        url.startswith(("file:", "about:srcdoc")) and url.split("#")[0].endswith(("page.html", "srcdoc"))
        for url in asked
    )
