"""`keyquery study NAME`: claims about attention, each re-run by one command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from keyquery import models as shipped
from keyquery.cli.options import (
    INT,
    PATH,
    STR,
    Csv,
    Device,
    FiveSeeds,
    Force,
    Json,
    Out,
    Picture,
    Quiet,
    ThreeSeeds,
    Workers,
    deliver,
    targets,
    watching,
)
from keyquery.layers import Shape

Texts = Annotated[
    Path | None,
    typer.Option(help="A text file, or a .tsv with a column `text`, packed or not; without, the tokens in --out."),
]
Seeds = Annotated[
    list[int] | None,
    typer.Option(
        metavar=INT, help="A seed; may be given several times. Without: three, and ten of the synthetic part."
    ),
]
Attentions = Annotated[
    list[str] | None,
    typer.Option(
        metavar=STR,
        help="primal, primal+ or general; may be given several times. Without: all. Speed is of all, side by side.",
    ),
]
Samples = Annotated[
    list[int] | None,
    typer.Option(
        metavar=INT,
        help="Sequences that the synthetic part learns from; may be given several times. Without: 16 to 1,024.",
    ),
]
ArenaData = Annotated[
    Path | None,
    typer.Option(
        metavar="<dir>", help="A folder with .ts files, a .tsv with split, label and text, an .npz of images."
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(metavar=STR, help="listops, text, image or pathfinder; may be given several times. Without: all."),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(metavar=STR, help="A set of series; may be given several times. Without: all in --data."),
]
Share = Annotated[
    float | None,
    typer.Option(help="Share of the arena's steps to run. Without: all of ListOps and Text, a fifth of the others."),
]
Examples = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Examples to generate and train on; a tenth more to choose by, and to test on. Without: as published.",
    ),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps of a whole training on the arena. Without: as published.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Break a training on the arena off after so many; --out goes on.")
]
study = typer.Typer(
    help="Claims about attention, each re-run by one command.", no_args_is_help=True, rich_markup_mode="markdown"
)


@study.callback()
def _studies() -> None:
    pass


@study.command("objectives")
def objectives(
    corpus: Annotated[Path, typer.Option(help="A text file to train on, packed by xz or not.")],
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write both models here; a run broken off is gone on with.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(metavar=INT, help="A seed; may be given several times. Without: 0.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 6000,
    width: Annotated[int, typer.Option(min=4, help="The models' width.")] = 128,
    depth: Annotated[int, typer.Option(min=1, help="How many layers.")] = 4,
    vocabulary: Annotated[int, typer.Option(min=260, help="How many tokens the tokenizer learns.")] = 4096,
    device: Device = "auto",
    about: Annotated[str, typer.Option(help="What the models' cards say of the text.")] = "",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Train an encoder and a decoder that differ in the objective alone, and see what their heads become, and when.

    Minutes on a GPU; a processor alone takes far longer, and may be interrupted: --out goes on. The models that ship
    are seed 0 on 21 novels.
    """
    from keyquery.studies.objectives import objectives as run

    files = targets(force, json=json, csv=csv, picture=picture)
    shape = Shape(vocab_size=vocabulary, width=width, depth=depth)
    with watching(quiet) as progress:
        reading = run(corpus, out, seed or [0], steps, shape, device, about, force, progress)
    deliver(reading, files, quiet)


