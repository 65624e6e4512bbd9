"""Study `words`: how far do co-occurrence counts go in predicting a masked token?

Masked tokens of held-out text are ranked by counts and by a Transformer. The initialisations and the heads of the
published reading were made at commit 7792c819.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery import models
from keyquery.instruments.ablation.losses import logits
from keyquery.instruments.look.embeddings import NAMES, level
from keyquery.instruments.look.reading import FORMER
from keyquery.learn.cooccurrence.cooccurrence import KINDS, Cooccurrence, normed_rows
from keyquery.learn.data import windows
from keyquery.listening.inputs.batches import encoded
from keyquery.listening.inputs.load import load_model, load_tokenizer
from keyquery.support.files import write_all
from keyquery.support.statistics import paired
from keyquery_studies.common.language_models import first_below, read_documents, text_in
from keyquery_studies.common.objectives import HELD_OUT
from keyquery_studies.common.rows import over_seeds, selected
from keyquery_studies.common.show import lines as lines
from keyquery_studies.common.store import digest_of, npy_bytes, read_json
from keyquery_studies.common.study import Rows, Study, StudyReading, Train, Trial, option

REACH, WIDE, COUNT = 8, 64, 1000  # maximum context on either side of a masked token, and masked tokens per seed
TIE = 1e-9  # weight of frequency, which breaks ties of a score
WHERE = 0.75  # of a training with random initialisation, whose loss there is the goal


@dataclass(frozen=True, kw_only=True)
class WordsStudy(StudyReading, kind="words study"):
    """Masked-token ranks by method and seed; trainings by initialisation; heads compared with the corpus."""

    former = FORMER

    ranks: Sequence[Mapping[str, Any]]  # one per method and seed
    trainings: Sequence[Mapping[str, Any]] = ()  # one per training, with its loss curve
    heads: Sequence[Mapping[str, Any]] = ()  # one per head of a trained model
    symmetry: Mapping[str, float]  # of the counts, their logarithms and PPMI

    def records(self) -> list[dict[str, Any]]:
        """One row per method and seed, per head, and per training, without its curve."""
        trained = [{key: value for key, value in row.items() if key != "curve"} for row in self.trainings]
        return [dict(row) for row in (*self.ranks, *self.heads)] + trained

    def summary(self) -> list[dict[str, Any]]:
        """One row per method, best last: median rank, mean reciprocal rank and top-10 accuracy, each with its sd."""
        return sorted(over_seeds(self.ranks, ["way"], ("median", "reciprocal", "ten")), key=lambda r: r["reciprocal"])

    def beside(self) -> list[dict[str, Any]]:
        """One row per model and layer: means over heads of what they share with the corpus, and their null levels."""
        rows = []
        for model, layer in dict.fromkeys((row["model"], row["layer"]) for row in self.heads):
            alike = selected(self.heads, model=model, layer=layer)
            means: dict[str, Any] = {"model": model, "layer": layer, "heads": len(alike)}
            for name in NAMES:
                means[name] = mean(row[name] for row in alike)
                means[f"{name}_level"] = mean(level(row, name) for row in alike)
            rows.append(means)
        return rows

    def goals(self) -> dict[str, float]:
        """Per objective, the loss that every random initialisation has reached after three quarters of its steps."""
        goals: dict[str, float] = {}
        for row in selected(self.trainings, start="random"):
            reached = min(loss for step, loss in row["curve"] if step <= WHERE * row["steps"])
            goals[row["objective"]] = max(goals.get(row["objective"], 0.0), reached)
        return goals

    def starts(self) -> list[dict[str, Any]]:
        """One row per objective and initialisation: steps to the goal and final loss, mean and sd over seeds.

        `saved` is how many steps fewer than at random, by seed, with a 95 % interval; None where some never come.
        """
        goals = self.goals()
        rows = [{**row, "reached": first_below(row["curve"], goals[row["objective"]])} for row in self.trainings]
        starts = []
        for means in over_seeds(rows, ["objective", "start"], ["reached", "loss"]):
            own, random = (
                {row["seed"]: row["reached"] for row in selected(rows, objective=means["objective"], start=start)}
                for start in (means["start"], "random")
            )
            seeds = sorted(own.keys() & random.keys())
            complete = len(seeds) > 1 and None not in (*own.values(), *random.values())
            pair = (torch.tensor([steps[seed] for seed in seeds]) for steps in (own, random)) if complete else None
            starts.append({**means, "saved": pair and paired(*pair)})
        return starts


@lru_cache(maxsize=1)
def learned_from(folder: Path, size: int, window: int) -> Cooccurrence:
    """Directed counts of the training text."""
    ids = np.load(folder / "blanks.npy")
    return Cooccurrence.from_ids(ids[: int(len(ids) * (1 - HELD_OUT))], list(map(str, range(size))), window)


def held_out(folder: Path, seed: int) -> Int[Tensor, "count n"]:
    """Windows from the test half of the held-out text, whose middle token is to be predicted."""
    ids = torch.from_numpy(np.load(folder / "blanks.npy").astype(np.int64))
    kept = int(len(ids) * (1 - HELD_OUT))
    tested = ids[kept + (len(ids) - kept) // 2 :]
    return windows(tested, COUNT, 2 * WIDE + 1, torch.Generator().manual_seed(1000 + seed))


def rank_metrics(scores: Float[Tensor, "count words"], truth: Int[Tensor, " count"]) -> dict[str, float]:
    """Median rank of the true words (from 1, ties averaged), mean reciprocal rank, and top-10 accuracy."""
    true = scores.gather(1, truth[:, None])
    ranks = 1 + (scores > true).sum(1) + ((scores == true).sum(1) - 1) / 2
    shares = {"reciprocal": 1 / ranks, "ten": (ranks <= 10).float()}
    return {"median": float(ranks.median()), **{name: float(share.mean()) for name, share in shares.items()}}


def counting(counts: Cooccurrence, texts: Int[Tensor, "count n"]) -> dict[str, Float[Tensor, "count words"]]:
    """Scores of every word for every masked token, by counting method.

    - unigram: word frequency, regardless of context
    - published: e of the projection, with co-occurrence counts; normed: the same with Norm(M)
    - ppmi: PPMI in place of counts, context words weighted by attention, Norm(M); equal: weighted equally
    - near: naive Bayes, log p(word) + Σ log p(context word | word), counts of one more; directed: of context words
      before, and of those after
    """
    before, after = texts[:, WIDE - REACH : WIDE], texts[:, WIDE + 1 : WIDE + REACH + 1]
    context, near = torch.cat((before, after), 1), counts.symmetric()
    raw, ppmi = near.dense().float(), near.dense("ppmi").float()
    frequency = torch.from_numpy(counts.frequency).float()
    rankings = {
        "unigram": frequency.expand(len(texts), -1),
        "published": _projected(raw, context, normed=False),
        "normed": _projected(raw, context, normed=True),
        "ppmi": _projected(ppmi, context, normed=True),
        "equal": ppmi[context].mean(1),
        "near": _bayes(near, before, after),
        "directed": _bayes(counts, before, after),
    }
    tie = TIE * frequency / frequency.max()
    return {way: scores + tie * scores.abs().max() * (way != "unigram") for way, scores in rankings.items()}


def _projected(s: Float[Tensor, "n n"], context: Int[Tensor, "count r"], normed: bool) -> Float[Tensor, "count n"]:
    """The e of each row's projection: mean over r of M_r (QS)."""
    m = s[context[:, :, None], context[:, None, :]]
    weights = (normed_rows(m) if normed else m).mean(1)
    return torch.stack([weight @ s[words] for weight, words in zip(weights, context, strict=True)])


