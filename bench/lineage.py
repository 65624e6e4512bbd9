"""Lineage on small language models trained from different seeds: its null, and the changes that it sees through.

`python bench/lineage.py TEXT OTHER --folder DIR` trains byte-level Llamas of one config (4 layers of 4 heads, width 64)
in the folder, those that are missing, one in four on the other text; then every pair is tested, and changed copies.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from harness import publish, row
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import keyquery as kq
from keyquery.data.text import read_corpus
from keyquery.instruments.lineage.evidence import basis_free, shared_basis
from keyquery.instruments.lineage.fingerprint import PERMUTATIONS, Fingerprint, fingerprint
from keyquery.training import Recipe, train

LENGTH, BATCH, STEPS, RATE = 48, 16, 500, 4e-3
WIDTH, HEADS, GROUPS = 64, 4, 2
HELD_OUT = 50_000  # bytes at the end of a text


def trained(seed: int, text: Tensor) -> nn.Module:
    """A small language model."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": HEADS}
    config = LlamaConfig(**sizes, num_key_value_heads=GROUPS, vocab_size=256, max_position_embeddings=256)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)

    def draw(step: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator).tolist()
        return torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())

    train(model, draw, loss, Recipe(STEPS, lr=RATE, warmup=50, seed=seed, check_every=STEPS, bf16=False))
    return model


def changed(model: nn.Module, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> nn.Module:
    """A copy with other queries (groups, heads, r, d) and keys (groups, 1, r, d), norms folded into them."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        gain = layer.input_layernorm.weight.data
        weights = [layer.self_attn.q_proj.weight.data, layer.self_attn.k_proj.weight.data]
        new = change(*((weight * gain).view(GROUPS, -1, WIDTH // HEADS, WIDTH) for weight in weights))
        for weight, value in zip(weights, new, strict=True):
            weight.copy_(value.reshape(weight.shape))
        gain.fill_(1.0)
    return model


def noise(size: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda query, key: tuple(weight + size * weight.std() * torch.randn_like(weight) for weight in (query, key))


def inside_heads(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated within RoPE planes, rescaled, and groups in another order: the model computes the same."""
    angles = 6.28 * torch.rand(GROUPS, 1, WIDTH // HEADS // 2, 1)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -2)
        turned = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.cat(turned, -2).flip(0)

    return 3 * turn(query), turn(key) / 3


def rotated() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The residual stream rotated, and heads disguised."""
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    return lambda query, key: tuple(weight @ turn for weight in inside_heads(query, key))


def kinds() -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    noisy = {f"noise of {size:g} of the weights": noise(size) for size in (0.1, 0.3, 1.0, 2.0)}
    turn = rotated()
    return {
        **noisy,
        "heads rotated, rescaled, reordered": inside_heads,
        "the same, and the residual stream rotated": turn,
        "the same, and noise of 0.3": lambda query, key: turn(*noise(0.3)(query, key)),
    }


def statistics_of(ours: Fingerprint, theirs: Fingerprint) -> tuple[float, float]:
    free, shared = basis_free(ours, theirs), shared_basis(ours, theirs)
    assert free is not None
    assert shared is not None
    return free.statistic, shared.statistic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, nargs=2)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", type=int, default=32)
    parser.add_argument("--changed", type=int, default=8, help="models of which changed copies are made")
    arguments = parser.parse_args()
    texts = [torch.frombuffer(bytearray(read_corpus(path).encode()), dtype=torch.uint8) for path in arguments.texts]
    folders = [arguments.folder / f"llama-{seed}" for seed in range(arguments.models)]
    for seed, folder in enumerate(folders):
        if not (folder / "config.json").exists():
            trained(seed, texts[seed % 4 == 0][:-HELD_OUT]).save_pretrained(folder)
    prints = [fingerprint(kq.read(folder), PERMUTATIONS) for folder in folders]
    null = [statistics_of(ours, theirs) for ours, theirs in itertools.combinations(prints, 2)]
    rows = []
    for name, values in zip(("basis-free", "shared-basis"), zip(*null, strict=True), strict=True):
        rows.append(
            row(f"lineage: {name} statistic of {len(null)} unrelated pairs, one config", list(values), "sd", "–")
        )
        print(f"  mean {statistics.mean(values):.3f}, sd {statistics.stdev(values):.3f}", flush=True)
    torch.manual_seed(0)
    for kind, change in kinds().items():
        pairs = []
        for folder, own in list(zip(folders, prints, strict=True))[: arguments.changed]:
            copied = changed(AutoModelForCausalLM.from_pretrained(folder), change)
            pairs.append(statistics_of(own, fingerprint(kq.read(copied), PERMUTATIONS)))
        for name, values in zip(("basis-free", "shared-basis"), zip(*pairs, strict=True), strict=True):
            rows.append(row(f"lineage: {name} statistic of a copy: {kind}", list(values), "sd", "–"))
    publish("lineage", rows, models=arguments.models, steps=STEPS, lr=RATE)


if __name__ == "__main__":
    main()
