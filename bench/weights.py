"""Small trained models of other layouts as folders that transformers reads, for the study of the dial.

    python bench/weights.py stories260K.bin tok512.bin FOLDER

turns a llama2.c checkpoint (its first layout, float32) and its tokenizer into a Llama, exactly, and writes stories.txt
beside it, which the model tells itself: text of the kind that it knows, where no other is at hand.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

HEADER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
STORY = """Once upon a time, there was a little girl named Lily. She had a red ball. She loved to play with her ball \
in the park. One day, Lily saw a big dog. The dog wanted to play with the ball. Lily was scared and ran to her mom. \
"Mom, the dog wants my ball!" she said. Her mom smiled and said, "It is okay, Lily. The dog is nice. You can share \
your ball with him." Lily was not sure, but she threw the ball to the dog. The dog ran fast and got the ball. He was \
very happy. Lily laughed and clapped her hands. They played together all day. From that day on, Lily and the dog were \
best friends."""


def tensors_of(data: bytes, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """A llama2.c file's tensors under the names of a Llama; they stand one after another, each of all layers."""
    d, hidden, layers, heads, shared = (config[name] for name in HEADER)
    rank, at = d // heads, 28

    def take(*shape: int) -> Tensor:
        nonlocal at
        found = torch.from_numpy(np.frombuffer(data, "<f4", int(np.prod(shape)), at).copy()).reshape(shape)
        at += found.nbytes
        return found

    yield "model.embed_tokens.weight", take(config["vocab_size"], d)
    blocks = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (shared * rank, d),
        "self_attn.v_proj": (shared * rank, d),
        "self_attn.o_proj": (d, d),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (hidden, d),
        "mlp.down_proj": (d, hidden),
        "mlp.up_proj": (hidden, d),
    }
    for name, shape in blocks.items():
        for layer, weight in enumerate(take(layers, *shape)):
            # Rotary pairs are neighbours there, and halves of a head here.
            turned = name.endswith(("q_proj", "k_proj"))
            halves = weight.reshape(-1, rank // 2, 2, d).transpose(1, 2).reshape(shape) if turned else weight
            yield f"model.layers.{layer}.{name}.weight", halves.contiguous()
    yield "model.norm.weight", take(d)
    take(2, config["max_position_embeddings"], rank // 2)  # cosines and sines, which are computed here
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", take(config["vocab_size"], d)
    assert at == len(data), f"{len(data) - at} bytes are left over: this is another layout"


def config_of(data: bytes) -> dict[str, Any]:
    *sizes, vocabulary, length = struct.unpack("<7i", data[:28])
    config = dict(zip(HEADER, sizes, strict=True))
    config |= {"vocab_size": abs(vocabulary), "max_position_embeddings": length, "tie_word_embeddings": vocabulary > 0}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "dtype": "float32"}
    return {**config, "hidden_act": "silu", "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}


def pieces_of(data: bytes, count: int) -> list[tuple[str, float]]:
    """The tokenizer's pieces and scores, blanks as sentencepiece writes them."""
    found, at = [], 4
    for _ in range(count):
        score, size = struct.unpack_from("<fi", data, at)
        found.append((data[at + 8 : at + 8 + size].decode().strip("\n").replace(" ", "▁"), score))
        at += 8 + size
    return found


def tokenizer_of(pieces: list[tuple[str, float]]) -> dict[str, Any]:
    """A tokenizer.json: pairs are joined by the score of what they make, the highest first, as sentencepiece does."""
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    assert len(ids) == len(pieces), "a piece stands there twice"
    made = []
    for piece, score in pieces[259:]:  # after three special ones and 256 bytes
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        made += [(-score, ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
    special = [
        {"id": number, "content": pieces[number][0], "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number in range(3)
    ]
    normalizers = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    begin = {"id": "<s>", "type_id": 0}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": begin}, text],
            "pair": [{"SpecialToken": begin}, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [[a, b] for _, _, _, a, b in sorted(made)],
        },
    }


def tell(folder: Path, stories: int) -> None:
    """Check that the model knows a story, and let it tell some more."""
    from keyquery.listening.inputs.load import load_model

    model, tokenizer = load_model(folder, lm_head=True)
    model.eval()
    ids = torch.tensor([tokenizer(STORY)["input_ids"]])
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
        print(f"loss on a story: {loss:.3f} nats a token, {ids.shape[1]} tokens")
        assert loss < 2, "the model does not know stories: its layout is read wrongly"
        torch.manual_seed(0)
        start = torch.ones(stories, 1, dtype=torch.long)
        told = model.generate(
            start, attention_mask=start, do_sample=True, top_k=0, min_new_tokens=250, max_new_tokens=250, pad_token_id=2
        )
    texts = tokenizer.batch_decode(told, skip_special_tokens=True)
    (folder / "stories.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("weights", "tokenizer", "folder"):
        options.add_argument(name, type=Path)
    options.add_argument("--stories", type=int, default=200)
    given = options.parse_args()
    data = given.weights.read_bytes()
    config = config_of(data)
    given.folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors_of(data, config)), given.folder / "model.safetensors", {"format": "pt"})
    (given.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    pieces = pieces_of(given.tokenizer.read_bytes(), config["vocab_size"])
    (given.folder / "tokenizer.json").write_text(json.dumps(tokenizer_of(pieces), ensure_ascii=False))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (given.folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1) + "\n")
    tell(given.folder, given.stories)


if __name__ == "__main__":
    main()
