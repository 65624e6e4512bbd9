"""Which tokens of a model are words, which are patches of an image, and where those patches lie."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.capture.hooks import Batch
from keyquery.capture.word_pieces import token_texts, words_of
from keyquery.checkpoints.sources import first_line
from keyquery.data.images import read_image
from keyquery.instruments.causes.attention import check_length
from keyquery.support.extras import optional

TEXT, IMAGE, SPECIAL = "text", "image", "special"
SEGMENTS = ("first text", "second text")
TOWERS = "has a tower for text and one for images that never attend to each other: no attention joins them"
LARGEST = 480  # pixels of a side, of the picture on a page


@dataclass(frozen=True)
class Tokens:
    """What a model is run on, a label for each of its tokens (of each text), and how they are called."""

    batch: Batch
    labels: list[list[str]]
    texts: list[str] | None = None
    picture: dict[str, Any] | None = None


def prepared(model: nn.Module, text: Any, image: Any, processor: Any) -> Tokens:
    """A text and an image, or two texts, through a processor or a tokenizer, as a model takes them."""
    texts: list[Any] = [text] if isinstance(text, str) or text is None else list(text)
    for one in texts:
        if not isinstance(one, str) or not one.strip():
            raise ValueError(f"text must hold words, got {one!r:.40}")
    if processor is None:
        raise ValueError("text and image need a processor (for two texts a tokenizer), and none was given or found")
    if image is None:
        if len(texts) != 2:
            raise ValueError(f"flow is between modalities: give a text and an image, or two texts, got {len(texts)}")
        return _pair(model, texts, processor)
    if len(texts) != 1:
        raise ValueError(f"an image goes with one text, got {len(texts)}")
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{type(model).__name__} takes no image: it has no image processor; give two texts")
    return _seen(model, texts[0], image, processor)


def tokens_of(model: nn.Module, batch: Batch, processor: Any = None) -> Tokens:
    """The labels of what a vision-language model of transformers is run on, as its config and its inputs tell them.

    Patches stand where a placeholder token does (Llava and its like), or behind the words (ViLT, VisualBERT).
    """
    config: Any = getattr(model, "config", None)
    ids = batch.get("input_ids")
    if config is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(f"{type(model).__name__} does not say which of its tokens are what: give modality")
    tokenizer = getattr(processor, "tokenizer", processor)
    added = set(getattr(tokenizer, "all_special_ids", None) or [])
    holders = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    holder = next((one for one in holders if isinstance(one, int)), None)
    behind = _behind(config, batch)
    if behind is None and all(hasattr(model, part) for part in ("text_model", "vision_model", "logit_scale")):
        raise ValueError(f"{type(model).__name__} {TOWERS}")
    if behind is None and (holder is None or not bool((ids == holder).any())):
        raise ValueError(f"{type(model).__name__}: which of its tokens are of an image is not known: give modality")
    labels = [
        [IMAGE if one == holder else SPECIAL if one in added else TEXT for one in row] + (behind or [])
        for row in ids.tolist()
    ]
    names = None
    if hasattr(tokenizer, "convert_ids_to_tokens") and len(ids) == 1:
        names = token_texts(ids[0].tolist(), tokenizer)
        names += ["[image]" if label == SPECIAL else "" for label in behind or []]
        patches = iter(range(1, len(names) + 1))
        names = [
            f"patch {next(patches)}" if label == IMAGE else name for name, label in zip(names, labels[0], strict=True)
        ]
    return Tokens(batch, labels, names)


def _behind(config: Any, batch: Batch) -> list[str] | None:
    """Labels of the tokens that stand behind those of the text, in models that put patches there."""
    if config.model_type == "visual_bert" and isinstance(batch.get("visual_embeds"), Tensor):
        return [IMAGE] * batch["visual_embeds"].shape[1]
    if config.model_type != "vilt" or not isinstance(batch.get("pixel_values"), Tensor):
        return None
    patch, pixels = config.patch_size, batch["pixel_values"]
    tall, wide = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    mask = batch.get("pixel_mask")
    real = torch.ones(len(pixels), tall, wide) if mask is None else mask[:, ::patch, ::patch][:, :tall, :wide].float()
    count = int((real[:, :, 0].sum(1) * real[:, 0].sum(1)).max())
    most = config.max_image_length
    return [SPECIAL, *[IMAGE] * (min(count, most) if isinstance(most, int) and most >= 0 else count)]


def _pair(model: nn.Module, texts: Sequence[str], tokenizer: Any) -> Tokens:
    """Two texts one behind the other, as a tokenizer joins them."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(*texts)
        ids, which = list(found["input_ids"]), found.sequence_ids(0)
        batch = {name: torch.tensor([list(row)]) for name, row in found.items()}
        labels = [SPECIAL if one is None else SEGMENTS[one] for one in which]
        names = token_texts(ids, tokenizer)
    else:
        parts = [
            words_of(one if index == 0 else f" {one.lstrip()}", tokenizer, False) for index, one in enumerate(texts)
        ]
        ids = [one for part in parts for one in part.ids]
        batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        labels = [label if real else SPECIAL for part, label in zip(parts, SEGMENTS, strict=True) for real in part.real]
        names = [name for part in parts for name in part.texts]
    check_length(model, len(ids))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"]
    return Tokens(batch, [labels], names)


