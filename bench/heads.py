"""HeadReranker: which of ten paragraphs continues a sentence, by a language model's own heads.

A query is the first sentence of a paragraph of WikiText-2; candidates are the rest of that paragraph and of nine others
of the same article, cut to 40 words. Heads are chosen on queries of the validation file, and everything is scored on
those of the test file: BM25, the mean of all heads, and the chosen heads, each with and without popularity removed.

    python bench/heads.py --data FOLDER --model FILE [--queries N] [--fit N] [--heads N]
"""

from __future__ import annotations

import argparse
import lzma
import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from harness import publish

import keyquery as kq

WORDS, CANDIDATES, SEED = 40, 10, 0


def questions(path, count):
    """Query, candidates and the index of the right one."""
    with lzma.open(path, "rt") as file:
        articles = re.split(r"\n = [^=]+ = \n", file.read())
    generator, found = random.Random(SEED), []
    generator.shuffle(articles)
    for article in articles:
        paragraphs = [line.strip().split(" . ", 1) for line in article.splitlines() if line.count(" . ") >= 2]
        paragraphs = [
            (first, " ".join(rest.split()[:WORDS])) for first, rest in paragraphs if len(rest.split()) >= WORDS
        ]
        if len(paragraphs) < CANDIDATES:
            continue
        chosen = generator.sample(paragraphs, CANDIDATES)
        right = generator.randrange(CANDIDATES)
        found.append((chosen[right][0], [rest for _, rest in chosen], right))
        if len(found) == count:
            break
    return found


def bm25(query, passages):
    """Okapi BM25 with its usual constants, 1.2 and 0.75; document frequencies are those of the candidates."""
    texts = [Counter(text.lower().split()) for text in passages]
    lengths = np.array([sum(text.values()) for text in texts])
    scores = np.zeros(len(texts))
    for word in set(query.lower().split()):
        counts = np.array([text[word] for text in texts])
        present = (counts > 0).sum()
        weight = math.log(1 + (len(texts) - present + 0.5) / (present + 0.5))
        scores += weight * counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * lengths / lengths.mean()))
    return scores


def rows_of(name, ranks):
    """The share ranked first and the mean reciprocal rank, with bootstrap intervals over queries."""
    rows, draws = [], np.random.default_rng(SEED).integers(len(ranks), size=(2000, len(ranks)))
    for metric, values in (("share ranked first", ranks == 0), ("mean reciprocal rank", 1 / (ranks + 1))):
        low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
        what = f"{metric}: {name}, {len(ranks)} queries, {CANDIDATES} passages each"
        rows.append({"what": what, "value": float(values.mean()), "low": float(low), "high": float(high)})
        rows[-1] |= {"unit": "", "goal": "—"}
        print(f"{what}: {values.mean():.3f} ({low:.3f} to {high:.3f})", flush=True)
    return rows


def rank(scores, right):
    return int((scores > scores[right]).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--fit", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = kq.HeadReranker(options.model, calibrate=False, device="cpu")

    def scored(file, count):
        """Candidates' attention from the query and from the empty one, per head; and the index of the right one."""
        results = []
        for query, passages, right in questions(options.data / file, count):
            attention = [model.head_scores(text, passages) for text in (query, "N/A")]
            results.append((query, passages, right, *attention))
            print(f"{file}: {len(results)}", flush=True)
        return results

    known, asked = scored("wikitext2_valid.txt.xz", options.fit), scored("wikitext2_test.txt.xz", options.queries)
    rows = rows_of("BM25", np.array([rank(bm25(query, passages), right) for query, passages, right, *_ in asked]))
    for removed in (False, True):
        label = "popularity removed" if removed else "popularity kept"
        of = [[(own - null if removed else own, right) for *_, right, own, null in part] for part in (known, asked)]
        gains = np.mean([s[..., right] - np.delete(s, right, -1).mean(-1) for s, right in of[0]], 0)
        best = np.unravel_index(np.argsort(-gains, axis=None, kind="stable")[: options.heads], gains.shape)
        every = np.array([rank(s.mean((0, 1)), right) for s, right in of[1]])
        rows += rows_of(f"all heads, {label}", every)
        rows += rows_of(
            f"{options.heads} chosen heads, {label}", np.array([rank(s[best].mean(0), right) for s, right in of[1]])
        )
    publish("heads", rows, seed=SEED, model=options.model.name, fitted_on=len(known), heads=options.heads)


if __name__ == "__main__":
    main()
