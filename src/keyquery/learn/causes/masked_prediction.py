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
    """The prediction at a word. `words` is the text with the prediction filled in, from which the graph is built.

    An encoder has a mask token at the target, a decoder sees only the tokens before it. As the tester of `kq.explain`,
    it returns whether masking some words changes the prediction: they become mask tokens for an encoder, and are
    removed for a decoder.
    """

    model: nn.Module
    words: Words
    target: int
    mask: int | None  # id of the mask token; None for a decoder

    def __call__(self, positions: tuple[int, ...], target: int) -> bool:
        """Whether the prediction changes without the words at these positions."""
        hidden = [place for word in positions for place in self.words.places[word]]
        return self.predict(hidden) != [self.words.ids[place] for place in self.words.places[self.target]]

    def predict(self, hidden: list[int]) -> list[int]:
        """The most likely tokens of the target with some tokens masked; empty if none precede it."""
        places, ids = self.words.places[self.target], list(self.words.ids)
        if self.mask is None:
            before = [number for place, number in enumerate(ids[: places[0]]) if place not in hidden]
            queried = range(len(before) - 1, len(before) - 1 + len(places))
            ids = before + [ids[place] for place in places]
            if not before:
                return []
        else:
            queried = range(places[0], places[-1] + 1)
            for place in (*hidden, *places):
                ids[place] = self.mask
        batch = replace(self.words, ids=ids).batch()
        with evaluating(self.model):
            predicted: list[int] = logits(self.model, batch)[0, list(queried)].argmax(-1).tolist()
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
    for place, number in zip(words.places[target], new_ids, strict=True):
        ids[place] = number
    prediction = tokenizer.decode(new_ids).strip() or words.texts[target]
    texts = [prediction if word == target else text for word, text in enumerate(words.texts)]
    return Predicted(model, replace(words, ids=ids, texts=texts), target, mask)
