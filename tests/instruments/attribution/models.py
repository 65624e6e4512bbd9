"""Tiny random models of many architectures, and the scores that they themselves give to their softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keyquery.listening.softmaxes import captured
from keyquery.proof.families import tiny_model

IDS = torch.tensor([[7, 12, 5, 33, 12, 5]])
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
}
# By what an architecture adds to those before; those without a tiny model of the library are built from SIZES.
ARCHITECTURES = ("gpt2", "llama", "gpt_neox", "gptj", "qwen2", "qwen3", "olmo2", "bert", "gemma2", "bloom", "t5")
ARCHITECTURES += ("deepseek", "cohere", "falcon", "opt", "Mixtral", "Granite")
EXTRA = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
}


def build(name: str, **changes: Any) -> Any:
    """A tiny model with random weights, biases and gains."""
    torch.manual_seed(0)
    if name not in EXTRA:
        return tiny_model(name, **changes)
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES, **EXTRA[name], attn_implementation="eager")
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            parameter.copy_(1 + noise if "norm" in label else noise)
    return model


def inputs(model: Any, ids: Tensor = IDS) -> dict[str, Tensor]:
    """Token ids, also for the decoder of an encoder-decoder."""
    pair = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    return {"input_ids": ids, **pair}


def softmax_inputs(model: Any, ids: Tensor = IDS) -> dict[str, Tensor]:
    """What every attention module itself gives to its softmax, (heads, n, n), by its name."""
    with captured(model) as capture:
        model(**inputs(model, ids))
    return {event.owner: event.scores.reshape(-1, *event.scores.shape[-2:]) for event in capture.events}
