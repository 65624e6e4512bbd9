"""Attention maps are those of a model's own eager attention, whatever it runs with; models are left as they were."""

import pytest
import torch

from keyquery.listening import attention_maps
from keyquery.listening.maps import layers_of, maps_by_head, run_with
from keyquery.proof.families import tiny_model
from tests import vision

pytest.importorskip("transformers")


def padded(name):
    """A batch of two sequences, the second of which is padded on the left."""
    batch = {"input_ids": torch.randint(3, 60, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    batch["attention_mask"][1, :4] = 0
    return batch | ({"decoder_input_ids": torch.randint(3, 60, (2, 5))} if name == "t5" else {})


@pytest.mark.parametrize("name", ["albert", "deberta_v2", "falcon", "gpt_oss", "t5"])
def test_maps_are_those_of_the_models_eager_attention(name):
    """With sinks, relative biases, shared layers, ALiBi, disentangled projections; of T5 its encoder."""
    model, batch = tiny_model(name), padded(name)
    maps, before = attention_maps(model, batch), model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    expected = out.encoder_attentions if name == "t5" else out.attentions
    real = batch["attention_mask"].bool()[:, None, :, None]
    assert len(maps) == len(expected)
    for layer, eager in zip(maps, expected, strict=True):
        rounding = 1e-6 if before == "eager" else 1e-5  # of fused attention, in the layers below
        torch.testing.assert_close(layer * real, eager[..., : layer.shape[-1]] * real, atol=rounding, rtol=0)


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_oss", "gemma2"])
def test_heads_one_by_one_and_last_queries_are_parts_of_the_whole(name):
    calls = []
    run_with(tiny_model(name), padded(name), lambda call, number: calls.append(call))
    for call in calls:
        whole = call.weights()
        heads = [maps for _, maps in maps_by_head(call)]
        assert [maps.shape[1] for maps in heads] == [1] * call.heads
        torch.testing.assert_close(torch.cat(heads, 1), whole)
        last = call.part(queries=slice(-3, None))
        torch.testing.assert_close(last.weights(), whole[..., -3:, :])
        assert last.positions.equal(call.positions[:, -3:])


def joint_batch():
    return dict(
        vision.llava_processor()(images=vision.photograph(), text=f"<image> {vision.TEXT}", return_tensors="pt")
    )


def test_the_layers_over_all_tokens_are_told_from_towers():
    model, batch = vision.llava(), joint_batch()
    calls, out = run_with(model, batch, lambda call, number: None)
    layers = layers_of(model, calls, out)
    assert [layer.name for layer in layers] == [f"language_model.layers.{layer}.self_attn" for layer in range(2)]
    assert sum("vision_tower" in call.name for call in calls) == 2
    tower = layers_of(model, calls, out, tokens=17)  # of the class token and 16 patches
    assert {"vision_tower" in layer.name for layer in tower} == {True}


def test_separate_towers_are_refused():
    batch = {"input_ids": torch.tensor([[2, 7, 3]]), "pixel_values": torch.zeros(1, 3, 32, 32)}
    with pytest.raises(ValueError, match="CLIPModel has separate text and image towers without attention between them"):
        attention_maps(vision.clip(), batch)
