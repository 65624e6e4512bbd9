"""`look`: the geometry of every head of a model, from its weights and, if there is any, on data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from keyquery.capture import Moments, joint_moments, text_batches, typical_length
from keyquery.capture.load import load_model
from keyquery.capture.text import read_lines
from keyquery.capture.watch import Batch
from keyquery.checkpoints import Heads, Layer, read
from keyquery.checkpoints.fitted import opened
from keyquery.checkpoints.sources import bare
from keyquery.checkpoints.vocabulary import vocabulary
from keyquery.forms import Form, Rope
from keyquery.forms.checks import check_count
from keyquery.forms.measures import directionality
from keyquery.forms.offsets import energies
from keyquery.forms.shares import Visible, part_ranks, shares
from keyquery.instruments.embedded import Embedded, joined
from keyquery.instruments.sample import Sample, take
from keyquery.instruments.validity import check_look
from keyquery.instruments.verdict import Thresholds, verdict
from keyquery.instruments.words import Cooccurrence
from keyquery.progress import Progress, silent
from keyquery.reading import Reading, provenance

OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64)
Measured = tuple[dict[str, Any], list[dict[str, Any]]]  # what is said of a layer, and of each of its heads
PIECE = 2**21  # entries of a factor that are measured at a time: small enough for the cache, large enough to be fast


@dataclass(frozen=True, kw_only=True)
class Look(Reading, kind="look"):
    """The geometry of every head and layer of a model.

    Views are never mixed: `raw` is of the weights alone, `folded` has biases, norm gains and shifts in it, `on_data`
    is of the form as it acts on real activations.
    """

    units: ClassVar[Mapping[str, str]] = {
        "symmetry": "tr(M²)/‖M‖², −1 skew to 1 symmetric",
        "directionality": "−1 columns to 1 rows stand out, by what exceeds mean + 2 std",
        "directionality_norms": "the same, by whole norms",
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
        "reciprocal": "of the variance of the scores on data; so are directional, popularity and position",
        "effective_rank_symmetric": "of S on data, at offset 0; likewise effective_rank_skew",
        "contents": "symmetry of M(Δ): contents change places, the offset stays",
        "compares": "cosine of the symmetric parts of scores between tokens and of a corpus's PPMI, centred",
        "points": "the same of the skew parts: above 0 at what comes after, below 0 at what comes before",
        "explained": "share of the scores between tokens that the corpus's PPMI accounts for",
        "exchange": "symmetry of ½(M(Δ) ± M(−Δ)ᵀ): tokens change places with their positions",
    }

    model: Mapping[str, Any]
    layers: list[dict[str, Any]]
    heads: list[dict[str, Any]]
    sample: Mapping[str, Any] | None = None
    corpus: Mapping[str, Any] | None = None  # what heads were held against, where that was asked for

    def __post_init__(self) -> None:
        super().__post_init__()
        check_look(self.model, self.layers, self.heads)

    def __repr__(self) -> str:
        counts = Counter(head["verdict"].split(" ")[0] for head in self.heads)
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        return f"Look({self.model['name']}: {len(self.heads)} heads in {len(self.layers)} layers, {told})"

    def records(self) -> list[dict[str, Any]]:
        """One row a head: its place, every figure of each view that is one number, and the verdict."""
        rows = []
        for head in self.heads:
            row = {key: head[key] for key in ("layer", "head", "name")}
            for view in ("raw", "folded", "on_data"):
                figures = head[view] or {}
                row |= {f"{view}_{key}": value for key, value in figures.items() if not isinstance(value, (list, dict))}
            row |= {f"corpus_{key}": value for key, value in head.get("corpus", {}).items()}
            rows.append({**row, "verdict": head["verdict"]})
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
    tokenizer: Any = None,
    length: int = 128,
    tokens: int = 20_000,
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

    `text` (a file of lines) or `inputs` (batches of tensors that the model takes) put the forms on data: the model is
    then run, at most `tokens` tokens in windows of `length`. `directions` is how many object directions and relation
    planes of each head to describe by the tokens along them; `sample`, of how many tokens at the start of the data to
    keep every head's scores, split into their parts. `corpus` (a text file, or a `kq.Cooccurrence` of the model's
    tokens) sets each head beside what stands within `window` tokens of what. `heads`, `query`, `key` and `config` are
    those of `read`. `workers` layers are measured at a time, each by one thread.

    >>> reading = kq.look(torch.nn.TransformerEncoderLayer(d_model=8, nhead=2))
    >>> [(head["layer"], head["head"]) for head in reading.heads]
    [(0, 0), (0, 1)]
    """
    check_count("sample", sample, least=0)
    source, name = opened(source, name, text=text, corpus=corpus, heads=heads, query=query, key=key, config=config)
    source = bare(source) if isinstance(source, nn.Module) else getattr(source, "network_", source)
    watching, live = progress or silent, isinstance(source, nn.Module)
    called = {"name": name or Path(str(source)).name} if name or not live else {}
    words, named = None if live or not directions else vocabulary(str(source)), str(source)
    if text is None and inputs is None:
        found, seen = read(source, heads, query, key, config), _Seen()
    else:
        source, batches, spoken, used = _prepare(source, text, inputs, tokenizer, length, tokens, watching)
        found = read(source, heads, query, key, config)
        kept = take(source, batches, found, sample, spoken)
        seen = _Seen.of(source, batches, found, {"longest": length, "from": used}, kept, watching)
    tensors, chosen, speaker = found.recorded(), _chosen(found, layers), tokenizer or (None if live else named)
    tokens_of = Embedded.of(found, (directions, words), corpus, speaker, window, watching)

    def measure(index: int) -> Measured:
        layer = found[index]
        row, cells = _measured(layer, found, seen, thresholds or Thresholds())
        return row, tokens_of.joined(layer, cells)

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
    return _measured(layer, found, _Seen(), Thresholds())


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


