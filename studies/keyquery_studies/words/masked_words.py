"""Masked-token prediction on held-out text: the rank of the true token by counting methods and by a model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from keyquery.instruments.ablation.losses import logits
from keyquery.learn.cooccurrence.cooccurrence import Cooccurrence
from keyquery.learn.cooccurrence.counts import KINDS, normed_rows
from keyquery.learn.data import windows
from keyquery.listening.inputs.encoding import encoded
from keyquery.listening.inputs.load import load_model, load_tokenizer
from keyquery.support.files import write_all
from keyquery_studies.common.language_models import read_documents
from keyquery_studies.common.objectives import HELD_OUT
from keyquery_studies.common.store import digest_of, npy_bytes, read_json, result_name

REACH, WIDE, COUNT = 8, 64, 1000  # maximum context on either side of a masked token, and masked tokens per seed
FEW = 1e-9  # weight of frequency, which breaks ties of a score


def encode(corpus: str | Path | None, folder: Path, model: str | Path, force: bool = False) -> dict[str, Any]:
    """The facts of a corpus, whose tokens by a model's tokenizer are in `folder`; they are computed if missing.

    Default: the tokens that are already there.
    """
    kept, name = folder / "blanks.json", Path(model).name
    facts: dict[str, Any] = read_json(kept, {})
    if corpus is None:
        if facts.get("model") != name:
            raise ValueError(f"data must be a text file: {folder} holds no tokens of {name} from an earlier run")
        return facts
    text = "\n".join(read_documents(Path(corpus)))
    digest = digest_of(text)
    if (facts.get("digest"), facts.get("model")) == (digest, name):
        return facts
    if facts and not force:
        raise FileExistsError(
            f"{folder} holds tokens of {facts['corpus']}, made with other settings; --force replaces them"
        )
    tokenizer = load_tokenizer(model)
    if tokenizer is None or getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError(f"model must be a masked language model with its tokenizer, got {model}")
    ids = np.concatenate([np.asarray(encoded(tokenizer, line), dtype=np.int32) for line in text.splitlines(True)])
    facts = {"corpus": Path(corpus).name, "digest": digest, "model": name, "tokens": len(ids)}
    facts |= {"size": len(tokenizer), "mask": int(tokenizer.mask_token_id)}
    folder.mkdir(parents=True, exist_ok=True)
    write_all({folder / "blanks.npy": npy_bytes(ids), kept: json.dumps(facts) + "\n"})
    return facts


@lru_cache(maxsize=1)
def learned_from(folder: Path, size: int, window: int) -> Cooccurrence:
    """Directed counts of the training text."""
    ids = np.load(folder / "blanks.npy")
    return Cooccurrence.from_ids(ids[: int(len(ids) * (1 - HELD_OUT))], [str(at) for at in range(size)], window)


@dataclass(frozen=True, eq=False)
class Blanks:
    """Windows of held-out text, whose middle token is to be predicted."""

    texts: Int[Tensor, "count n"]

    @classmethod
    def of(cls, folder: Path, seed: int) -> Blanks:
        """Windows of a seed, from the test half of the held-out text."""
        ids = torch.from_numpy(np.load(folder / "blanks.npy").astype(np.int64))
        kept = int(len(ids) * (1 - HELD_OUT))
        last = ids[kept + (len(ids) - kept) // 2 :]
        return cls(windows(last, COUNT, 2 * WIDE + 1, torch.Generator().manual_seed(1000 + seed)))

    @property
    def truth(self) -> Int[Tensor, " count"]:
        """The true tokens."""
        return self.texts[:, WIDE]

    def around(self, reach: int) -> Int[Tensor, "count n"]:
        """The masked token, with so many tokens on either side."""
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


def rank_metrics(scores: Float[Tensor, "count words"], truth: Int[Tensor, " count"]) -> dict[str, float]:
    """Median rank of the true words (from 1, ties averaged), mean reciprocal rank, and top-10 accuracy."""
    own = scores.gather(1, truth[:, None])
    ranks = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return {
        "median": float(ranks.median()),
        "reciprocal": float((1 / ranks).mean()),
        "ten": float((ranks <= 10).float().mean()),
    }


def counting(counts: Cooccurrence, blanks: Blanks) -> dict[str, Float[Tensor, "count words"]]:
    """Scores of every word for every masked token, by counting method.

    - unigram: word frequency, regardless of context
    - published: e of the projection, with co-occurrence counts; normed: the same with Norm(M)
    - ppmi: PPMI in place of counts, context words weighted by attention, Norm(M); equal: weighted equally
    - near: naive Bayes, log p(word) + Σ log p(context word | word), counts of one more; directed: of context words
      before, and of those after
    """
    near = counts.symmetric()
    raw, ppmi = near.dense().float(), near.dense("ppmi").float()
    frequency = torch.from_numpy(counts.frequency).float()
    rankings = {
        "unigram": frequency.expand(len(blanks.truth), -1),
        "published": _projected(raw, blanks.context, normed=False),
        "normed": _projected(raw, blanks.context, normed=True),
        "ppmi": _projected(ppmi, blanks.context, normed=True),
        "equal": ppmi[blanks.context].mean(1),
        "near": _bayes(near, blanks),
        "directed": _bayes(counts, blanks),
    }
    tie = FEW * frequency / frequency.max()
    return {
        name: scores if name == "unigram" else scores + tie * scores.abs().max() for name, scores in rankings.items()
    }


def _projected(s: Float[Tensor, "n n"], context: Int[Tensor, "count r"], normed: bool) -> Float[Tensor, "count n"]:
    """The e of each row's projection: mean over r of M_r (QS)."""
    m = s[context[:, :, None], context[:, None, :]]
    weights = (normed_rows(m) if normed else m).mean(1)
    return torch.stack([weight @ s[words] for weight, words in zip(weights, context, strict=True)])


