"""Handles and `kq.undo`: a model is given back bit for bit, whatever was changed and however it ended."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import keyquery as kq
from keyquery.intervene.handle import Handle, lasting
from keyquery.listening.exclusive import left_open, temporarily
from keyquery.listening.hooks import put
from tests.intervene.dial.test_running import decoder, text
from tests.intervene.tiny import encoder
from tests.listening.models import assert_as_it_was, snapshot
from tests.listening.test_exclusive import BUSY

MODELS = {
    "keyquery": lambda: (kq.Attention(8, 2), {"x": torch.randn(1, 4, 8)}),
    "llama": lambda: (decoder("llama"), text(1, 4)),
    "bloom": lambda: (decoder("bloom"), text(1, 4)),
    "torch": lambda: (encoder(), {"src": torch.randn(1, 4, 16)}),
}
CHANGES = {
    "dial": lambda model: kq.dial(model, popularity=0),
    "project": lambda model: kq.project(model, (0, 1)),
    "swap": lambda model: kq.swap(model),
    "ablation": lambda model: kq.ablate_heads(model),
}
# A kq.Attention and BLOOM are not swapped, and heads of nn.MultiheadAttention are not ablated.
PAIRS = [
    (name, change)
    for name in MODELS
    for change in CHANGES
    if (name, change) not in (("keyquery", "swap"), ("bloom", "swap"), ("torch", "ablation"))
]


class Unchanged:
    """A model that must be as it was, and compute the same."""

    def __init__(self, model, batch):
        self.model, self.batch = model, batch
        self.before, self.result = snapshot(model), self.run()

    def run(self):
        with torch.no_grad():
            out = self.model(**self.batch)
        return out if isinstance(out, torch.Tensor) else out[0]

    def check(self):
        assert_as_it_was(self.model, self.before)
        assert torch.equal(self.run(), self.result)
        assert left_open(self.model) == []


@pytest.mark.parametrize(("name", "change"), PAIRS)
def test_an_interrupt_in_a_block_or_in_a_forward_gives_the_model_back(name, change):
    model, changed = Unchanged(*MODELS[name]()), []

    def stop(*_):
        changed.append(len(left_open(model.model)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CHANGES[change](model.model):
        stop()
    model.check()
    hook = model.model.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt), CHANGES[change](model.model):
        model.run()
    hook.remove()
    model.check()
    assert min(changed) > 0


@pytest.mark.parametrize(("name", "change"), PAIRS)
def test_a_handle_that_was_not_kept_is_undone_by_the_model(name, change):
    model = Unchanged(*MODELS[name]())
    CHANGES[change](model.model)
    assert not torch.equal(model.run(), model.result)
    kq.undo(model.model)
    model.check()
    kq.undo(model.model)  # harmless
    model.check()


def test_stacked_changes_are_all_undone_newest_first():
    model = Unchanged(decoder("llama"), text(1, 6))
    handles = [
        kq.swap(model.model, "psd", [0]),
        kq.ablate_heads(model.model, heads="0.1"),
        kq.dial(model.model, skew=0, heads="1.0"),
        kq.project(model.model, (1, 1)),
        kq.dial(model.model, popularity=0, heads="0.*"),
    ]
    assert not torch.equal(model.run(), model.result)
    assert not any(handle.undone for handle in handles)
    kq.undo(model.model)
    assert all(handle.undone for handle in handles)
    model.check()
    for handle in handles:
        with pytest.raises(RuntimeError, match="is already undone"):
            handle.undo()
    kq.dial(model.model, skew=0).undo()
    model.check()


def test_a_part_a_whole_and_a_wrapper_stand_for_the_model():
    model = Unchanged(decoder("llama"), text(1, 6))
    for dialled, given in (
        (model.model, model.model.model.layers[0]),
        (model.model.model, model.model),
        (model.model, torch.nn.DataParallel(model.model)),
    ):
        kq.dial(dialled, skew=0)
        kq.undo(decoder("llama"))  # of another model, nothing is undone
        assert not torch.equal(model.run(), model.result)
        kq.undo(given)
        model.check()
    with pytest.raises(TypeError, match=r"model must be a live torch.nn.Module, got str"):
        kq.undo("model.safetensors")


def test_an_undo_that_fails_does_not_keep_the_others():
    layer = torch.nn.Linear(2, 2)
    before = snapshot(layer)

    def change(changes):
        put(layer, "bias", None, changes)
        return Handle(changes, "removal of the bias")

    def failing(changes):
        changes.callback(lambda: 1 / 0)
        return Handle(changes, "failure")

    handles = lasting(layer, change), lasting(layer, failing)
    with pytest.raises(ZeroDivisionError):
        kq.undo(layer)
    assert all(handle.undone for handle in handles)
    assert_as_it_was(layer, before)


UNDOING = {
    "block": lambda dial, model: dial.__exit__(None, None, None),
    "handle": lambda dial, model: dial.undo(),
    "model": lambda dial, model: kq.undo(model),
}


@pytest.mark.parametrize("undo", UNDOING.values(), ids=UNDOING)
def test_a_change_is_undone_also_while_another_thread_measures_which_is_told(undo):
    model, begun, done = Unchanged(decoder("llama"), text(1, 6)), threading.Event(), threading.Event()
    hooks = []

    def measure(changes):
        hook = model.model.register_forward_hook(lambda *_: None)
        hooks.append(hook.id)
        changes.callback(hook.remove)

    def use():
        with temporarily(model.model, measure):
            begun.set()
            assert done.wait(60)

    with kq.dial(model.model, skew=0) as dial, ThreadPoolExecutor(1) as pool:
        measured = pool.submit(use)
        assert begun.wait(60)
        with pytest.raises(RuntimeError, match=BUSY):
            kq.ablate_heads(model.model)
        undo(dial, model.model)
        assert dial.undone
        assert torch.equal(model.run(), model.result)
        assert list(model.model._forward_hooks) == hooks  # the other thread's own, until it ends
        done.set()
        with pytest.raises(RuntimeError, match=BUSY):
            measured.result(60)
    model.check()
    with kq.dial(model.model, skew=0), temporarily(model.model):
        pass  # nothing is refused any more
    model.check()


def test_dials_from_two_threads_leave_nothing_behind():
    model = Unchanged(decoder("llama"), text(1, 6))
    switching, outcomes, start = sys.getswitchinterval(), [], threading.Barrier(2)
    sys.setswitchinterval(1e-6)

    def work(layer):
        start.wait(60)
        for _ in range(15):
            try:
                with kq.dial(model.model, popularity=0, heads=f"{layer}.*"):
                    outcomes.append("made")
            except RuntimeError as error:
                outcomes.append(str(error))

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, (0, 1)))
    finally:
        sys.setswitchinterval(switching)
    assert "made" in outcomes
    assert set(outcomes) <= {"made", BUSY}
    model.check()


def test_a_part_of_a_dialled_model_is_not_dialled_again():
    model = decoder("llama")
    with kq.dial(model, popularity=0):
        for use in (lambda: kq.dial(model.model, position=0), lambda: kq.swap(model.model)):
            with pytest.raises(ValueError, match="undo that first"):
                use()
    kq.dial(model.model, position=0).undo()
