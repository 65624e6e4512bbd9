"""Interrupts at any line, and several threads at once: a model is either used as it should be, or left as it was."""

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import keyquery as kq
from keyquery.capture import attention_maps, joint_moments
from keyquery.capture.attention_stream import stream_maps
from keyquery.capture.guard import alone, temporarily, uninterrupted
from keyquery.capture.probe import Probe
from keyquery.surgery.rewriting.attach import _CHANGED
from tests.surgery.dial.test_running import GAINS, decoder, text
from tests.surgery.interrupts import SOURCE, interrupted_everywhere, states
from tests.surgery.tiny import assert_as_it_was, encoder, snapshot, tiny

FILES = {
    *(SOURCE / "surgery" / f"{name}.py" for name in ("handle", "dial/dial", "project/project", "swap/swap")),
    *(SOURCE / "surgery" / f"{name}.py" for name in ("head_output", "distill")),
    *(SOURCE / "surgery" / f"{name}.py" for name in ("swap/adapters", "rewriting/attach", "rewriting/register")),
    *(SOURCE / "capture" / f"{name}.py" for name in ("value_norms", "guard", "whole_maps", "moments", "probe")),
    *(SOURCE / "capture" / f"{name}.py" for name in ("attention_stream", "hooks")),
}
assert all(path.is_file() for path in FILES)
FILES = {str(path) for path in FILES}

MODELS = {
    "keyquery": lambda: (kq.Attention(8, 2), {"x": torch.randn(1, 4, 8)}),
    "llama": lambda: (tiny("llama", num_hidden_layers=1), text(1, 4)),
    "torch": lambda: (encoder(), {"src": torch.randn(1, 4, 16)}),
}
OPERATIONS = {
    "dial": lambda model: kq.dial(model, popularity=0),
    "project": lambda model: kq.project(model, (0, 1)),
    "swap": lambda model: kq.swap(model),
    "heads": lambda model: kq.ablate_heads(model),
}
RUNS = {
    "joint_moments": lambda model, batch: joint_moments(model, [batch], kq.read(model)),
    "attention_maps": attention_maps,
    "stream_maps": lambda model, batch: stream_maps(model, batch, lambda heard: None),
    "probe": lambda model, batch: Probe(model, "", batch)(),
}
# A kq.Attention is not swapped, and the heads of nn.MultiheadAttention are not ablated.
CHANGES = [(m, o) for m in MODELS for o in OPERATIONS if (m, o) not in (("keyquery", "swap"), ("torch", "heads"))]
CAPTURES = [(m, r) for m in MODELS for r in RUNS if m != "torch" or r in ("joint_moments", "probe")]


def interrupt(name, use, step):
    model, batch = MODELS[name]()
    return interrupted_everywhere(model, partial(use, model, batch), FILES, step)


def in_a_block(operation, model, batch):
    with OPERATIONS[operation](model):
        pass


def by_a_handle(operation, model, batch):
    return OPERATIONS[operation](model)


def running(run, model, batch):
    RUNS[run](model, batch)


@pytest.mark.unchecked
@pytest.mark.parametrize("use", [in_a_block, by_a_handle])
@pytest.mark.parametrize(("name", "operation"), CHANGES)
def test_an_interrupt_leaves_no_change_behind(name, operation, use):
    assert interrupt(name, partial(use, operation), step=71) > 5


@pytest.mark.unchecked
@pytest.mark.parametrize(("name", "run"), CAPTURES)
def test_an_interrupted_run_leaves_the_model_as_it_was(name, run):
    assert interrupt(name, partial(running, run), step=61) > 2


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("use", [in_a_block, by_a_handle])
@pytest.mark.parametrize(("name", "operation"), CHANGES)
def test_an_interrupt_at_no_line_leaves_a_change_behind(name, operation, use):
    assert interrupt(name, partial(use, operation), step=1) > 400


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize(("name", "run"), CAPTURES)
def test_a_run_interrupted_at_any_line_leaves_the_model_as_it_was(name, run):
    assert interrupt(name, partial(running, run), step=1) > 200


@pytest.mark.slow
@pytest.mark.unchecked
def test_an_interrupted_distillation_leaves_the_layer_as_it_was():
    data = torch.randn(3, 4, 8)
    assert interrupt("keyquery", lambda layer, batch: kq.distill(layer, data, rank=1) and None, step=53) > 20


