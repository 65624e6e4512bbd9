"""Which device is meant."""

import pytest
import torch

from keyquery.support.devices import pick_device


def test_devices_are_strings_or_of_torch():
    assert pick_device("cpu") == pick_device(torch.device("cpu")) == "cpu"
    assert pick_device("auto") in ("cpu", "cuda")


@pytest.mark.parametrize("device", ["foo", "mps", "meta", "", None, 1.5], ids=str)
def test_others_are_refused(device):
    with pytest.raises(ValueError, match=r"device must be 'auto', 'cpu', 'cuda' or 'cuda:0', 'cuda:1', …, got "):
        pick_device(device)


@pytest.mark.parametrize("count", [0, 2])
def test_a_gpu_must_be_there(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match="device 'cuda:2': there is no GPU here" if not count else "only 2 GPUs here"):
        pick_device("cuda:2")
    if count:
        assert (pick_device("auto"), pick_device("cuda:1")) == ("cuda", "cuda:1")
        monkeypatch.setenv("LOCAL_RANK", "1")  # as torchrun tells its second process
        assert [pick_device(name) for name in ("auto", "cuda", "cuda:0", "cpu")] == [
            "cuda:1",
            "cuda:1",
            "cuda:0",
            "cpu",
        ]


def test_a_local_rank_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "abc")
    with pytest.raises(ValueError, match=r"the environment variable LOCAL_RANK must be a number, .* got 'abc'"):
        pick_device("cpu")
