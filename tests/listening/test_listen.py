"""`kq.listen`: what it shows is what models compute, whatever the architecture, padding, packing and cache.

The reference of a batch are the attentions that a model returns for each of its sequences alone, eager and in float64.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.checkpoints.family import families
from keyquery.proof.families import tiny_inputs, tiny_model
from tests.listening.models import (
    full_precision,
)


@dataclass
class Architecture:
    """A tiny model, and what its calls must say."""

    name: str
    scale: float = 8**-0.5
    key_heads: int = 4
    causal: bool = True
    left: bool = True  # takes left padding: positions are derived from the mask, relative, or given
    given: bool = False  # positions are given to it as position_ids
    first: int = 0  # the first of these
    packed: bool = True  # takes position_ids that start again, and a mask of pairs
    cache: bool = True
    config: dict[str, Any] = field(default_factory=dict)

    def model(self):
        model = tiny_model(self.name, **self.config)
        for name, weight in model.named_parameters():
            if any(part in name for part in families()[self.name].tiny.get("zero", [])):
                nn.init.normal_(weight, std=0.3)
        return model if self.name == "gpt_oss" else model.double()  # whose experts know no float64


ENCODER = {"causal": False, "cache": False}
WINDOW = {"sliding_window": 3}
ARCHITECTURES = {
    "bert": Architecture("bert", given=True, **ENCODER),
    "bloom": Architecture("bloom", packed=False),
    "deberta_v2": Architecture("deberta_v2", scale=24**-0.5, given=True, packed=False, **ENCODER),
    "deepseek": Architecture("deepseek", scale=10**-0.5),
    "falcon with alibi": Architecture("falcon", packed=False, config={"alibi": True}),
    "gemma2": Architecture("gemma2", scale=20**-0.5, key_heads=2, config=WINDOW),
    "gemma3": Architecture("gemma3", scale=20**-0.5, key_heads=2, config=WINDOW),
    "gpt2": Architecture("gpt2", given=True, config={"scale_attn_by_inverse_layer_idx": False}),
    "gpt_neo": Architecture("gpt_neo", scale=1.0, given=True, config={"window_size": 3}),
    "gpt_neox": Architecture("gpt_neox"),
    "gpt_oss": Architecture("gpt_oss", scale=0.25, key_heads=2, config=WINDOW),
    "gptj": Architecture("gptj"),
    "llama": Architecture("llama", key_heads=2),
    "modernbert": Architecture("modernbert", config={"local_attention": 4}, packed=False, **ENCODER),
    "opt": Architecture("opt", scale=1.0),
    "roberta": Architecture("roberta", given=True, first=2, **ENCODER),
}
LENGTHS = (7, 4, 6)


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    full_precision(monkeypatch)


class Layout:
    """Sequences in the slots of a batch: which sequence a slot holds (−1: none), and at which position."""

    def __init__(self, rows, left=False):
        width = max(sum(LENGTHS[sequence] for sequence in row) for row in rows)
        self.sequence = torch.full((len(rows), width), -1)
        self.position = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            start = width - sum(LENGTHS[sequence] for sequence in row) if left else 0
            for sequence in row:
                slots = slice(start, start := start + LENGTHS[sequence])
                self.sequence[number, slots] = sequence
                self.position[number, slots] = torch.arange(LENGTHS[sequence])
        self.real = self.sequence >= 0

    def cut(self, start, end):
        part = Layout.__new__(Layout)
        part.sequence, part.position, part.real = (t[:, start:end] for t in (self.sequence, self.position, self.real))
        return part

    def filled(self, sequences):
        """The tokens in the slots; padding is some token."""
        padded = torch.stack([nn.functional.pad(ids, (0, max(LENGTHS) - len(ids)), value=5) for ids in sequences])
        return padded[self.sequence, self.position].where(self.real, 7)


PADDED = {
    "none": Layout([[0], [0]]),
    "left": Layout([[0], [1], [2]], left=True),
    "right": Layout([[0], [1], [2]]),
}
PACKED = Layout([[1, 2], [2, 1]])


def arguments(architecture, layout, total=None):
    """What a model gets beside its tokens."""
    out = {"attention_mask": layout.real.long()} if not layout.real.all() else {}
    if architecture.given:
        out["position_ids"] = layout.position + architecture.first
    return out


def references(model, sequences):
    """Attentions by layer of every sequence alone: (heads, n, n), in float64."""
    with torch.no_grad():
        maps = [model(ids[None], output_attentions=True).attentions for ids in sequences]
    return [[layer[0].double() for layer in layers] for layers in zip(*maps, strict=True)]


def expected(reference, queries, keys):
    """The attention of a batch, from that of its sequences alone."""
    same = (queries.sequence[:, :, None] == keys.sequence[:, None]) & queries.real[:, :, None] & keys.real[:, None]
    width = max(LENGTHS)
    table = torch.stack(
        [nn.functional.pad(each, (0, width - each.shape[-1], 0, width - each.shape[-2])) for each in reference]
    )
    picked = table[queries.sequence[:, :, None], :, queries.position[:, :, None], keys.position[:, None]]
    return (picked * same[..., None]).permute(0, 3, 1, 2)


def assert_shows(call, reference, queries, keys, limit):
    """Weights, scores and tokens of a call are those of its sequences alone."""
    wanted, real = expected(reference, queries, keys), queries.real
    weights, scores = call.weights().detach().double(), call.scores().detach().double()
    assert (weights - wanted).transpose(1, 2)[real].abs().max() <= limit
    seen = (wanted > 0) & real[:, None, :, None]
    assert seen.any(-1).transpose(1, 2)[real].all()
    log = (scores - scores.amax(-1, keepdim=True)) - (wanted / wanted.amax(-1, keepdim=True)).log()
    assert log[seen].abs().max() <= 30 * limit  # relative to scores
    hidden = real[:, None, :, None] & ~(queries.sequence[:, None, :, None] == keys.sequence[:, None, None])
    assert (scores[hidden.expand_as(scores)] == -torch.inf).all()
    for positions, layout in ((call.positions, queries), (call.key_positions, keys)):
        assert torch.equal(positions.expand_as(layout.position)[layout.real], layout.position[layout.real])
    for mask, layout in ((call.real, keys), (call.real_queries, queries)):
        assert layout.real.all() if mask is None else torch.equal(mask, layout.real)


def assert_facts(call, architecture):
    assert call.query.shape[1] == call.heads == 4
    assert call.key.shape[1] == call.key_heads == architecture.key_heads
    assert call.scale == pytest.approx(architecture.scale, rel=1e-7)
    assert call.is_causal == architecture.causal
    assert not call.is_cross


def limit_of(model):
    return 1e-6 if next(model.parameters()).dtype == torch.float64 else 1e-5  # rotations are in float32 everywhere


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_calls_are_the_attention_of_each_sequence_alone(name, padding):
    architecture, layout = ARCHITECTURES[name], PADDED[padding]
    model, sequences = architecture.model(), [torch.randint(3, 60, (length,)) for length in LENGTHS]
    reference, entered = references(model, sequences), []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args: entered.append(args[0].flatten(2) if args[0].ndim > 2 else args[0])
        )
        for module in model.modules()
        if "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"
    ]
    with kq.listen(model) as calls, torch.no_grad():
        model(input_ids=layout.filled(sequences), **arguments(architecture, layout))
    for hook in hooks:
        hook.remove()
    assert [call.layer for call in calls] == [0, 1]
    for call, of_layer in zip(calls, reference, strict=True):
        assert_facts(call, architecture)
        assert_shows(call, of_layer, layout, layout, limit_of(model))
        output = call.output().detach().transpose(1, 2).flatten(2).double()
        error = min(  # what the output projection gets is among what enters linear maps
            float((output - x.double())[layout.real].abs().max()) for x in entered if x.shape == output.shape
        )
        assert error <= limit_of(model) * float(output.abs().max())


PACKABLE = [name for name, architecture in ARCHITECTURES.items() if architecture.packed]
EAGER = ("gemma2", "gpt_neo", "gpt_oss", "gptj")  # have no other attention


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "eager") for name in PACKABLE] + [(name, "sdpa") for name in PACKABLE if name not in EAGER],
)
def test_packed_rows(name, attention):
    """Positions start again, and a mask of pairs separates the sequences."""
    architecture = ARCHITECTURES[name]
    model, sequences = architecture.model(), [torch.randint(3, 60, (length,)) for length in LENGTHS]
    reference = references(model, sequences)
    if attention == "sdpa":
        model.set_attn_implementation(attention)
    pairs = PACKED.sequence[:, :, None] == PACKED.sequence[:, None]
    if architecture.causal:
        pairs = pairs & torch.ones_like(pairs).tril()
    mask = pairs[:, None]
    if attention == "eager":
        mask = torch.zeros(mask.shape, dtype=next(model.parameters()).dtype).masked_fill(~mask, -torch.inf)
    masks = {"full_attention": mask}
    if "sliding_window" in architecture.config:
        near = torch.ones_like(pairs).triu(1 - 3)[:, None]
        masks["sliding_attention"] = mask & near if attention == "sdpa" else mask.masked_fill(~near, -torch.inf)
    with kq.listen(model) as calls, torch.no_grad():
        model(
            input_ids=PACKED.filled(sequences),
            attention_mask=masks if len(masks) > 1 else mask,
            position_ids=PACKED.position + architecture.first,
        )
    for call, of_layer in zip(calls, reference, strict=True):
        assert_facts(call, architecture)
        assert_shows(call, of_layer, PACKED, PACKED, limit_of(model))


@pytest.mark.parametrize("steps", [(5, 1, 1), (3, 4)], ids=["decoding", "chunks"])
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if architecture.cache])
def test_calls_with_a_cache(name, padding, steps):
    """Right padding stands between the prompt and what follows it, if that is longer than the sequence."""
    architecture, layout = ARCHITECTURES[name], PADDED[padding]
    model, sequences = architecture.model(), [torch.randint(3, 60, (length,)) for length in LENGTHS]
    reference, ids = references(model, sequences), layout.filled(sequences)
    given, cache, start = arguments(architecture, layout), None, 0
    for step in steps:
        end = start + step
        part = {
            name: value[:, start:end] if name == "position_ids" else value[:, :end] for name, value in given.items()
        }
        with kq.listen(model) as calls, torch.no_grad():
            out = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, **part)
        cache = out.past_key_values
        for call, of_layer in zip(calls, reference, strict=True):
            assert_facts(call, architecture)
            if layout.cut(start, end).real.any():
                m = call.key.shape[-2]
                assert_shows(call, of_layer, layout.cut(start, end), layout.cut(end - m, end), limit_of(model))
        start = end


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "vit", "clip"])
def test_encoders_decoders_and_images(name):
    """As many calls as the model returns attentions, each the same; encoder-decoders are right-padded."""
    model = tiny_model(name).double()
    inputs = tiny_inputs(name, model)
    inputs = {
        key: value.double() if value.is_floating_point() else torch.randint(3, 60, (3, 7 if key == "input_ids" else 5))
        for key, value in inputs.items()
    }
    inputs = {key: value if len(value) == 3 else value.expand(3, *value.shape[1:]) for key, value in inputs.items()}
    if "input_ids" in inputs:
        inputs["attention_mask"] = PADDED["right"].real.long()
    if "decoder_input_ids" in inputs:
        inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    with kq.listen(model) as calls, torch.no_grad():
        out = model(**inputs, output_attentions=True)
    towers = [out] if name != "clip" else [out.vision_model_output, out.text_model_output]
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    maps = {kind: [] for kind in kinds}
    for tower in towers:
        for kind in kinds:
            maps[kind] += list(tower.get(kind) or ())
    assert len(calls) == sum(map(len, maps.values()))
    for call in calls:
        decoder = "decoder" in call.name.split(".")
        kind = "cross_attentions" if call.is_cross else "decoder_attentions" if decoder else "encoder_attentions"
        weights = (maps[kind] or maps["attentions"]).pop(0)
        real = torch.ones(call.query.shape[::2], dtype=torch.bool) if call.real_queries is None else call.real_queries
        error = (call.weights() - weights).transpose(1, 2)[real]
        assert error.abs().max() <= 1e-9
        assert call.is_cross == ("EncDecAttention" in call.name or "encoder_attn" in call.name)
        assert call.is_causal == ((decoder and not call.is_cross) or "text_model" in call.name)
        scale = {"t5": 1.0, "whisper": 1.0}.get(name, 8**-0.5)
        assert call.scale == pytest.approx(scale)
    assert not any(maps.values())


DECODERS = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bloom": "BloomForCausalLM",
    "gptj": "GPTJForCausalLM",
}


@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache_is_as_without_listening(name):
    """With every tensor replaced by itself: fused, or from its parts."""
    model = tiny_model(name, model=DECODERS[name]).double()
    inputs = {"input_ids": torch.randint(3, 60, (2, 5)), "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5])}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    seen = []

    def same(call):
        seen.append(call.layer)
        return {"query": call.query.clone(), "key": call.key.clone(), "value": call.value.clone()}

    with kq.listen(model, same) as kept:
        assert torch.equal(model.generate(**inputs, **options), plain)
    assert seen == [0, 1] * 6
    assert kept == []