@study.command("kernels")
def kernels(
    corpus: Texts = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="synthetic, language, init, or all.")] = "all",
    seed: Seeds = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each language model on all the text.")] = 800,
    few_steps: Annotated[int, typer.Option(min=1, help="Training steps on a small share of it.")] = 400,
    few: Annotated[float, typer.Option(help="That share.")] = 0.02,
    samples: Samples = None,
    width: Annotated[int, typer.Option(min=8, help="The language models' width.")] = 256,
    depth: Annotated[int, typer.Option(min=1, help="How many layers.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 128,
    vocabulary: Annotated[int, typer.Option(min=260, help="How many tokens the tokenizer learns.")] = 4096,
    workers: Workers = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto; of the language models.")] = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Does structure pay? Every kernel on two tasks of known truth and in language models, and three other starts.

    Minutes on a GPU with several --workers; the synthetic part takes minutes on any machine and needs no text.
    """
    from keyquery.studies.kernels import Plan
    from keyquery.studies.kernels import kernels as run

    files = targets(force, json=json, csv=csv, picture=picture)
    if picture is not None and part == "init":
        raise ValueError("--picture draws the parts synthetic and language, not init")
    sizes = {"width": width, "depth": depth, "length": length, "vocabulary": vocabulary}
    given: dict[str, Any] = {"part": part, "steps": steps, "few_steps": few_steps, "few": few, **sizes}
    given |= {"seeds": _once(seed), "trial_seeds": _once(seed)} if seed else {}
    given |= {"samples": _once(samples)} if samples else {}
    with watching(quiet) as progress:
        reading = run(corpus, out, Plan(**given), device, workers, force, progress)
    deliver(reading, files, quiet)


@study.command("dial")
def dial(
    models: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders or .gguf files; the two that ship if none."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar=PATH,
            help="A text, compressed by xz or not; may be given several times. Default: the one that ships.",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="all, layer or head: in all heads at once; also by layer; also by head.")
    ] = "layer",
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="A seed of random tokens; may be given several times. Default: 0."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="How many of each text and seed.")] = 16,
    length: Annotated[int, typer.Option(min=16, help="How many tokens each has.")] = shipped.LENGTH,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep results here, so that an interrupted run is resumed.")
    ] = None,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Leave out each part of the scores, and measure what the model can no longer do.

    Decoders: the next token of a text, repeated random tokens and how many are copied, look-ups, duplicates, attention
    to the first token.
    Encoders: masked words, and which halves of a passage belong together.
    """
    from keyquery.studies.dial import dial_abilities

    files = targets(force, json=json, csv=csv, picture=picture)
    chosen, texts = models or [shipped.DECODER, shipped.ENCODER], text or [shipped.LONG_TEXT]
    with watching(quiet) as progress:
        reading = dial_abilities(chosen, texts, by, _once(seed or [0]), sequences, length, device, progress, out)
    deliver(reading, files, quiet)


@study.command("primal")
def primal(
    data: ArenaData = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="series, ablation, arena, speed, or all.")] = "all",
    task: Tasks = None,
    attention: Attentions = None,
    dataset: Datasets = None,
    seed: FiveSeeds = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of a training on series.")] = 100,
    width: Annotated[int, typer.Option(min=8, help="Width of the networks on series.")] = 512,
    share: Share = None,
    steps: Steps = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step on the arena. Without: as published.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="published: a share is a run cut short; shortened: a whole one.")] = (
        "published"
    ),
    start: Annotated[str, typer.Option(help="How primal layers start: published, or default, the layer's own.")] = (
        "published"
    ),
    examples: Examples = None,
    minutes: Minutes = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each step is timed.")] = 7,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """What is Primal-Attention worth? Against fused softmax on sets of series and on the Long Range Arena.

    ListOps and Pathfinder are generated; Text and Image are made of files in --data. Minutes to hours on a GPU; with
    --out it may be broken off at any time, or by --minutes, and goes on.
    """
    from keyquery.studies.primal import Plan
    from keyquery.studies.primal import primal as run

    files = targets(force, json=json, csv=csv, picture=picture)
    if picture is not None and part == "ablation":
        raise ValueError("--picture draws the parts series, arena and speed, not ablation")
    named = {"tasks": task, "attentions": attention, "datasets": dataset, "seeds": seed}
    given: dict[str, Any] = {name: tuple(values) for name, values in named.items() if values}
    given |= {"part": part, "epochs": epochs, "share": share, "steps": steps, "batch": batch, "schedule": schedule}
    given |= {"start": start, "width": width, "minutes": minutes, "repeats": repeats}
    if examples is not None:
        given["examples"] = (examples, -(-examples // 10), -(-examples // 10))
    with watching(quiet) as progress:
        reading = run(data, out, Plan(**given), device, workers, progress)
    deliver(reading, files, quiet)


@study.command("time")
def time(
    badges: Annotated[Path | None, typer.Option(help="Stack Overflow: an .npz of time, event and offsets.")] = None,
    retail: Annotated[Path | None, typer.Option(help="Online Retail: its .csv, packed or not.")] = None,
    cdnow: Annotated[Path | None, typer.Option(help="CDNOW: its master file, packed or not.")] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="Epochs of a training at most; it stops when it gets no better.")
    ] = 20,
    width: Annotated[int, typer.Option(min=8, help="The models' width.")] = 32,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Does attention that knows when do better than one that knows the order alone?

    The next event of users never seen, by their past: positions, Bochner's and Mercer's codes of time, three ways to
    take them in, dates, and what knowing the time of the next event is worth. Two minutes a training on one core.
    """
    from keyquery.studies.time import foretell

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"badges": badges, "retail": retail, "cdnow": cdnow}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources:
        raise ValueError("give at least one file of events: --badges, --retail or --cdnow")
    with watching(quiet) as progress:
        reading = foretell(sources, out, seed or (0, 1, 2), epochs, width, device, workers, progress)
    deliver(reading, files, quiet)


