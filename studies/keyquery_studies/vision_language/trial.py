"""One training of the study `vision-language`, its final accuracy, and attention flow during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from keyquery.instruments.ablation.ablate import ablate
from keyquery.instruments.flow.flow import flow
from keyquery.intervene.dial.means import Means
from keyquery.learn.inputs.captions import MASK, PAD, Vocabulary
from keyquery.learn.inputs.images import images_of
from keyquery.learn.vision_language.network import VisionLanguageNetwork
from keyquery.learn.vision_language.parser import VisualParser
from keyquery.support.extras import optional
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import array_file, result_name
from keyquery_studies.rerank.embeddings import load_dino
from keyquery_studies.vision_language.scenes import DIRECTED, GRIDS, Said, Scene, Things, digits, drawn, scenes

VARIANTS: dict[str, dict[str, Any]] = {
    "parser": {},
    "no MFR": {"masking": None},
    "random MFR": {"masking": "random"},
    "frozen patches": {"parser_depth": 0, "frozen": True, "masking": "random"},
    "symmetric": {"kernel": "symmetric"},
    "split": {"kernel": "split"},
    "DINOv2": {"size": 112, "parser_depth": 0},
}
SIZES: dict[str, dict[str, Any]] = {
    "digits": {"size": 16, "patch": 8, "masked": 0.4},  # a patch is a cell
    "fine digits": {"size": 16, "patch": 4, "masked": 0.25},
    "cifar": {
        "size": 64,
        "patch": 8,
        "masked": 0.25,
        "width": 96,
        "parser_depth": 4,
        "batch_size": 128,
        "lr": 2e-3,
    },
}
LEARNED: dict[str, Any] = {
    "width": 48,
    "depth": 3,
    "heads": 4,
    "parser_depth": 1,
    "batch_size": 64,
    "lr": 4e-3,
}
TESTED, FOLLOWED = 400, 12  # scenes that are tested on, and of these whose flow is measured
CHECKS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)  # of the training, where flow is measured
READINGS = ("raw", "weighted", "rollout")
AT = (1, 5, 10)  # ranks that retrieval is counted to
RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
_LATER = "encoder.layer.0.attention.q_proj.weight"
TURNED = ("symmetric", "skew", "popularity")


class Tested(NamedTuple):
    """Test scenes, and the captions that each is tested with."""

    scenes: list[Scene]
    images: np.ndarray
    others: list[Said]  # the sentence of another scene, which is false here
    replaced: list[Said]  # one object replaced by an absent one


def asked_of(things: Things, seed: int) -> Tested:
    """Test scenes of held-out pairs, composed of test images."""
    names = len(things.names)
    test_scenes, rng = scenes(names, TESTED, seed, test=True), np.random.default_rng((seed, 11))
    others, replaced = list[Said](), list[Said]()
    for scene in test_scenes:
        wrong = [other.said for other in test_scenes if not scene.true(other.said)]
        others.append(wrong[rng.integers(len(wrong))])
        absent = [thing for thing in range(names) if thing not in scene.cells]
        thing = absent[rng.integers(len(absent))]
        first, relation, second = scene.said
        replaced.append(Said(thing, relation, second) if rng.random() < 0.5 else Said(first, relation, thing))
    return Tested(test_scenes, drawn(things.half(test=True), test_scenes, seed), others, replaced)


@lru_cache(maxsize=2)
def _things(folder: Path, dataset: str, digest: str | None) -> Things:
    if dataset != "cifar":
        return digits()
    with np.load(folder / array_file(dataset, digest or "")) as arrays:
        return Things(arrays["pixels"], arrays["labels"], tuple(map(str, arrays["names"])))


def dino_model(path: str | Path) -> nn.Module:
    """The Dinov2Model of transformers, with the weights of a file, its sizes read off them."""
    library, weights = optional("transformers", "DINOv2"), load_dino(path)
    tokens, width = weights["embeddings.position_embeddings"].shape[1:]
    patch = weights["embeddings.patch_embeddings.projection.weight"].shape[-1]
    depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 64, "patch_size": patch}
    config = library.Dinov2Config(image_size=patch * round((tokens - 1) ** 0.5), **sizes)
    own = library.Dinov2Model(config)
    # Files have the names of transformers 4; later versions know projections by others.
    known = {_renamed(name): weight for name, weight in weights.items()} if _LATER in own.state_dict() else weights
    if lost := sorted(own.state_dict().keys() - known.keys() - {"embeddings.mask_token"}):
        raise ValueError(f"{path} is an incomplete DINOv2 backbone: it lacks {lost[0]}")
    own.load_state_dict(known, strict=False)
    return own.eval()


def _renamed(name: str) -> str:
    for before, after in RENAMED.items():
        name = name.replace(before, after)
    return name


@dataclass(frozen=True, kw_only=True)
class ParserTrial:
    """One variant trained on one dataset."""

    dataset: str
    variant: str
    seed: int
    epochs: int
    count: int  # of training scenes
    digest: str | None = None  # of data that come from a file
    weights: str | None = None  # of DINOv2
    backbone: str | None = None  # their digest

    @property
    def name(self) -> str:
        """The name of its result file."""
        settings = {name: value for name, value in asdict(self).items() if name != "weights"}
        design = {**LEARNED, **SIZES[self.dataset], **VARIANTS[self.variant], "checks": CHECKS, "tested": TESTED}
        design |= {"grids": GRIDS, "parts": TURNED}
        return result_name((self.dataset, self.variant, self.seed), {**settings, "design": design})

    def estimator(self, device: str) -> VisualParser:
        """The estimator at initialisation."""
        options = {**LEARNED, **SIZES[self.dataset], **VARIANTS[self.variant]}
        if self.variant == "DINOv2":
            assert self.weights is not None
            options["backbone"] = dino_model(self.weights)
        return VisualParser(**options, epochs=self.epochs, random_state=self.seed, device=device)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Learn, followed on the way, and test."""
        things, model = _things(folder, self.dataset, self.digest), self.estimator(device)
        learned, asked = scenes(len(things.names), self.count, self.seed), asked_of(things, self.seed)
        texts = [scene.said.text(things.names) for scene in learned]
        words = Vocabulary.of(texts)
        steps = self.epochs * -(-self.count // model.batch_size)
        still: dict[str, Tensor] = {}  # what a parser that does not learn sees, it sees once
        marks, course = {round(share * steps) for share in CHECKS}, list[dict[str, Any]]()

        def watch(step: int, network: Any) -> None:
            if step in marks:
                network.eval()
                moving = any(weight.requires_grad for weight in network.vision.parameters())
                exam = Exam(network, words, things, asked, None if moving else still.get("features"))
                still["features"] = exam.features
                course.append({"step": step, **exam.flow(), "rise": exam.rise()})

        start = process_time()
        model._learn(drawn(things.half(test=False), learned, self.seed), texts, watch)
        seconds = process_time() - start
        exam = Exam(model.network_, words, things, asked)
        return {
            **{name: value for name, value in asdict(self).items() if name != "weights"},
            **exam.scores(),
            **exam.retrieval(self.seed),
            "course": course,
            "layers": exam.layers(),
            "turned": exam.turned(),
            "loss": model.history_[-1]["loss"],
            "seconds": seconds,
            "device": device_name(device),
        }


class Exam:
    """Accuracy of a network on unseen scenes."""

    def __init__(
        self,
        network: VisionLanguageNetwork,
        words: Vocabulary,
        things: Things,
        asked: Tested,
        features: Tensor | None = None,
    ) -> None:
        self.network = network
        self.words = words
        self.asked = asked
        self.things = things
        self.names = things.names
        self.device = next(network.parameters()).device
        self.features = self.see(asked.images) if features is None else features

    @torch.no_grad()
    def see(self, images: np.ndarray) -> Float[Tensor, "batch tokens features"]:
        """Patch-encoder features of images."""
        parts = images_of(images, self.network.vision.size).to(self.device).split(100)
        return torch.cat([self.network.see(images).features for images in parts])

    def ids(self, sentences: Sequence[Said]) -> Int[Tensor, "batch n"]:
        """Sentences as numbers of words."""
        token_ids = self.words.batch([sentence.text(self.names) for sentence in sentences]).to(self.device)
        return torch.nn.functional.pad(token_ids, (0, self.network.longest - token_ids.shape[1]), value=PAD)

    @torch.no_grad()
    def odds(self, sentences: Sequence[Said], features: Tensor | None = None) -> Float[Tensor, " batch"]:
        """Log-odds that scene i and caption i match."""
        seen = self.features if features is None else features
        return self.network.match(self.network(seen, self.ids(sentences)))

    def scores(self) -> dict[str, float]:
        """Accuracy: half of the pairs are true, half are not."""
        asked, right = self.asked, self.odds([scene.said for scene in self.asked.scenes]) > 0
        directed = torch.tensor([scene.said.relation in DIRECTED for scene in asked.scenes])
        exchanged = self.odds([scene.said.exchanged() for scene in asked.scenes]) <= 0
        other, replaced = self.odds(asked.others) <= 0, self.odds(asked.replaced) <= 0
        moved = self.features.roll(1, 0)
        own = [scene.said for scene in asked.scenes]
        blind = (self.odds(own, moved) > 0, self.odds(asked.others, moved) <= 0)
        turned = (self.odds(own, moved) > 0, self.odds([sentence.exchanged() for sentence in own], moved) <= 0)
        filled, both = self.fill()
        two = torch.tensor([scene.cells.count(-1) == 2 for scene in asked.scenes])
        return {
            "matching": _half(right, other),
            "relations": _half(right[directed], exchanged[directed]),
            "matching_of_two": _half(right[two], other[two]),
            "relations_of_two": _half(right[directed & two], exchanged[directed & two]),
            "things": _half(right, replaced),
            "shuffled_matching": _half(*blind),
            "shuffled_relations": _half(turned[0][directed], turned[1][directed]),
            "filled": filled,
            "filled_both": both,
        }

    @torch.no_grad()
    def fill(self) -> tuple[float, float]:
        """Accuracy of masked objects: with one of two masked, and with both, in directed captions."""
        ids = self.ids([scene.said for scene in self.asked.scenes])
        places, predicted = self._things_in(ids), list[Tensor]()
        for hidden in (places[:, :1], places[:, 1:]):
            logits = self._spelled(self.features, ids, hidden)
            predicted.append(logits.gather(1, hidden[..., None].expand(-1, -1, logits.shape[-1])).argmax(-1))
        truth = ids.gather(1, places)
        directed = torch.tensor([scene.said.relation in DIRECTED for scene in self.asked.scenes])
        logits = self._spelled(self.features, ids, places)
        both = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).argmax(-1)
        single = (torch.cat(predicted, 1) == truth).double().mean()
        return float(single), float((both == truth)[directed].double().mean())

    def _things_in(self, ids: Int[Tensor, "batch n"]) -> Int[Tensor, "batch 2"]:
        """Token positions of the two objects in each caption."""
        numbers = self.words.batch(list(self.names)).flatten().to(ids.device)
        return torch.isin(ids, numbers).nonzero()[:, 1].view(-1, 2)

    def _spelled(self, features: Tensor, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.network.spell(self.network(features, ids.scatter(1, hidden, MASK)))

    @torch.no_grad()
    def text_loss(self, features: Tensor) -> Float[Tensor, " batch"]:
        """−log p of both objects of each caption, masked, in nats per object."""
        ids = self.ids([scene.said for scene in self.asked.scenes])
        places = self._things_in(ids)
        logits = self._spelled(features, ids, places)
        chosen = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
        return cross_entropy(chosen.mT, ids.gather(1, places), reduction="none").mean(1)

    def rise(self) -> float:
        """The increase of the text loss with shuffled images."""
        return float((self.text_loss(self.features.roll(1, 0)) - self.text_loss(self.features)).mean())

    def flow(self) -> dict[str, Any]:
        """Flow above chance, by reading, of every layer: mean over heads and scenes. `to_text` is that into words."""
        few = slice(0, FOLLOWED)
        ids = self.ids([scene.said for scene in self.asked.scenes[few]])
        with torch.no_grad():
            x, real = self.network.joined(self.features[few], ids)
        tokens = self.network.vision.tokens
        labels = ["special"] + ["image"] * tokens + ["text"] * ids.shape[1]
        reading = flow(self.network.joint, labels, inputs={"x": x, "mask": real})
        by_metric = {name: _layers(reading.of(name, corrected=True)) for name in READINGS}
        return {**by_metric, "to_text": _layers(reading.directed_of("raw", corrected=True)["image", "text"])}

    def layers(self) -> list[dict[str, float]]:
        """Of every layer its flow, and the rise of the text loss when words read other images in that layer alone."""
        by_layer, before = self.flow(), self.text_loss(self.features)
        rows = []
        for number, block in enumerate(self.network.joint.blocks):
            with reading_others(block, self.network.vision.tokens):
                rise = float((self.text_loss(self.features) - before).mean())
            rows.append({**{name: values[number] for name, values in by_layer.items()}, "rise": rise})
        return rows

    def retrieval(self, seed: int) -> dict[str, Any]:
        """R@1, 5 and 10 among all sentences with a direction of pairs never said, one image each, two things an image.

        `texts_at` are sentences found for images, `images_at` images for sentences.
        """
        pairs = sorted({(s.said.first, s.said.second) for s in self.asked.scenes if s.said.relation in DIRECTED})
        sentences = [Said(a, relation, b) for a, b in pairs for relation in DIRECTED]
        shown = [
            Scene((a, b, -1, -1) if relation == "left of" else (a, -1, b, -1), Said(a, relation, b))
            for a, relation, b in sentences
        ]
        features = self.see(drawn(self.things.half(test=True), shown, seed))
        odds = np.stack(
            [self.odds(sentences, image.expand(len(sentences), -1, -1)).cpu().numpy() for image in features]
        )
        recalls: dict[str, Any] = {"gallery": len(sentences)}
        for name, table in (("texts_at", odds), ("images_at", odds.T)):
            rank = (table > np.diag(table)[:, None]).sum(1)
            recalls |= {f"{name}_{most}": float((rank < most).mean()) for most in AT}
        return recalls

    def turned(self) -> list[dict[str, Any]]:
        """The matching loss with parts of the joint encoder's scores ablated, task by task."""
        directed = [scene.said.relation in DIRECTED for scene in self.asked.scenes]
        own = [scene.said for scene in self.asked.scenes]
        tasks = {
            "directed, exchanged": (True, [sentence.exchanged() for sentence in own]),
            "directed, replaced": (True, self.asked.replaced),
            "reciprocal, replaced": (False, self.asked.replaced),
        }
        rows = []
        for task, (wanted, wrong) in tasks.items():
            index = [place for place, sentence in enumerate(directed) if sentence == wanted]
            sentences = [own[i] for i in index] + [wrong[i] for i in index]
            with torch.no_grad():
                x, real = self.network.joined(self.features[index + index], self.ids(sentences))
            x, real = x[:, real.any(0)], real[:, real.any(0)]  # no means at positions that are padding throughout
            truth = (torch.arange(len(sentences), device=self.device) < len(index)).float()

            def loss(joint: nn.Module, batch: Any, truth: Tensor = truth) -> Tensor:
                logits = self.network.match(joint(**batch))
                return binary_cross_entropy_with_logits(logits, truth, reduction="none")

            joint, batches = self.network.joint, [{"x": x, "mask": real}]
            means = Means(joint, batches, "position")  # also of fewer sequences than are asked for by name
            ablation = ablate(joint, batches, loss, by="all", changes=TURNED, means=means)
            rows += [{"task": task, "loss": ablation.loss, **_plain(row)} for row in ablation.rows]
        return rows


def _plain(row: Any) -> dict[str, Any]:
    return {name: row[name] for name in ("part", "change", "low", "high")}


def _half(true: Tensor, false: Tensor) -> float:
    return float((true.double().mean() + false.double().mean()) / 2)


def _layers(values: Any) -> list[float]:
    """A figure a layer."""
    array = np.asarray(values, dtype=np.float64)
    return array.reshape(len(array), -1).mean(1).tolist()


@contextmanager
def reading_others(block: Any, tokens: int) -> Iterator[None]:
    """In this block, all but patches attend to the patches of the next image of the batch; patches to their own."""
    attention, forward = block.attention, block.attention.forward

    def mixed(x: Tensor, **options: Any) -> Tensor:
        own = forward(x, **options)
        swapped = torch.cat((x[:, :1], x[:, 1 : 1 + tokens].roll(1, 0), x[:, 1 + tokens :]), 1)
        other = forward(swapped, **options)
        return torch.cat((other[:, :1], own[:, 1 : 1 + tokens], other[:, 1 + tokens :]), 1)

    attention.forward = mixed
    try:
        yield
    finally:
        del attention.forward
