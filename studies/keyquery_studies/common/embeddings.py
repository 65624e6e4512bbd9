"""Vectors of digits by DINOv2, and of passages of books by a sentence encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import interpolate

from keyquery.learn.data import read_corpus, unwrap
from keyquery.listening.inputs.load import load_model
from keyquery.support.extras import optional

MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images that DINOv2 has seen
HEAD = 64  # the width of a head, in every size of the model
BATCH = 64
WORDS, STRETCH = 60, 12  # words per passage, consecutive passages that form a group
RENAMED = {  # of transformers 4, by the names of later versions
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}


def dino_model(path: str | Path) -> torch.nn.Module:
    """A DINOv2 backbone of a safetensors file with the names of transformers' Dinov2Model."""
    library = optional("transformers", "DINOv2")
    try:
        weights = {name.removeprefix("dinov2."): weight.float() for name, weight in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    patches, positions = "embeddings.patch_embeddings.projection.weight", "embeddings.position_embeddings"
    if lost := [name for name in (patches, positions) if name not in weights]:
        raise ValueError(f"{path} is not a DINOv2 backbone: it lacks {', '.join(lost)}")
    tokens, width = weights[positions].shape[1:]
    patch = weights[patches].shape[-1]
    depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // HEAD}
    config = library.Dinov2Config(image_size=patch * round((tokens - 1) ** 0.5), patch_size=patch, **sizes)
    model: torch.nn.Module = library.Dinov2Model(config)
    if "encoder.layer.0.attention.q_proj.weight" in model.state_dict():
        weights = {_renamed(name): weight for name, weight in weights.items()}
    if missing := sorted(model.state_dict().keys() - weights.keys() - {"embeddings.mask_token"}):
        raise ValueError(f"{path} is an incomplete DINOv2 backbone: it lacks {missing[0]}")
    model.load_state_dict(weights, strict=False)
    return model.eval()


def _renamed(name: str) -> str:
    for before, after in RENAMED.items():
        name = name.replace(before, after)
    return name


@torch.no_grad()
def digit_vectors(weights: Path) -> tuple[Float[np.ndarray, "n dim"], Int[np.ndarray, " n"]]:
    """The first token of DINOv2's last layer for each digit of scikit-learn, enlarged to 56 × 56; and the labels."""
    digits = optional("sklearn.datasets", "the data set digits").load_digits()
    model, vectors = dino_model(weights), []
    mean, spread = (torch.tensor(channels).view(3, 1, 1) for channels in (MEAN, SPREAD))
    for some in torch.from_numpy(digits.images / 16).float().unsqueeze(1).split(BATCH):
        images = interpolate(some.expand(-1, 3, -1, -1), (56, 56), mode="bicubic", antialias=True).clamp(0, 1)
        vectors.append(model(pixel_values=(images - mean) / spread).last_hidden_state[:, 0])
    return torch.cat(vectors).numpy(), digits.target


def passages(path: Path, most: int) -> dict[str, tuple[list[str], np.ndarray]]:
    """Passages of 60 words of works that form feeds separate: equally many by work, and groups of 12 in a row."""
    words = [unwrap(work).split() for work in read_corpus(path).split("\f")]
    works = [[" ".join(w[i : i + WORDS]) for i in range(0, len(w) - WORDS + 1, WORDS)] for w in words]
    rng, texts, groups = np.random.default_rng(0), list[tuple[str, int]](), list[str]()
    for label, work in enumerate(works):
        chosen = np.sort(rng.permutation(len(work))[: max(most // len(works), 2)])
        texts += [(work[index], label) for index in chosen]
        count = min(len(work) // STRETCH, max(most // STRETCH // len(works), 1))
        for start in np.linspace(0, len(work) // STRETCH - 1, count).astype(int) * STRETCH:
            groups += work[start : start + STRETCH]
    stretches = np.arange(len(groups)) // STRETCH
    return {"texts": ([text for text, _ in texts], np.array([n for _, n in texts])), "stretches": (groups, stretches)}


@torch.no_grad()
def text_vectors(texts: Sequence[str], folder: Path) -> Float[np.ndarray, "n dim"]:
    """The mean over the first 64 tokens of each text, by a sentence encoder."""
    model, tokenizer = load_model(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} must be a transformers encoder with its tokenizer, such as a sentence encoder")
    model, vectors = model.eval(), list[Tensor]()
    for start in range(0, len(texts), 64):
        inputs = tokenizer(texts[start : start + 64], padding=True, truncation=True, max_length=64, return_tensors="pt")
        hidden, real = model(**inputs).last_hidden_state.float(), inputs["attention_mask"].unsqueeze(-1)
        vectors.append((hidden * real).sum(1) / real.sum(1))
    return torch.cat(vectors).numpy()