@dataclass(frozen=True)
class _Seen:
    """What running the model gave: nothing, unless there was data."""

    moments: Mapping[int, Moments] = field(default_factory=dict)
    facts: Mapping[str, Any] | None = None
    sample: Sample | None = None

    @classmethod
    def of(
        cls, model: nn.Module, batches: list[Batch], found: Heads, facts: Any, sample: Sample | None, watching: Progress
    ) -> _Seen:
        """The moments of every layer, and of what they are."""
        moments = joint_moments(model, watching(batches, "running the model", len(batches)), found)
        if not moments:
            raise ValueError("on data only self-attention is split, and this model has none: leave text and inputs out")
        # Offsets on data are those that occur, often far fewer than the longest window has.
        length = min(facts["longest"], typical_length(batches) or facts["longest"])
        some = next(iter(moments.values()))
        count, width = some.count, some.mean.shape[-1]
        few = (
            f"only {count} tokens for heads of {width // 2}: on data, figures are rough" if count < 4 * width else None
        )
        return cls(moments, {"tokens": count, "length": length, **facts, **({"note": few} if few else {})}, sample)


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
    batches = list(text_batches(lines, tokenizer, length, tokens))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        batches = [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in batches]
    return model, batches, tokenizer, Path(str(text)).name


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


def _measured(layer: Layer, found: Heads, seen: _Seen, thresholds: Thresholds) -> Measured:
    """The figures of all heads together, and of each."""
    cells = _apart(layer, found, seen, thresholds)
    return {**_place(layer), "causal": layer.causal, "raw": _together(layer.form)}, cells


def _apart(layer: Layer, found: Heads, seen: _Seen, thresholds: Thresholds) -> list[dict[str, Any]]:
    """Every head's own figures."""
    form = layer.form
    raw = [cell for piece in _pieces(form) for cell in _figures(piece, layer.rope)]
    folded = [cell for piece in _pieces(layer.folded) for cell in _figures(piece)]
    moments = seen.moments.get(layer.index)
    on_data = [None] * layer.heads if moments is None else _on_data(layer, found, moments, (seen.facts or {})["length"])
    cells = []
    for head in range(layer.heads):
        ruling, reason = verdict(raw[head], on_data[head], form.rank, thresholds)
        cells.append(
            {
                **_place(layer),
                "head": head,
                "name": f"{layer.name}.{head}",
                "scale": layer.scale,
                "rank": form.rank,
                "raw": raw[head],
                "folded": folded[head],
                "on_data": on_data[head],
                "verdict": ruling,
                "reason": reason,
            }
        )
    if moments is not None and seen.sample is not None and layer.index in seen.sample.projected:
        scores = seen.sample.scores(layer, found, moments.mean)
        cells = joined(cells, [{"scores": of_head} for of_head in scores])
    return cells


