"""A real browser for the tests of pages."""

import shutil

import pytest

from keyquery.report.kit.page import page

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens the page of a reading in a fresh context; at the end nothing was asked, and no error told."""
    contexts, asked, told = [], [], []

    def go(reading, place="", html=None, **options):
        file = tmp_path / "page.html"
        file.write_text(html or page(reading), encoding="utf-8")
        context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: told.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: told.append(str(error)))
        tab.goto(file.as_uri() + place)
        return tab

    yield go
    for context in contexts:
        context.close()
    assert told == []
    assert all(
        url.startswith(("file:", "about:srcdoc")) and url.split("#")[0].endswith(("page.html", "srcdoc"))
        for url in asked
    )