def _bayes(counts: Cooccurrence, before: Tensor, after: Tensor) -> Float[Tensor, "count n"]:
    x = counts.dense().float() + 1
    given_before, given_after = (x / x.sum(0)).log(), (x / x.sum(1, keepdim=True)).log().mT
    frequency = torch.from_numpy(counts.frequency).float() + 1
    return given_before[before].sum(1) + given_after[after].sum(1) + (frequency / frequency.sum()).log()


@torch.no_grad()
def filled(model: torch.nn.Module, texts: Tensor, mask: int, reach: int) -> Float[Tensor, "count n"]:
    """Predictions of a masked language model, with so many tokens on either side."""
    hidden = texts[:, WIDE - reach : WIDE + reach + 1].clone()
    hidden[:, reach] = mask
    return torch.cat([logits(model, {"input_ids": part})[:, reach].cpu() for part in hidden.split(50)])


@dataclass(frozen=True, kw_only=True)
class Ranking(Trial):
    """Masked tokens of one seed, predicted by counts and by a masked language model."""

    seed: int
    text: str  # the digest of the corpus
    model: str
    size: int
    mask: int
    window: int = 5

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Ranks by every method, and the symmetry of the counts."""
        counts, texts = learned_from(folder, self.size, self.window), held_out(folder, self.seed)
        model = load_model(self.model, lm_head=True)[0].to(device).eval()
        ranks = counting(counts, texts)
        for way, reach in (("Transformer", REACH), ("Transformer, more", WIDE)):
            ranks[way] = filled(model, texts, self.mask, reach)
        ways = {way: rank_metrics(scores, texts[:, WIDE]) for way, scores in ranks.items()}
        return {**self.settings(), "ways": ways, "symmetry": {kind: counts.symmetry(kind) for kind in KINDS}}


@dataclass(frozen=True, kw_only=True)
class Words(Study):
    """How far do co-occurrence counts go?

    Masked tokens of held-out text are predicted from co-occurrence (PMI) and by a masked language model. Minutes on one
    core.
    """

    result = WordsStudy

    data: Path | None = option(None, "A text file, plain or compressed. Default: the tokens in --out.")
    model: Path = option(models.ENCODER, "A masked language model, which is compared with counts.")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "A seed.", "seed")
    window: int = option(5, "Maximum distance of two tokens to count as a pair.", least=1)

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """The facts of the corpus, whose tokens by the model's tokenizer are in `folder`; computed if missing."""
        facts: dict[str, Any] = read_json(folder / "blanks.json", {})
        if self.data is None:
            if facts.get("model") != self.model.name:
                raise ValueError(f"data must be a text file: {folder} holds no tokens of {self.model.name}")
            return {"blanks": facts}
        text = "\n".join(read_documents(text_in(self.data)))
        known, wanted = (facts.get("digest"), facts.get("model")), (digest_of(text), self.model.name)
        if known == wanted:
            return {"blanks": facts}
        if facts and not force:
            raise FileExistsError(f"{folder} holds tokens of {facts['corpus']}; --force replaces them")
        tokenizer: Any = load_tokenizer(self.model)
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise ValueError(f"model must be a masked language model with its tokenizer, got {self.model}")
        ids = np.concatenate([np.asarray(encoded(tokenizer, line), dtype=np.int32) for line in text.splitlines(True)])
        facts = {"corpus": self.data.name, "digest": wanted[0], "model": wanted[1], "tokens": len(ids)}
        facts |= {"size": len(tokenizer), "mask": int(tokenizer.mask_token_id)}
        folder.mkdir(parents=True, exist_ok=True)
        write_all({folder / "blanks.npy": npy_bytes(ids), folder / "blanks.json": json.dumps(facts) + "\n"})
        return {"blanks": facts}

    def rows(self, facts: Mapping[str, Any], train: Train) -> Rows:
        """The ranks by every method, and the symmetry of the counts."""
        about = facts["blanks"]
        same = {"text": about["digest"], "model": str(self.model), "size": about["size"], "mask": about["mask"]}
        ranked = train([Ranking(seed=seed, window=self.window, **same) for seed in self.seeds])
        ranks = [{"way": way, "seed": row["seed"], **found} for row in ranked for way, found in row["ways"].items()]
        return {"ranks": ranks, "symmetry": ranked[0]["symmetry"]}
