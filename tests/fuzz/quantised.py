"""Files of quantised weights and of adapters for the table of readers."""

import json

import torch
from safetensors.torch import save_file

import keyquery as kq

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "weight_block_size": [128, 128]},
}
STATE = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 64], "nested_blocksize": 256, "nested_offset": 0.1}


def fp8(rows):
    return {"weight": torch.randn(rows, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(1, 1)}


def gptq(rows):
    return {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (8, rows), dtype=torch.int32),
        "qzeros": torch.randint(-(2**31), 2**31 - 1, (2, rows // 8), dtype=torch.int32),
        "scales": torch.rand(2, rows),
        "g_idx": (torch.arange(64) // 32).int(),
    }


def four_bit(rows):
    count = rows * 64
    state = json.dumps({**STATE, "shape": [rows, 64]}).encode()
    return {
        "weight": torch.randint(0, 256, (count // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.randint(0, 256, (count // 64,), dtype=torch.uint8),
        "weight.quant_map": torch.randn(16),
        "weight.nested_absmax": torch.rand(1),
        "weight.nested_quant_map": torch.rand(256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }


def packed(rows):
    return {
        "weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, 8), dtype=torch.int32),
        "weight_scale": torch.rand(rows, 2),
        "weight_shape": torch.tensor([rows, 64]),
    }


def quantised(folder):
    """A format per layer, also for its keys."""
    torch.manual_seed(0)
    tensors = {}
    for layer, make in enumerate((fp8, gptq, four_bit, packed)):
        for role, rows in (("q", 64), ("k", 32)):
            name = f"model.layers.{layer}.self_attn.{role}_proj"
            tensors |= {f"{name}.{ending}": part for ending, part in make(rows).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def adapted(folder):
    """A base, and an adapter in the same folder."""
    torch.manual_seed(0)
    tensors, parts = {}, {}
    for role, rows in (("q", 64), ("k", 32)):
        name = f"model.layers.0.self_attn.{role}_proj"
        tensors[f"{name}.weight"] = torch.randn(rows, 64)
        parts[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, 64)
        parts[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 2)
        parts[f"base_model.model.{name}.lora_magnitude_vector"] = torch.rand(rows)
    save_file(tensors, folder / "model.safetensors")
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": None}))
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True, "alpha_pattern": {"k_proj": 3}}
    facts |= {"fan_in_fan_out": False, "use_rslora": True, "init_lora_weights": True, "layer_replication": None}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def read_quantised(folder):
    return [(layer.form.norm2, layer.notes) for layer in kq.read(folder)]


def read_adapted(folder):
    return [(layer.form.norm2, layer.notes) for layer in kq.read(folder, adapter=folder)]
