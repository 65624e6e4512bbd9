"""The monitor in training: bit-identical, exact, resumable, and harmless when it fails."""

import json
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import keyquery as kq
from keyquery.proof.families import tiny_model
from tests.instruments.monitor.models import language_model, monitored
from tests.processes import run

transformers = pytest.importorskip("transformers")


class Torch(torch.nn.Module):
    """A model of torch's own attention, whose weights are returned or not."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(60, 32)
        self.first = torch.nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.second = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)

    def forward(self, ids):
        x = self.tokens(ids)
        return self.second(x + self.first(x, x, x)[0]) @ self.tokens.weight.mT


def make(kind):
    if kind == "kq":
        return language_model(dropout=0.1)
    torch.manual_seed(0)
    if kind == "torch":
        return Torch()
    model = transformers.LlamaForCausalLM(tiny_model("llama").config)
    model.set_attn_implementation(kind)
    return model


def train(model, monitor=None, steps=5, first=0):
    torch.manual_seed(3)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for step in range(first, first + steps):
        ids = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(step))
        out = model(ids)
        logits = getattr(out, "logits", out)
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimiser.step()
        if monitor is not None:
            monitor.step()
        optimiser.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("kind", ["kq", "torch", "sdpa", "eager"])
def test_training_is_bit_identical(kind):
    plain, watched = make(kind), make(kind)
    monitor = monitored(watched, every=2, structure=2)
    assert torch.equal(train(plain), train(watched, monitor))
    reading = monitor.reading()
    assert reading.steps == [0, 2, 4]
    assert len(reading.heads) == 8
    assert kq.Reading.load(reading.to_json()) == reading
    for metric in ("largest", "bound", "sigma", "query_gradient", "entropy", "sink", "effective_rank"):
        assert all(curve[0] is not None for curve in reading.curves[metric]), metric
    assert (np.array(reading.curves["largest"]) <= np.array(reading.curves["bound"])).all()


COMPILED = """
import sys, torch, warnings, keyquery as kq
from keyquery.layers import LanguageModel, Shape

def train(how, late, watched):
    torch.manual_seed(0)
    bare = model = LanguageModel(Shape(60, 32, 2, 4, 32, True, "general", rope=True, dropout=0.1)).train()
    monitor = kq.Monitor(model, every=2) if watched and late else None
    if how == "whole":
        model = torch.compile(model, backend="eager", fullgraph=late)
    for part in {"blocks": bare.body.blocks, "in place": [bare]}.get(how, ()):
        part.compile(backend="eager", fullgraph=late)
    monitor = kq.Monitor(model, every=2, strict=True) if watched and not late else monitor
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        for step in range(3):
            ids = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16):  # keeps the weights that it casts
                (model(ids) + model(ids)).square().mean().backward()
            optimiser.step()
            if watched:
                monitor.step()
            optimiser.zero_grad()
    messages = [str(warning.message) for warning in caught if "monitor" in str(warning.message)]
    if watched:
        assert len(messages) == late and all("make the monitor of what is called" in text for text in messages)
        assert late or monitor.reading().steps == [0, 2]
    return torch.cat([weight.detach().flatten() for weight in bare.parameters()])

for late in (False, True) if sys.argv[1] != "blocks" else (False,):  # compiled after the monitor was made
    assert torch.equal(train(sys.argv[1], late, False), train(sys.argv[1], late, True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "blocks", "in place"])
def test_compiled_models_stay_compiled(how):
    # In a process of its own: shape checks of tests would be compiled, too.
    subprocess.run([sys.executable, "-c", COMPILED, how], check=True)


def test_a_run_is_resumed_and_watched_from_its_file(tmp_path):
    model = make("kq")
    monitor = monitored(model, every=2, folder=tmp_path)
    train(model, monitor, steps=6)
    monitor.close()
    again = monitored(model, every=2, folder=tmp_path)
    again.resume(4)  # a checkpoint of step 4
    train(model, again, steps=3, first=4)
    assert again.reading().steps == [0, 2, 4, 6]
    again.close()
    with (tmp_path / "monitor.jsonl").open("a") as file:
        file.write('{"step": 8, "val')  # killed while writing
    out = tmp_path / "monitor.json"
    run("monitor", tmp_path, "--json", out, "--html", tmp_path / "a.html")
    assert json.loads(out.read_text())["steps"] == [0, 2, 4, 6]
    assert "<!doctype html>" in (tmp_path / "a.html").read_text()[:20]


