"""`look`: the geometry of every head of a model, from its weights and, optionally, on data."""

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
from keyquery.instruments.look.metrics import metrics_of, of_whole_layer
from keyquery.instruments.look.on_data import PAIRS, SHARES, OnData
from keyquery.instruments.look.sample import take
from keyquery.instruments.look.validity import check_look
from keyquery.reading import Reading, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress, silent

Measured = tuple[dict[str, Any], list[dict[str, Any]]]  # metrics of a layer, and of each of its heads


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

    Each metric belongs to one view: `raw` is the QK form of the weights, `folded` has biases and LayerNorm parameters
    folded in, `on_data` is measured on activations.
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
    corpus: Mapping[str, Any] | None = None  # the corpus that heads are compared with, if any
    summary: Mapping[str, int] = field(default_factory=dict)  # heads per label, most frequent first; recomputed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_look(self.model, self.layers, self.heads)
        counts = Counter(head["label"] for head in self.heads).most_common()
        object.__setattr__(self, "summary", dict(counts))

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {label}" for label, count in self.summary.items())
        return f"Look({self.model['name']}: {len(self.heads)} heads in {len(self.layers)} layers: {counts})"

    def records(self) -> list[dict[str, Any]]:
        """One row per head: layer, head, every scalar metric of each view, its interval, and the label."""
        rows = []
        for head in self.heads:
            row = {key: head[key] for key in ("layer", "head", "name")}
            for view in ("raw", "folded", "on_data"):
                metrics = head[view] or {}
                row |= {f"{view}_{key}": value for key, value in metrics.items() if not isinstance(value, (list, dict))}
                for key, ends in metrics.get("intervals", {}).items():
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
    partial: bool = False,
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
    """Measure the geometry of every attention head of a model.

    The QK form M = WqᵀWk of a head is split into a symmetric part S = (M + Mᵀ)/2 and a skew part A = (M − Mᵀ)/2, with
    symmetry = tr(M²)/‖M‖² = (‖S‖² − ‖A‖²)/‖M‖². With data, the variance of the scores is split into the shares
    symmetric, skew, popularity, query_only and position.

    Parameters
    ----------
    source
        A folder, a file, a hub name, a live model or a fitted estimator.
    text, inputs
        A text file, one sequence per line, or batches of input tensors; the model is run on them. Default: none,
        weights only.
    layers
        Indices of the layers to measure. Default: all.
    heads, query, key, config, layout, partial
        As in `kq.read`, for checkpoints whose layout is not recognised.
    tokenizer
        For `text`. Default: the one stored with the model.
    length, tokens
        `text` is cut into windows of `length` tokens, at most `tokens` in total. Default: 128 and 20,000.
    lengths
        Further window lengths at which shares are measured; shares depend on the window. Default: none.
    pairs
        "visible": shares of the variance over the query-key pairs that the model scores. "independent": in closed
        form, as if tokens were independent. Default: "visible".
    directions
        How many eigenvectors of S and planes of A to describe by tokens. Default: 0.
    sample
        Keep every head's scores, by part, for this many tokens at the start of the data. Default: 0.
    corpus, window
        A text file or a `kq.Cooccurrence` to compare heads with, counted within `window` tokens. Default: none, and 5.
    name
        Name of the model. Default: that of its file.
    thresholds
        Decision thresholds for labels. Default: `Thresholds()`.
    workers, progress
        Layers measured in parallel, one thread each, and progress bars. Default: 1, and none.

    Returns
    -------
    Look
        A Reading with metrics and a label per head.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing, the checkpoint layout is unknown, or arguments contradict each other.

    Examples
    --------
    >>> reading = kq.look(torch.nn.TransformerEncoderLayer(d_model=8, nhead=2))
    >>> [(head["layer"], head["head"]) for head in reading.heads]
    [(0, 0), (0, 1)]

    See Also
    --------
    compare : How far the heads of two models differ.
    ablate : What the loss changes by without each part.
    """
    check_count("sample", sample, least=0)
    check_choice("pairs", pairs, PAIRS)
    lengths = _other_windows(lengths, text)
    source, name = opened(source, name, text=text, corpus=corpus, heads=heads, query=query, key=key, config=config)
    source = bare(source) if isinstance(source, nn.Module) else getattr(source, "network_", source)
    watching, live = progress or silent, isinstance(source, nn.Module)
    label = {"name": name or Path(str(source)).name} if name or not live else {}
    words, named = None if live or not directions else vocabulary(str(source)), str(source)
    if text is None and inputs is None:
        checkpoint, on_data, curves = read(source, heads, query, key, config, layout, partial), OnData(), {}
    else:
        source, batches, text_tokenizer, origin = _prepare(source, text, inputs, tokenizer, length, tokens, watching)
        checkpoint = read(source, heads, query, key, config, layout, partial)
        first_tokens = take(source, batches, checkpoint, sample, text_tokenizer)
        facts = {"from": origin, "pairs": pairs}
        on_data = OnData.of(source, batches, checkpoint, {"longest": length, **facts}, first_tokens, watching)
        curves = {
            other: OnData.of(source, windows, checkpoint, {"longest": other, **facts}, None, watching)
            for other in lengths
            for windows in [_cut(source, text, text_tokenizer, other, tokens)]
        }
    tensors, chosen = checkpoint.recorded(), _chosen(checkpoint, layers)
    corpus_tokenizer = tokenizer or (None if live else named)
    tokens_of = Embedded.of(checkpoint, (directions, words), corpus, corpus_tokenizer, window, watching)

    def measure(index: int) -> Measured:
        layer = checkpoint[index]
        row, cells = _measured(layer, checkpoint, on_data, thresholds or Thresholds())
        return row, tokens_of.joined(layer, _with_lengths(cells, layer, checkpoint, curves))

    measured = list(watching(_in_turn(measure, chosen, workers), "reading layers", len(chosen)))
    shown = None if on_data.sample is None else on_data.sample.to_dict()
    facts = {**checkpoint.model, "width": checkpoint[chosen[0]].form.dim, **label}
    return _whole(facts, measured, tensors, data=on_data.facts, sample=shown, corpus=tokens_of.facts)


