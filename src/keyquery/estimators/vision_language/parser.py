"""VisualParser: images and their texts in, whether an image and a text belong together out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor, nn

from keyquery.capture.load import load_model, pick_device
from keyquery.estimators.base import Estimator, check_sizes, filled, read_fitted, seed_of, seeded, write_fitted
from keyquery.estimators.inputs.captions import Vocabulary, cut, texts_of
from keyquery.estimators.inputs.images import images_of
from keyquery.estimators.vision_language.network import Backbone, VisionLanguageNetwork, backbone_of, built
from keyquery.estimators.vision_language.training import MASKINGS, Pairs, learn, watched
from keyquery.layers.kernels import KERNELS
from keyquery.layers.vision import VisionEncoder
from keyquery.reading import plain
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import bars

PAIRS = 256  # that are judged at a time


class VisualParser(Estimator):
    """Vision and language, learned from images and their texts: a visual parser, and an encoder that sees and reads.

    A Transformer over the patches of an image, the visual parser, gives visual tokens, which go with the words of a
    text through a joint encoder, all attending to all. Three losses are summed: of words that are hidden (MLM), of
    whether image and text belong together (ITM; against texts of other images, half of them drawn at random, half
    with many words in common), and of features of patches that are hidden (MFR). With `masking="attention"` a patch is
    hidden together with those that it attends to most in the parser, a share `masked` of all; "random" ones are the
    control, and None leaves that loss out.

    Images are an array (n, h, w) or (n, h, w, c), uint8 or floats from 0 to 1, or a list of arrays, images of Pillow
    and paths, of any sizes and modes; all are brought to `size` pixels. Words that no text had count as hidden ones.

    The parser is a `kq.Encoder` of `parser_depth` layers over patches of `patch` pixels; 0 leaves it at a linear map
    of the patches. Or it is `backbone`, a vision model of transformers or its folder, such as DINOv2 or Swin. With
    `frozen` it does not learn; None: a backbone does not, an own parser does. `kernel` is that of the joint encoder.

    >>> rng = np.random.default_rng(0)
    >>> dark = rng.integers(2, size=64)
    >>> images = rng.uniform(0.0, 0.3, (64, 8, 8)) + 0.6 * (1 - dark)[:, None, None]
    >>> texts = [("a light field", "a dark field")[one] for one in dark]
    >>> model = kq.VisualParser(8, 4, width=16, depth=1, heads=2, epochs=25, lr=5e-3, random_state=0, device="cpu")
    >>> found = model.fit(images, texts).match(images[:2], ["a light field"] * 2)
    >>> (found > 0.5) == (dark[:2] == 0)
    array([ True,  True])
    """

    network_: VisionLanguageNetwork
    vocabulary_: Vocabulary
    history_: list[dict[str, float]]  # one row an epoch: the loss, and its parts

    def __init__(
        self,
        size: int = 64,
        patch: int = 8,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        parser_depth: int = 2,
        kernel: str = "general",
        backbone: Any = None,
        frozen: bool | None = None,
        masking: str | None = "attention",
        masked: float = 0.15,
        dropout: float = 0.0,
        epochs: int = 20,
        batch_size: int = 64,
        lr: float = 1e-3,
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: bool = False,
    ) -> None:
        self.size, self.patch, self.width, self.depth, self.heads = size, patch, width, depth, heads
        self.parser_depth, self.kernel, self.backbone, self.frozen = parser_depth, kernel, backbone, frozen
        self.masking, self.masked, self.dropout = masking, masked, dropout
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self, images: Any, texts: Any) -> VisualParser:
        """Learn from images and one text for each."""
        return self._learn(images, texts)

    def _learn(self, images: Any, texts: Any, after: Callable[[int, nn.Module], None] | None = None) -> VisualParser:
        """`fit`, with an `after` for the training loop: for who follows it."""
        self._check()
        device, said = pick_device(self.device), texts_of(texts)
        shown = images_of(images, self.size)
        if len(said) != len(shown):
            raise ValueError(f"texts must hold one for each of the {len(shown)} images, got {len(said)}")
        vocabulary, seed = Vocabulary.of(said), seed_of(self.random_state)
        ids = vocabulary.batch(said)
        if len(torch.unique(ids, dim=0)) < 2:
            raise ValueError("texts must say at least two different things: with one there is nothing to match")
        with seeded(seed, device):
            network = self._network(self._backbone(), len(vocabulary), ids.shape[1]).to(device)
            with bars(self.verbose) as progress:
                history = learn(
                    network,
                    self._pairs(network, shown.to(device), ids.to(device)),
                    masking=self.masking,
                    masked=self.masked,
                    size=self.batch_size,
                    epochs=self.epochs,
                    lr=self.lr,
                    seed=seed,
                    progress=progress,
                    after=after,
                )
        self.network_, self.vocabulary_, self.history_ = network.eval(), vocabulary, history
        self.params_ = self._plain_params()
        return self

    @torch.no_grad()
    def match(
        self, images: Any, texts: Any, crossed: bool = False
    ) -> Float64[np.ndarray, " n"] | Float64[np.ndarray, "n m"]:
        """The probability that image i and text i belong together, (n,); `crossed`, of every image and text, (n, m)."""
        self._check_fitted()
        said, shown = texts_of(texts), images_of(images, self.params_["size"])
        if not crossed and len(said) != len(shown):
            raise ValueError(f"texts must hold one for each of the {len(shown)} images, got {len(said)}")
        for place, text in enumerate(said):
            if (words := len(cut(text))) > self.network_.longest:
                raise ValueError(
                    f"texts[{place}] has {words} words, more than the {self.network_.longest} of any in fit"
                )
        device = pick_device(self.device)
        network, ids = self.network_.to(device).eval(), self.vocabulary_.batch(said).to(device)
        features = torch.cat([network.see(some.to(device)).features for some in shown.split(PAIRS)])
        at, of = torch.arange(len(shown)), torch.arange(len(said))
        if crossed:
            at, of = (grid.flatten() for grid in torch.meshgrid(at, of, indexing="ij"))
        steps = zip(at.split(PAIRS), of.split(PAIRS), strict=True)
        odds = torch.cat([network.match(network(features[i], ids[j])) for i, j in steps])
        found = odds.double().sigmoid().cpu().numpy()
        return found.reshape(len(shown), len(said)) if crossed else found

    def save(self, path: str | Path) -> None:
        """Write everything that matching needs, a backbone also, and the parameters of the fit, into one file."""
        self._check_fitted()
        vision = self.network_.vision
        config: Any = vision.model.config if isinstance(vision, Backbone) else None
        facts = {
            "params": {**self.params_, "backbone": None},
            "words": self.vocabulary_.names,
            "longest": self.network_.longest,
            "backbone": None if config is None else plain(config.to_dict()),
            "history": self.history_,
        }
        write_fitted(path, type(self).__name__, facts, dict(self.network_.state_dict()))

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "auto") -> VisualParser:
        """The estimator of a file that `save` wrote, to run on `device`. With a backbone it needs transformers."""
        pick_device(device)
        facts, weights = read_fitted(path, cls.__name__)
        try:
            config = facts["backbone"]
            made = cls(**{**facts["params"], "backbone": config, "device": device})
            made._check()
            made.vocabulary_, made.history_ = Vocabulary(facts["words"]), list(facts["history"])
            check_count("longest", longest := facts["longest"])
            words = len(made.vocabulary_)

            def build() -> VisionLanguageNetwork:
                return made._network(None if config is None else built(config, made.size), words, longest)

            made.network_ = filled(build, weights, made.depth + made.parser_depth)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is no whole {cls.__name__}: {str(error).splitlines()[0]}") from None
        made.params_ = facts["params"]
        vision = made.network_.vision
        made.backbone = vision.model if isinstance(vision, Backbone) else None
        return made

    def _plain_params(self) -> dict[str, Any]:
        """A backbone is no plain fact: its name is."""
        given, self.backbone = self.backbone, None
        try:
            found = super()._plain_params()
        finally:
            self.backbone = given
        named = type(given).__name__ if isinstance(given, nn.Module) else None if given is None else str(given)
        return {**found, "backbone": named}

    def _check(self) -> None:
        sizes = ("size", "patch", "width", "depth", "heads", "epochs", "batch_size")
        check_sizes(self, sizes, lr=math.inf, dropout=1, masked=1)
        check_count("parser_depth", self.parser_depth, least=0)
        check_choice("kernel", self.kernel, KERNELS)
        if self.masking is not None:
            check_choice("masking", self.masking, MASKINGS)
        if self.frozen not in (None, True, False):
            raise ValueError(f"frozen must be True, False or None, got {self.frozen!r}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")
        if self.backbone is None and self.size % self.patch:
            raise ValueError(f"patch must divide size: {self.patch} does not divide {self.size}")
        if self.backbone is None and self.parser_depth == 0 and self.masking == "attention":
            raise ValueError('masking="attention" needs a parser that attends: parser_depth is 0; "random" needs none')

    def _backbone(self) -> Backbone | None:
        given = self.backbone
        if isinstance(given, (str, Path)):
            given = load_model(given)[0]
        return None if given is None else backbone_of(given, self.size)

    def _network(self, backbone: Backbone | None, words: int, longest: int) -> VisionLanguageNetwork:
        vision: Any = backbone
        if vision is None:
            vision = (
                VisionEncoder(self.size, self.patch, self.width, self.parser_depth, self.heads, dropout=self.dropout)
                if self.parser_depth
                else VisionEncoder(self.size, self.patch, self.width, 0, self.heads)
            )
        return VisionLanguageNetwork(
            vision, words, longest, self.width, self.depth, self.heads, self.kernel, self.dropout
        )

    def _pairs(self, network: VisionLanguageNetwork, shown: UInt8[Tensor, "n 3 h w"], ids: Tensor) -> Pairs:
        """What is learned from; of a parser that does not learn, what it makes of the images, once."""
        still = self.backbone is not None if self.frozen is None else self.frozen
        network.vision.requires_grad_(not still)
        if not still:
            return Pairs(shown, ids)
        network.eval()
        return Pairs(watched(network, shown, self.masking == "attention"), ids)
