"""The prediction of a language model at a word, and whether it changes if other words are masked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from keyquery.checkpoints import read
from keyquery.instruments.ablation.losses import logits
from keyquery.listening.hooks import evaluating
from keyquery.listening.inputs.word_pieces import Words
from keyquery.listening.maps import check_length
from keyquery.support.checks import check_count


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction at a word, and the tester of `kq.explain`: does masking some words change it?

    They become mask tokens for an encoder, which has one at the target too, and are removed for a decoder.
    """

    model: nn.Module
    words: Words  # of the text with the prediction filled in, from which the graph is built
    target: int
    mask: int | None  # id of the mask token; None for a decoder

    def __call__(self, positions: tuple[int, ...], target: int) -> bool:
        """Whether the prediction changes without the words at these positions."""
        hidden = [piece for word in positions for piece in self.words.places[word]]
        return self.predict(hidden) != [self.words.ids[piece] for piece in self.words.places[self.target]]

    def predict(self, hidden: list[int]) -> list[int]:
        """The most likely tokens of the target with some tokens masked; empty if none precede it."""
        pieces, ids = self.words.places[self.target], list(self.words.ids)
        first = pieces[0]
        if self.mask is None:
            before = [number for piece, number in enumerate(ids[:first]) if piece not in hidden]
            if not before:
                return []
            first, ids = len(before) - 1, before + [ids[piece] for piece in pieces]
        else:
            for piece in (*hidden, *pieces):
                ids[piece] = self.mask
        with evaluating(self.model):
            output = logits(self.model, replace(self.words, ids=ids).batch())[0]
        predicted: list[int] = output[first : first + len(pieces)].argmax(-1).tolist()
        return predicted


def predicted(model: nn.Module, tokenizer: Any, words: Words, target: int) -> Predicted:
    """The prediction of a model with an LM head at a word of a text."""
    check_count("target", target, least=0, most=len(words.texts) - 1)
    check_length(model, len(words.ids))
    causal = read(model)[0].causal
    mask = None if causal else getattr(tokenizer, "mask_token_id", None)
    if causal and words.places[target][0] == 0:
        raise ValueError("target must be at least 1: a decoder does not predict the first token")
    if not causal and mask is None:
        raise ValueError("target needs a mask token: the model is bidirectional, and its tokenizer has none")
    new_ids = Predicted(model, words, target, mask).predict([])
    ids = list(words.ids)
    for piece, number in zip(words.places[target], new_ids, strict=True):
        ids[piece] = number
    prediction = tokenizer.decode(new_ids).strip() or words.texts[target]
    texts = [prediction if word == target else text for word, text in enumerate(words.texts)]
    return Predicted(model, replace(words, ids=ids, texts=texts), target, mask)
