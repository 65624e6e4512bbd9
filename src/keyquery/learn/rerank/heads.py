"""HeadReranker: passages re-ranked by the attention of a language model's own heads, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import nn

from keyquery.learn.base import Estimator
from keyquery.listening.call import Call
from keyquery.listening.inputs.batches import encoded, special_tokens
from keyquery.listening.inputs.data import token_argument
from keyquery.listening.inputs.load import load_model
from keyquery.listening.maps import is_square, layers_of, maps_by_head, run_with
from keyquery.support.checks import check_count
from keyquery.support.progress import bars

NULL = "N/A"  # the query without content that popularity is measured with
PASSAGE, QUERY = "[{}] {}\n", "Query: "


@dataclass(eq=False, repr=False)
class HeadReranker(Estimator):
    """Zero-shot re-ranking of passages by the retrieval heads of a language model (QRHead), with popularity removed.

    The prompt holds the passages and then the query. The score of a passage under a head is the attention that it gets
    from the tokens of the query, averaged over them, minus the same from a query without content ("N/A"): what every
    query gives to a passage, for its place or its words, is its popularity and not evidence. Scores are the mean over
    heads: all of them, or after `fit` on a few labelled queries the `heads` that separate relevant passages best.

    Parameters
    ----------
    model
        A model folder or file, as in `kq.look`, or a live model that takes token ids, which stays where it is.
    tokenizer
        Of a model that is not a path. Default: that of the path.
    heads
        Number of heads that `fit` chooses. Default: 16.
    calibrate
        Whether popularity is removed. Default: True.
    device
        Of a model that is a path. Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    Examples
    --------
    >>> model = kq.HeadReranker(kq.models.DECODER, device="cpu")
    >>> order, scores = model.rerank("the sea", ["A ship on the sea.", "A house in the town."])
    >>> sorted(order.tolist()), scores.shape
    ([0, 1], (2,))
    """

    model: Any
    tokenizer: Any = None
    heads: int = 16
    calibrate: bool = True
    device: str | torch.device = "auto"
    verbose: bool = False

    def fit(self, queries: Any, passages: Any, relevant: Any) -> HeadReranker:
        """Choose heads on labelled queries: `passages[i]` are the candidates of query i, `relevant[i]` indices of them.

        The separation of a head is the mean score of relevant passages minus that of the others, averaged over queries.

        Parameters
        ----------
        queries
            Texts of the queries.
        passages
            For each query, the texts of its candidates.
        relevant
            For each query, the indices of its relevant candidates.

        Returns
        -------
        HeadReranker
            The estimator, with the chosen heads.
        """
        check_count("heads", self.heads)
        if not len(queries) == len(passages) == len(relevant) or len(queries) == 0:
            sizes = f"{len(queries)}, {len(passages)} and {len(relevant)}"
            raise ValueError(f"queries, passages and relevant must be of one length, at least 1, got {sizes}")
        masks = [np.isin(np.arange(len(texts)), items) for texts, items in zip(passages, relevant, strict=True)]
        for number, mask in enumerate(masks):
            if mask.all() or not mask.any():
                raise ValueError(f"query {number} must have relevant passages and others, got {mask.sum()} relevant")
        separation = []
        with bars(self.verbose) as progress:
            labelled = zip(queries, passages, masks, strict=True)
            for query, texts, mask in progress(labelled, "choosing heads", len(queries)):
                scores = self.head_scores(query, texts)
                separation.append(scores[..., mask].mean(-1) - scores[..., ~mask].mean(-1))
        self.separation_ = np.mean(separation, 0)  # (layers, heads): the mean advantage of relevant passages
        best = np.argsort(-self.separation_, axis=None, kind="stable")[: self.heads]
        # Layer and head, best first.
        self.chosen_ = [divmod(int(number), self.separation_.shape[1]) for number in best]
        return self

    def rerank(self, query: Any, passages: Any) -> tuple[Int[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        """Indices of the passages, best first, and their scores in that order.

        Parameters
        ----------
        query
            The text of the query.
        passages
            Texts of the candidates.

        Returns
        -------
        tuple of ndarray
            Indices, best first, and scores in that order.
        """
        scores = self.head_scores(query, passages)
        chosen = getattr(self, "chosen_", None)
        mean = scores.mean((0, 1)) if chosen is None else np.mean([scores[head] for head in chosen], 0)
        order = np.argsort(-mean, kind="stable")
        return order, mean[order]

    def head_scores(self, query: Any, passages: Any) -> Float64[np.ndarray, "layers heads n"]:
        """Scores of the passages under every head.

        Parameters
        ----------
        query
            The text of the query.
        passages
            Texts of the candidates.

        Returns
        -------
        ndarray
            Scores (layers, heads, n).
        """
        if isinstance(passages, str) or len(passages) == 0 or not all(isinstance(text, str) for text in passages):
            raise ValueError("passages must be a list of at least one text")
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"query must be a text that is not empty, got {query!r}")
        scores = self._attention(query, passages)
        return scores - self._attention(NULL, passages) if self.calibrate else scores

    def _attention(self, query: str, passages: Sequence[str]) -> Float64[np.ndarray, "layers heads n"]:
        """Attention of the query's tokens to each passage, averaged over them."""
        model, tokenizer = self._loaded()
        start, _ = special_tokens(tokenizer, *passages)
        texts = [PASSAGE.format(number, text) for number, text in enumerate(passages, 1)]
        parts = [encoded(tokenizer, text) for text in (*texts, QUERY, query)]
        spans = list(pairwise(accumulate(map(len, parts), initial=len(start))))
        device = next(model.parameters()).device
        ids = torch.tensor([[*start, *(token for part in parts for token in part)]], device=device)
        scores: dict[int, list[np.ndarray]] = {}

        def add(call: Call, number: int) -> None:
            if not is_square(call):
                return
            for _, maps in maps_by_head(call.part(queries=slice(*spans[-1]))):
                row = maps[0, 0].double().mean(0)
                sums = torch.stack([row[slice(*span)].sum() for span in spans[: len(passages)]])
                scores.setdefault(number, []).append(sums.cpu().numpy())

        layers = layers_of(model, *run_with(model, {token_argument(model): ids}, add))
        return np.stack([np.stack(scores[layer.number]) for layer in layers])

    def _loaded(self) -> tuple[nn.Module, Any]:
        """The model and its tokenizer; a path is read once, in float32."""
        model, tokenizer = self.model, None
        if not isinstance(model, nn.Module):
            source, read = (str(self.model), str(self.device)), vars(self).get("_read")
            if read is None or read[0] != source:
                read = self._read = (source, *load_model(self.model, device=self.device, dtype="float32"))
            _, model, tokenizer = read
        tokenizer = self.tokenizer or tokenizer
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: pass one as tokenizer=")
        return model, tokenizer

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: a model that was read from a path is read again."""
        return {name: value for name, value in super().__getstate__().items() if name != "_read"}
