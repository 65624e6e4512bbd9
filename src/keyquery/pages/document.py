"""Self-contained HTML pages: one file with its style, script and data, under a strict content security policy."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from keyquery.kinds import show_of
from keyquery.pages.colours import tones
from keyquery.reading import Reading

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("kit", "map", "table", "detail", "curve", "text", "graph")
MORE = {
    "cloud": "motion",
    "ranking": "motion",
    "trend": "trends",
    "triangle": "look",
}  # scripts of components that few pages have


def document(
    name: str,
    kind: str,
    tabs: Sequence[Mapping[str, Any]],
    facts: str = "",
    notes: Sequence[str] = (),
    figures: Sequence[str] = (),
    style: str = "",
    images: bool = False,
    **settings: Any,
) -> str:
    """A page from its tabs, each with a `frame` of items, the `state` it opens with, and `blocks` naming components.

    `figures` are pictures as SVG, to which blocks refer by number, with their `style`; `settings` are switches of the
    whole page and its state.
    """
    data = {"name": name, "kind": kind, "facts": facts, "notes": list(notes), "tabs": list(tabs), **settings}
    more = {MORE[block["type"]] for tab in tabs for block in tab["blocks"] if block["type"] in MORE}
    script, sheet = _script(*more), (ASSETS / "page.css").read_text(encoding="utf-8") + tones() + style
    parts = {"policy": policy(script, sheet, images), "style": sheet, "script": script, "figures": "".join(figures)}
    parts |= {"title": escape(f"{name}: {kind}"), "data": as_json(data)}
    # In one pass, so that nothing in the data is taken for a placeholder.
    shell = (ASSETS / "shell.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], shell)


def page(reading: Reading) -> str:
    """The page of a reading as self-contained HTML, if its kind has one."""
    draw = getattr(show_of(reading), "page", None)
    if draw is None:
        raise ValueError(f"a reading of kind {reading.kind!r} has no page")
    return str(draw(reading))


def as_json(data: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def policy(script: str, style: str, images: bool = False) -> str:
    """A content security policy that allows only this script and style, by digest, and embedded `images`."""
    only = f"script-src '{_digest(script)}'" if script else "script-src 'none'"
    only += f"; style-src '{_digest(style)}'" + ("; img-src data:" if images else "")
    return f"default-src 'none'; {only}; base-uri 'none'; form-action 'none'"


@cache
def _script(*more: str) -> str:
    text = "".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in (*SCRIPTS, *more))
    # Without indentation and lines of comment, a tenth of what every page carries.
    return re.sub(r"^[ ]*(//.*\n)?", "", text, flags=re.MULTILINE) + "begin();\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
