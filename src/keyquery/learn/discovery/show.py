"""What displays of causal graphs share: edges in the terminal and as columns, pictures, figures and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyquery.learn.discovery.pag import Edge
from keyquery.pages.components import column, versioned
from keyquery.pages.document import document
from keyquery.pages.rings import (
    MEANS,
    STYLE,
    Ring,
    drawing,
    edge_text,
    inline,
    key_inline,
    kind_of,
    kinds_of,
    panels_figure,
)
from keyquery.pages.tables import Table, Text

LISTED = 40  # edges that the terminal shows
Names = Sequence[str]


def written(names: Names, edge: Edge) -> str:
    """An edge as text, such as "blue o→ whale"; an edge that points back is reversed."""
    i, j, at_i, at_j = edge
    return edge_text(names[i], names[j], at_i, at_j)


def edge_lines(names: Names, edges: Sequence[Edge], extra: Mapping[str, Sequence[str]], nodes: str) -> list[Any]:
    """Edges in the terminal with their meaning and `extra` columns; `nodes` names what the graph is over."""
    if not edges:
        return [f"No edges: all {nodes} are independent of each other."]
    table = plain_table(["edge", "meaning"], list(extra))
    for index, edge in enumerate(edges[:LISTED]):
        row = (values[index] for values in extra.values())
        table.add_row(Text(written(names, edge)), MEANS[kind_of(*edge[2:])], *row)
    more = f"The first {LISTED} of {len(edges)} edges; --json, --csv or --html for all."
    return [table, more] if len(edges) > LISTED else [table]


def plain_table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table with columns of texts, and then of numbers."""
    table = Table(box=None, pad_edge=False, header_style="")
    for title in (*texts, *numbers):
        table.add_column(title, justify="left" if title in texts else "right", no_wrap=True)
    return table


def edge_table(
    title: str, names: Names, edges: Sequence[Edge], *columns: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """The block of a page with a row per edge, and further columns."""
    text = column("edge", [written(names, edge) for edge in edges])
    meaning = column("meaning", [MEANS[kind_of(*edge[2:])] for edge in edges])
    return {"type": "table", "place": "five", "title": title, "columns": [text, meaning, *columns], **more}


def tests_note(tests: int, done: bool) -> str:
    """How many tests a search made."""
    return f"{tests:,} tests" + ("" if done else ", stopped early")


@dataclass(frozen=True)
class Drawn:
    """The panels of a reading, all edges in them, and the title and description of the picture."""

    panels: list[Ring]
    edges: list[Edge]
    title: str
    label: str

    def svg(self) -> str:
        """All panels as one SVG, for light and dark backgrounds."""
        return drawing(self.panels, kinds_of(self.edges), self.title, self.label)

    def figure(self, pyplot: Any) -> Any:
        """The panels as a matplotlib figure."""
        return panels_figure(self.panels, kinds_of(self.edges), self.title, pyplot)

    def page(
        self,
        kind: str,
        facts: str,
        sentences: Sequence[str],
        graph: Mapping[str, Any],
        blocks: Sequence[Mapping[str, Any]],
        provenance: Mapping[str, Any],
    ) -> str:
        """A page: sentences, the first panel with the words of `graph`, further blocks, and the other panels."""
        kinds = kinds_of(self.edges)
        figures = [*map(inline, self.panels), *map(key_inline, kinds)]
        legend = [[name, MEANS[name]] for name in kinds]
        first = {"type": "graph", "place": "seven", "legend": legend, "pictures": [0], **graph}
        page: list[Any] = [{"type": "summary", "sentences": list(sentences)}, first, *blocks]
        if len(self.panels) > 1:
            rest = list(range(1, len(self.panels)))
            page.append({"type": "graph", "title": "Each head", "words": [], "legend": [], "pictures": rest})
        notes = versioned([], provenance)
        return document(self.title, kind, [{"blocks": page}], facts, notes, figures, style=STYLE)
