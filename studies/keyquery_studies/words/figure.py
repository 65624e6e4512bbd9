"""Figure of the study `words`: masked-token prediction, and losses by initialisation."""

from __future__ import annotations

from typing import Any

from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.words.planted_models import STARTS
from keyquery_studies.words.study import WordsStudy

# Display names of the prediction methods.
FILLED = {
    "unigram": "unigram frequency",
    "published": "projection, as published",
    "normed": "projection, Norm(M)",
    "ppmi": "projection of PPMI, Norm(M)",
    "equal": "PPMI, equal weights",
    "near": "naive Bayes, undirected",
    "directed": "naive Bayes, directed",
    "Transformer": "Transformer, same tokens",
    "Transformer, more": "Transformer, 128 tokens",
}
STARTED = {
    "random": "random",
    "symmetric": "symmetric, Wq = Wk",
    "embeddings": "embeddings: counts",
    "scores": "+ scores",
    "values": "+ values",
    "shuffled": "all, tokens shuffled",
}
COLOURS = dict(zip(STARTS, ("#24292f", "#54aeff", "#2a9d8f", "#2166ac", "#d6701c", "#8c959f"), strict=True))


def starts(reading: WordsStudy, pyplot: Any) -> Any:
    """Left, mean reciprocal rank by method; then one panel per objective: losses by initialisation."""
    names = [name for name in OBJECTIVES if any(row["objective"] == name for row in reading.trainings)]
    count = 1 + len(names)
    figure, axes = pyplot.subplots(1, count, figsize=(0.6 + 3.1 * count, 3.3), layout="constrained")
    rows = reading.summary()
    ways = [FILLED.get(row["way"], row["way"]) for row in rows]
    spreads = [row["reciprocal_sd"] or 0.0 for row in rows]
    axes[0].barh(ways, [row["reciprocal"] for row in rows], xerr=spreads, color=[_tone(way) for way in ways])
    axes[0].set(xlabel="mean reciprocal rank", title="masked tokens, held-out text")
    for axis, objective in zip(axes[1:], names, strict=True):
        _losses(axis, reading, objective)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Line2D([], [], color=COLOURS[start], label=STARTED[start]) for start in STARTS]
    figure.legend(handles=handles, loc="outside lower center", ncols=3 if count < 3 else len(STARTS), frameon=False)
    return figure


def _tone(way: str) -> str:
    return "#d6701c" if "Transformer" in way else "#8c959f" if way == FILLED["unigram"] else "#2166ac"


def _losses(axis: Any, reading: WordsStudy, objective: str) -> None:
    for row in reading.trainings:
        if row["objective"] == objective:
            steps, losses = zip(*row["curve"], strict=True)
            style = {"lw": 1.0, "alpha": 0.85, "ls": "--" if row["start"] == "shuffled" else "-"}
            axis.plot(steps, losses, color=COLOURS[row["start"]], **style)
    goal = reading.goals()[objective]
    axis.axhline(goal, color="#8c959f", lw=0.6, ls=":")
    axis.set(
        title=f"{objective}: loss by initialisation", xlabel="training step", ylabel="held-out loss, nats per token"
    )
