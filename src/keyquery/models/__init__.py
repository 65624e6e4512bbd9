"""Two small bundled models that differ only in their training objective, and texts to analyse them on.

`keyquery study objectives` trains them. Each folder holds weights, tokenizer, model card and training log.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
ENCODER = FOLDER / "encoder"  # trained by masked language modelling
DECODER = FOLDER / "decoder"  # trained by causal language modelling
TEXT = FOLDER / "text.txt"  # 671 tokens
LONG_TEXT = FOLDER / "long_text.txt"  # the same, then chapters of a novel that neither model was trained on
LENGTH = 256  # context length of both

__all__ = ["DECODER", "ENCODER", "LENGTH", "LONG_TEXT", "TEXT"]
