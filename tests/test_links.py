"""Links between pages: every file and every heading that a page names is there, and a how-to is short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")), *sorted(DOCS.glob("notebooks/*.ipynb"))]
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Made when the site is built: the command line, pages of notebooks, pages of the gallery.
MADE = {DOCS / "cli.md"}
MADE |= {path.with_suffix(".md") for path in DOCS.glob("notebooks/*.ipynb")}
MADE |= {path.with_name(path.name.replace(".json.xz", ".html")) for path in DOCS.glob("atlas/*.json.xz")}
MADE |= {path.parent / "appendix" / path.name for path in DOCS.glob("studies/*.md")}
MOST_WORDS = 300


def slug(heading):
    """The name of a heading, as the toc extension of Markdown makes it."""
    plain = re.sub(r"[`*]", "", heading).replace("\\", "")
    plain = "".join(letter for letter in plain if letter.isascii())
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def links(page):
    return [link for link in LINK.findall(FENCED.sub("", page.read_text())) if not re.match(r"\w+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() or target in MADE, link
        named = anchor.startswith("keyquery")  # an object of the reference: mkdocs checks those
        if anchor and target.suffix == ".md" and target not in MADE and not named:
            assert anchor in map(slug, HEADING.findall(FENCED.sub("", target.read_text()))), link


def test_links_are_seen():
    assert sum(len(links(page)) for page in PAGES) > 200
    assert slug("What is verified, and what is not") == "what-is-verified-and-what-is-not"


SHORT = [
    *sorted(DOCS.glob("howto/*.md")),
    *(DOCS / f"{name}.md" for name in ("roles", "attribution", "survey", "data")),
]


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.stem)
def test_a_how_to_is_short(page):
    assert len(page.read_text().split()) <= MOST_WORDS


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = DOCS.rglob("*.md")
    assert [page for page in pages if f": {page.relative_to(DOCS).as_posix()}\n" not in menu] == []
