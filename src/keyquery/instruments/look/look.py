"""`look`: the geometry of every head of a model, from its weights and, optionally, on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from keyquery.checkpoints import Heads, read
from keyquery.checkpoints.formats.adapters import adapted_name
from keyquery.checkpoints.sources import bare
from keyquery.checkpoints.vocabulary import vocabulary
from keyquery.instruments.look.data import LookData
from keyquery.instruments.look.embeddings import Corpus, Directions, check_corpus
from keyquery.instruments.look.metrics import measure_layer
from keyquery.instruments.look.reading import Look
from keyquery.kinds import ESTIMATORS, imported
from keyquery.listening.exclusive import alone
from keyquery.listening.hooks import Batch
from keyquery.listening.inputs.batches import LENGTH, TOKENS
from keyquery.listening.inputs.data import Prepared
from keyquery.listening.live import live_heads
from keyquery.reading import provenance
from keyquery.support.bounded_json import parse_json
from keyquery.support.checks import check_count, checked_integers
from keyquery.support.progress import Progress, silent

STREAMS = 4  # threads that feed a GPU with layers
OF_DATA = ("tokenizer", "dtype", "sample", "roles", "threshold")  # further keywords that concern data


class LookOptions(TypedDict, total=False):
    """The further keywords of `look`, which describes them."""

    tokenizer: Any
    dtype: str | torch.dtype | None
    directions: int
    sample: int
    corpus: Any
    roles: bool
    threshold: float
    workers: int
    progress: Progress | None
    heads: int | None
    query: str | None
    key: str | None
    config: str | Path | Mapping[str, Any] | None
    layout: str | None
    adapter: str | Path | None
    partial: bool
    unproven: bool


def look(
    source: str | Path | nn.Module,
    text: str | Path | None = None,
    inputs: Batch | Iterable[Batch] | None = None,
    layers: Sequence[int] | None = None,
    *,
    length: int = LENGTH,
    tokens: int = TOKENS,
    cost: bool | None = None,
    name: str | None = None,
    device: Any = None,
    **options: Unpack[LookOptions],
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
    length, tokens
        `text` is cut into windows of `length` tokens, at most `tokens` in total. Default: 128 and 20,000.
    cost
        Whether to estimate what every set of parts of each head costs the loss, on at most 32 sequences; labels then
        say what a head needs. Default: with `text`, if the model has a loss.
    name
        Name of the model. Default: that of its file.
    device
        Where layers are measured and the model runs, such as "cuda". Default: the CPU, or where a live model is.
    **options
        Further keywords, below.

    Other Parameters
    ----------------
    tokenizer
        For `text`. Default: the one stored with the model.
    dtype
        In which the model runs; metrics of the weights are in float64. Default: as the weights are stored.
    directions
        How many eigenvectors of S and planes of A to describe by tokens. Default: 0.
    sample
        Keep every head's scores, by part, for this many tokens at the start of the data. Default: 0.
    corpus
        A `kq.Cooccurrence` of the model's tokens to compare heads with. Default: none.
    roles
        Whether to score every head by role, as `kq.roles` does, on random tokens and on the data. Default: no.
    threshold
        Nats per token up to which the loss counts as kept. Default: .003.
    workers, progress
        Layers measured in parallel, one thread each, and progress bars. Default: 1 (4 on a GPU), and none.
    heads, query, key, config, layout, adapter, partial, unproven
        How the checkpoint is read, as in `kq.read`.

    Returns
    -------
    Look
        A Reading with metrics and a label per head.

    Examples
    --------
    >>> reading = kq.look(torch.nn.TransformerEncoderLayer(d_model=8, nhead=2))
    >>> [(head["layer"], head["head"]) for head in reading.heads]
    [(0, 0), (0, 1)]
    """
    layers = None if layers is None else checked_integers("layers", layers)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if unknown := sorted(options.keys() - LookOptions.__annotations__.keys()):
        raise TypeError(f"look() got an unexpected keyword argument {unknown[0]!r}")
    given: dict[str, Any] = {**options}
    directions, corpus, workers = given.pop("directions", 0), given.pop("corpus", None), given.pop("workers", 1)
    check_count("directions", directions, least=0)
    check_count("workers", workers)
    progress = given.pop("progress", None) or silent
    on_data = {option: given.pop(option) for option in OF_DATA if option in given}
    data = LookData(text=text, inputs=inputs, length=length, tokens=tokens, cost=cost, device=device, **on_data)
    adapter = given.get("adapter")
    path = source if isinstance(source, (str, Path)) else None
    name = name or adapted_name(source, adapter) or (None if path is None else Path(path).name)
    source = opened(source, {"text": text, "corpus": corpus, **given})
    with alone(source):
        prepared = data.prepare(source, progress, adapter)
        heads = _heads(source, prepared, {**given, "device": device})
        chosen = _chosen(heads, layers)
        check_corpus(corpus, heads)  # the last check before the model runs
        result = data.run(prepared, heads, chosen, progress)
        tensors = heads.recorded()
        by_tokens = _by_tokens(source, heads, directions, corpus)
        measured = _in_turn(
            lambda index: measure_layer(heads[index], heads, result, *by_tokens), chosen, workers, heads.device
        )
        rows, cells = zip(*progress(measured, "reading layers", len(chosen)), strict=True)
        model = {**heads.model, "width": heads[chosen[0]].form.dim, "heads": sum(map(len, cells))}
    reading = Look(
        model={**model, **({"name": name} if name else {})},
        layers=list(rows),
        heads=[cell for of_layer in cells for cell in of_layer],
        sample=None if result.sample is None else result.sample.facts,
        corpus=None if by_tokens[1] is None else by_tokens[1].facts,
        provenance=provenance(tensors=dict(sorted(tensors.items())), **result.facts),  # layers are read in any order
    )
    return reading if result.costs is None else reading.with_costs(result.costs)


