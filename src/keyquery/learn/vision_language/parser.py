"""VisualParser: a vision-language model for image-text matching."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from keyquery.layers.kernels import KERNELS
from keyquery.learn.base import SavedEstimator, check_is_fitted, check_sizes, seed_of, seeded
from keyquery.learn.inputs.captions import Vocabulary, cut, texts_of
from keyquery.learn.inputs.images import images_of
from keyquery.learn.layers.vision import VisionEncoder
from keyquery.learn.vision_language.network import Backbone, VisionLanguageNetwork, backbone_of, built
from keyquery.learn.vision_language.training import Pairs, learn, watched
from keyquery.listening.hooks import running
from keyquery.listening.inputs.load import load_model
from keyquery.reading import plain
from keyquery.support.checks import check_choice, check_count
from keyquery.support.devices import pick_device
from keyquery.support.progress import bars

NO_BETTER = 0.97  # share of the loss at chance
ENOUGH = 5  # epochs after which matching should be better than that
PAIRS = 256  # image-text pairs per forward pass
WIDEST = 1 << 16  # vectors of a text encoder
WORDS = 256  # per forward pass of a text encoder


@dataclass(eq=False, repr=False)
class VisualParser(SavedEstimator):
    """Vision-language model trained on image-text pairs: a patch encoder and a joint encoder, for image-text matching.

    From a paper: of 48 comparisons with its patch encoder none survives correction.

    It is for captions, above all for relations in them ("red left of blue"). To classify images, use a classifier: it
    is more accurate and far cheaper. Use a pretrained `backbone` and `text_encoder` where there are any for your data:
    from scratch it learns small vocabularies and simple images only.

    The patch encoder (visual parser) turns an image into visual tokens, which pass with the words of the text through a
    joint encoder with full attention. The loss is the sum of three:

        MLM (masked language modelling) + ITM (image-text matching) + MFR (masked feature regression)

    MFR masks a patch and those that it attends to most, 15 % in all; random ones without attention (`parser_depth=0`).
    Negatives of ITM are texts of other images, half random, half with many words in common. Images are an array
    (n, h, w) or (n, h, w, c), uint8 or floats from 0 to 1, or a list of arrays, Pillow images and paths; all are
    resized to `size` pixels. Words that do not occur in the training texts are treated as [MASK], unless there is a
    `text_encoder`.

    Parameters
    ----------
    size, patch
        Image and patch size in pixels. Default: 64, 8.
    width, depth, heads
        Size of the joint encoder. Default: 64, 2, 4.
    parser_depth
        Layers of the patch encoder, a `kq.Encoder`; 0: a linear patch embedding. Default: 2.
    kernel
        Kernel of the joint encoder, any of `kq.Attention`. Default: "general".
    backbone
        A transformers vision model such as DINOv2 or Swin, or its folder, in place of the patch encoder.
        Default: None.
    text_encoder
        A text encoder of transformers with its tokenizer, such as a sentence encoder: its folder, or a pair
        (model, tokenizer). Words then have its vectors, and in `match` a word that did not occur in training counts as
        the mixture of those that did that is most like it, which helps little if they are few. It is not part of a
        saved model: set it again after `load`. Default: None.
    frozen
        Whether the patch encoder is frozen. Default: True for a backbone, False for the own patch encoder.
    epochs, batch_size, lr
        Default: 20, 64, 1e-3.
    random_state
        Seed: None, an integer or a numpy generator. Default: None.
    device
        Default: "auto", a GPU if there is one.
    verbose
        Show progress: bars in a terminal, elsewhere lines. Default: False.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> dark = rng.integers(2, size=64)
    >>> images = rng.uniform(0.0, 0.3, (64, 8, 8)) + 0.6 * (1 - dark)[:, None, None]
    >>> texts = [("a light field", "a dark field")[label] for label in dark]
    >>> model = kq.VisualParser(8, 4, width=16, depth=1, heads=2, epochs=60, lr=1e-2, random_state=0, device="cpu")
    >>> probabilities = model.fit(images, texts).match(images[:2], ["a light field"] * 2)
    >>> (probabilities > 0.5) == (dark[:2] == 0)
    array([ True,  True])
    """

    _prefix = ""

    size: int = 64
    patch: int = 8
    width: int = 64
    depth: int = 2
    heads: int = 4
    parser_depth: int = 2
    kernel: str = "general"
    backbone: Any = None
    text_encoder: Any = None
    frozen: bool | None = None
    epochs: int = 20
    batch_size: int = 64
    lr: float = 1e-3
    random_state: Any = None
    device: str | torch.device = "auto"
    verbose: bool = False

    def fit(self, images: Any, texts: Any) -> VisualParser:
        """Fit to images and their texts, one text per image.

        Parameters
        ----------
        images
            An array (n, h, w) or (n, h, w, c), or a list of arrays, Pillow images and paths.
        texts
            One text per image.

        Returns
        -------
        VisualParser
            The fitted estimator.
        """
        self._check()
        device, captions = pick_device(self.device), texts_of(texts)
        pixels = images_of(images, self.size)
        if len(captions) != len(pixels):
            raise ValueError(f"texts must hold one for each of the {len(pixels)} images, got {len(captions)}")
        vocabulary, seed = Vocabulary.of(captions), seed_of(self.random_state)
        ids = vocabulary.batch(captions)
        if len(torch.unique(ids, dim=0)) < 2:
            raise ValueError("texts must hold at least two different texts: with one there is nothing to match")
        with seeded(seed, device):
            vectors = None if self.text_encoder is None else word_vectors(self.text_encoder, vocabulary.names)
            network = self._network(self._backbone(), len(vocabulary), ids.shape[1], vectors).to(device)
            network.vision.requires_grad_(not self._frozen)
            options: dict[str, Any] = {"epochs": self.epochs, "lr": self.lr, "seed": seed, "verbose": self.verbose}
            with bars(self.verbose) as progress:
                shown = watched(network, pixels.to(device), progress) if self._frozen else pixels.to(device)
                pairs = Pairs(shown, ids.to(device))
                history = learn(network, pairs, size=self.batch_size, progress=progress, **options)
        if len(history) >= ENOUGH and history[-1]["match"] > NO_BETTER * math.log(2):
            warnings.warn(
                f"after {self.epochs} epochs matching is at chance, {history[-1]['match']:.3f} nats (log 2 is 0.693): "
                f"use more epochs, a larger lr{', or frozen=False' if self._frozen else ''}",
                stacklevel=3,
            )
        self.network_, self.vocabulary_, self.history_ = network.eval(), vocabulary, history
        self.params_ = self._plain_params()
        return self

    @torch.no_grad()
    def match(
        self, images: Any, texts: Any, crossed: bool = False
    ) -> Float64[np.ndarray, " n"] | Float64[np.ndarray, "n m"]:
        """Probability that image i and text i match, (n,); with `crossed`, of every image and text, (n, m).

        Parameters
        ----------
        images
            Images, as in `fit`.
        texts
            Texts.
        crossed
            Every image with every text. Default: image i with text i.

        Returns
        -------
        ndarray
            Probabilities (n,) or (n, m).
        """
        check_is_fitted(self)
        captions, pixels = texts_of(texts), images_of(images, self.params_["size"])
        if not crossed and len(captions) != len(pixels):
            raise ValueError(f"texts must hold one for each of the {len(pixels)} images, got {len(captions)}")
        for index, text in enumerate(captions):
            if (words := len(cut(text))) > self.network_.longest:
                raise ValueError(f"texts[{index}] has {words} words, the longest of fit has {self.network_.longest}")
        device = pick_device(self.device)
        network = self.network_.to(device).eval()
        ids, further = self._encoded(captions)
        ids, further = ids.to(device), None if further is None else further.to(device)
        rows, columns = torch.arange(len(pixels)), torch.arange(len(captions))
        if crossed:
            rows, columns = (grid.flatten() for grid in torch.meshgrid(rows, columns, indexing="ij"))
        chunks, steps = pixels.split(PAIRS), list(zip(rows.split(PAIRS), columns.split(PAIRS), strict=True))
        with bars(self.verbose) as progress:
            seen = progress(chunks, "features of images", len(chunks))
            features = torch.cat([network.see(chunk.to(device)).features for chunk in seen])
            pairs = progress(steps, "matching", len(steps))
            logits = torch.cat([network.match(network(features[i], ids[j], further=further)) for i, j in pairs])
        probabilities = logits.double().sigmoid().cpu().numpy()
        return probabilities.reshape(len(pixels), len(captions)) if crossed else probabilities

    def _saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        vision = self.network_.vision
        config: Any = vision.model.config if isinstance(vision, Backbone) else None
        facts = {
            "params": {**self.params_, "backbone": None, "text_encoder": None},
            "text_width": None if self.network_.text is None else self.network_.text.in_features,
            "words": self.vocabulary_.names,
            "longest": self.network_.longest,
            "backbone": None if config is None else plain(config.to_dict()),
        }
        return facts, {}

    @classmethod
    def _params_of(cls, facts: dict[str, Any]) -> dict[str, Any]:
        return {**facts["params"], "backbone": facts["backbone"]}

    def _restore(
        self, facts: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[Callable[[], VisionLanguageNetwork], int]:
        self.vocabulary_, config = Vocabulary(facts["words"]), facts["backbone"]
        check_count("longest", longest := facts["longest"])
        check_count("text_width", width := facts.get("text_width"), optional=True, most=WIDEST)

        def build() -> VisionLanguageNetwork:
            backbone = None if config is None else built(config, self.size)
            self.backbone = backbone and backbone.model
            vectors = None if width is None else torch.zeros(len(self.vocabulary_.names), width)
            return self._network(backbone, len(self.vocabulary_), longest, vectors)

        return build, self.depth + self.parser_depth

    def _plain_params(self) -> dict[str, Any]:
        """A backbone and a text encoder are recorded by their names."""
        names = {name: _name(getattr(self, name)) for name in ("backbone", "text_encoder")}
        return super()._plain_params() | names

    def _encoded(self, captions: list[str]) -> tuple[Tensor, Tensor | None]:
        """Word ids of texts, and the vectors of words that did not occur in training, if a text encoder has them."""
        unseen = self.vocabulary_.unseen(captions)
        if self.text_encoder is None or self.network_.text is None or not unseen:
            return self.vocabulary_.batch(captions), None
        vectors = word_vectors(self.text_encoder, unseen)
        if vectors.shape[1] != self.network_.text.in_features:
            width = self.network_.text.in_features
            raise ValueError(
                f"text_encoder must be that of fit: its vectors have {vectors.shape[1]} numbers, not {width}"
            )
        return Vocabulary([*self.vocabulary_.names, *unseen]).batch(captions), vectors

    @property
    def _frozen(self) -> bool:
        return self.backbone is not None if self.frozen is None else self.frozen

    def _check(self) -> None:
        sizes = ("size", "patch", "width", "depth", "heads", "epochs", "batch_size")
        check_sizes(self, sizes, lr=math.inf)
        check_count("parser_depth", self.parser_depth, least=0)
        check_choice("kernel", self.kernel, KERNELS)
        if self.frozen not in (None, True, False):
            raise ValueError(f"frozen must be True, False or None, got {self.frozen!r}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")
        if self.backbone is None and self.size % self.patch:
            raise ValueError(f"patch must divide size: {self.patch} does not divide {self.size}")

    def _backbone(self) -> Backbone | None:
        backbone = self.backbone
        if isinstance(backbone, (str, Path)):
            backbone = load_model(backbone)[0]
        return None if backbone is None else backbone_of(backbone, self.size)

    def _network(
        self, backbone: Backbone | None, words: int, longest: int, vectors: Float[Tensor, "words dim"] | None = None
    ) -> VisionLanguageNetwork:
        sizes = (self.size, self.patch, self.width, self.parser_depth, self.heads)
        vision: Any = VisionEncoder(*sizes) if backbone is None else backbone
        return VisionLanguageNetwork(vision, words, longest, self.width, self.depth, self.heads, self.kernel, vectors)


def _name(model: Any) -> str | None:
    """The name of a pretrained model: its class, or its folder."""
    part = model[0] if isinstance(model, (tuple, list)) and model else model
    return type(part).__name__ if isinstance(part, nn.Module) else part and str(part)


def word_vectors(source: Any, words: Sequence[str]) -> Float[Tensor, "words dim"]:
    """Words as vectors: the mean of the last hidden states of a text encoder over the tokens of each word.

    `source` is a folder, or a pair (model, tokenizer). The vectors have mean 0 and variance 1.
    """
    if isinstance(source, (str, Path)):
        source = load_model(source)
    if not isinstance(source, (tuple, list)) or len(source) != 2 or not isinstance(source[0], nn.Module):
        raise TypeError(f"text_encoder must be a folder or a pair (model, tokenizer), got {type(source).__name__}")
    model, tokenizer = source
    if tokenizer is None:
        raise ValueError("text_encoder must have a tokenizer in its folder: pass a pair (model, tokenizer)")
    parts = []
    with running(model) as run:
        for first in range(0, len(words), WORDS):
            batch = tokenizer(list(words[first : first + WORDS]), padding=True, return_tensors="pt")
            states = getattr(run(batch), "last_hidden_state", None)
            if states is None:
                raise ValueError(f"text_encoder must have hidden states, which {type(model).__name__} does not return")
            real = batch["attention_mask"].unsqueeze(-1).to(states.device)
            mean = (states.float() * real).sum(1) / real.sum(1)
            parts.append(layer_norm(mean, mean.shape[-1:]).cpu())
    return torch.cat(parts)
