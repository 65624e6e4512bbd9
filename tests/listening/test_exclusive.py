"""Changes to a live model: undone whatever happens, found if they are left on, and made by one thread at a time."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from transformers import BertModel

import keyquery as kq
from keyquery.listening import attention_maps, joint_moments
from keyquery.listening.exclusive import Changes, alone, left_open, temporarily
from tests.intervene.dial.test_running import decoder, text
from tests.intervene.tiny import encoder, tiny
from tests.listening.models import assert_as_it_was, snapshot

BUSY = "the model is in use by another thread: run one after the other"


def in_another_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def test_what_is_left_open_is_found_by_whoever_shares_modules_and_forgotten_when_closed():
    model, other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.nn.Linear(2, 2)
    inner, outer = Changes(model[0]), Changes(model)
    assert left_open(model) == [inner, outer] == left_open(model[0])
    assert left_open(model[1]) == [outer]
    assert left_open(other) == []
    outer.close()
    outer.close()  # harmless
    assert left_open(model) == [inner]
    assert (inner.is_open, outer.is_open, outer.model) == (True, False, None)
    inner.close()
    assert left_open(model) == []


def test_an_interrupted_undo_can_be_repeated():
    layer, undone = torch.nn.Linear(2, 2), []
    changes = Changes(layer)
    changes.callback(undone.append, "first")
    changes.callback(undone.append, "second")
    changes._exit_callbacks.pop()[1](None, None, None)  # as after an interrupt between two of its callbacks
    assert (undone, changes.is_open) == (["second"], True)
    changes.close()
    assert (undone, changes.is_open) == (["second", "first"], False)


def test_nothing_is_kept_of_a_model_that_is_no_longer_used():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with temporarily(model), alone(model[0]):
        gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


USES = {
    "alone": lambda model: alone(model).__enter__(),
    "look": kq.look,
    "look on data": lambda model: kq.look(model, inputs=text(1, 5)),
    "dial": lambda model: kq.dial(model, skew=0),
    "swap": kq.swap,
    "a part": lambda model: kq.dial(model.model, skew=0),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_second_thread_is_refused_and_may_follow(use):
    model = decoder("llama")
    before = snapshot(model)
    with alone(model):
        with pytest.raises(RuntimeError, match=BUSY):
            in_another_thread(lambda: use(model))
        assert_as_it_was(model, before)
        with alone(model), alone(model.model):  # one thread may do so again
            pass
        with pytest.raises(RuntimeError, match=BUSY):
            in_another_thread(lambda: use(model))
    in_another_thread(lambda: use(model))
    kq.undo(model)
    assert_as_it_was(model, before)


def test_models_that_share_modules_or_a_config_are_used_one_after_the_other():
    model = tiny("bert")
    same_config, same_module = BertModel(model.config), torch.nn.Sequential(model.encoder)
    different = tiny("bert")
    with temporarily(model):
        for other in (same_config, same_module):
            with pytest.raises(RuntimeError, match=BUSY):
                in_another_thread(lambda other=other: alone(other).__enter__())
        in_another_thread(lambda: kq.look(different))


def test_a_thread_that_has_ended_uses_nothing():
    model = torch.nn.Linear(2, 2)
    kept = []

    def leave():
        kept.append(alone(model))
        kept[0].__enter__()

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    with alone(model):
        pass
    kq.undo(model)
    assert left_open(model) == []


RUNS = {
    "joint_moments": lambda model, batch: joint_moments(model, [batch], kq.read(model)),
    "attention_maps": attention_maps,
    "lens": lambda model, batch: kq.TransportLens(model, inputs=batch),
    "look": lambda model, batch: kq.look(model, inputs=batch),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_run_that_ends_in_the_middle_leaves_the_model_as_it_was(run, error):
    model, batch = decoder("llama"), text(2, 9)
    run(model, batch)  # transformers attaches its own hooks when attentions are first asked for

    def stop(*_):
        raise error

    hook = model.model.layers[1].register_forward_hook(stop)
    before, name = snapshot(model), model.config._attn_implementation
    with pytest.raises(error):
        run(model, batch)
    assert_as_it_was(model, before)
    assert model.config._attn_implementation == name
    assert left_open(model) == []
    hook.remove()
    run(model, batch)


def test_the_fused_path_of_torch_is_shared_by_models_in_several_threads():
    models, x = [encoder() for _ in range(4)], torch.randn(1, 4, 16)
    assert torch.backends.mha.get_fastpath_enabled()

    def run(model):
        heads = kq.read(model)
        return [joint_moments(model, [{"src": x}], heads)[0].count for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        assert all(count == 4 for counts in pool.map(run, models) for count in counts)
    assert torch.backends.mha.get_fastpath_enabled()


def test_another_threads_forward_changes_no_measurement():
    """Either is refused if both run at once."""
    model, batch, means, done = decoder("llama"), text(2, 9), [], threading.Event()
    heads = kq.read(model)
    expected = joint_moments(model, [batch], heads)[0].mean

    def run():
        while not done.is_set():
            with torch.no_grad(), suppress(RuntimeError):
                model(**text(1, 5))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run)
        for _ in range(5):
            with suppress(RuntimeError, ValueError):
                means.append(joint_moments(model, [batch], heads)[0].mean)
        done.set()
    assert all(torch.equal(mean, expected) for mean in means)