def test_a_run_is_followed_while_it_trains_and_beyond_nan(tmp_path, monkeypatch):
    model = make("kq")
    monitor = monitored(model, folder=tmp_path)
    looks = []  # the first is for the first record

    def train_on(seconds):
        looks.append(seconds)
        if len(looks) == 4:
            raise KeyboardInterrupt
        if len(looks) == 3:
            for weight in model.parameters():
                weight.data.fill_(torch.nan)
        train(model, monitor, steps=1, first=len(looks) - 1)

    monkeypatch.setattr("time.sleep", train_on)
    output = run("monitor", tmp_path, "--follow", "--seconds", "7")
    assert looks == [7.0] * 4
    first, *rest = [line for line in output.splitlines() if line.startswith("step ")]
    assert re.match(r"step 1: largest logit \d", first)
    assert rest[0] == "step 2: largest logit nan"
    assert any("NaN or infinite" in line for line in rest)


def test_trainer_callback(tmp_path):
    model = make("sdpa")
    monitor = monitored(model, every=2)
    ids = torch.randint(60, (8, 12))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    options |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[monitor.callback()])
    trainer.train()
    reading = monitor.reading()
    assert reading.steps == [0, 2]
    assert all(curve[0] > 0 for curve in reading.curves["query_gradient"])
    logged = [row for row in trainer.state.log_history if "attention/max largest" in row]
    largest = np.array(reading.curves["largest"]).max(0)
    np.testing.assert_allclose([row["attention/max largest"] for row in logged], largest, rtol=1e-6)
    assert [row["step"] for row in logged] == [1, 3]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 4  # none is lost to a record's
    assert reading.losses == [None, pytest.approx(np.mean(losses[:2]), rel=1e-6)]  # logged after the step


def test_a_loss_above_its_lowest_raises_an_alarm():
    model, raised = make("kq"), []
    monitor = monitored(model, every=2, on_alarm=raised.append)
    losses = [3.0, 2.0, 2.2, 2.1, 2.2, 2.3, 2.24, float("nan"), 1.0]
    for step, loss in enumerate(losses):
        model(torch.randint(60, (2, 6)))
        monitor.add_loss(torch.tensor(loss, requires_grad=True) if step % 2 else loss)
        monitor.step()
    reading = monitor.reading()
    assert reading.losses == pytest.approx([3.0, 2.1, 2.15, 2.27, None])
    assert [(alarm["step"], alarm["heads"], alarm["value"]) for alarm in raised] == [(6, [], pytest.approx(2.27))]
    assert raised[0]["reason"] == "loss: the loss is 2.27, 0.17 above its lowest"
    assert kq.Reading.load(reading.to_json()) == reading
    assert reading.alarms == raised


def test_a_failure_of_the_monitor_does_not_stop_training(monkeypatch):
    model = make("kq")
    monitor = kq.Monitor(model, every=1)
    monkeypatch.setattr(monitor.recorder, "add", lambda *args: 1 / 0)
    with pytest.warns(RuntimeWarning, match="training goes on: division by zero"):
        assert torch.equal(train(make("kq"), steps=2), train(model, monitor, steps=2))
    monitor.strict = True
    with pytest.raises(ZeroDivisionError):
        train(model, monitor, steps=1)


def test_bad_input_is_one_sentence():
    with pytest.raises(ValueError, match="Linear has no attention module: there is nothing to monitor"):
        kq.Monitor(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the monitor has recorded nothing"):
        kq.Monitor(make("kq")).reading()
    model = make("kq")
    with torch.no_grad():
        model.body.blocks[0].attention.key.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        kq.Monitor(model)


def test_a_monitor_that_is_dropped_leaves_the_model():
    model, records = make("kq"), []
    monitor = monitored(model)
    train(model, monitor, steps=1)
    monitor.recorder.add = lambda *args: records.append(args)
    train(model, monitor, steps=1)
    assert len(records) == 1
    before = weakref.ref(monitor)
    del monitor
    assert before() is None  # at once: it is part of no cycle
    assert "_compiled_call_impl" not in vars(model)
    train(model, steps=1)
    assert len(records) == 1
