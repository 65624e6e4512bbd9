"""Self-contained HTML pages: one file with its style, script and data, under a strict content security policy."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from keyquery.pages.embedded_json import as_json
from keyquery.pages.kinds import display_of, imported
from keyquery.reading import Reading

ASSETS = Path(__file__).parent / "old"
DATA = """<noscript>
<p>This page needs JavaScript, which is included in the file. All numbers are also in the JSON.</p>
</noscript>
<script type="application/json" id="data">{{data}}</script>
"""
SCRIPT = "<script>{{script}}</script>\n"


def document(
    body: str,
    title: str,
    scripts: Sequence[str] = (),
    data: Any = None,
    kind: str | None = None,
    own_style: str = "",
    images: bool = False,
    **parts: str,
) -> str:
    """Build a page from the assets."""
    common, own_sheet = ASSETS / "page.css", ASSETS / f"{body}.css"
    style = common.read_text(encoding="utf-8") + own_style
    style += own_sheet.read_text(encoding="utf-8") if own_sheet != common else ""
    script = "".join((ASSETS / name).read_text(encoding="utf-8") for name in scripts)
    embedded = (DATA if data is not None else "") + (SCRIPT if script else "")
    shell = (ASSETS / "shell.html").read_text(encoding="utf-8").replace("{{embedded}}", embedded)
    template = shell.replace("{{body}}", (ASSETS / f"{body}.html").read_text(encoding="utf-8"))
    own = {"policy": policy(script, style, images), "style": style, "script": script, "title": escape(title)}
    own |= {"tab": escape(f"{title}: {kind}" if kind else title), "data": "" if data is None else as_json(data)}
    # In one pass, so that nothing in the data is taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: {**own, **parts}[match[1]], template)


def page(reading: Reading) -> str:
    """The page of a reading as HTML.

    Parameters
    ----------
    reading
        A reading of a kind that has a page.

    Returns
    -------
    str
        HTML, self-contained.

    Examples
    --------
    >>> page(kq.look(torch.nn.MultiheadAttention(8, 2), name="two heads"))[:15]
    '<!doctype html>'
    """
    display = display_of(reading)
    if not display.page:
        raise ValueError(f"a reading of kind {reading.kind!r} has no page")
    return str(imported(display.page)(reading))


def policy(script: str, style: str, images: bool = False) -> str:
    """A content security policy that allows only this script and style, by digest, and embedded `images`."""
    only = f"script-src '{_digest(script)}'" if script else "script-src 'none'"
    only += f"; style-src '{_digest(style)}'" + ("; img-src data:" if images else "")
    return f"default-src 'none'; {only}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
