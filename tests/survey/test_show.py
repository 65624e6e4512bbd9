"""The page of a survey in a real browser: searching, links and curves; and names in the terminal."""

import pytest

from keyquery.pages.document import page
from keyquery.survey.reading import Survey, answer
from tests.conftest import CHROMIUM
from tests.pages.kinds import survey, surveyed
from tests.pages.readings import shown

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def names(tab):
    return tab.locator(".of-table tbody th").all_inner_texts()


@needs_browser
def test_the_table_sorts_and_searches(visit):
    tab = visit(survey())
    assert names(tab) == ["big", "enc", "run/step0", "run/step200", "run/step1000"]
    tab.locator('[data-sort="symmetry of heads"]').click()
    assert names(tab) == ["enc", "run/step1000", "run/step200", "run/step0", "big"]
    tab.locator('[data-sort="step"]').click()
    assert names(tab) == ["run/step1000", "run/step200", "run/step0", "big", "enc"]  # those without a step come last
    tab.locator("input[type='search']").fill("LLAMA step")
    assert sorted(names(tab)) == ["run/step0", "run/step1000", "run/step200"]
    assert tab.locator('circle.dot.faint[data-item="big"]').count() == 2
    assert tab.locator(".of-table tbody a").first.get_attribute("href") == "models/f%20run%2Fstep1000.html"
    assert tab.locator('#page svg a[href="models/f%20run%2Fstep1000.html"]').count() == 3  # steps, size, architecture


@needs_browser
def test_curves_over_steps_and_those_of_layers(visit):
    tab = visit(survey())
    assert tab.locator("path.line").count() == 1
    tab.locator('[data-run="run"]').click()
    assert tab.locator("path.line.thin").count() == 2
    titles = tab.locator("path.line.thin title").all_text_contents()
    assert titles == ["layer 0: +0.50 at the end", "layer 1: +0.17 at the end"]
    groups = tab.locator("svg[aria-label='By architecture'] text.ink title").all_text_contents()
    assert groups == ["llama, bidirectional: 1", "llama, causal: 1", "gpt2, causal: 1"]  # the highest median first
    assert tab.evaluate("document.activeElement.dataset.run") == "run"
    tab.locator('.switch button:has-text("column directionality")').click()  # which is not kept by layer
    assert tab.locator("path.line.thin").count() == 0
    tab.locator("#log").click()
    assert tab.locator("#log").get_attribute("aria-pressed") == "true"
    text = tab.locator("#page").inner_text()
    change = "symmetry goes from +0.000 at step 0 to +0.500 at 1,000, half of the change by step 1,000"
    assert f"During training, run: {change}" in text
    assert "Could not be read\nbroken: no config" in text


def test_a_survey_of_nothing_and_one_of_steps_alone_have_pages():
    assert "<!doctype html>" in page(Survey(models=[]))
    assert "<!doctype html>" in page(Survey(models=[surveyed("one", 0.1)], **answer([surveyed("one", 0.1)])))


def test_the_terminal_takes_names_for_names():
    rows = [surveyed("[/red]a", 0.2, "[/red]", 1), surveyed("[bold]b", 0.3, "[/red]", 2)]
    reading = Survey(models=rows, broken=[{"name": "[/x]", "source": "x", "why": "[link]"}], **answer(rows))
    text = shown(reading)
    for words in ("[/red]a", "[bold]b", "Could not read [/x]: [link]"):
        assert words in text
