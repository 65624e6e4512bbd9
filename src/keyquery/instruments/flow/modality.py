"""Which tokens of a model are text and which are image patches, and where those patches lie."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.instruments.flow.counting import CLASS, IMAGE, SPECIAL
from keyquery.listening.hooks import Batch, evaluating, replace_method
from keyquery.listening.inputs.word_pieces import token_texts, words_of
from keyquery.listening.maps import TOWERS, check_length
from keyquery.support.extras import optional
from keyquery.support.images import read_image
from keyquery.support.printable import first_line

TEXT = "text"
SEGMENTS = ("first text", "second text")
PAGE_PIXELS = 480  # per side of the image on a page


@dataclass(frozen=True)
class Tokens:
    """Inputs of a model, one label per token (of each text), and token names."""

    batch: Batch
    labels: list[list[str]]
    texts: list[str] | None = None
    picture: dict[str, Any] | None = None


def prepared(model: nn.Module, text: Any, image: Any, processor: Any) -> Tokens:
    """A text and an image, two texts, or an image alone, processed into model inputs."""
    if image is not None and not text and text != "":
        return _image_alone(model, image, processor)
    texts: list[Any] = [text] if isinstance(text, str) or text is None else list(text)
    if without := [part for part in texts if not isinstance(part, str) or not part.strip()]:
        raise ValueError(f"text must contain words, got {without[0]!r:.40}")
    if processor is None:
        raise ValueError("text and image need a processor (two texts a tokenizer), and none was passed or found")
    if image is None and len(texts) != 2:
        raise ValueError(f"flow needs two modalities: pass a text and an image, or two texts, got {len(texts)}")
    if image is None:
        return _pair(model, texts, getattr(processor, "tokenizer", processor))
    if len(texts) != 1:
        raise ValueError(f"an image needs exactly one text, got {len(texts)}")
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{type(model).__name__} takes no image: it has no image processor; pass two texts")
    holder = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    missing = isinstance(holder, str) and holder not in texts[0]
    batch = _processed(processor, images=_pillow(image), text=f"{holder} {texts[0]}" if missing else texts[0])
    if isinstance(batch.get("input_ids"), Tensor):
        check_length(model, batch["input_ids"].shape[1])
    return tokens_of(model, batch, processor)


def tokens_of(model: nn.Module, batch: Batch, processor: Any = None) -> Tokens:
    """Token labels of a vision-language model: patches replace placeholders (Llava), or follow the text (ViLT)."""
    config: Any = getattr(model, "config", None)
    ids = batch.get("input_ids")
    if config is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(f"{type(model).__name__} does not define the modality of its tokens: pass modality")
    tokenizer = getattr(processor, "tokenizer", processor)
    added = set(getattr(tokenizer, "all_special_ids", None) or [])
    holders = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    holder = next((token for token in holders if isinstance(token, int)), None)
    behind = _appended(config, batch)
    if not behind and all(hasattr(model, part) for part in ("text_model", "vision_model", "logit_scale")):
        raise ValueError(f"{type(model).__name__} {TOWERS}")
    if not behind and (holder is None or not bool((ids == holder).any())):
        raise ValueError(f"{type(model).__name__}: image tokens not found: pass modality")
    labels = [
        [IMAGE if token == holder else SPECIAL if token in added else TEXT for token in row] + behind
        for row in ids.tolist()
    ]
    names = None
    if hasattr(tokenizer, "convert_ids_to_tokens") and len(ids) == 1:
        texts, numbers = token_texts(ids[0].tolist(), tokenizer) + ["[image]"] * len(behind), count(1)
        pairs = zip(texts, labels[0], strict=True)
        names = [f"patch {next(numbers)}" if label == IMAGE else text for text, label in pairs]
    return Tokens(batch, labels, names)


def _appended(config: Any, batch: Batch) -> list[str]:
    """Labels of the tokens after the text, in models that append patches."""
    if config.model_type == "visual_bert" and isinstance(batch.get("visual_embeds"), Tensor):
        return [IMAGE] * batch["visual_embeds"].shape[1]
    if config.model_type != "vilt" or not isinstance(batch.get("pixel_values"), Tensor):
        return []
    patch, pixels = config.patch_size, batch["pixel_values"]
    tall, wide = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    mask = batch.get("pixel_mask")
    real = torch.ones(len(pixels), tall, wide) if mask is None else mask[:, ::patch, ::patch][:, :tall, :wide].float()
    count = int((real[:, :, 0].sum(1) * real[:, 0].sum(1)).max())
    most = config.max_image_length
    return [SPECIAL, *[IMAGE] * (min(count, most) if isinstance(most, int) and most >= 0 else count)]


def _pair(model: nn.Module, texts: Sequence[str], tokenizer: Any) -> Tokens:
    """Two texts concatenated by a tokenizer."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(*texts)
        batch = {name: torch.tensor([list(row)]) for name, row in encoded.items()}
        labels = [SPECIAL if segment is None else SEGMENTS[segment] for segment in encoded.sequence_ids(0)]
        names = token_texts(batch["input_ids"][0].tolist(), tokenizer)
    else:
        parts = [words_of(words, tokenizer, False) for words in (texts[0], f" {texts[1].lstrip()}")]
        ids = torch.tensor([[number for part in parts for number in part.ids]])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        labels = [label if real else SPECIAL for part, label in zip(parts, SEGMENTS, strict=True) for real in part.real]
        names = [name for part in parts for name in part.texts]
    check_length(model, len(names))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"]
    return Tokens(batch, [labels], names)


