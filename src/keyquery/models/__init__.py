"""Two small bundled models that differ in training objective and attention mask, and texts to analyse them on.

`keyquery study objectives` trains them. Each folder holds weights, tokenizer, model card and training log.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
ENCODER = FOLDER / "encoder"  # masked language modelling, bidirectional attention
DECODER = FOLDER / "decoder"  # next-token prediction, causal attention
TEXT = FOLDER / "text.txt"  # 671 tokens
LONG_TEXT = FOLDER / "long_text.txt"  # the same, then chapters of a novel that neither model was trained on
LENGTH = 256  # context length of both
DIFFERENCE = (
    "same architecture, novels and number of steps; two things differ: the objective (encoder: masked tokens, decoder: "
    "next token) and the attention mask (encoder: both directions, decoder: causal). This pair does not tell which of "
    "the two makes the heads differ"
)

__all__ = ["DECODER", "DIFFERENCE", "ENCODER", "LENGTH", "LONG_TEXT", "TEXT"]
