"""Models within wrappers, of data parallelism and of the compiler: the same as the bare model, or refused."""

import pytest
import torch
from torch import nn

import keyquery as kq
from tests.intervene.dial.test_running import GAINS, decoder, text

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


WRAPPERS = {"parallel": nn.DataParallel, "compiled": compiled, "both": lambda model: nn.DataParallel(compiled(model))}


@pytest.mark.parametrize("wrap", ["parallel", "compiled", pytest.param("both", marks=pytest.mark.slow)])
def test_what_is_read_measured_and_changed_is_the_model_within(wrap):
    model, batch = decoder("llama"), text(2, 6)
    wrapped = WRAPPERS[wrap](model)
    assert kq.look(wrapped) == kq.look(model)
    assert kq.look(wrapped, inputs=batch).heads == kq.look(model, inputs=batch).heads
    assert [layer.name for layer in kq.read(wrapped)] == [layer.name for layer in kq.read(model)]
    rows = [kq.ablate(one, [batch], by="layer", heads="0.*").rows for one in (wrapped, model)]
    assert rows[0] == rows[1]
    ways = (
        lambda one: kq.dial(one, **GAINS),
        lambda one: kq.project(one, (0, 1)),
        lambda one: kq.swap(one, "psd"),
    )
    with torch.no_grad():
        plain = model(**batch).logits
        for way in ways:
            with way(model):
                expected = model(**batch).logits
            with way(wrapped):
                assert torch.equal(model(**batch).logits, expected)
            assert torch.equal(model(**batch).logits, plain)


@pytest.mark.parametrize("name", ["llama", pytest.param("bloom", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_compiled_model_follows_every_turn_of_its_dial(name):
    """What the compiler keeps of one turn, or of one dial, must not be used for the next."""
    model, batch = decoder(name), text(2, 6)
    fast = compiled(model)

    def agree():
        return torch.allclose(fast(**batch).logits, model(**batch).logits, atol=1e-6)

    with torch.no_grad():
        plain = fast(**batch).logits
        for _ in range(2):
            with kq.dial(fast, **GAINS) as dial:
                assert agree()
                dial.turn("0.*", skew=0.3)
                assert agree()
                assert not torch.allclose(fast(**batch).logits, plain, atol=1e-3)
        with kq.project(fast, (1, 0), kernel="zero"):
            assert agree()
        assert torch.equal(fast(**batch).logits, plain)
