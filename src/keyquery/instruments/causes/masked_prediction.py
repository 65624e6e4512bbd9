"""What a language model predicts at a word, and whether it still does with other words masked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from keyquery.capture.hooks import evaluating
from keyquery.capture.word_pieces import Words
from keyquery.checkpoints import read
from keyquery.instruments.ablation.losses import logits
from keyquery.instruments.causes.attention import check_length
from keyquery.support.checks import check_count


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction at a word. `words` is the text with it put back: what the graph is made from.

    An encoder sees the target's own pieces behind its mask token, a decoder only what stands before them. As a tester
    of `kq.explain`, it says whether masking some words changes the prediction: an encoder sees mask tokens in their
    place, a decoder a text without them.
    """

    model: nn.Module
    words: Words
    target: int
    mask: int | None  # the token that hides others; None for a decoder

    def __call__(self, positions: tuple[int, ...], target: int) -> bool:
        """Whether the prediction changes without the words at these positions."""
        hidden = [place for word in positions for place in self.words.places[word]]
        return self.predict(hidden) != [self.words.ids[place] for place in self.words.places[self.target]]

    def predict(self, hidden: list[int]) -> list[int]:
        """The most likely tokens of the target, with the tokens at some places hidden; none without a token before."""
        places, ids = self.words.places[self.target], list(self.words.ids)
        if self.mask is None:
            before = [number for place, number in enumerate(ids[: places[0]]) if place not in hidden]
            asked = range(len(before) - 1, len(before) - 1 + len(places))
            ids = before + [ids[place] for place in places]
            if not before:
                return []
        else:
            asked = range(places[0], places[-1] + 1)
            for place in (*hidden, *places):
                ids[place] = self.mask
        batch = replace(self.words, ids=ids).batch()
        with evaluating(self.model):
            found: list[int] = logits(self.model, batch)[0, list(asked)].argmax(-1).tolist()
        return found


def predicted(model: nn.Module, tokenizer: Any, words: Words, target: int) -> Predicted:
    """What a model that gives logits of tokens predicts at a word of a text, by position among its words."""
    check_count("target", target, least=0, most=len(words.texts) - 1)
    check_length(model, len(words.ids))
    causal = read(model)[0].causal
    mask = None if causal else getattr(tokenizer, "mask_token_id", None)
    if causal and words.places[target][0] == 0:
        raise ValueError("target is the first token, and a decoder predicts none: it must be at least 1")
    if not causal and mask is None:
        raise ValueError("target needs a mask token: the model sees both sides, and its tokenizer has none")
    found = Predicted(model, words, target, mask).predict([])
    ids = list(words.ids)
    for place, number in zip(words.places[target], found, strict=True):
        ids[place] = number
    said = tokenizer.decode(found).strip() or words.texts[target]
    texts = [said if word == target else text for word, text in enumerate(words.texts)]
    return Predicted(model, replace(words, ids=ids, texts=texts), target, mask)