def test_signals_wait_for_the_end_of_a_change_and_are_all_delivered():
    heard, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append("terminate"))
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]

    def both():
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            heard.append("whole")

    try:
        with pytest.raises(KeyboardInterrupt):
            both()
        assert heard == ["whole", "terminate"]
        assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupted_wait_for_a_model_ends():
    model, taken, over = kq.Attention(8, 2), threading.Event(), threading.Event()

    def use():
        with alone(model):
            taken.set()
            over.wait(20)

    thread = threading.Thread(target=use)
    thread.start()
    taken.wait(20)
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kq.dial(model, popularity=0)
    over.set()
    thread.join()
    kq.dial(model, popularity=0).undo()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_dials_from_two_threads_leave_nothing_behind(name):
    model, inputs = decoder(name), text(1, 6)
    before, shared = snapshot(model), states(model)
    with torch.no_grad():
        plain = model(**inputs).logits
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(layer):
        refused = 0
        for _ in range(15):
            try:
                with kq.dial(model, popularity=0, heads=f"{layer}.*"):
                    pass
            except RuntimeError:  # the other thread has it
                refused += 1
        return refused

    try:
        with ThreadPoolExecutor(2) as pool:
            refused = sum(pool.map(work, (0, 1)))
    finally:
        sys.setswitchinterval(switching)
    assert refused < 30
    assert_as_it_was(model, before)
    assert states(model) == shared
    assert model not in _CHANGED
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain)


def test_looks_from_many_threads_are_all_the_same():
    model, batches = decoder("llama"), [text(2, 9) for _ in range(2)]
    expected = kq.look(model, inputs=batches)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: kq.look(model, inputs=batches), range(8)))
    assert all(one.heads == expected.heads for one in found)


def test_looks_are_of_the_model_before_or_after_another_threads_swap():
    model, batch, done = decoder("llama"), text(2, 9), threading.Event()
    plain = kq.look(model, inputs=batch).heads
    with kq.swap(model):
        swapped = kq.look(model, inputs=batch).heads

    def run():
        while not done.is_set():
            kq.swap(model).undo()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        looks = [kq.look(model, inputs=batch, workers=2).heads for _ in range(12)]
    finally:
        done.set()
        thread.join()
    assert all(heads in (plain, swapped) for heads in looks)


def test_somebody_elses_run_of_the_same_model_is_not_heard():
    model, batch, done = decoder("llama"), text(2, 9), threading.Event()
    heads = kq.read(model)
    expected = joint_moments(model, [batch], heads)[0].mean

    def run():
        with torch.no_grad():
            while not done.is_set():
                model(**text(1, 5))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        found = [joint_moments(model, [batch], heads)[0].mean for _ in range(5)]
    finally:
        done.set()
        thread.join()
    assert all(torch.equal(one, expected) for one in found)


def test_a_dialled_model_runs_in_several_threads_as_in_one():
    model, batches = decoder("llama"), [text(2, n) for n in (5, 9, 13)]
    for batch in batches[1:]:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -2:] = 0
    with kq.dial(model, **GAINS), torch.no_grad():
        expected = [model(**batch).logits for batch in batches]

        def run(number):
            with torch.no_grad():
                return torch.equal(model(**batches[number % 3]).logits, expected[number % 3])

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, range(24)))


@pytest.mark.parametrize("change", [lambda model: kq.dial(model, popularity=0), kq.ablate_heads])
def test_a_model_that_another_thread_has_changed_is_refused_and_can_be_undone_there(change):
    model, batch = decoder("llama"), text(1, 6)
    with ThreadPoolExecutor(1) as pool:
        dial = pool.submit(change, model).result()
        for use in (lambda: kq.look(model, inputs=batch), lambda: kq.dial(model, position=0), lambda: kq.swap(model)):
            with pytest.raises((RuntimeError, ValueError), match="undo that first"):
                use()
    dial.undo()
    kq.look(model, inputs=batch)


def test_a_part_of_a_dialled_model_is_not_dialled_again():
    model = decoder("llama")
    with kq.dial(model, popularity=0):
        for use in (lambda: kq.dial(model.model, position=0), lambda: kq.swap(model.model)):
            with pytest.raises(ValueError, match="undo that first"):
                use()
    kq.dial(model.model, position=0).undo()


def test_the_fused_path_of_torch_is_shared_by_models_in_several_threads():
    models, x = [encoder() for _ in range(4)], torch.randn(1, 4, 16)
    assert torch.backends.mha.get_fastpath_enabled()

    def run(model):
        heads = kq.read(model)
        return [joint_moments(model, [{"src": x}], heads)[0].count for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        assert all(count == 4 for counts in pool.map(run, models) for count in counts)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_change_that_fails_is_undone():
    layer = torch.nn.Linear(2, 2)
    before = snapshot(layer)

    def fail(stack):
        stack.callback(layer.train, layer.training)
        layer.eval()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), temporarily(layer, fail):
        pass
    assert_as_it_was(layer, before)
