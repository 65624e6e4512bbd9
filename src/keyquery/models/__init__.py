"""Two small models that ship, alike but for the objective, and texts to look at them on.

`keyquery study objectives` trains them. Each folder holds weights, tokenizer, card and training log.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
ENCODER = FOLDER / "encoder"  # learned to find masked words
DECODER = FOLDER / "decoder"  # learned to tell the next word
TEXT = FOLDER / "text.txt"  # 671 tokens
LONG_TEXT = FOLDER / "long_text.txt"  # the same, then chapters of a novel that neither model was trained on
LENGTH = 256  # tokens that both have places for

__all__ = ["DECODER", "ENCODER", "LENGTH", "LONG_TEXT", "TEXT"]
