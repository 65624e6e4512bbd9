"""A trained model as a folder that can stand alone: weights, tokenizer, card and log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyquery._version import __version__
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.layers import LanguageModel, Shape
from keyquery.support.files import write_text

CARD = """# {title}

A small Transformer {kind}, trained by keyquery to be looked at, not to be used: depth {depth}, width {width}, {heads} \
heads per layer, a vocabulary of {vocabulary} byte-level tokens, learned positions for {length} tokens, {parameters:,} \
parameters in bfloat16. Its twin differs in the objective and in the attention mask.

- Objective: {objective}. Loss on held-out text: {loss:.3f} nats per token.
- Text: {corpus}, {tokens:,} tokens. {about}
- Recipe: `keyquery study objectives --corpus {corpus} --vocabulary {vocabulary} --width {width} --depth {depth} \
--steps {steps} --seed {seed}`, keyquery {version}; {batch} windows of {length} tokens per step, AdamW, learning rate \
{lr}, cosine; the log is in log.json.

It reproduces what its novels say about people and is not fit for any use but analysis.
"""


def write_model(folder: Path, model: LanguageModel, tokenizer: Tokenizer, facts: Mapping[str, Any]) -> None:
    """Weights in bfloat16, config.json, tokenizer.json, a card (README.md) and the training log."""
    model.save(folder)
    tokenizer.save(folder)
    count = sum(weight.numel() for weight in model.parameters())
    write_text(folder / "README.md", card(folder.name, model.config, count, facts))
    write_text(folder / "log.json", json.dumps(dict(facts), indent=1) + "\n")


def card(name: str, shape: Shape, parameters: int, facts: Mapping[str, Any]) -> str:
    """What the model is, what it was trained on, and how to train it again."""
    recipe = facts["recipe"]
    return CARD.format(
        title=f"keyquery {name}",
        kind="decoder" if shape.causal else "encoder",
        depth=shape.depth,
        width=shape.width,
        heads=shape.num_attention_heads,
        vocabulary=shape.vocab_size,
        length=shape.length,
        parameters=parameters,
        version=__version__,
        steps=recipe["steps"],
        lr=recipe["lr"],
        **{key: facts[key] for key in ("objective", "loss", "corpus", "tokens", "about", "batch", "seed")},
    )
