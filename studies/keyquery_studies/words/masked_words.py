"""Blanks in text that nobody has learned from, and how far down the list a filler has the token that stood there."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from keyquery.capture.load import load_model, load_tokenizer
from keyquery.data import windows
from keyquery.forms.counts import KINDS, normed_rows
from keyquery.instruments.ablation.losses import logits
from keyquery.instruments.cooccurrence.cooccurrence import Cooccurrence, encoded
from keyquery.support.files import write_all
from keyquery_studies.common.jobs import name_of
from keyquery_studies.common.language_models import read_documents
from keyquery_studies.common.objectives import HELD_OUT

REACH, WIDE, COUNT = 8, 64, 1000  # tokens on either side of a blank, as the widest has it, and blanks a seed
FEW = 1e-9  # of a score, so that tokens that score alike go by how frequent they are


def encode(corpus: str | Path | None, folder: Path, model: str | Path, force: bool = False) -> dict[str, Any]:
    """The facts of a corpus whose tokens, by a model's tokenizer, lie in `folder`; they are made where they do not.

    Without a corpus, what lies there is used.
    """
    kept, name = folder / "blanks.json", Path(model).name
    facts: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if corpus is None:
        if facts.get("model") != name:
            raise ValueError(f"data must be a text file: {folder} holds no tokens of {name} from an earlier run")
        return facts
    text = "\n".join(read_documents(Path(corpus)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    if (facts.get("digest"), facts.get("model")) == (digest, name):
        return facts
    if facts and not force:
        raise FileExistsError(f"{folder} holds tokens of {facts['corpus']}, made otherwise; --force replaces them")
    tokenizer = load_tokenizer(model)
    if tokenizer is None or getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError(f"model must be one that finds masked tokens, with its tokenizer, and {model} is not")
    ids = np.concatenate([np.asarray(encoded(tokenizer, line), dtype=np.int32) for line in text.splitlines(True)])
    facts = {"corpus": Path(corpus).name, "digest": digest, "model": name, "tokens": len(ids)}
    facts |= {"size": len(tokenizer), "mask": int(tokenizer.mask_token_id)}
    packed = io.BytesIO()
    np.save(packed, ids)
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str | Path, str | bytes] = {folder / "blanks.npy": packed.getvalue(), kept: json.dumps(facts) + "\n"}
    write_all(contents)
    return facts


@lru_cache(maxsize=1)
def learned_from(folder: Path, size: int, window: int) -> Cooccurrence:
    """Directed counts of what is not held out."""
    ids = np.load(folder / "blanks.npy")
    return Cooccurrence.from_ids(ids[: int(len(ids) * (1 - HELD_OUT))], [str(at) for at in range(size)], window)


@dataclass(frozen=True, eq=False)
class Blanks:
    """Windows of held-out text, whose middle token is asked for."""

    texts: Int[Tensor, "count n"]

    @classmethod
    def of(cls, folder: Path, seed: int) -> Blanks:
        """Those of a seed: of the last half of what is held out, which chooses nothing in any training."""
        ids = torch.from_numpy(np.load(folder / "blanks.npy").astype(np.int64))
        kept = int(len(ids) * (1 - HELD_OUT))
        last = ids[kept + (len(ids) - kept) // 2 :]
        return cls(windows(last, COUNT, 2 * WIDE + 1, torch.Generator().manual_seed(1000 + seed)))

    @property
    def truth(self) -> Int[Tensor, " count"]:
        """What stood in the blank."""
        return self.texts[:, WIDE]

    def around(self, reach: int) -> Int[Tensor, "count n"]:
        """The blank, and so many tokens on either side of it."""
        return self.texts[:, WIDE - reach : WIDE + reach + 1]

    @property
    def before(self) -> Int[Tensor, "count reach"]:
        """Tokens to the left."""
        return self.around(REACH)[:, :REACH]

    @property
    def after(self) -> Int[Tensor, "count reach"]:
        """Tokens to the right."""
        return self.around(REACH)[:, REACH + 1 :]

    @property
    def context(self) -> Int[Tensor, "count words"]:
        """Tokens on both sides."""
        return torch.cat((self.before, self.after), 1)


def told_ranks(scores: Float[Tensor, "count words"], truth: Int[Tensor, " count"]) -> dict[str, float]:
    """Of the words that were there: median rank from 1, ties in the middle; mean of 1/rank; share among the first ten.

    >>> told_ranks(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([2]))
    {'median': 2.0, 'reciprocal': 0.5, 'ten': 1.0}
    """
    own = scores.gather(1, truth[:, None])
    ranks = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return {
        "median": float(ranks.median()),
        "reciprocal": float((1 / ranks).mean()),
        "ten": float((ranks <= 10).float().mean()),
    }


def counting(counts: Cooccurrence, blanks: Blanks) -> dict[str, Float[Tensor, "count words"]]:
    """Scores of every word for every blank, by ways to count.

    - unigram: how frequent a word is, whatever stands around it
    - published: e of the projection, with counts of what stands near; normed: the same with Norm(M)
    - ppmi: PPMI in place of counts, each word of the context weighed by attention, Norm(M); equal: all weighed alike
    - near: naive Bayes, log p(word) + Σ log p(context word | word), counts of one more; directed: of context words
      before, and of those after
    """
    near = counts.symmetric()
    raw, ppmi = near.dense().float(), near.dense("ppmi").float()
    frequency = torch.from_numpy(counts.frequency).float()
    found = {
        "unigram": frequency.expand(len(blanks.truth), -1),
        "published": _projected(raw, blanks.context, normed=False),
        "normed": _projected(raw, blanks.context, normed=True),
        "ppmi": _projected(ppmi, blanks.context, normed=True),
        "equal": ppmi[blanks.context].mean(1),
        "near": _bayes(near, blanks),
        "directed": _bayes(counts, blanks),
    }
    tie = FEW * frequency / frequency.max()
    return {name: scores if name == "unigram" else scores + tie * scores.abs().max() for name, scores in found.items()}


def _projected(s: Float[Tensor, "n n"], context: Int[Tensor, "count r"], normed: bool) -> Float[Tensor, "count n"]:
    """The e of each row's projection: mean over r of M_r (QS)."""
    m = s[context[:, :, None], context[:, None, :]]
    weights = (normed_rows(m) if normed else m).mean(1)
    return torch.stack([weight @ s[words] for weight, words in zip(weights, context, strict=True)])


