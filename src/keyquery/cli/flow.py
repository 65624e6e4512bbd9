"""`keyquery flow`."""

from __future__ import annotations

import os
from pathlib import Path

from keyquery.cli.options import RUNNING, Output, argument, command, option
from keyquery.instruments.flow.flow import flow as measure_flow
from keyquery.instruments.flow.show import HEADS
from keyquery.listening.inputs.load import load_model, load_processor


@command(
    *("json", "csv", "html", "picture"),
    calls=measure_flow,
    model=argument(str, "A folder with a model and its processor or tokenizer."),
    image=option(Path | None, "An image file, for a vision-language model, or alone for a ViT."),
    text=option(
        list[str] | None, "The text that goes with the image. Without --image, give --text twice: flow between texts."
    ),
    special=option(str, "Special tokens such as [CLS]: leave (exclude) or count (as a separate class).", "leave"),
    keep=option(
        int | None,
        f"Keep the attention maps of this many heads, the strongest. Default: {HEADS} with --html, else 0.",
        min=0,
    ),
    sink=option(
        float,
        "Attention sinks: when ranking heads, ignore keys that take more than this share of a head's "
        "attention. 1 keeps all keys.",
    ),
    **RUNNING,
)
def flow(
    model: str,
    image: Path | None,
    text: list[str] | None,
    special: str,
    keep: int | None,
    sink: float,
    device: str,
    dtype: str | None,
    output: Output,
) -> None:
    """Measure how much attention flows between image and text, or between two texts.

    Reports, for every layer and head, raw attention, attention with the residual stream, attention rollout, and
    norm-weighted attention, each next to its null level under uniform attention. The HTML page highlights, per head,
    the image patches that the words attend to, with or without the popularity of keys (attention sinks). A plain vision
    Transformer takes --image alone: the page shows the patches that its class token, or any patch, attends to.
    """
    if special not in ("leave", "count"):
        raise ValueError(f"--special must be leave or count, got {special!r}")
    if image is not None and not image.is_file():
        raise FileNotFoundError(f"image file not found: {image}")
    if paths := [part for part in text or () if Path(part).suffix and os.path.isfile(part)]:
        raise ValueError(f"--text takes the text itself, but {paths[0]} is a file: give its content")
    if not text and image is None:
        raise ValueError("give --text TEXT together with --image FILE or a second --text")
    live, tokenizer = load_model(model, device=device, dtype=dtype)
    reading = measure_flow(
        live,
        text=text,
        image=image,
        processor=load_processor(model) or tokenizer,
        counted=special == "count",
        keep=keep if keep is not None else HEADS if "html" in output.files else 0,
        sink=sink,
        name=Path(model).name,
    )
    output.deliver(reading)
