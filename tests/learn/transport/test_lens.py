"""TransportLens: what it records, in which ways, and that training does not notice."""

import copy
import warnings

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.learn.training import Recipe, train


class Small(nn.Module):
    """An encoder with all that a probe could disturb: dropout, batch norm, a count of calls, and noise in any mode."""

    def __init__(self, **attention):
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.body = kq.Encoder(8, depth=2, heads=2, dropout=0.2, **attention)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, attention_mask=None):
        self.calls += 1
        mask = None if attention_mask is None else attention_mask.bool()
        return self.out(self.norm(self.body(self.enter(x), mask).mean(1))) + 1e-3 * torch.rand(2)


def data(n=24, tokens=4, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(n, tokens, 3, generator=drawn), torch.arange(n) % 2


def fit(model, steps=6, after=lambda: None):
    x, y = data(seed=1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
        optimiser.zero_grad()
        after()
    return optimiser


def made(**options):
    torch.manual_seed(0)
    model = Small()
    x, y = data()
    return model, kq.TransportLens(model, **{"module": "body", "inputs": x, "labels": y, **options})


def given(model, x):
    """What the body gives in eval mode, by hand."""
    still = copy.deepcopy(model).eval()
    with torch.no_grad():
        return still.body(still.enter(x))


def test_the_path_is_what_the_module_gives():
    x, y = data()
    model, lens = made()
    expected = [given(model, x)]
    fit(model, 4, lambda: (lens.step(), expected.append(given(model, x))))
    assert lens.steps == [0, 1, 2, 3, 4]
    torch.testing.assert_close(lens.path(), torch.stack(expected).flatten(1, 2), rtol=0, atol=1e-6)
    reading, truth = lens.reading(frames=3), kq.transport(lens.path(), lens.labels, frames=3)
    assert lens.labels.tolist() == y.repeat_interleave(4).tolist()
    assert reading.steps == [0, 2, 4]
    for name in ("distance", "path_length", "optimality", "classes", "curves", "sketch"):
        assert getattr(reading, name) == getattr(truth, name)
    assert (reading.unit, reading.model) == ("epoch", {"name": "Small", "module": "body"})
    assert kq.Reading.load(reading.to_json()) == reading


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("way", ["by hand", "around", "every other"])
def test_training_does_not_notice(way):
    torch.manual_seed(0)
    alone = Small()
    fit(alone)
    drawn = torch.rand(3)
    model, lens = made(every=1 if way == "around" else 2 if way == "every other" else "epoch")
    assert model.training
    if way == "around":
        with lens:
            fit(model)
    else:
        fit(model, after=lens.step)
    assert all(torch.equal(one, other) for one, other in zip(state(alone).values(), state(model).values(), strict=True))
    assert torch.equal(torch.rand(3), drawn)
    assert model.training
    assert model.body.blocks[0].training
    assert len(lens.steps) == (4 if way == "every other" else 7)
    assert all(not module._forward_hooks for module in model.modules())


def test_around_any_training_the_optimiser_tells_the_steps():
    model, lens = made(every=5)
    x, y = data(seed=1)
    with lens:
        fit(Small(), 3)  # another model's optimiser does not count
        train(model, lambda step, drawn: None, lambda m, _: nn.functional.cross_entropy(m(x), y), Recipe(12, warmup=1))
    assert lens.steps == [0, 5, 10, 12]  # the last, too
    assert lens.reading().unit == "step"
    fit(model, 5)  # outside nothing is recorded
    assert lens.steps == [0, 5, 10, 12]


def test_as_a_callback_of_the_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Losing(Small):
        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}

    x, y = data()
    rows = [{"x": tokens, "labels": label} for tokens, label in zip(*data(seed=1), strict=True)]
    options = {"output_dir": str(tmp_path), "num_train_epochs": 2, "per_device_train_batch_size": 6, "use_cpu": True}
    options |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    for every, steps in (("epoch", [0, 1, 2]), (3, [0, 3, 6])):  # eight steps
        torch.manual_seed(0)
        model = Losing()
        lens = kq.TransportLens(model, "body", inputs={"x": x, "labels": y}, labels=y, every=every)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the Trainer's own
            settings = transformers.TrainingArguments(**options)
            transformers.Trainer(model, settings, train_dataset=rows, callbacks=[lens.callback()]).train()
        assert lens.steps == steps
    assert lens.reading().distance > 0


def test_padding_is_left_out_and_tokens_are_chosen():
    x, y = data(n=4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 1]])
    torch.manual_seed(0)
    model = Small()
    still = copy.deepcopy(model).eval()
    with torch.no_grad():
        body = still.body(still.enter(x), mask.bool())
    real = mask.nonzero().tolist()
    for tokens, expected, owners in (
        ("all", [body[i, j] for i, j in real], [i for i, _ in real]),
        ("first", [body[0, 0], body[1, 1], body[2, 0], body[3, 2]], [0, 1, 2, 3]),
        ("last", [body[0, 3], body[1, 2], body[2, 0], body[3, 3]], [0, 1, 2, 3]),
        ("mean", [body[i][mask[i].bool()].mean(0) for i in range(4)], [0, 1, 2, 3]),
    ):
        lens = kq.TransportLens(model, "body", inputs={"x": x, "attention_mask": mask}, labels=y, tokens=tokens)
        torch.testing.assert_close(lens.path()[0], torch.stack(expected), rtol=0, atol=1e-6)
        assert lens.labels.tolist() == y[owners].tolist()


