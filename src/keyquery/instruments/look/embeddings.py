"""What a look needs the embeddings of tokens for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keyquery.checkpoints import Heads, Layer
from keyquery.instruments.look.corpus import Corpus, corpus_of
from keyquery.instruments.look.directions import Directions
from keyquery.support.progress import Progress


@dataclass(frozen=True)
class Embedded:
    """What the embeddings of tokens are needed for: directions by their tokens, and a corpus to be held against."""

    directions: Directions | None
    count: int
    corpus: Corpus | None

    @classmethod
    def of(
        cls, found: Heads, directions: tuple[int, Any], corpus: Any, speaker: Any, window: int, watching: Progress
    ) -> Embedded:
        """Read only where they are needed; `directions` is how many, and the words of all tokens."""
        count, words = directions
        embedding = found.embedding() if count or corpus is not None else None
        described = None if embedding is None or not count else Directions(embedding, words)
        beside = None if corpus is None else corpus_of(corpus, embedding, speaker, window, watching)
        return cls(described, count, beside)

    @property
    def facts(self) -> dict[str, Any] | None:
        """Of the corpus."""
        return None if self.corpus is None else self.corpus.facts

    def joined(self, layer: Layer, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each head's figures with these; a layer of another width has none."""
        width = layer.form.dim
        if self.directions is not None and self.directions.width == width:
            cells = joined(cells, self.directions.of(layer.form, self.count))
        if self.corpus is not None and self.corpus.width == width and layer.kind != "cross":
            cells = joined(cells, [{"corpus": figures} for figures in self.corpus.of(layer)])
        return cells


def joined(cells: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of each head with further ones.

    >>> joined([{"head": 0}], [{"corpus": None}])
    [{'head': 0, 'corpus': None}]
    """
    return [{**cell, **further} for cell, further in zip(cells, more, strict=True)]
