"""docs/architectures.md from the table of proofs: `python docs/site/architectures.py PROOFS.jsonl`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from keyquery.checkpoints.family import families

PAGE = Path(__file__).parent.parent / "architectures.md"
HEAD = """# Architectures

Every config type of transformers {version}, and how its checkpoints are read. `keyquery prove` has built a tiny random
model of each type, saved it, read it, and compared the scores of every attention module with those that the model gave
to its softmax, at several positions. **Exact** means a relative error of at most 1e-5 in all of them. **Content exact**
means the same for the product of queries and keys, while some layers have a position term that is not read; the notes
of those layers say so. Sliding windows are compared as well.

| status | types | meaning |
| --- | --- | --- |
{counts}

Of the {bearing} types with attention that can be built here, {exact} ({share:.0f} %) are exact and {content} content
exact; the others are refused with the reason that stands below. A file of a type that is in no row is labelled
"unproven", without positions; `keyquery prove TYPE` tests it. Regenerate: `python -m tools.architectures prove --cache
proofs.jsonl`, then `python docs/site/architectures.py proofs.jsonl`.

| model type | status | attention modules | architecture | note |
| --- | --- | --- | --- | --- |
"""
MEANING = {
    "exact": "all scores agree",
    "content exact": "all scores agree but for a position term that is not read",
    "refused": "files are refused, with the reason",
    "no softmax attention": "nothing to read",
    "cannot be built": "no tiny model runs here: unproven",
    "wrong": "scores differ",
    "missing layers": "some attention modules are not read",
}


def page(rows: list[dict[str, Any]]) -> str:
    """The page of a table of proofs."""
    rows = [{**row, "status": "content exact" if _content_only(row) else row["status"]} for row in rows]
    found = Counter(row["status"] for row in rows)
    bearing = sum(found[status] for status in ("exact", "content exact", "refused", "wrong", "missing layers"))
    counts = "\n".join(f"| {status} | {found[status]} | {text} |" for status, text in MEANING.items() if found[status])
    facts = {"bearing": bearing, "exact": found["exact"], "share": 100 * found["exact"] / max(bearing, 1)}
    facts["content"] = found["content exact"]
    text = HEAD.format(version=rows[0]["transformers"], counts=counts, **facts)
    order = list(MEANING)
    rows = sorted(rows, key=lambda row: (order.index(row["status"]), row["model_type"]))
    return text + "".join(_line(row) for row in rows)


def _content_only(row: dict[str, Any]) -> bool:
    """Whether an exact reading leaves out a position term."""
    if "content" in row:
        return row["status"] == "exact" and bool(row["content"])
    kinds = families()[row["family"]].attention if row["status"] == "exact" else []
    return any("unread" in (kind.rope, kind.position) for kind in kinds)


def _line(row: dict[str, Any]) -> str:
    note = "" if row["status"] == "exact" and not row["reason"] else row["reason"]
    note = re.sub(r"'/[^' ]*", "'…", " ".join(note.split()))  # no paths of the machine it was proven on
    note = note.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")
    note = note if len(note) <= 160 else note[:159] + "…"
    modules = str(len(row["modules"]) or len(row["missing"]) or "")
    return f"| {row['model_type']} | {row['status']} | {modules} | {row['family'] or ''} | {note} |\n"


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    latest = {row["model_type"]: row for row in map(json.loads, lines)}  # later lines hold
    PAGE.write_text(page(list(latest.values())), encoding="utf-8")