def _seen(model: nn.Module, text: str, image: Any, processor: Any) -> Tokens:
    pixels: Any = read_image(image) if isinstance(image, (str, Path)) else image
    holder = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    if isinstance(holder, str) and holder not in text:
        text = f"{holder} {text}"
    if not hasattr(pixels, "mode"):  # an array: which side of it is the colours is then not guessed
        pixels = optional("PIL.Image", "an image").fromarray(pixels)
    try:
        batch = dict(processor(images=pixels.convert("RGB"), text=text, return_tensors="pt"))
    except (ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError, KeyError) as error:
        size = " × ".join(map(str, pixels.size))
        raise ValueError(f"{type(processor).__name__} refuses an image of {size}: {first_line(error)}") from None
    if isinstance(batch.get("input_ids"), Tensor):
        check_length(model, batch["input_ids"].shape[1])
    if getattr(getattr(model, "config", None), "model_type", None) == "visual_bert":
        raise ValueError("VisualBERT takes what a detector finds as visual_embeds, not an image: give inputs")
    return tokens_of(model, batch, processor)


@contextmanager
def patch_order(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within, rows and columns (patches, 2) of patches that a model draws in an order of its own, as ViLT does."""
    owner: Any = next((module for module in model.modules() if hasattr(module, "visual_embed")), None)
    found: list[Tensor] = []
    if owner is None:
        yield found
        return
    plain = owner.visual_embed

    def heard(*args: Any, **options: Any) -> Any:
        out = plain(*args, **options)
        found.append(out[-1][0][0].cpu())
        return out

    owner.visual_embed = heard
    try:
        yield found
    finally:
        del owner.visual_embed


def located(tokens: Tokens, order: Sequence[Tensor], processor: Any = None, shown: bool = False) -> Tokens:
    """Patches called by their row and column, where these can be told; `shown`: with the image as the model sees it."""
    count = tokens.labels[0].count(IMAGE)
    pixels = tokens.batch.get("pixel_values")
    if len(tokens.labels) != 1 or not count or not isinstance(pixels, Tensor) or pixels.ndim != 4 or len(pixels) != 1:
        return tokens
    tall, wide = pixels.shape[-2:]
    places = order[0].tolist() if order else _by_rows(count, tall, wide)
    if len(places) != count:
        return tokens  # not patches of the one image
    names = iter(f"patch {row + 1},{column + 1}" for row, column in places)
    texts = tokens.texts or [str(place) for place in range(len(tokens.labels[0]))]
    texts = [next(names) if label == IMAGE else text for text, label in zip(texts, tokens.labels[0], strict=True)]
    data = _encoded(pixels[0], getattr(processor, "image_processor", None)) if shown else None
    if data is None:
        return replace(tokens, texts=texts)
    grid = [1 + max(place[axis] for place in places) for axis in (0, 1)]
    return replace(tokens, texts=texts, picture={"data": data, "size": [tall, wide], "grid": grid, "places": places})


def _by_rows(count: int, tall: int, wide: int) -> list[list[int]]:
    """Rows and columns of so many square patches of an image, none where they do not fill it.

    >>> _by_rows(6, 32, 48)
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    about = math.isqrt(count * tall // wide)
    for rows in (about, about + 1):
        if rows and count % rows == 0 and rows * wide == count // rows * tall:
            return [list(divmod(place, count // rows)) for place in range(count)]
    return []


def _encoded(pixels: Tensor, processor: Any) -> str | None:
    """Pixels (3, h, w) as a model takes them, as a JPEG in base64; None without Pillow."""
    try:
        library = optional("PIL.Image", "a picture of it")
    except ImportError:
        return None
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    pixels = pixels.detach().float().cpu()
    if mean is not None and spread is not None and len(mean) == len(pixels):
        pixels = pixels * torch.tensor(spread)[:, None, None] + torch.tensor(mean)[:, None, None]
    else:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low).clamp(min=1e-9)
    colours = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    bytes_ = (255 * colours.clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()
    image = library.fromarray(bytes_)
    image.thumbnail((LARGEST, LARGEST))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88)
    return base64.b64encode(out.getvalue()).decode()


def labelled(modality: Any, count: int | None = None) -> list[list[str]]:
    """Labels as they are given: one for each token, or a row of them for each text."""
    rows = modality.tolist() if hasattr(modality, "tolist") else modality
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Sequence) or not len(rows):
        raise TypeError(f"modality must be a label for each token, such as ['text', 'image'], got {modality!r:.60}")
    nested = [isinstance(row, (list, tuple)) for row in rows]
    found = [[str(one) for one in row] for row in rows] if all(nested) else [[str(one) for one in rows]]
    sizes = {len(row) for row in found}
    if any(nested) != all(nested) or len(sizes) != 1:
        raise ValueError("modality must be one row of labels, or a row for each text, all of one length")
    if count is not None and sizes != {count}:
        raise ValueError(f"modality has {sizes.pop()} labels, but the attention has {count} tokens")
    return found
