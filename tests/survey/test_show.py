"""The page of a survey in a real browser: sorting, searching, curves, and names that are no markup."""

import io

import pytest

from keyquery.pages.document import page
from keyquery.survey.reading import Survey, answer
from tests.conftest import CHROMIUM
from tests.pages.readings import EVIL

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def model(name, symmetry, run=None, step=None, family="llama", parameters=1_000_000, attention="causal"):
    figures = {"symmetry": symmetry, "symmetry_folded": -symmetry, "symmetry_together": symmetry / 2}
    figures |= {
        "symmetry_low": symmetry - 0.1,
        "symmetry_high": symmetry + 0.1,
        "column_directionality": 0.0,
        "rank_used": 0.5,
    }
    facts = {"name": name, "file": f"f {name}", "run": run, "step": step, "family": family, "model_type": family}
    facts |= {"parameters": parameters, "layers": 2, "heads": 4, "width": 8, "attention": attention, "source": "/none"}
    layers = {"by_layer": [symmetry, symmetry / 3], "together_by_layer": [0.0, symmetry], "notes": []}
    return {**facts, **figures, **layers, "labels": {"mixed": 4}}


@pytest.fixture
def reading():
    models = [model(f"run/step{step}", step / 2000, "run", step) for step in (1000, 0, 200)]
    models += [
        model("big", -0.3, parameters=8_000_000_000, family="gpt2"),
        model("enc", 0.6, attention="bidirectional"),
    ]
    return Survey(models=models, broken=[{"name": EVIL, "source": "x", "why": EVIL}], **answer(models))


def names(tab):
    return tab.locator(".of-table tbody th").all_inner_texts()


@needs_browser
def test_the_table_sorts_and_searches(visit, reading):
    tab = visit(reading)
    assert names(tab) == ["big", "enc", "run/step0", "run/step200", "run/step1000"]
    tab.locator('[data-sort="symmetry of heads"]').click()
    assert names(tab) == ["enc", "run/step1000", "run/step200", "run/step0", "big"]
    tab.locator('[data-sort="symmetry of heads"]').click()
    assert names(tab)[0] == "big"
    assert tab.locator('th[aria-sort="ascending"]').inner_text().startswith("symmetry")
    tab.locator('[data-sort="step"]').click()
    assert names(tab) == ["run/step1000", "run/step200", "run/step0", "big", "enc"]  # those without a step come last
    tab.locator("input[type='search']").fill("LLAMA step")
    assert sorted(names(tab)) == ["run/step0", "run/step1000", "run/step200"]
    assert tab.locator('circle.dot.faint[data-item="big"]').count() == 2
    assert tab.locator(".of-table tbody a").first.get_attribute("href") == "models/f%20run%2Fstep1000.html"
    assert tab.locator('#page svg a[href="models/f%20run%2Fstep1000.html"]').count() == 3  # steps, size, architecture


@needs_browser
def test_curves_over_steps_and_those_of_layers(visit, reading):
    tab = visit(reading)
    assert tab.locator("path.line").count() == 1
    tab.locator('[data-run="run"]').click()
    assert tab.locator("path.line.thin").count() == 2
    assert tab.evaluate("document.activeElement.dataset.run") == "run"
    tab.locator('.switch button:has-text("column directionality")').click()  # which is not kept by layer
    assert tab.locator("path.line.thin").count() == 0
    tab.locator("#log").click()
    assert tab.locator("#log").get_attribute("aria-pressed") == "true"
    told = tab.locator("#page").inner_text()
    assert (
        "During training, run: symmetry goes from +0.000 at step 0 to +0.500 at 1,000, half of the change by step 1,000"
        in told
    )


@needs_browser
def test_names_are_data_never_markup(visit, reading):
    evil = [model(EVIL, 0.1, EVIL, step, family=EVIL) for step in (0, 1)]
    models = [{**row, "name": f"{EVIL}{i}"} for i, row in enumerate(evil)]
    tab = visit(Survey(models=models, broken=reading.broken, **answer(models)))
    assert EVIL in tab.locator(".of-table tbody th").first.inner_text()
    assert EVIL in tab.locator("#page").inner_text()
    assert tab.evaluate("document.querySelectorAll('script').length") == 2
    assert tab.locator("img").count() == 0
    assert tab.evaluate("window.hurt") is None


def test_a_survey_of_nothing_and_one_of_steps_alone_have_pages(reading):
    assert "<!doctype html>" in page(Survey(models=[]))
    assert "<!doctype html>" in page(Survey(models=[model("one", 0.1)], **answer([model("one", 0.1)])))


def test_the_terminal_takes_names_for_names(reading):
    from rich.console import Console

    from keyquery.pages import terminal

    rows = [model("[/red]a", 0.2, "[/red]", 1), model("[bold]b", 0.3, "[/red]", 2)]
    survey = Survey(models=rows, broken=[{"name": "[/x]", "source": "x", "why": "[link]"}], **answer(rows))
    out = io.StringIO()
    terminal.show(survey, Console(width=100, file=out))
    text = out.getvalue()
    assert "[/red]a" in text
    assert "[bold]b" in text
    assert "Could not read [/x]: [link]" in text