def look_at_layer(layer: Layer, heads: Heads) -> Measured:
    """Metrics of one layer and its heads, from the weights alone; `whole_look` joins layers.

    >>> heads = kq.read(torch.nn.MultiheadAttention(8, 2))
    >>> row, cells = look_at_layer(heads[0], heads)
    >>> row["layer"], [cell["head"] for cell in cells]
    (0, [0, 1])
    """
    return _measured(layer, heads, OnData(), Thresholds())


def whole_look(facts: Mapping[str, Any], measured: Iterable[Measured], tensors: Mapping[str, str]) -> Look:
    """The look of a model from the metrics of its layers; `facts` are `Heads.model` and the width.

    `tensors` are the digests of the tensors that were read, as returned by `Heads.recorded`.

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
    facts_of_run = provenance(data=data, tensors=dict(sorted(tensors.items())))  # layers may be read in any order
    return Look(model=model, layers=rows, heads=cells, **more, provenance=facts_of_run)


def _in_turn(measure: Callable[[int], Any], chosen: list[int], workers: int) -> Iterator[Any]:
    """Layers in order, several at a time: on small matrices one thread per layer beats many threads per matrix."""
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
        raise ValueError("pass either text or inputs, not both")
    data = [inputs] if isinstance(inputs, Mapping) else inputs
    if isinstance(data, (Tensor, str)):
        raise TypeError(f"inputs must be batches: mappings of argument names to tensors, got a {type(data).__name__}")
    lines = None if text is None else read_lines(text)
    live = isinstance(source, nn.Module)
    [(model, own_tokenizer)] = [
        (path, None) if live else load_model(path) for path in watching([source], "building the model", 1)
    ]
    argument = getattr(model, "main_input_name", "input_ids")
    if lines is not None and argument != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {argument}, not text: pass `inputs` from Python")
    tokenizer = tokenizer or own_tokenizer
    if lines is None:
        return model, list(data or []), tokenizer, "inputs"
    if tokenizer is None:
        raise ValueError("text needs a tokenizer: none was passed, and none was found with the model")
    return model, _cut(model, lines, tokenizer, length, tokens), tokenizer, Path(str(text)).name


def _other_windows(lengths: Sequence[int] | None, text: str | Path | None) -> list[int]:
    for length in (lengths := list(lengths or [])):
        check_count("lengths", length, least=2)
    if lengths and text is None:
        raise ValueError("lengths are windows of a text: pass text as well")
    return lengths


def _cut(
    model: nn.Module, text: str | Path | list[str] | None, tokenizer: Any, length: int, tokens: int
) -> list[Batch]:
    """A text in windows of `length` tokens, as batches for the model."""
    assert text is not None
    lines = text if isinstance(text, list) else read_lines(text)
    batches: list[Batch] = list(text_batches(lines, tokenizer, length, tokens))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in batches]
    return batches


def _chosen(heads: Heads, layers: Sequence[int] | None) -> list[int]:
    chosen = list(range(len(heads))) if layers is None else list(dict.fromkeys(layers))
    wrong = [layer for layer in chosen if not 0 <= layer < len(heads)]
    if wrong or not chosen:
        problem = f"there is no layer {wrong[0]}" if wrong else "no layer is selected"
        raise ValueError(f"{problem}: {heads.source.label} has layers 0 to {len(heads) - 1}")
    return chosen


def _place(layer: Layer) -> dict[str, Any]:
    notes = {"notes": list(layer.notes)} if layer.notes else {}
    return {"layer": layer.index, "name": layer.name, "kind": layer.kind, **notes}


def _measured(layer: Layer, heads: Heads, seen: OnData, thresholds: Thresholds) -> Measured:
    """Metrics of the whole layer, and of each head."""
    cells = _apart(layer, heads, seen, thresholds)
    return {**_place(layer), "causal": layer.causal, "raw": of_whole_layer(layer.form)}, cells


def _apart(layer: Layer, heads: Heads, seen: OnData, thresholds: Thresholds) -> list[dict[str, Any]]:
    """Metrics of each head."""
    form = layer.form
    raw, folded = metrics_of(form, layer.rope), metrics_of(layer.folded)
    rows = []
    for head, on_data in enumerate(seen.of_layer(layer, heads)):
        label = label_head(raw[head], on_data, None, thresholds)
        if on_data is not None and "half_window" in on_data:
            half = label_head(raw[head], {**on_data["half_window"], "sink": on_data["sink"]}, None, thresholds).label
            decided = half != label.label and label.label != "undecided"
            on_data["changes_with_window"] = on_data.pop("sign_changes") + ["label"] * decided
        rows.append(
            {
                **_place(layer),
                "head": head,
                "name": f"{layer.name}.{head}",
                "scale": layer.scale,
                "rank": form.rank,
                "raw": raw[head],
                "folded": folded[head],
                "on_data": on_data,
                **label._asdict(),
                "properties": properties(raw[head], on_data, form.rank, thresholds),
            }
        )
    scores = seen.scores(layer, heads)
    return rows if scores is None else joined(rows, [{"scores": of_head} for of_head in scores])


def _with_lengths(
    cells: list[dict[str, Any]], layer: Layer, heads: Heads, curves: Mapping[int, OnData]
) -> list[dict[str, Any]]:
    """Each head with its shares at other window lengths."""
    rows = {length: seen.of_layer(layer, heads) for length, seen in sorted(curves.items())}
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