def _pieces(form: Form) -> Iterator[Form]:
    """Some heads at a time, in float32 at least, so that what is computed of them stays small."""
    each = math.prod(form.batch[1:]) * form.rank * form.dim
    count = max(PIECE // each, 1)
    dtype = torch.promote_types(form.dtype, torch.float32)
    return (form[start : start + count].to(dtype) for start in range(0, len(form), count))


def _figures(form: Form, rope: Rope | None = None) -> list[dict[str, Any]]:
    """The numbers of each head in one view, with curves over offsets where there are rotary positions."""
    symmetric, skew = form.core().energies
    rows, columns = form.row_norms(), form.column_norms()
    numbers = {
        "symmetry": form.symmetry,
        "directionality": directionality(rows, columns),
        "directionality_norms": directionality(rows, columns, kind="norms"),
        "symmetric_energy": symmetric,
        "skew_energy": skew,
        "positive_share": form.positive_share,
        "effective_rank": form.effective_rank(),
        "stable_rank": form.stable_rank(),
        "eigenvalues": form.eigenvalues(),
        "skew_values": form.skew_values(),
        "singular_values": form.singular_values(),
    }
    cells = _by_head(numbers, len(form.batch))
    if rope is None:
        return cells
    gram = form.gram().flatten(0, len(form.batch) - 1)
    at = energies(gram, rope, -torch.tensor(OFFSETS, dtype=torch.float64))
    curves = _by_head({"contents": at.contents_symmetry().mT, "exchange": at.exchange_symmetry().mT}, 1)
    offsets = [-offset for offset in OFFSETS]
    return [{**cell, "offsets": {"offset": offsets, **curve}} for cell, curve in zip(cells, curves, strict=True)]


def _on_data(layer: Layer, found: Heads, moments: Moments, length: int) -> list[dict[str, Any]]:
    visible = Visible(length, layer.causal, layer.window)
    bias = found.position_bias(layer, visible.offsets())
    mean, covariance = moments.mean.cpu(), moments.covariance.cpu()  # small, whatever the model runs on
    bias = None if bias is None else bias.cpu()
    numbers: dict[str, Tensor] = shares(mean, covariance, layer.scale, visible, layer.rope, bias)
    alike, points = part_ranks(covariance)
    return _by_head({**numbers, "effective_rank_symmetric": alike, "effective_rank_skew": points}, 1)


def _by_head(numbers: Mapping[str, Tensor], batch: int) -> list[dict[str, Any]]:
    """Numbers with a batch of one or two dimensions, head by head."""
    flat = {name: number.flatten(0, batch - 1).tolist() for name, number in numbers.items()}
    count = len(next(iter(flat.values())))
    return [{name: values[head] for name, values in flat.items()} for head in range(count)]


def _together(form: Form) -> dict[str, float]:
    """The one M of all heads of a layer, M = Σ_h M_h: the score that is published for whole layers.

    Queries that share a key are summed first. Row and column norms come from blocks of M, in the precision of the
    weights (rounding of single entries averages out in all figures), tr(M²) from KQᵀ.
    """
    while form.batch:
        form = form.sum()
    query, key = form.query, form.key
    if form.dtype != torch.bfloat16:  # which matrix units multiply as it is; other short floats are slow
        query, key = form.working("query"), form.working("key")
    wide = torch.promote_types(form.dtype, torch.float32)
    rows, columns = [], torch.zeros(form.dim, dtype=torch.float64, device=form.device)
    for block in query.split(512, dim=1):
        squares = (block.mT @ key).to(wide).square()
        rows.append(squares.sum(1).double())
        columns += squares.sum(0)
    cross = (key @ query.mT).to(wide)
    energy, trace = columns.sum(), (cross * cross.mT).sum(1).double().sum()
    norms = torch.cat(rows).sqrt(), columns.sqrt()
    kinds = {"directionality": "excess", "directionality_norms": "norms"}
    ways = {name: directionality(*norms, kind=kind).item() for name, kind in kinds.items()}
    return {"symmetry": (trace / torch.where(energy > 0, energy, 1.0)).item(), **ways}
