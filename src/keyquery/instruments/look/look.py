"""`look`: the geometry of every head of a model, from its weights and, optionally, on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyquery.checkpoints import Heads, read
from keyquery.checkpoints.formats.adapters import adapted_name
from keyquery.checkpoints.sources import bare
from keyquery.checkpoints.vocabulary import vocabulary
from keyquery.instruments.cooccurrence.cooccurrence import WINDOW, Cooccurrence
from keyquery.instruments.look.corpus import check_corpus, corpus_tokenizer
from keyquery.instruments.look.data import LookData, RunResult
from keyquery.instruments.look.embeddings import Embedded
from keyquery.instruments.look.fitted import opened
from keyquery.instruments.look.labels import Thresholds
from keyquery.instruments.look.layers import Measured, Metrics
from keyquery.instruments.look.on_data import PAIRS
from keyquery.instruments.look.reading import Look
from keyquery.listening.exclusive import alone
from keyquery.listening.hooks import Batch
from keyquery.listening.inputs.batches import LENGTH, TOKENS
from keyquery.listening.inputs.data import Prepared
from keyquery.listening.live import live_heads
from keyquery.reading import provenance
from keyquery.support.checks import check_count, checked_integers
from keyquery.support.progress import Progress, silent

STREAMS = 4  # threads that feed a GPU with layers


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
    adapter: str | Path | None = None,
    partial: bool = False,
    tokenizer: Any = None,
    length: int = LENGTH,
    lengths: Sequence[int] | None = None,
    tokens: int = TOKENS,
    pairs: str = PAIRS[0],
    directions: int = 0,
    sample: int = 0,
    corpus: str | Path | Cooccurrence | None = None,
    window: int = WINDOW,
    roles: bool = False,
    cost: bool | None = None,
    name: str | None = None,
    thresholds: Thresholds | None = None,
    device: Any = None,
    dtype: str | torch.dtype | None = None,
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
    heads, query, key, config, layout, adapter, partial
        As in `kq.read`: for checkpoints whose layout is not recognised, for a model with a LoRA adapter, and for one of
        which some attention modules cannot be read.
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
    roles
        Whether to score every head by role, as `kq.roles` does, on random tokens and on the data. Default: no.
    cost
        Whether to estimate what every set of parts of each head costs the loss, on at most 32 sequences; labels then
        say what a head needs. Default: with `text`, if the model has a loss.
    name
        Name of the model. Default: that of its file.
    thresholds
        Decision thresholds for labels. Default: `Thresholds()`.
    device, dtype
        Where layers are measured and the model runs, such as "cuda", and the dtype in which it runs. Metrics of the
        weights are in float64 on any device. Default: the CPU, or where a live model is; as the weights are stored.
    workers, progress
        Layers measured in parallel, one thread each, and progress bars. Default: 1 (4 on a GPU), and none.

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
    layers = _check_options(layers, directions, corpus, window, workers, name, thresholds)
    cut: dict[str, Any] = {"length": length, "lengths": lengths, "tokens": tokens, "pairs": pairs, "sample": sample}
    cut |= {"roles": roles, "cost": cost}
    data = LookData(text=text, inputs=inputs, tokenizer=tokenizer, device=device, dtype=dtype, **cut)
    how: dict[str, Any] = {"heads": heads, "query": query, "key": key, "config": config, "adapter": adapter}
    source, name = opened(source, name or adapted_name(source, adapter), text=text, corpus=corpus, **how)
    source = bare(source) if isinstance(source, nn.Module) else getattr(source, "network_", source)
    stored = None if isinstance(source, nn.Module) else str(source)  # the path of a model that is not live
    words = vocabulary(stored) if stored and directions else None
    watching = progress or silent
    with alone(source):
        prepared = data.prepare(source, watching, adapter)
        checkpoint = _heads(source, prepared, {"layout": layout, "partial": partial, "device": device, **how})
        chosen = _chosen(checkpoint, layers)
        tokenizer = corpus_tokenizer(corpus, checkpoint, tokenizer or stored)  # the last check before the model runs
        ran = RunResult() if prepared is None else data.run(prepared, checkpoint, watching)
        costs, why = data.costs(prepared, checkpoint, chosen, watching)
        tensors = checkpoint.recorded()
        embedded = Embedded.of(checkpoint, (directions, words), corpus, tokenizer, window, watching)
        metrics = Metrics(checkpoint, ran.on_data, ran.lengths, embedded, thresholds or Thresholds(), ran.roles)
        measured = list(
            watching(_in_turn(metrics.of, chosen, workers, checkpoint.device), "reading layers", len(chosen))
        )
        facts = {**checkpoint.model, "width": checkpoint[chosen[0]].form.dim}
    facts |= {"name": name or Path(stored or "").name} if name or stored else {}
    whole = _whole(facts, measured, tensors, ran.facts | why, sample=ran.sample, corpus=embedded.facts)
    return whole if costs is None else whole.with_costs(costs, thresholds)


def _heads(source: Any, prepared: Prepared | None, asked: Mapping[str, Any]) -> Heads:
    """The heads of a live model as it is, or of a checkpoint, with what was asked of it."""
    if isinstance(source, nn.Module) and not any(asked.values()):
        return live_heads(source, None if prepared is None else next(iter(prepared.windows.values()), [None])[0])
    running = {} if prepared is None else {"source": prepared.model, "adapter": None}  # the adapter is in the model
    return read(**{"source": source, **asked, **running})


def _whole(
    facts: Mapping[str, Any],
    measured: list[Measured],
    tensors: Mapping[str, str],
    run: Mapping[str, Any],
    **more: Any,
) -> Look:
    rows, cells = [row for row, _ in measured], [cell for _, more in measured for cell in more]
    model = {**facts, "heads": len(cells)}
    in_order = dict(sorted(tensors.items()))  # layers may be read in any order
    facts_of_run = provenance(**{"data": None, "tensors": in_order, **run})
    return Look(model=model, layers=rows, heads=cells, **more, provenance=facts_of_run)


def _in_turn(
    measure: Callable[[int], Any], chosen: list[int], workers: int, device: torch.device | None
) -> Iterator[Any]:
    """Layers in order, several at a time: on small matrices one thread per layer beats many threads per matrix.

    A GPU solves one layer while other threads read the next ones.
    """
    if device is not None and device.type == "cuda":
        workers = max(workers, STREAMS)
        torch.cuda.synchronize(device)
    if workers == 1:
        yield from map(measure, chosen)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=_begin_thread, initargs=(device,)) as pool:
            yield from pool.map(measure, chosen)
    finally:
        torch.set_num_threads(before)


def _begin_thread(device: torch.device | None) -> None:
    """One CPU thread, and a stream of its own on a GPU, so that small kernels of several layers run side by side."""
    torch.set_num_threads(1)
    if device is not None and device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def _check_options(
    layers: Any, directions: int, corpus: Any, window: int, workers: int, name: Any, thresholds: Any
) -> tuple[int, ...] | None:
    """Check the arguments that do not concern data, and return the layers; `Data` checks the others."""
    layers = None if layers is None else checked_integers("layers", layers)
    check_count("directions", directions, least=0)
    check_corpus(corpus)
    check_count("window", window)
    check_count("workers", workers)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if thresholds is not None and not isinstance(thresholds, Thresholds):
        raise TypeError(f"thresholds must be Thresholds, got a {type(thresholds).__name__}")
    return layers


def _chosen(heads: Heads, layers: Sequence[int] | None) -> list[int]:
    chosen = list(range(len(heads))) if layers is None else list(dict.fromkeys(layers))
    wrong = [layer for layer in chosen if not 0 <= layer < len(heads)]
    if wrong or not chosen:
        problem = f"there is no layer {wrong[0]}" if wrong else "no layer is selected"
        raise ValueError(f"{problem}: {heads.source.label} has layers 0 to {len(heads) - 1}")
    return chosen