def _image_alone(model: nn.Module, image: Any, processor: Any) -> Tokens:
    """An image for a vision Transformer: its class tokens, then its patches row by row."""
    name = type(model).__name__
    images = getattr(processor, "image_processor", processor)
    if getattr(model, "main_input_name", None) != "pixel_values":
        raise ValueError(f"{name} is no plain vision Transformer: pass a text with the image")
    if not hasattr(images, "image_mean"):
        raise ValueError("an image needs an image processor, and none was passed or found")
    pixels = _processed(images, images=_pillow(image))["pixel_values"]
    with evaluating(model):
        out: Any = getattr(model, "base_model", model)(pixel_values=pixels.to(next(model.parameters()).device))
    hidden = getattr(out, "last_hidden_state", None)
    size: Any = getattr(model.config, "patch_size", None)
    patches = (pixels.shape[-2] // size) * (pixels.shape[-1] // size) if isinstance(size, int) else 0
    more = hidden.shape[1] - patches if isinstance(hidden, Tensor) and hidden.ndim == 3 and patches else -1
    if more < 1:
        reason = "has patches only, without a class token" if more == 0 else "does not attend to patches of the image"
        raise ValueError(f"{name} {reason}: there is nothing that attention could flow between")
    texts = ["class token", *(f"extra token {i + 1}" for i in range(more - 1)), *[""] * patches]
    return Tokens({"pixel_values": pixels}, [[CLASS] * more + [IMAGE] * patches], texts)


def _pillow(image: Any) -> Any:
    """An image file, array or Pillow image, as the latter, in colours."""
    pixels: Any = read_image(image) if isinstance(image, (str, Path)) else image
    # The channel axis of an array is not guessed.
    picture = pixels if hasattr(pixels, "mode") else optional("PIL.Image", "an image").fromarray(pixels)
    return picture.convert("RGB")


def _processed(processor: Any, **inputs: Any) -> dict[str, Any]:
    try:
        return dict(processor(**inputs, return_tensors="pt"))
    except (ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError, KeyError) as error:
        size = " × ".join(map(str, inputs["images"].size))
        raise ValueError(f"{type(processor).__name__} rejects an image of {size}: {first_line(error)}") from None


@contextmanager
def patch_order(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context that records rows and columns (patches, 2) of patches in the model's own order, as in ViLT."""
    owner: Any = next((module for module in model.modules() if hasattr(module, "visual_embed")), None)
    orders: list[Tensor] = []
    original: Any = getattr(owner, "visual_embed", None)

    def recording(*args: Any, **options: Any) -> Any:
        out = original(*args, **options)
        orders.append(out[-1][0][0].cpu())
        return out

    with ExitStack() as changes:
        if owner is not None:
            replace_method(owner, "visual_embed", recording, changes)
        yield orders


def located(tokens: Tokens, order: Sequence[Tensor], processor: Any, shown: bool) -> Tokens:
    """Name patches by row and column, where known; `shown`: add the image as the model sees it."""
    patches = [token for token, label in enumerate(tokens.labels[0]) if label == IMAGE]
    pixels = tokens.batch.get("pixel_values")
    if len(tokens.labels) != 1 or not isinstance(pixels, Tensor) or pixels.ndim != 4 or len(pixels) != 1:
        return tokens
    tall, wide = pixels.shape[-2:]
    places = order[0].tolist() if order else _by_rows(len(patches), tall, wide)
    if not patches or len(places) != len(patches):
        return tokens  # not patches of the one image
    texts = list(tokens.texts or map(str, range(len(tokens.labels[0]))))
    for token, (row, column) in zip(patches, places, strict=True):
        texts[token] = f"patch {row + 1},{column + 1}"
    if not shown:
        return replace(tokens, texts=texts)
    data = _encoded(pixels[0], getattr(processor, "image_processor", processor))
    grid = [1 + max(corner[axis] for corner in places) for axis in (0, 1)]
    return replace(tokens, texts=texts, picture={"data": data, "size": [tall, wide], "grid": grid, "places": places})


def _by_rows(count: int, tall: int, wide: int) -> list[list[int]]:
    """Rows and columns of `count` square patches of an image; empty if they do not fill it."""
    about = math.isqrt(count * tall // wide)
    for rows in (about, about + 1):
        if rows and count % rows == 0 and rows * wide == count // rows * tall:
            return [list(divmod(patch, count // rows)) for patch in range(count)]
    return []


def _encoded(pixels: Tensor, processor: Any) -> str:
    """Preprocessed pixels (3, h, w) as a base64 JPEG."""
    mean, deviation = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    pixels = pixels.detach().float().cpu()
    if mean is not None and deviation is not None and len(mean) == len(pixels):
        pixels = pixels * torch.tensor(deviation)[:, None, None] + torch.tensor(mean)[:, None, None]
    else:
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-9)
    colours = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    array = (255 * colours.clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()
    image = optional("PIL.Image", "the image on a page").fromarray(array)
    image.thumbnail((PAGE_PIXELS, PAGE_PIXELS))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88)
    return base64.b64encode(out.getvalue()).decode()


def labelled(modality: Any) -> list[list[str]]:
    """Validate labels: one per token, or one row per text."""
    rows = modality.tolist() if hasattr(modality, "tolist") else modality
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Sequence) or not len(rows):
        raise TypeError(f"modality must be one label per token, such as ['text', 'image'], got {modality!r:.60}")
    nested = [isinstance(row, (list, tuple)) for row in rows]
    labels = [[str(label) for label in row] for row in rows] if all(nested) else [[str(label) for label in rows]]
    if any(nested) != all(nested) or len({len(row) for row in labels}) != 1:
        raise ValueError("modality must be one row of labels, or one row per text, all of one length")
    return labels
