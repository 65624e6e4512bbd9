"""Embeddings of images and texts for the study `rerank`: DINOv2 from its weights, sentences by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, interpolate, layer_norm, linear, scaled_dot_product_attention

from keyquery.layers import LanguageModel
from keyquery.listening.inputs.load import load_model
from keyquery.support.extras import optional
from keyquery.support.progress import Progress, silent

MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images that DINOv2 has seen
HEAD = 64  # the width of a head, in every size of the model
EPSILON = 1e-6
RENAMED = {  # of transformers 4, by the names of later versions
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}


def load_dino(path: str | Path) -> dict[str, Tensor]:
    """Weights of a DINOv2 backbone: a safetensors file with the names of transformers' Dinov2Model."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        weights = {name.removeprefix("dinov2."): weight.float() for name, weight in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    needed = ("embeddings.cls_token", "embeddings.position_embeddings", "encoder.layer.0.mlp.fc1.weight")
    if lost := [name for name in needed if name not in weights]:
        raise ValueError(f"{path} is not a DINOv2 backbone: it lacks {', '.join(lost)}")
    return weights


def dino_model(path: str | Path) -> torch.nn.Module:
    """A DINOv2 backbone as transformers' own model."""
    library, weights = optional("transformers", "DINOv2"), load_dino(path)
    tokens, width = weights["embeddings.position_embeddings"].shape[1:]
    patch = weights["embeddings.patch_embeddings.projection.weight"].shape[-1]
    depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // HEAD}
    config = library.Dinov2Config(image_size=patch * round((tokens - 1) ** 0.5), patch_size=patch, **sizes)
    model: torch.nn.Module = library.Dinov2Model(config)
    if "encoder.layer.0.attention.q_proj.weight" in model.state_dict():
        weights = {_renamed(name): weight for name, weight in weights.items()}
    if lost := sorted(model.state_dict().keys() - weights.keys() - {"embeddings.mask_token"}):
        raise ValueError(f"{path} is an incomplete DINOv2 backbone: it lacks {lost[0]}")
    model.load_state_dict(weights, strict=False)
    return model.eval()


def _renamed(name: str) -> str:
    for before, after in RENAMED.items():
        name = name.replace(before, after)
    return name


@torch.no_grad()
def image_vectors(
    pixels: UInt8[np.ndarray, "n h w c"],
    weights: Mapping[str, Tensor],
    size: int = 112,
    device: str = "cpu",
    batch: int = 64,
    progress: Progress | None = None,
) -> Float[np.ndarray, "n dim"]:
    """The first token of each image's last layer, of images brought to size × size by bicubic interpolation."""
    on = {name: weight.to(device) for name, weight in weights.items()}
    mean, spread = (torch.tensor(three, device=device).view(3, 1, 1) for three in (MEAN, SPREAD))
    vectors, starts = [], range(0, len(pixels), batch)
    for start in (progress or silent)(starts, "vectors of images", len(starts)):
        some = torch.from_numpy(pixels[start : start + batch]).to(device).permute(0, 3, 1, 2).float() / 255
        some = interpolate(some.expand(-1, 3, -1, -1), (size, size), mode="bicubic", antialias=True).clamp(0, 1)
        vectors.append(dino((some - mean) / spread, on)[:, 0].cpu())
    return torch.cat(vectors).numpy()


def dino(images: Float[Tensor, "n 3 h w"], weights: Mapping[str, Tensor]) -> Float[Tensor, "n tokens dim"]:
    """A DINOv2 transformer: patches, positions brought to their grid, pre-norm blocks with a scale on what they add."""
    kernel = weights["embeddings.patch_embeddings.projection.weight"]
    bias = weights["embeddings.patch_embeddings.projection.bias"]
    patches = torch.nn.functional.conv2d(images, kernel, bias, stride=kernel.shape[-1])
    tokens = torch.cat((weights["embeddings.cls_token"].expand(len(images), -1, -1), patches.flatten(2).mT), 1)
    x = tokens + _positions(weights["embeddings.position_embeddings"], patches.shape[-2], patches.shape[-1])
    depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    for layer in range(depth):
        own = {
            name.removeprefix(f"encoder.layer.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"encoder.layer.{layer}.")
        }
        x = x + own["layer_scale1.lambda1"] * _attended(_normed(x, own, "norm1"), own)
        hidden = gelu(_mapped(_normed(x, own, "norm2"), own, "mlp.fc1"))
        x = x + own["layer_scale2.lambda1"] * _mapped(hidden, own, "mlp.fc2")
    return _normed(x, weights, "layernorm")


def _attended(x: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    query, key, value = (
        _mapped(x, own, f"attention.attention.{part}").unflatten(-1, (-1, HEAD)).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    joined = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    return _mapped(joined, own, "attention.output.dense")


def _mapped(x: Tensor, own: Mapping[str, Tensor], name: str) -> Tensor:
    return linear(x, own[f"{name}.weight"], own[f"{name}.bias"])


def _normed(x: Tensor, own: Mapping[str, Tensor], name: str) -> Tensor:
    return layer_norm(x, x.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"], EPSILON)


def _positions(learned: Float[Tensor, "1 tokens dim"], rows: int, columns: int) -> Float[Tensor, "1 _ dim"]:
    """Positions of a square grid, as they were learned, on another grid; that of the first token stays."""
    side = round((learned.shape[1] - 1) ** 0.5)
    if (rows, columns) == (side, side):
        return learned
    grid = learned[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    turned = interpolate(grid, (rows, columns), mode="bicubic", align_corners=False)
    return torch.cat((learned[:, :1], turned.flatten(2).mT), 1)


@torch.no_grad()
def text_vectors(
    texts: Sequence[str],
    folder: str | Path,
    length: int = 64,
    device: str = "cpu",
    batch: int = 64,
    progress: Progress | None = None,
) -> Float[np.ndarray, "n dim"]:
    """The mean over the tokens of each text, by an encoder of a folder, of the first `length` tokens."""
    model, tokenizer = load_model(folder)
    if tokenizer is None or isinstance(model, LanguageModel):
        raise ValueError(f"{folder} must be a transformers encoder with its tokenizer, such as a sentence encoder")
    model.to(device).eval()
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # so that little is padding
    embedded, starts = [], range(0, len(texts), batch)
    for start in (progress or silent)(starts, "vectors of texts", len(starts)):
        some = [texts[place] for place in order[start : start + batch]]
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
        inputs = {name: tensor.to(device) for name, tensor in tokenizer(some, **options).items()}
        hidden = model(**inputs).last_hidden_state.float()
        real = inputs["attention_mask"].unsqueeze(-1)
        embedded.append(((hidden * real).sum(1) / real.sum(1)).cpu())
    vectors = torch.cat(embedded)
    return torch.empty_like(vectors).index_copy_(0, torch.tensor(order), vectors).numpy()
