"""Files of quantised weights and of adapters for the table of readers."""

import json

import torch
from safetensors.torch import save_file

import keyquery as kq
from tests.checkpoints.formats import test_quantised as q

FACTS = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True, "alpha_pattern": {"k_proj": 3}}
FACTS |= {"fan_in_fan_out": False, "use_rslora": True, "init_lora_weights": True, "layer_replication": None}


def quantised(folder):
    """A format per layer, also for its keys."""
    tensors = {}
    for layer, make in enumerate((q.fp8_blocks, q.gptq(4), q.four_bit("nf4", True), q.packed_int(4))):
        own, _ = q.tensors_of(make)
        tensors |= {name.replace("layers.0", f"layers.{layer}"): tensor for name, tensor in own.items()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "weight_block_size": [128, 128]}
    q.save(folder, tensors, settings)


def adapted(folder):
    """A base, and an adapter in the same folder."""
    torch.manual_seed(0)
    tensors, parts = {}, {}
    for role, rows in q.ROWS.items():
        name = q.NAME.format(role)
        tensors[f"{name}.weight"] = torch.randn(rows, q.WIDTH)
        parts[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, q.WIDTH)
        parts[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 2)
        parts[f"base_model.model.{name}.lora_magnitude_vector"] = torch.rand(rows)
    q.save(folder, tensors, None)
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(FACTS))


def read_quantised(folder):
    return [(layer.form.norm2, layer.notes) for layer in kq.read(folder)]


def read_adapted(folder):
    return [(layer.form.norm2, layer.notes) for layer in kq.read(folder, adapter=folder)]
