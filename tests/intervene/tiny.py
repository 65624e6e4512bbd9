"""Tiny models to operate on, and whether they are as they were."""

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.intervene.swap.build import FAMILIES
from keyquery.proof.families import tiny_model

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


def snapshot(model):
    """Everything that a model is: its modules, their tensors and the bits in them."""
    modules = {name: (module, type(module), module.training) for name, module in model.named_modules()}
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    places = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
    facts = {name: {**vars(m), **{p: dict(vars(m)[p]) for p in places}} for name, m in model.named_modules()}
    return modules, tensors, facts


def assert_as_it_was(model, before):
    modules, tensors, facts = snapshot(model)
    assert list(modules) == list(before[0])
    assert all(
        now[0] is was[0] and now[1:] == was[1:] for now, was in zip(modules.values(), before[0].values(), strict=True)
    )
    assert list(tensors) == list(before[1])
    for name, (tensor, _) in tensors.items():
        assert tensor is before[1][name][0]
        assert torch.equal(tensor, before[1][name][1])
    for name, was in before[2].items():
        assert facts[name].keys() == was.keys()
        for key, value in was.items():
            now = facts[name][key]
            assert now is value or list(now) == list(value) if isinstance(value, dict) else now == value


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
