"""Runs as users make them: a folder used again, several optimisers, failing callbacks, restarts, wrong arguments."""

import json

import pytest
import torch

import keyquery as kq
from keyquery.instruments.monitor.alarms import Rules
from tests.instruments.monitor.models import monitored


def decoder(heads=2, depth=1):
    torch.manual_seed(0)
    return kq.Decoder(16, depth=depth, heads=heads)


def train(model, steps, optimiser=None, rate=0.0, after=None):
    """Steps with an optimiser, by default a new one."""
    optimiser = optimiser or torch.optim.SGD(model.parameters(), rate)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(2, 6, 16, generator=generator)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        if after is not None:
            after()


def steps_of(path):
    return [line["step"] for line in map(json.loads, path.read_text().splitlines()[1:]) if "values" in line]


def test_an_earlier_run_in_the_folder_is_put_aside(tmp_path):
    model = decoder()
    with monitored(model, folder=tmp_path):
        train(model, 4)
    with (
        pytest.warns(RuntimeWarning, match=r"has a run up to step 3, now renamed to monitor.1.jsonl"),
        monitored(model, folder=tmp_path) as monitor,
    ):
        train(model, 2)
    assert monitor.reading().steps == [0, 1]
    assert steps_of(tmp_path / "monitor.jsonl") == [0, 1]
    assert steps_of(tmp_path / "monitor.1.jsonl") == [0, 1, 2, 3]


def test_a_folder_of_another_model_is_refused(tmp_path):
    model = decoder()
    with monitored(model, folder=tmp_path):
        train(model, 1)
    with pytest.raises(ValueError, match="has records of another model"):
        kq.Monitor(decoder(heads=4, depth=2), folder=tmp_path)


def test_alarms_that_were_raised_before_a_restart_are_not_raised_again(tmp_path):
    model, raised = decoder(), []
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.0)  # of other weights: its steps do not count
    rules = Rules(limit=1e-6, dead=False, rank=False)
    with monitored(model, rules=rules, folder=tmp_path) as first:
        train(model, 2, after=other.step)
    assert len(first.reading().alarms) == 1
    second = monitored(model, rules=rules, folder=tmp_path, on_alarm=raised.append)
    second.resume(2)
    with second:
        train(model, 2)  # another optimiser takes over
        train(model, 1)
    assert second.reading().steps == steps_of(tmp_path / "monitor.jsonl") == [0, 1, 2, 3, 4]
    assert raised == []


def test_a_failing_on_alarm_loses_no_record(tmp_path):
    def fails(alarm):
        raise OSError("no network")

    model = decoder()
    rules = Rules(limit=1e-6, dead=False, rank=False)
    with (
        pytest.warns(RuntimeWarning, match="no network"),
        monitored(model, rules=rules, folder=tmp_path, strict=False, on_alarm=fails) as monitor,
    ):
        train(model, 4)
    assert steps_of(tmp_path / "monitor.jsonl") == monitor.reading().steps == [0, 1, 2, 3]
    assert len(monitor.reading().alarms) == 1


def test_cross_attention_to_other_widths_is_recorded_without_its_weights():
    layer = torch.nn.MultiheadAttention(16, 2, kdim=12, vdim=12, batch_first=True)
    query, key = torch.randn(2, 5, 16), torch.randn(2, 7, 12)
    monitor = monitored(layer)
    layer(query, key, key, need_weights=False)
    monitor.step()
    monitor.close()
    q, k = query @ layer.q_proj_weight.mT, key @ layer.k_proj_weight.mT  # its biases are 0
    truth = (q.view(2, 5, 2, 8).transpose(1, 2) @ k.view(2, 7, 2, 8).permute(0, 2, 3, 1) / 8**0.5).amax((0, 2, 3))
    assert monitor.reading().curves["largest"] == pytest.approx(truth.detach()[:, None].numpy(), rel=1e-5)
    with pytest.raises(ValueError, match="cannot be clipped, its weights are not read"):
        monitor.clip(1.0)
