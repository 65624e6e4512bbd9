"""Tiny models to operate on, and whether they are as they were."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.intervene.swap.build import FAMILIES
from keyquery.proof.families import tiny_model
from tests.listening.models import assert_as_it_was, snapshot

SPECIAL = {"mistral": {"sliding_window": None}}
TEXT = [name for name in FAMILIES if name not in ("clip", "dinov2", "vit")]
HEADS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}


def tiny(name, attention="sdpa", **changes):
    model = tiny_model(name, **SPECIAL.get(name, {}), **changes)
    model.set_attn_implementation(attention)
    return model


def encoder(batch_first=True, **options):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def padded(left=False):
    """Two texts, one shorter: their tokens and which are real."""
    ids, mask = torch.randint(3, 60, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, : 3 if left else 0] = 0
    mask[1, 7 if left else 4 :] = 0
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


def assert_refused(model, match, error=ValueError, **options):
    before = snapshot(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=match):
        kq.swap(model, **options)
    if before is not None:
        assert_as_it_was(model, before)


def assert_close(given, expected, where=None):
    error = (given - expected).abs()
    error = error if where is None else error[where]
    assert error.max() <= 1e-5 * expected.abs().max()
