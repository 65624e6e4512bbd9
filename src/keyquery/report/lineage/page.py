"""Lineage as a self-contained HTML page: the label, both tests, maps of layers, and the similarity of matched heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from keyquery.instruments.lineage.lineage import Lineage
from keyquery.instruments.lineage.significance import p_text
from keyquery.pages.document import document
from keyquery.report.lineage.terminal import CAVEAT, layer_names, runs

SIDE, LEFT, BELOW = 320, 46, 40  # pixels: of a figure, and of the room for its labels
MOST = 10  # heads that moved most
STRONGEST = 8.0  # standard deviations at which a pair of layers has its full colour


def lineage_page(reading: Lineage) -> str:
    """The page; it needs no script."""
    versions = reading.provenance.get("versions", {})
    figures = [_layers(reading, test) for test in reading.tests]
    return document(
        "lineage",
        f"{reading.theirs} and {reading.ours}",
        kind="lineage",
        facts=escape(
            f"is {reading.theirs} made from {reading.ours}? · keyquery {versions.get('keyquery', '')}".strip()
        ),
        label=escape(reading.label),
        reasons="".join(f"<li>{escape(reason)}</li>" for reason in reading.reasons),
        tests=_tests(reading),
        figures="".join((*figures, _heads(reading))),
        changes=_changes(reading) + _merge(reading),
        caveat=escape(CAVEAT),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>'


def _tests(reading: Lineage) -> str:
    names = layer_names(reading, "ours")
    rows = [(t["test"], f"{t['statistic']:.1f}", p_text(t["p"]), runs(t["path"], names)) for t in reading.tests]
    head = ("test", "statistic (sd of the null)", "p", "source of each layer")
    return _table(head, rows) if rows else ""


def _layers(reading: Lineage, test: Mapping[str, Any]) -> str:
    """All pairs of layers, and the path through them."""
    table = test["table"]
    ours, theirs = len(table), len(table[0])
    width, height = SIDE / theirs, SIDE / ours
    cells = [f'<rect class="plane" x="{LEFT}" y="0" width="{SIDE}" height="{SIDE}"/>']
    for row, values in enumerate(table):
        for column, z in enumerate(values):
            if z > 1:
                place = (
                    f'x="{LEFT + column * width:.1f}" y="{row * height:.1f}" width="{width:.1f}" height="{height:.1f}"'
                )
                shown = f"<title>{z:.1f}</title>" if ours * theirs <= 1024 else ""
                strength = min(z / STRONGEST, 1)
                cells.append(f'<rect class="layer-pair" {place} fill-opacity="{strength:.2f}">{shown}</rect>')
    points = " ".join(
        f"{LEFT + (column + 0.5) * width:.1f},{(row + 0.5) * height:.1f}" for column, row in enumerate(test["path"])
    )
    cells.append(f'<polyline class="path" points="{points}"/>')
    cells += _ticks(ours, height, vertical=True) + _ticks(theirs, width, vertical=False)
    caption = f"{test['test']}: layers"
    note = f"standard deviations above the null, full colour from {STRONGEST:g}; the line is the best path"
    return _figure(caption, note, cells, escape(reading.theirs), escape(reading.ours))


def _ticks(count: int, step: float, vertical: bool) -> list[str]:
    every = max(-(-count // 8), 1)
    if vertical:
        return [
            f'<text x="{LEFT - 6}" y="{(i + 0.5) * step + 4:.1f}" text-anchor="end">{i}</text>'
            for i in range(0, count, every)
        ]
    return [
        f'<text x="{LEFT + (i + 0.5) * step:.1f}" y="{SIDE + 14}" text-anchor="middle">{i}</text>'
        for i in range(0, count, every)
    ]


def _figure(caption: str, note: str, marks: Sequence[str], below: str, beside: str) -> str:
    labels = f'<text x="{LEFT + SIDE / 2}" y="{SIDE + 32}" text-anchor="middle">{below}</text>'
    labels += f'<text transform="translate(10 {SIDE / 2}) rotate(-90)" text-anchor="middle">{beside}</text>'
    svg = f'<svg viewBox="0 0 {LEFT + SIDE + 4} {SIDE + BELOW}" role="img">{"".join(marks)}{labels}</svg>'
    described = f'<figcaption><h3>{escape(caption)}</h3><span class="muted">{escape(note)}</span></figcaption>'
    return f'<figure class="wide">{described}{svg}</figure>'


def _heads(reading: Lineage) -> str:
    """The similarity of every head of the second model with its source, by both tests."""
    by_test = {test["test"]: [value for row in test["similarity"] for value in row] for test in reading.tests}
    if len(by_test) < 2:
        return ""
    first, second = by_test.values()
    marks = [
        f'<rect class="plane" x="{LEFT}" y="0" width="{SIDE}" height="{SIDE}"/>',
        *(
            f'<text x="{LEFT - 6}" y="{SIDE * (1 - v) + 4:.0f}" text-anchor="end">{v:g}</text>'
            f'<text x="{LEFT + SIDE * v:.0f}" y="{SIDE + 14}" text-anchor="middle">{v:g}</text>'
            for v in (0, 0.5, 1)
        ),
        *(
            f'<circle class="dot" cx="{LEFT + SIDE * max(x, 0):.1f}" cy="{SIDE * (1 - max(y, 0)):.1f}" r="4"/>'
            for x, y in zip(first, second, strict=True)
        ),
    ]
    note = "cosine of each head of the second model with its source; unrelated heads lie near the lower left"
    return _figure("heads", note, marks, "gaps of spectra", "QK forms")


def _changes(reading: Lineage) -> str:
    rows = sorted(reading.changes, key=lambda row: -(row["change"] or 0.0))[:MOST]
    if not any(row["change"] for row in rows):
        return ""
    columns = ("change", "symmetric", "skew")
    cells = [
        (f"{row['layer']}.{row['head']}", *("–" if row[c] is None else f"{row[c]:.3g}" for c in columns))
        for row in rows
    ]
    return "<h3>heads that moved most</h3>" + _table(("head", "‖ΔM‖/‖M‖", "symmetric", "skew"), cells)


def _merge(reading: Lineage) -> str:
    rows = [(str(row["model"]), f"{row['weight']:.3f}") for row in reading.merge]
    return "<h3>estimated weights of a merge</h3>" + _table(("model", "weight"), rows) if rows else ""
