"""Lineage of models on a hub: byte ranges of queries and keys alone are fetched, from a real server."""

import json

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq
from tests.checkpoints.test_hub import Site, constants, serve

WIDTH, HEADS, DEPTH = 64, 4, 4


def checkpoint(folder, seed, noise=0.0):
    """A Llama whose other weights are far larger than its queries and keys."""
    base, own = (torch.Generator().manual_seed(number) for number in (seed, 99))
    tensors = {"model.embed_tokens.weight": torch.zeros(4000, WIDTH)}
    for layer in range(DEPTH):
        for role in "qk":
            weight = torch.randn(WIDTH, WIDTH, generator=base)
            weight = weight + noise * torch.randn(WIDTH, WIDTH, generator=own)
            tensors[f"model.layers.{layer}.self_attn.{role}_proj.weight"] = weight
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": WIDTH}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, "rope_theta": 10000.0}))
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    sent = []

    def answer(handler):
        real, counted = handler.wfile.write, []
        handler.wfile.write = lambda data: (counted.append(len(data)), real(data))[1]
        serve(handler, tmp_path / handler.path.split("/")[2])
        sent.append(sum(counted))

    server = Site(answer)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    yield sent
    server.shutdown()
    server.server_close()


def test_models_on_a_hub_against_each_other_and_a_local_one(tmp_path, hub):
    for name, seed, noise in (("base", 0, 0.0), ("tuned", 0, 0.1), ("stranger", 1, 0.0)):
        checkpoint(tmp_path / name, seed, noise)
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    assert kq.lineage("org/base", "org/tuned").label == "fine-tuned"
    assert 0 < sum(hub) < size  # of two models, read twice: the embedding was left where it is
    assert kq.lineage("org/base", tmp_path / "stranger").label == "unrelated"
    assert kq.lineage(tmp_path / "base", "org/base").label == "identical"
