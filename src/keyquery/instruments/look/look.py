"""`look`: the geometry of every head of a model, from its weights and, if there is any, on data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from keyquery.capture import text_batches
from keyquery.capture.batches import LENGTH, read_lines
from keyquery.capture.hooks import Batch
from keyquery.capture.load import load_model
from keyquery.checkpoints import Heads, Layer, read
from keyquery.checkpoints.fitted import opened
from keyquery.checkpoints.sources import bare
from keyquery.checkpoints.vocabulary import vocabulary
from keyquery.instruments.cooccurrence.cooccurrence import Cooccurrence
from keyquery.instruments.look.embeddings import Embedded, joined
from keyquery.instruments.look.labels import Thresholds, label_head, properties
from keyquery.instruments.look.metrics import figures_of, of_whole_layer
from keyquery.instruments.look.on_data import PAIRS, SHARES, OnData
from keyquery.instruments.look.sample import take
from keyquery.instruments.look.validity import check_look
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress, silent

Measured = tuple[dict[str, Any], list[dict[str, Any]]]  # what is said of a layer, and of each of its heads


# Names of schema 1.
FORMER = {
    "directionality": "column_directionality",
    "directionality_norms": "column_directionality_norms",
    **{f"compares{of}": f"symmetric_cosine{of}" for of in ("", "_chance", "_random")},
    **{f"points{of}": f"skew_cosine{of}" for of in ("", "_chance", "_random")},
}


@dataclass(frozen=True, kw_only=True)
class Look(Reading, kind="look"):
    """The geometry of every head and layer of a model.

    Views are never mixed: `raw` is of the weights alone, `folded` has biases, norm gains and shifts in it, `on_data`
    is of the form as it acts on real activations.
    """

    units: ClassVar[Mapping[str, str]] = {
        "symmetry": "tr(M²)/‖M‖², −1 skew to 1 symmetric",
        "column_directionality": "−1 columns to 1 rows stand out, by what exceeds mean + 2 std",
        "column_directionality_norms": "the same, by whole norms",
        "symmetric_energy": "‖S‖²",
        "skew_energy": "‖A‖²",
        "positive_share": "of ‖S‖²",
        "effective_rank": "exp of the entropy of σ(M)",
        "stable_rank": "‖M‖²/σ₁²",
        "eigenvalues": "of S, descending",
        "skew_values": "singular values of A, descending",
        "singular_values": "of M, descending",
        "scale": "by which the model multiplies the score",
        "scores": "of the sample's tokens, query by key, scaled; their sum's softmax is the attention",
        "symmetric": "of the variance of scores over visible pairs; so are skew, popularity, query_only, position",
        "interaction": "of that variance: 2·covariances between parts; shares and interaction sum to 1",
        "sink": "of that variance: the first key against all others, in the position part",
        "half_window": "the same shares over pairs within the first half of each window",
        "effective_rank_symmetric": "of S on data, at offset 0; likewise effective_rank_skew",
        "contents": "symmetry of M(Δ): contents change places, the offset stays",
        "symmetric_cosine": "cosine of the symmetric parts of scores between tokens and of a corpus's PPMI, centred",
        "skew_cosine": "the same of the skew parts: above 0 at what comes after, below 0 at what comes before",
        "explained": "share of the scores between tokens that the corpus's PPMI accounts for",
        "exchange": "symmetry of ½(M(Δ) ± M(−Δ)ᵀ): tokens change places with their positions",
    }

    former = FORMER
    model: Mapping[str, Any]
    layers: list[dict[str, Any]]
    heads: list[dict[str, Any]]
    sample: Mapping[str, Any] | None = None
    corpus: Mapping[str, Any] | None = None  # what heads were held against, where that was asked for
    summary: Mapping[str, int] = field(default_factory=dict)  # heads by label, most first; counted, whatever is given

    def __post_init__(self) -> None:
        super().__post_init__()
        check_look(self.model, self.layers, self.heads)
        counts = Counter(head["label"] for head in self.heads).most_common()
        object.__setattr__(self, "summary", dict(counts))

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {label}" for label, count in self.summary.items())
        return f"Look({self.model['name']}: {len(self.heads)} heads in {len(self.layers)} layers: {counts})"

    def records(self) -> list[dict[str, Any]]:
        """One row per head: its place, every figure of each view that is one number, intervals, and the label."""
        rows = []
        for head in self.heads:
            row = {key: head[key] for key in ("layer", "head", "name")}
            for view in ("raw", "folded", "on_data"):
                figures = head[view] or {}
                row |= {f"{view}_{key}": value for key, value in figures.items() if not isinstance(value, (list, dict))}
                for key, ends in figures.get("intervals", {}).items():
                    low, high = ends or (None, None)
                    row |= {f"{view}_{key}_low": low, f"{view}_{key}_high": high}
            row |= {f"corpus_{key}": value for key, value in head.get("corpus", {}).items()}
            known = {key: head[key] for key in ("label", "evidence")}
            rows.append({**row, **known, "properties": ", ".join(head["properties"])})
        return rows


def look(
    source: str | Path | nn.Module,
    text: str | Path | None = None,
    inputs: Batch | Iterable[Batch] | None = None,
    layers: Sequence[int] | None = None,
    *,
    heads: int | None = None,
    query: str | None = None,
    key: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    layout: str | None = None,
    tokenizer: Any = None,
    length: int = LENGTH,
    lengths: Sequence[int] | None = None,
    tokens: int = 20_000,
    pairs: str = "visible",
    directions: int = 0,
    sample: int = 0,
    corpus: str | Path | Cooccurrence | None = None,
    window: int = 5,
    name: str | None = None,
    thresholds: Thresholds | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Look:
    """Every head's geometry as a Reading, from a path, a hub name, a live model or a fitted estimator.

    Parameters
    ----------
    source
        A folder, a file, a hub name, a live model or a fitted estimator.
    text, inputs
        A file of lines, or batches of tensors that the model takes: the model is run on them, and the scores of its
        heads are divided into parts. Default: weights alone.
    layers
        Which layers. Default: all.
    heads, query, key, config, layout
        As in `read`, for checkpoints that do not say.
    tokenizer
        For `text`. Default: the one beside the model.
    length, tokens
        The text is cut into windows of `length` tokens, at most `tokens` in all. Default: 128 and 20,000.
    lengths
        Other windows, whose shares are measured too: shares depend on the window. Default: none.
    pairs
        "visible": shares are of the variance over the pairs that the model scores. "independent": in closed form, as
        if tokens were independent. Default: "visible".
    directions
        How many eigenvectors of S and planes of A to describe by tokens. Default: 0.
    sample
        Of how many tokens at the start of the data to keep every head's scores, in parts. Default: 0.
    corpus, window
        A text file, or a `kq.Cooccurrence`: each head beside what stands within `window` tokens of what.
    name
        Of the model. Default: that of its file.
    thresholds
        Where figures decide on labels. Default: `Thresholds()`.
    workers
        Layers that are measured at a time, each by one thread. Default: 1.
    progress
        Wraps iterables in progress bars. Default: none.

    Examples
    --------
    >>> reading = kq.look(torch.nn.TransformerEncoderLayer(d_model=8, nhead=2))
    >>> [(head["layer"], head["head"]) for head in reading.heads]
    [(0, 0), (0, 1)]
    """
    check_count("sample", sample, least=0)
    check_choice("pairs", pairs, PAIRS)
    lengths = _other_windows(lengths, text)
    source, name = opened(source, name, text=text, corpus=corpus, heads=heads, query=query, key=key, config=config)
    source = bare(source) if isinstance(source, nn.Module) else getattr(source, "network_", source)
    watching, live = progress or silent, isinstance(source, nn.Module)
    called = {"name": name or Path(str(source)).name} if name or not live else {}
    words, named = None if live or not directions else vocabulary(str(source)), str(source)
    if text is None and inputs is None:
        found, seen, curves = read(source, heads, query, key, config, layout), OnData(), {}
    else:
        source, batches, spoken, used = _prepare(source, text, inputs, tokenizer, length, tokens, watching)
        found = read(source, heads, query, key, config, layout)
        kept = take(source, batches, found, sample, spoken)
        facts = {"from": used, "pairs": pairs}
        seen = OnData.of(source, batches, found, {"longest": length, **facts}, kept, watching)
        curves = {
            one: OnData.of(
                source, _cut(source, text, spoken, one, tokens), found, {"longest": one, **facts}, None, watching
            )
            for one in lengths
        }
    tensors, chosen, speaker = found.recorded(), _chosen(found, layers), tokenizer or (None if live else named)
    tokens_of = Embedded.of(found, (directions, words), corpus, speaker, window, watching)

    def measure(index: int) -> Measured:
        layer = found[index]
        row, cells = _measured(layer, found, seen, thresholds or Thresholds())
        return row, tokens_of.joined(layer, _with_lengths(cells, layer, found, curves))

    measured = list(watching(_in_turn(measure, chosen, workers), "reading layers", len(chosen)))
    shown = None if seen.sample is None else seen.sample.told()
    facts = {**found.model, "width": found[chosen[0]].form.dim, **called}
    return _whole(facts, measured, tensors, data=seen.facts, sample=shown, corpus=tokens_of.facts)


def look_at_layer(layer: Layer, found: Heads) -> Measured:
    """What `look` says of one layer of `found` and its heads, from the weights alone; `whole_look` joins layers.

    >>> heads = kq.read(torch.nn.MultiheadAttention(8, 2))
    >>> row, cells = look_at_layer(heads[0], heads)
    >>> row["layer"], [cell["head"] for cell in cells]
    (0, [0, 1])
    """
    return _measured(layer, found, OnData(), Thresholds())


def whole_look(facts: Mapping[str, Any], measured: Iterable[Measured], tensors: Mapping[str, str]) -> Look:
    """The look of a model from what is said of each of its layers; `facts` are `Heads.model` and the width.

    `tensors` are the digests of what was read of it, as `Heads.recorded` gives them.

    >>> model = torch.nn.MultiheadAttention(8, 2)
    >>> heads = kq.read(model)
    >>> tensors = heads.recorded()
    >>> whole_look({**heads.model, "width": 8}, [look_at_layer(heads[0], heads)], tensors) == kq.look(model)
    True
    """
    return _whole(facts, list(measured), tensors)


def _whole(
    facts: Mapping[str, Any], measured: list[Measured], tensors: Mapping[str, str], data: Any = None, **more: Any
) -> Look:
    rows, cells = [row for row, _ in measured], [cell for _, more in measured for cell in more]
    model = {**facts, "heads": len(cells)}
    said = provenance(data=data, tensors=dict(sorted(tensors.items())))  # layers may be read in any order
    return Look(model=model, layers=rows, heads=cells, **more, provenance=said)


def _in_turn(measure: Callable[[int], Any], chosen: list[int], workers: int) -> Iterator[Any]:
    """Layers in order, several at a time: on small matrices one thread a layer beats many threads a matrix."""
    if workers == 1:
        yield from map(measure, chosen)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(measure, chosen)
    finally:
        torch.set_num_threads(before)


def _prepare(
    source: Any,
    text: str | Path | None,
    inputs: Batch | Iterable[Batch] | None,
    tokenizer: Any,
    length: int,
    tokens: int,
    watching: Progress,
) -> tuple[nn.Module, list[Batch], Any, str]:
    """A live model, its batches, its tokenizer or None, and where the batches come from."""
    if text is not None and inputs is not None:
        raise ValueError("give text or inputs, not both: each says what the model is run on")
    given = [inputs] if isinstance(inputs, Mapping) else inputs
    if isinstance(given, (Tensor, str)):
        raise TypeError(f"inputs must be batches, mappings of what the model takes, got a {type(given).__name__}")
    lines = None if text is None else read_lines(text)
    live = isinstance(source, nn.Module)
    [(model, found)] = [(one, None) if live else load_model(one) for one in watching([source], "building the model", 1)]
    taken = getattr(model, "main_input_name", "input_ids")
    if lines is not None and taken != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {taken}, not text: give `inputs` from Python")
    tokenizer = tokenizer or found
    if lines is None:
        return model, list(given or []), tokenizer, "inputs"
    if tokenizer is None:
        raise ValueError("text needs a tokenizer: none lies beside the model, and none was given")
    return model, _cut(model, lines, tokenizer, length, tokens), tokenizer, Path(str(text)).name


def _other_windows(lengths: Sequence[int] | None, text: str | Path | None) -> list[int]:
    for one in (lengths := list(lengths or [])):
        check_count("lengths", one, least=2)
    if lengths and text is None:
        raise ValueError("lengths are windows of a text: give text, too")
    return lengths


def _cut(
    model: nn.Module, text: str | Path | list[str] | None, tokenizer: Any, length: int, tokens: int
) -> list[Batch]:
    """A text in windows of `length` tokens, as batches that the model takes."""
    assert text is not None
    lines = text if isinstance(text, list) else read_lines(text)
    batches: list[Batch] = list(text_batches(lines, tokenizer, length, tokens))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in batches]
    return batches


def _chosen(found: Heads, layers: Sequence[int] | None) -> list[int]:
    chosen = list(range(len(found))) if layers is None else list(dict.fromkeys(layers))
    wrong = [layer for layer in chosen if not 0 <= layer < len(found)]
    if wrong or not chosen:
        asked = f"there is no layer {wrong[0]}" if wrong else "no layer is chosen"
        raise ValueError(f"{asked}: {found.source.label} has layers 0 to {len(found) - 1}")
    return chosen


def _place(layer: Layer) -> dict[str, Any]:
    notes = {"notes": list(layer.notes)} if layer.notes else {}
    return {"layer": layer.index, "name": layer.name, "kind": layer.kind, **notes}


def _measured(layer: Layer, found: Heads, seen: OnData, thresholds: Thresholds) -> Measured:
    """The figures of all heads together, and of each."""
    cells = _apart(layer, found, seen, thresholds)
    return {**_place(layer), "causal": layer.causal, "raw": of_whole_layer(layer.form)}, cells


def _apart(layer: Layer, found: Heads, seen: OnData, thresholds: Thresholds) -> list[dict[str, Any]]:
    """Every head's own figures."""
    form = layer.form
    raw, folded = figures_of(form, layer.rope), figures_of(layer.folded)
    cells = []
    for head, on_data in enumerate(seen.of_layer(layer, found)):
        known = label_head(raw[head], on_data, None, thresholds)
        if on_data is not None and "half_window" in on_data:
            half = label_head(raw[head], {**on_data["half_window"], "sink": on_data["sink"]}, None, thresholds).label
            decided = half != known.label and known.label != "undecided"
            on_data["changes_with_window"] = on_data.pop("sign_changes") + ["label"] * decided
        cells.append(
            {
                **_place(layer),
                "head": head,
                "name": f"{layer.name}.{head}",
                "scale": layer.scale,
                "rank": form.rank,
                "raw": raw[head],
                "folded": folded[head],
                "on_data": on_data,
                **known._asdict(),
                "properties": properties(raw[head], on_data, form.rank, thresholds),
            }
        )
    scores = seen.scores(layer, found)
    return cells if scores is None else joined(cells, [{"scores": of_head} for of_head in scores])


def _with_lengths(
    cells: list[dict[str, Any]], layer: Layer, found: Heads, curves: Mapping[int, OnData]
) -> list[dict[str, Any]]:
    """Each head with its shares in other windows."""
    rows = {length: seen.of_layer(layer, found) for length, seen in sorted(curves.items())}
    if not rows or next(iter(rows.values()))[0] is None:
        return cells
    kept = (*SHARES, "intervals")
    return [
        {
            **cell,
            "lengths": [
                {"length": length, **{name: (of[head] or {}).get(name) for name in kept}} for length, of in rows.items()
            ],
        }
        for head, cell in enumerate(cells)
    ]