def opened(source: Any, options: Mapping[str, Any] | None = None) -> Any:
    """What to look at: a live model, also of a fitted estimator or its file, which takes no `options`; or a path."""
    if isinstance(source, nn.Module):
        return bare(source)
    if isinstance(source, (str, Path)) and (kind := _estimator_in(Path(source))) is not None:
        if given := [name for name, value in (options or {}).items() if value not in (None, False)]:
            raise ValueError(f"{given[0]} is not for {source}, which an estimator has saved: it is read as it is")
        estimator: Any = imported(f"{ESTIMATORS[kind]}:{kind}")
        source = estimator.load(source, device="cpu")
    return getattr(source, "network_", source)


def _estimator_in(path: Path) -> str | None:
    """The class of the estimator that a file holds; None if the file is anything else."""
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = parse_json((file.metadata() or {}).get("keyquery", "null"))
    except (SafetensorError, ValueError):
        return None
    kind = str(facts.get("kind")) if isinstance(facts, dict) else ""
    return kind if kind in ESTIMATORS else None


def _heads(source: Any, prepared: Prepared | None, options: Mapping[str, Any]) -> Heads:
    """The heads of a live model as it is, or of a checkpoint, read with some options."""
    if isinstance(source, nn.Module) and not any(options.values()):
        batches = [] if prepared is None else prepared.batches
        return live_heads(source, batches[0] if batches else None)
    running = {} if prepared is None else {"source": prepared.model, "adapter": None}  # the adapter is in the model
    return read(**{"source": source, **options, **running})


def _by_tokens(source: Any, heads: Heads, directions: int, corpus: Any) -> tuple[Directions | None, Corpus | None]:
    """What token embeddings are needed for, if anything."""
    embedding = heads.embedding() if directions or corpus is not None else None
    if embedding is None:
        return None, None
    words = vocabulary(str(source)) if directions and not isinstance(source, nn.Module) else None
    described = Directions(embedding, words, directions) if directions else None
    return described, None if corpus is None else Corpus(corpus, embedding)


def _in_turn(
    measure: Callable[[int], Any], chosen: list[int], workers: int, device: torch.device | None
) -> Iterator[Any]:
    """Layers in order, several at a time: one thread each is fastest on small matrices; on a GPU, one stream each."""
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        workers = max(workers, STREAMS)
        torch.cuda.synchronize(device)
    if workers == 1:
        yield from map(measure, chosen)
        return

    def begin() -> None:
        torch.set_num_threads(1)
        if on_gpu:
            torch.cuda.set_stream(torch.cuda.Stream(device))

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=begin) as pool:
            yield from pool.map(measure, chosen)
    finally:
        torch.set_num_threads(before)


def _chosen(heads: Heads, layers: Sequence[int] | None) -> list[int]:
    chosen = list(range(len(heads))) if layers is None else list(dict.fromkeys(layers))
    wrong = [layer for layer in chosen if not 0 <= layer < len(heads)]
    if wrong or not chosen:
        problem = f"there is no layer {wrong[0]}" if wrong else "no layer is selected"
        raise ValueError(f"{problem}: {heads.source.label} has layers 0 to {len(heads) - 1}")
    return chosen
