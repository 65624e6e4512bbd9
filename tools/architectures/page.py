"""docs/architectures.md from the rows of a sweep: what of each type was tried, and what is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tools.architectures.table import BAD, Tried, by_type
from tools.architectures.workers import ROOT

PAGE = ROOT / "docs" / "architectures.md"
HEAD = """# Architectures

Every config type of transformers {version}, and how its checkpoints are read. A tiny random model of each type was
built, saved and read, and the scores of every attention module, its mask and the norm that feeds it were compared with
those of the model, at several positions. **Exact** means a relative error of at most 1e-5 in all of them. **Content
exact** means the same for the product of queries and keys, while some layers have a position term that is not read; the
notes of those layers say so.

| status | types | meaning |
| --- | --- | --- |
{counts}

Then one field of the config after another was changed: booleans flipped, enumerations walked, numbers changed, rotary
positions of every kind, and what configs of released models say. Of {tried:,} configs that could be built, {read:,}
({share:.1f} %) are read exactly; {refused:,} are refused by the reader, and {unread:,} would be read wrongly and are
refused by the name of the field. "Fields" counts those that move scores and are read, and names those of which a value
is refused; where the cell is empty, the default config alone was tried. A file of a type that is in no row is labelled
"unproven", without positions; `keyquery prove FOLDER` tests a config. Regenerate: `python -m tools.architectures fields
CACHE.jsonl`.

| model type | status | attention modules | architecture | fields: read / refused | note |
| --- | --- | --- | --- | --- | --- |
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


def write(rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the page."""
    PAGE.write_text(page(list(rows)), encoding="utf-8")


def page(rows: list[Mapping[str, Any]]) -> str:
    """The page of a sweep."""
    defaults = {row["type"]: {**row, "status": _status(row)} for row in rows if row.get("change") == {}}
    counts = Counter(row["status"] for row in defaults.values())
    lines = "\n".join(f"| {status} | {counts[status]} | {text} |" for status, text in MEANING.items() if counts[status])
    of_type = by_type(rows)
    tried = {name: Tried.of(some) for name, some in of_type.items()}
    statuses = Counter(_came(row, tried[row["type"]]) for row in rows if "change" in row)
    read, unread = statuses["exact"] + statuses["inert"], sum(statuses[status] for status in BAD)
    facts = {"read": read, "refused": statuses["refused"], "unread": unread, "version": rows[0]["transformers"]}
    facts["tried"] = read + unread + statuses["refused"]
    text = HEAD.format(counts=lines, share=100 * read / max(facts["tried"], 1), **facts)
    order = list(MEANING)
    ordered = sorted(defaults.values(), key=lambda row: (order.index(row["status"]), row["type"]))
    return text + "".join(_line(row, _fields(tried[row["type"]])) for row in ordered)


def _status(row: Mapping[str, Any]) -> str:
    return "content exact" if row["status"] == "exact" and row["content"] else str(row["status"])


def _came(row: Mapping[str, Any], tried: Tried | None) -> str:
    """The status of a variant; a field that models ignore is ignored when their files are read."""
    ignored = tried is not None and row["status"] == "ignored" and tried.changed(row["change"]) <= set(tried.ignored())
    return "inert" if ignored else str(row["status"])


def _fields(tried: Tried | None) -> str:
    """How many fields that move scores are read, and which are refused."""
    if tried is None:
        return ""
    moving = set(tried.moving())
    refused = sorted(tried.blamed() & moving)
    return f"{len(moving) - len(refused)} / {', '.join(refused) or '–'}"


def _line(row: Mapping[str, Any], fields: str) -> str:
    note = str(row.get("reason") or "") if row["status"] != "exact" else ""
    note = re.sub(r"'/[^' ]*", "'…", " ".join(note.split()))  # no paths of the machine it was proven on
    note = note.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")
    note = note if len(note) <= 160 else note[:159] + "…"
    cells = [row["type"], row["status"], row.get("modules") or "", row.get("family") or "", fields, note]
    return f"| {' | '.join(map(str, cells))} |\n"
