"""Parts of a look that need the token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keyquery.checkpoints import Heads, Layer
from keyquery.instruments.look.corpus import Corpus, corpus_of
from keyquery.instruments.look.directions import Directions
from keyquery.support.progress import Progress


@dataclass(frozen=True)
class Embedded:
    """Token embeddings of a model: directions described by tokens, and a corpus to compare heads with."""

    directions: Directions | None
    count: int
    corpus: Corpus | None

    @classmethod
    def of(
        cls, heads: Heads, directions: tuple[int, Any], corpus: Any, tokenizer: Any, window: int, watching: Progress
    ) -> Embedded:
        """Read embeddings only if needed; `directions` is how many, and the text of every token."""
        count, words = directions
        embedding = heads.embedding() if count or corpus is not None else None
        described = None if embedding is None or not count else Directions(embedding, words)
        compared = (
            None if corpus is None or embedding is None else corpus_of(corpus, embedding, tokenizer, window, watching)
        )
        return cls(described, count, compared)

    @property
    def facts(self) -> dict[str, Any] | None:
        """Facts of the corpus; None without one."""
        return None if self.corpus is None else self.corpus.facts

    def joined(self, layer: Layer, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add these metrics to each head's; layers of another width get none."""
        width = layer.form.dim
        if self.directions is not None and self.directions.width == width:
            cells = joined(cells, self.directions.of(layer.form, self.count))
        if self.corpus is not None and self.corpus.width == width and layer.kind != "cross":
            cells = joined(cells, [{"corpus": metrics} for metrics in self.corpus.of(layer)])
        return cells


def joined(cells: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge further metrics into each head's."""
    return [{**cell, **further} for cell, further in zip(cells, more, strict=True)]