def test_points_are_drawn_once_and_keep_their_labels():
    x, y = data()
    model, whole = made(points=None, inputs=[x[:10], x[10:]])
    assert kq.TransportLens(model, model.body, inputs=x).module == "body"
    lens = kq.TransportLens(torch.compile(model), "body", inputs=(x,), labels=y, points=17)
    fit(model, 2, lambda: [one.step() for one in (whole, lens)])
    assert lens.path().shape == (3, 17, 8)
    found = (lens.path()[0][:, None] - whole.path()[0]).abs().amax(-1).min(1)
    assert found.values.max() == 0
    assert len(set(found.indices.tolist())) == 17
    torch.testing.assert_close(lens.path()[2], whole.path()[2][found.indices])
    assert lens.labels.tolist() == y.repeat_interleave(4)[found.indices].tolist()
    assert lens.reading().provenance["points"] == "17 of 96"


def test_nan_and_missing_points_name_the_step():
    model = nn.Linear(2, 2)
    lens = kq.TransportLens(model, inputs=torch.ones(4, 2), every=10)
    for _ in range(29):
        lens.step()
    model.bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="Linear gives NaN or infinite values at step 30, for 4 of 4 points"):
        lens.step()
    assert lens.steps == [0, 10, 20]
    with pytest.raises(ValueError, match="Linear gives NaN or infinite values at the start"):
        kq.TransportLens(model, inputs=torch.ones(4, 2))
    model.bias.data.zero_()
    lens = kq.TransportLens(model, inputs=torch.ones(4, 2))
    lens.batches = [torch.ones(3, 2)]
    with pytest.raises(ValueError, match="same number of points: 4 points at the start, 3 at epoch 1"):
        lens.step()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": torch.ones(2, 4, 5)}, "Small does not run on these inputs: "),
        ({"inputs": []}, "inputs must contain at least one batch, got none"),
        ({"labels": [0, 1]}, "labels must have one class per instance in inputs, 24, got 2"),
        ({"module": "unused"}, "unused is not called on these inputs: there is nothing to record"),
        ({"module": "body.block.0"}, r"module must be one of .* did you mean 'body\.blocks\.0'\?"),
        ({"module": nn.Linear(1, 1)}, "module must be one of .* got 'a Linear of another model'"),
        ({"tokens": "middle"}, "tokens must be one of 'all', 'first', 'last', 'mean', got 'middle'"),
        ({"module": "out", "tokens": "first"}, r"tokens 'first' needs outputs \(batch, tokens, width\), not \(batch"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"points": 0}, "points must be at least 1, got 0"),
    ],
)
def test_arguments_are_told(change, words):
    with pytest.raises(ValueError, match=words):
        made(**change)


def test_a_failing_training_leaves_no_hook():
    model, lens = made(every=1)
    with pytest.raises(RuntimeError, match="mine"), lens:
        raise RuntimeError("mine")
    fit(model, 2)
    assert lens.steps == [0]


def test_a_lens_that_saw_nothing_says_what_to_do():
    _, lens = made(every=2)
    with pytest.raises(ValueError, match=r"the lens has recorded only the start: call lens\.step\(\)"):
        lens.reading()
    with lens, pytest.raises(ValueError, match="inside `with lens` steps are counted by the optimiser"):
        lens.step()


def test_sequences_may_come_first_and_outputs_in_tuples():
    x = torch.randn(5, 3, 8)  # tokens, batch, width
    layer = nn.TransformerEncoderLayer(8, 2, 16).eval()
    lens = kq.TransportLens(layer, "self_attn", inputs=x, tokens="first")
    with torch.no_grad():
        expected = layer.self_attn(x, x, x)[0][0]
    torch.testing.assert_close(lens.path()[0], expected, rtol=0, atol=1e-6)
