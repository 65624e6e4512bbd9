"""Small checkpoints for the tests of surveys."""

import json
import os
import sys

import torch
from safetensors.torch import save_file

WIDTH, HEADS = 16, 2
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "OMP_NUM_THREADS": "1",
}  # of processes


def llama(folder, layers=2, width=WIDTH, seed=0, alike=0.0):
    """A Llama of query and key weights, the keys partly equal to the queries."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        query, noise = torch.randn(2, width, width, generator=generator)
        block = f"model.layers.{layer}"
        tensors |= {
            f"{block}.self_attn.q_proj.weight": query,
            f"{block}.self_attn.k_proj.weight": alike * query + (1 - alike) * noise,
            f"{block}.input_layernorm.weight": 1 + 0.1 * torch.randn(width, generator=generator),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": width}
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
    return folder


def results(out):
    """What must be the same, byte for byte, however a survey came about."""
    files = [out / "heads.parquet", out / "index.html", out / "survey.json", *(out / "models").iterdir()]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}
