"""The network of a VisualParser: a patch encoder, and a joint encoder of visual tokens and words."""

from __future__ import annotations

import copy
import math
from inspect import signature
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from keyquery.layers.blocks import Encoder
from keyquery.learn.inputs.captions import FIRST, PAD
from keyquery.learn.layers.vision import VisionEncoder
from keyquery.support.extras import optional

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet statistics
RANK = 1e-3  # relative to the largest, below which singular values of word vectors count as 0
POSITIONS = 0.5  # initial standard deviation of the position embeddings, relative to tokens of 1


class Seen(NamedTuple):
    """Features of patches, and optionally the attention between them."""

    features: Float[Tensor, "batch tokens features"]
    attention: Float[Tensor, "batch tokens tokens"] | None = None

    def take(self, index: Any) -> Seen:
        """A subset, in full precision; stored values are half precision."""
        attention = None if self.attention is None else self.attention[index].float()
        return Seen(self.features[index].float(), attention)


class Backbone(nn.Module):
    """A transformers vision model as the patch encoder, for images of `size` × `size` pixels.

    Patches are the last of its tokens. Their attention is that of the last layer if it is global; for windowed
    attention, or none, it is softmax(f fᵀ/√d) of their normalised features f.
    """

    def __init__(self, model: Any, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # unused, and missing in some checkpoints
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")  # fused attention returns no maps
        accepted = signature(model.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in accepted else {}
        with torch.no_grad():
            device = next(model.parameters()).device
            features = self._run(torch.zeros(1, 3, size, size, device=device), attention=False)[0]
        patch = getattr(model.config, "patch_size", None)
        patches = (size // patch) ** 2 if isinstance(patch, int) else features.shape[1]
        self.tokens = patches if 0 < patches <= features.shape[1] else features.shape[1]
        self.dim = features.shape[2]

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch tokens dim"]:
        """Features of the patches."""
        return self._run(images, attention=False)[0][:, -self.tokens :]

    def with_attention(
        self, images: Float[Tensor, "batch 3 h w"]
    ) -> tuple[Float[Tensor, "batch tokens dim"], Float[Tensor, "batch tokens tokens"]]:
        """Features, and attention maps averaged over heads, without gradients."""
        whole, maps = self._run(images, attention=True)
        features, last = whole[:, -self.tokens :], maps[-1] if maps else None
        if last is not None and last.shape[0] == len(whole) and last.shape[-1] == whole.shape[1]:
            return features, last.detach().mean(1)[:, -self.tokens :, -self.tokens :]
        alike = layer_norm(features.detach(), features.shape[-1:])
        return features, (alike @ alike.mT / math.sqrt(self.dim)).softmax(-1)

    def _run(self, images: Tensor, attention: bool) -> tuple[Tensor, Any]:
        out: Any = self.model(pixel_values=images, output_attentions=attention, **self._options)
        whole = out.last_hidden_state
        # Convolutional models return channels first.
        return whole.flatten(2).mT if whole.ndim == 4 else whole, getattr(out, "attentions", None)


def backbone_of(model: Any, size: int) -> Backbone:
    """A copy of a transformers vision model as a Backbone."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"backbone must be a transformers vision model, or its folder, got {type(model).__name__}")
    if getattr(model, "main_input_name", "pixel_values") != "pixel_values":
        raise ValueError(f"backbone must take pixel_values, and {type(model).__name__} takes {model.main_input_name}")
    return Backbone(copy.deepcopy(model), size)


def built(facts: dict[str, Any], size: int) -> Backbone:
    """A Backbone with random weights from a config; only architectures of transformers, no remote code."""
    library = optional("transformers", "a backbone")
    return Backbone(library.AutoModel.from_config(library.AutoConfig.for_model(**facts)), size)


class VisionLanguageNetwork(nn.Module):
    """[match; visual tokens; words] through an Encoder, with heads for matching, masked words and masked features.

    `vision` returns features of `vision.tokens` patches, of dimension `vision.dim`. A linear map and a norm make visual
    tokens of them. The output embedding of words is tied to the input embedding. With `vectors`, those of a text
    encoder, the embedding of a word is a linear map of its vector.
    """

    mean: Tensor
    spread: Tensor
    vectors: Tensor

    def __init__(
        self,
        vision: VisionEncoder | Backbone,
        words: int,
        longest: int,
        width: int,
        depth: int,
        heads: int,
        kernel: str = "general",
        vectors: Float[Tensor, "words dim"] | None = None,
    ) -> None:
        super().__init__()
        self.vision, self.longest = vision, longest
        self.project = nn.Sequential(nn.Linear(vision.dim, width), nn.LayerNorm(width))
        self.words = nn.Embedding(words if vectors is None else FIRST, width, padding_idx=PAD)
        self.word_places = nn.Parameter(torch.empty(longest, width))
        self.visual_places = nn.Parameter(torch.empty(vision.tokens, width))
        self.first = nn.Parameter(torch.empty(width))  # the [match] token
        self.hidden = nn.Parameter(torch.empty(width))  # embedding of a masked patch
        self.word_norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=width**-0.5)
        for weight in (self.word_places, self.visual_places, self.first, self.hidden):
            nn.init.normal_(weight, std=POSITIONS)
        self.joint = Encoder(width, depth, heads, kernel=kernel)
        self.matcher = nn.Linear(width, 1)
        self.regressor = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, vision.dim))
        self.text = None if vectors is None else nn.Linear(vectors.shape[1], width)
        if vectors is not None and self.text is not None:
            self.register_buffer("vectors", vectors)
            nn.init.normal_(self.text.weight, std=math.sqrt(vectors.shape[1] / width))
            nn.init.zeros_(self.text.bias)
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))
        self.register_buffer("spread", torch.tensor(DEVIATION).view(3, 1, 1))

    def see(self, images: Num[Tensor, "batch 3 h w"], attention: bool = False) -> Seen:
        """Patch features of images with values from 0 to 255, and the attention between them if there is any."""
        shown = (images.float() / 255 - self.mean) / self.spread
        return Seen(*self.vision.with_attention(shown)) if attention else Seen(self.vision(shown))

    def table(self, further: Float[Tensor, "more dim"] | None = None) -> Float[Tensor, "words width"]:
        """Embeddings of all words, and of `further` words by their vectors."""
        if self.text is None:
            return self.words.weight
        mean = self.vectors.mean(0)  # what all words have in common would dominate
        vectors = self.vectors - mean
        # Divided by their width, so that a step of the optimiser moves a word as far as it moves an embedding.
        scale = vectors.square().mean().sqrt().clamp(min=1e-6) * vectors.shape[1]
        if further is not None:  # what differs from all words of the training is unknown, and left out
            known = (further - mean) @ torch.linalg.pinv(vectors, rtol=RANK) @ vectors
            vectors = torch.cat((vectors, known))
        return torch.cat((self.words.weight, self.text(vectors / scale)))

    def forward(
        self,
        features: Float[Tensor, "batch tokens features"],
        ids: Int[Tensor, "batch n"],
        hidden: Bool[Tensor, "batch tokens"] | None = None,
        further: Float[Tensor, "more dim"] | None = None,
    ) -> Float[Tensor, "batch all width"]:
        """Output of the joint encoder; `hidden` patches are masked."""
        seen = self.project(features)
        if hidden is not None:
            seen = torch.where(hidden.unsqueeze(-1), self.hidden, seen)
        embedded = self.words(ids) if self.text is None else self.table(further)[ids]
        words = self.word_norm(embedded) + self.word_places[: ids.shape[1]]
        first = self.first.expand(len(ids), 1, -1)
        real = torch.cat((ids.new_ones(len(ids), 1 + seen.shape[1], dtype=torch.bool), ids != PAD), 1)
        return self.joint(torch.cat((first, seen + self.visual_places, words), 1), real)

    def match(self, out: Float[Tensor, "batch all width"]) -> Float[Tensor, " batch"]:
        """Logit of image and text matching."""
        return self.matcher(out[:, 0]).squeeze(-1).float()

    def spell(self, out: Float[Tensor, "batch all width"]) -> Float[Tensor, "batch n words"]:
        """Logits of every word."""
        return (out[:, 1 + self.vision.tokens :] @ self.table().mT).float()

    def regress(self, out: Float[Tensor, "batch all width"]) -> Float[Tensor, "batch tokens features"]:
        """Normalised features of every patch."""
        return self.regressor(out[:, 1 : 1 + self.vision.tokens]).float()