@study.command("causes")
def causes(
    reviews: Annotated[Path | None, typer.Option(help="A .tsv with columns split, label (0 or 1) and text.")] = None,
    retail: Annotated[Path | None, typer.Option(help="Online Retail: its .csv, packed or not.")] = None,
    out: Out = None,
    seed: ThreeSeeds = None,
    count: Annotated[int, typer.Option(min=2, help="Predictions to explain, of each training.")] = 200,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a training. Without: as many as it needs.")] = None,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Are explanations along the causal graph of attention shorter, or cheaper, than those in other orders?

    Small Transformers learn the sentiment of reviews and what a customer buys next. Then words or items are hidden
    until the prediction changes: along the graph, by attention, by gradient × input, by place, at random. Ten minutes
    a training on one core.
    """
    from keyquery.studies.causes import explain_blanks

    files = targets(force, json=json, csv=csv, picture=picture)
    named = {"sentiment": reviews, "recommendation": retail}
    sources = {name: path for name, path in named.items() if path is not None}
    if not sources:
        raise ValueError("give at least one file: --reviews or --retail")
    with watching(quiet) as progress:
        reading = explain_blanks(sources, out, seed or (0, 1, 2), count, steps, device, workers, progress)
    deliver(reading, files, quiet)


@study.command("transport")
def transport(
    data: Annotated[
        Path | None,
        typer.Option(metavar="<dir>", help="A folder with uci_adult_train.csv and uci_adult_test.csv, packed or not."),
    ] = None,
    out: Out = None,
    part: Annotated[str, typer.Option(help="accuracy, course, start, or all.")] = "all",
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar=STR, help="A set of the part accuracy; may be given several times. Without: all."),
    ] = None,
    seed: FiveSeeds = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of every network. Without: as many as each has of its own.")
    ] = None,
    workers: Workers = 1,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Is optimal transport a way to train a classifier, and is it what the training of a Transformer does?

    `kq.TransportClassifier` against Transformers and plainer methods, on classes whose best accuracy is known and on
    public tables; Transformers followed through training; heads that were pre-trained. Half an hour on one core.
    """
    from keyquery.studies.transport import carry

    files = targets(force, json=json, csv=csv, picture=picture)
    if picture is not None and part != "all":
        raise ValueError("--picture draws all parts of the study together: leave out --part")
    with watching(quiet) as progress:
        reading = carry(data, out, part, seed or (0, 1, 2, 3, 4), dataset or (), epochs, device, workers, progress)
    deliver(reading, files, quiet)


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    """A seed that is given twice is one seed."""
    return tuple(dict.fromkeys(values))
