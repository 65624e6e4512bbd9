"""The two objectives on text: batches, loss, and validation on held-out text."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.look import look
from keyquery.learn.data import windows

OBJECTIVES = ("masked", "next token")
CAUSAL = {"masked": False, "masked causal": True, "next token": True}  # whether a model sees only earlier tokens
MASKED = 0.15  # of the tokens are prediction targets; 8 in 10 of these are masked, 1 in 10 replaced, 1 in 10 kept
HELD_OUT = 0.02  # of the corpus, at its end
BATCH = 128
LOOKED_AT = 64  # windows on which heads are analysed: means by position need at least 32
SHARES = (*PARTS, "interaction")


class Task:
    """One objective on one corpus; `checks` windows of the held-out text are what it is validated on."""

    def __init__(
        self,
        objective: str,
        ids: Int[Tensor, " tokens"],
        held_out: Int[Tensor, " held"],
        length: int,
        tokenizer: Tokenizer,
        batch: int = BATCH,
        checks: int = 256,
    ) -> None:
        self.objective = objective
        self.ids = ids
        self.length = length
        self.tokenizer = tokenizer
        self.batch = batch
        generator = torch.Generator().manual_seed(0)
        sequences = windows(held_out, checks, length + 1, generator)
        self.texts = sequences[:LOOKED_AT, :-1]
        self.held_out = [self._batch(part, generator) for part in sequences.split(32)]

    def draw(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets; −100 where there is no target."""
        return self._batch(windows(self.ids, self.batch, self.length + 1, generator), generator)

    def draw_many(self, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of several steps at once, (steps, batch, n)."""
        drawn = self._batch(windows(self.ids, steps * self.batch, self.length + 1, generator), generator)
        inputs, targets = (part.unflatten(0, (steps, self.batch)) for part in drawn)
        return inputs, targets

    def _batch(self, sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.objective == "next token":
            return sequences[:, :-1], sequences[:, 1:]
        sequences = sequences[:, :-1]
        dice, fate = torch.rand(2, *sequences.shape, generator=generator).to(sequences.device)
        random = torch.randint(2, len(self.tokenizer), sequences.shape, generator=generator).to(sequences.device)
        asked = dice < MASKED
        mask = self.tokenizer.mask_token_id
        assert mask is not None
        inputs = sequences.masked_fill(asked & (fate < 0.8), mask).where(~asked | (fate < 0.9), random)
        return inputs, sequences.masked_fill(~asked, -100)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy at the target tokens."""
        inputs, targets = batch
        return cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())

    def validate(self, model: nn.Module) -> float:
        """The loss on held-out text."""
        with torch.no_grad():
            return float(torch.stack([self.loss(model, batch) for batch in self.held_out]).mean())

    def look(self, model: nn.Module, length: int | None = None) -> list[dict[str, Any]]:
        """Every head's symmetry and shares on held-out text, unmasked, over the pairs that the model scores.

        `length` shortens the windows (default: the length that the model is trained with).
        """
        still, texts = copy.deepcopy(model).cpu().eval(), self.texts[:, :length].cpu()
        reading = look(still, inputs=[{"input_ids": texts}], length=texts.shape[1])
        return [
            {"layer": head["layer"], "head": head["head"], "raw_symmetry": head["raw"]["symmetry"]}
            | {name: head["on_data"][name] for name in ("symmetry", *SHARES)}
            for head in reading.heads
        ]
