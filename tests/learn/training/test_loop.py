"""The training loop: repeatable, resumable after a kill, stopping early, over several processes."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.learn.training import Recipe, train
from keyquery.learn.training.optimisers import Lamb, make_optimiser, schedule

TARGET = torch.tensor([[1.0, -2.0, 3.0]])


def draw(step, generator):
    return torch.randn(16, 3, generator=generator)


def loss(model, x):
    return (model(x) - x @ TARGET.mT).square().mean()


def small(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("optimiser", "schedule"), [("adamw", "flat"), ("radam", "linear"), ("npt", "flat+cosine"), ("adamw", "cosine")]
)
def test_every_optimiser_learns(optimiser, schedule):
    model = small()
    recipe = Recipe(300, lr=0.02, optimiser=optimiser, schedule=schedule, warmup=10, weight_decay=0.0)
    log = train(model, draw, loss, recipe)
    assert log.rows[-1]["loss"] < 0.2 < log.rows[0]["loss"]
    assert not model.training


def interrupt(step, model):
    if step == 25:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("optimiser", "killed"), [("adamw", True), ("npt", True), ("adamw", False)])
def test_a_run_that_was_broken_off_ends_as_if_it_had_not(tmp_path, optimiser, killed):
    recipe, file = Recipe(40, optimiser=optimiser, check_every=10), tmp_path / "run.checkpoint"
    whole, broken, fresh, seen = small(0.2), small(0.2), small(0.2), []
    expected = train(whole, draw, loss, recipe)
    if killed:
        with pytest.raises(KeyboardInterrupt):
            train(broken, draw, loss, recipe, after=interrupt, checkpoint=file)
    else:  # on purpose, and once more, when there is nothing to do
        for _ in range(2):
            log = train(broken, draw, loss, recipe, until=lambda step: step >= 25, checkpoint=file)
            assert ([row["step"] for row in log.rows], log.stopped) == ([10, 20], False)
    assert file.exists()
    log = train(fresh, draw, loss, recipe, checkpoint=file, after=lambda step, model: seen.append(step))
    assert seen == list(range(21 if killed else 26, 41))
    assert log.rows == expected.rows
    assert not file.exists()
    assert all(map(torch.equal, whole.parameters(), fresh.parameters()))


@pytest.mark.parametrize(
    ("model", "seed", "content", "said"),
    [
        (small(), 1, None, "was written with another recipe"),
        (nn.Linear(3, 1), 0, None, "is not a complete checkpoint of this model: .*: delete it to restart"),
        (small(), 0, b"half a file", "is not a complete checkpoint"),
    ],
)
def test_a_checkpoint_of_something_else_is_not_gone_on_with(tmp_path, model, seed, content, said):
    file = tmp_path / "run.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        train(small(), draw, loss, Recipe(40, check_every=10), after=interrupt, checkpoint=file)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        train(model, draw, loss, Recipe(40, check_every=10, seed=seed), checkpoint=file)


def test_patience_stops_and_the_best_weights_are_kept():
    values = iter([3.0, 1.0, 2.0, 2.5, 0.1])
    kept = []

    def validate(model):
        assert not model.training
        kept.append(model[0].weight.detach().clone())
        return next(values)

    model = small()
    log = train(model, draw, loss, Recipe(100, check_every=10, patience=2), validate=validate)
    assert log.stopped
    assert (log.best, log.best_step) == (1.0, 20)
    assert [row["step"] for row in log.rows] == [10, 20, 30, 40]
    assert torch.equal(model[0].weight, kept[1])


def test_a_loss_that_is_no_number_is_told():
    with pytest.raises(FloatingPointError, match="the loss is nan at step 5"):
        train(small(), draw, lambda model, x: loss(model, x) * torch.nan, Recipe(5))


@pytest.mark.parametrize(
    "options",
    [{"check_every": 0}, {"clip": -1.0}, {"lr": float("nan")}, {"flat": 1}, {"optimiser": "sgd"}, {"schedule": "step"}],
)
def test_settings_that_cannot_be_meant_are_refused_before_any_work(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        Recipe(**{"steps": 5, **options})


# TensorBoard


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what tensorboard itself imports
def test_curves_are_told_to_tensorboard_once_also_after_a_kill(tmp_path, monkeypatch):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra board"
    )
    recipe, file, board = Recipe(40, check_every=10, lr=0.01, warmup=0), tmp_path / "run.checkpoint", tmp_path / "board"
    checks = {"validate": lambda model: {"validation": 1.0, "error": 0.5}, "checkpoint": file}
    with pytest.raises(KeyboardInterrupt):
        train(small(), draw, loss, recipe, after=interrupt, board=board, **checks)
    monkeypatch.setenv("KEYQUERY_TENSORBOARD", str(board))  # as studies and estimators are asked
    log = train(small(), draw, loss, recipe, **checks)
    found = events.EventAccumulator(str(board / "run"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["error", "loss", "lr", "validation"]
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [
        (row["step"], pytest.approx(row["loss"])) for row in log.rows
    ]
    rates = [one.value for one in found.Scalars("lr")]
    assert rates == sorted(rates, reverse=True)


def test_without_tensorboard_one_sentence_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"a log for TensorBoard needs tensorboard: pip install 'keyquery\[board\]'"):
        train(small(), draw, loss, Recipe(1), board=tmp_path)
    train(small(), draw, loss, Recipe(1))  # nobody asked


# Optimisers, by hand


def by_hand(weight, gradients, lr, decay):
    """LAMB and Lookahead of NPT, one tensor and one line of its definition at a time, in float64."""
    mean = square = torch.zeros_like(weight)
    slow = weight
    for step, gradient in enumerate(gradients, 1):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        update = mean / (square**0.5 + 1e-6) + decay * weight
        length, size = weight.norm().item(), update.norm().item()
        ratio = min(length, 10.0) / size if length > 0 and size > 0 else 1.0
        weight = weight - lr * ratio * update
        if step % 6 == 0:
            weight = slow = (slow + weight) / 2
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_its_definition(decay):
    torch.manual_seed(1)
    starts = [torch.randn(3, 2) * 4, torch.randn(9) * 40, torch.zeros(5), torch.randn(1) / 10]
    gradients = [torch.randn(7, *start.shape) for start in starts]
    gradients[3][:] = 0  # and with it the whole direction, where nothing decays
    weights = [nn.Parameter(start.clone()) for start in starts]
    optimiser = Lamb(weights, lr=0.05, weight_decay=decay)
    for step in range(7):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient[step]
        optimiser.step()
    for weight, start, gradient in zip(weights, starts, gradients, strict=True):
        expected = by_hand(start.double(), gradient.double(), 0.05, decay)
        assert torch.allclose(weight.detach().double(), expected, rtol=1e-5, atol=1e-5)


def test_entries_of_gradients_are_cut_each_by_itself():
    model, x = nn.Linear(2, 1, bias=False), torch.tensor([[100.0, 0.1]])
    train(model, lambda *_: x, lambda model, x: model(x).sum(), Recipe(1, clip=None, clip_each=0.5))
    assert torch.allclose(model.weight.grad, torch.tensor([[0.5, 0.1]]))


def test_a_cosine_begins_where_the_flat_part_ends():
    found = [schedule("flat+cosine", step, 100, 0, flat=0.5) for step in (0, 50, 75, 99)]
    assert found[:3] == pytest.approx([1.0, 1.0, 0.5])
    assert 0 < found[3] < 0.01
    assert schedule("flat+cosine", 69, 100, 0) == 1.0


def test_chance_in_a_step_is_that_of_the_seed_and_the_step():
    drawn = []

    def loss(model, batch):
        drawn.append(torch.rand(2))
        return model.weight.sum()

    for seed in (3, 4):
        train(torch.nn.Linear(1, 1), lambda step, generator: None, loss, Recipe(2, seed=seed))
    for number, found in enumerate(drawn):
        torch.manual_seed((((3 + number // 2) * 1_000_003) << 24) + number % 2)
        assert torch.equal(found, torch.rand(2))


def test_vectors_embeddings_and_the_diagonal_of_a_kernel_do_not_decay():
    layer = kq.Attention(8, 2, kernel="symmetric")
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "layer": layer})
    decays, rest = make_optimiser("adamw", model, 1e-3, 0.1).param_groups
    kept = {id(weight) for weight in rest["params"]}
    assert kept >= {id(model["embedding"].weight), id(layer.shape.gain), id(layer.value.bias)}
    assert {id(layer.key.weight), id(layer.value.weight)} <= {id(weight) for weight in decays["params"]}
    assert (decays["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


# Several processes

TOGETHER = """
import sys, torch
sys.path.insert(0, {root!r})
from tests.learn.training.test_loop import draw, loss, small
from keyquery.learn.training import Recipe, train
import torch.distributed as dist
model = small()
log = train(model, draw, loss, Recipe(10, check_every=10))
if dist.get_rank() == 0:
    torch.save([model[0].weight.detach(), log.rows[-1]["loss"]], {out!r})
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_averages_gradients_over_processes(tmp_path):
    out = tmp_path / "out.pt"
    script = tmp_path / "script.py"
    script.write_text(TOGETHER.format(root=os.getcwd(), out=str(out)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    weight, _ = torch.load(out)

    def both(step, generator):
        parts = []
        for rank in range(2):
            generator.manual_seed((rank << 24) + step)
            parts.append(draw(step, generator))
        return torch.cat(parts)

    alone = small()
    train(alone, both, loss, Recipe(10, check_every=10))
    assert torch.allclose(alone[0].weight, weight, atol=1e-6)


def test_a_world_size_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match=r"the environment variable WORLD_SIZE must be a number, .* got 'two'"):
        train(small(), draw, loss, Recipe(1))