def _bayes(counts: Cooccurrence, blanks: Blanks) -> Float[Tensor, "count n"]:
    x = counts.dense().float() + 1
    given = (
        (x / x.sum(0)).log(),
        (x / x.sum(1, keepdim=True)).log().mT,
    )  # rows: context word before, after; columns: word
    frequency = torch.from_numpy(counts.frequency).float() + 1
    found = given[0][blanks.before].sum(1) + given[1][blanks.after].sum(1)
    return found + (frequency / frequency.sum()).log()


@torch.no_grad()
def filled(model: nn.Module, blanks: Blanks, mask: int, reach: int) -> Float[Tensor, "count n"]:
    """What a model that finds masked tokens says of each blank, of so many tokens on either side."""
    scores = []
    for part in blanks.around(reach).split(50):
        hidden = part.clone()
        hidden[:, reach] = mask
        scores.append(logits(model, {"input_ids": hidden})[:, reach].cpu())
    return torch.cat(scores)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Blanks of one seed, filled by counting, and by a model that has learned to."""

    seed: int
    text: str  # the digest of the corpus
    model: str
    size: int
    mask: int
    window: int = 5

    @property
    def name(self) -> str:
        """The name of its file."""
        settings = {**asdict(self), "model": Path(self.model).name, "reach": [REACH, WIDE, COUNT]}
        return name_of(("ranks", self.seed), settings)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Ranks by every way, and what the counts are."""
        counts, blanks = learned_from(folder, self.size, self.window), Blanks.of(folder, self.seed)
        model = load_model(self.model, lm_head=True)[0].to(device).eval()
        found = {
            **counting(counts, blanks),
            "Transformer": filled(model, blanks, self.mask, REACH),
            "Transformer, more": filled(model, blanks, self.mask, WIDE),
        }
        ways = {way: told_ranks(scores, blanks.truth) for way, scores in found.items()}
        symmetry = {kind: counts.symmetry(kind) for kind in KINDS}
        settings = {**asdict(self), "model": Path(self.model).name}
        return {**settings, "ways": ways, "symmetry": symmetry, "pairs": counts.total}