def _bayes(counts: Cooccurrence, blanks: Blanks) -> Float[Tensor, "count n"]:
    x = counts.dense().float() + 1
    log_given = (
        (x / x.sum(0)).log(),
        (x / x.sum(1, keepdim=True)).log().mT,
    )  # rows: context word before, after; columns: word
    frequency = torch.from_numpy(counts.frequency).float() + 1
    scores = log_given[0][blanks.before].sum(1) + log_given[1][blanks.after].sum(1)
    return scores + (frequency / frequency.sum()).log()


@torch.no_grad()
def filled(model: nn.Module, blanks: Blanks, mask: int, reach: int) -> Float[Tensor, "count n"]:
    """Predictions of a masked language model, with so many tokens on either side."""
    scores = []
    for part in blanks.around(reach).split(50):
        hidden = part.clone()
        hidden[:, reach] = mask
        scores.append(logits(model, {"input_ids": hidden})[:, reach].cpu())
    return torch.cat(scores)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Masked tokens of one seed, predicted by counts and by a masked language model."""

    seed: int
    text: str  # the digest of the corpus
    model: str
    size: int
    mask: int
    window: int = 5

    @property
    def name(self) -> str:
        """The name of its result file."""
        settings = {**asdict(self), "model": Path(self.model).name, "reach": [REACH, WIDE, COUNT]}
        return result_name(("ranks", self.seed), settings)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Ranks by every method, and the symmetry of the counts."""
        counts, blanks = learned_from(folder, self.size, self.window), Blanks.of(folder, self.seed)
        model = load_model(self.model, lm_head=True)[0].to(device).eval()
        ranks = {
            **counting(counts, blanks),
            "Transformer": filled(model, blanks, self.mask, REACH),
            "Transformer, more": filled(model, blanks, self.mask, WIDE),
        }
        ways = {way: rank_metrics(scores, blanks.truth) for way, scores in ranks.items()}
        symmetry = {kind: counts.symmetry(kind) for kind in KINDS}
        settings = {**asdict(self), "model": Path(self.model).name}
        return {**settings, "ways": ways, "symmetry": symmetry, "pairs": counts.total}
