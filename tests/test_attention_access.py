"""Only `listening/` sees and changes running attention: by its source, and by a spy while every analysis runs."""

import re
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import keyquery as kq
from keyquery.layers import LanguageModel

SOURCE = Path(kq.__file__).parent
LISTENING = SOURCE / "listening"
HOOKS = re.compile(r"register_(module_)?(forward|full_backward|backward)(_pre)?_hook")
FORWARDS = {"forward", "_call_impl", "_compiled_call_impl"}
# What a line outside of listening does not say; the spy sees what is done by other words.
FORBIDDEN = {
    "hook": re.compile(rf"{HOOKS.pattern}|_(forward|backward)(_pre)?_hooks\[[^]]*\] = "),
    "mode": re.compile(r"TorchFunctionMode|TorchDispatchMode|__torch_(function|dispatch)__"),
    "interface": re.compile(
        r"Attention(Mask)?Interface|ALL_(MASK_)?ATTENTION_FUNCTIONS|_attn_implementation(_internal)?['\"]?\]? = "
    ),
    "torch": re.compile(r"^\s*(F|(torch\.)?nn\.functional|torch(\.\w+)*)\.\w+ = "),
    "forward": re.compile(rf"(\.|\[?['\"])({'|'.join(FORWARDS)})(['\"]\])? = |(setattr|put)\([^)]*['\"]_?forward"),
    "attributes": re.compile(r"(?<![\w.])(setattr|put)\((?!self)|vars\((?!self)[^)]*\)(\[[^]]*\] = |\.update)"),
}
# What other files may do, and why.
ALLOWED = {
    ("intervene/handle.py", "attributes"): "`put`, the undoable assignment that swap uses",
    ("intervene/swap/swap.py", "attributes"): "swap replaces modules, and refuses save_pretrained meanwhile",
    ("intervene/swap/adapters.py", "attributes"): "swap replaces modules, and turns off nested tensors around them",
    ("proof/models.py", "interface"): "an option of the config that a tiny model is built from",
}


def violations(source):
    """Kinds of what a source says that only `listening/` may."""
    code = [line for line in source.splitlines() if not line.lstrip().startswith("#")]
    return {kind for kind, pattern in FORBIDDEN.items() if any(map(pattern.search, code))}


def test_no_other_file_sees_or_changes_attention():
    files = [path for path in SOURCE.rglob("*.py") if LISTENING not in path.parents]
    seen = {(str(path.relative_to(SOURCE)), kind) for path in files for kind in violations(path.read_text())}
    assert seen - set(ALLOWED) == set()
    assert set(ALLOWED) - seen == set(), "an exception is no longer needed"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("hook", "getattr(module, 'register_full_backward_hook')(print)"),
        ("hook", "module._forward_hooks[0] = print"),
        ("mode", "class Mode(torch.overrides.TorchFunctionMode):\n    pass"),
        ("mode", "class Mine(torch.Tensor):\n    def __torch_function__(cls, func, types, args=()):\n        pass"),
        ("interface", "from transformers import AttentionMaskInterface as masks\nmasks.register('mine', print)"),
        ("interface", "model.config._attn_implementation = 'mine'"),
        ("torch", "import torch\ntorch.nn.functional.softmax = print"),
        ("torch", "F.scaled_dot_product_attention = print"),
        ("forward", "module.forward = print"),
        ("forward", "put(module, 'forward', print, changes)"),
        ("forward", "vars(module)['forward'] = print"),
        ("attributes", "setattr(module, name, print)"),
        ("attributes", "vars(module).update(other)"),
    ],
)
def test_a_planted_line_is_seen(kind, source):
    assert kind in violations(source)


@contextmanager
def spied():
    """(what, file) of every hook, mode, forward and attention implementation that is set inside, but by libraries."""
    seen = []

    def note(what):
        frame = sys._getframe(3)  # that of what calls `wrapped`
        while frame.f_back is not None and _is_library(frame.f_code.co_filename, ("torch", "contextlib", "functools")):
            frame = frame.f_back
        if not _is_library(frame.f_code.co_filename, ("",)):
            seen.append((what, Path(frame.f_code.co_filename)))

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _hooks():
            _wrap(patch, owner, name, lambda *args, name=name: note(name))
        for mode in (TorchFunctionMode, TorchDispatchMode):
            _wrap(patch, mode, "__enter__", lambda self: type(self).__module__.startswith("torch.") or note("mode"))
        _wrap(patch, nn.Module, "__setattr__", lambda self, name, value: name in FORWARDS and note(name))
        for interface in _interfaces():
            for name in ("register", "__setitem__"):
                _wrap(patch, interface, name, lambda *args: note("interface"))
        yield seen


def _hooks():
    for owner in (nn.Module, torch_module):
        yield from ((owner, name) for name in dir(owner) if HOOKS.fullmatch(name))


def _interfaces():
    transformers = pytest.importorskip("transformers", reason="its attention interface is part of the extra hf")
    return transformers.AttentionInterface, transformers.AttentionMaskInterface


def _wrap(patch, owner, name, before):
    """Call a function before another, with its arguments; class methods stay class methods."""
    original = getattr(owner, name)
    bound = hasattr(original, "__self__")

    def wrapped(*args, **kwargs):
        before(*args)
        return original(*args[1:] if bound else args, **kwargs)

    patch.setattr(owner, name, classmethod(wrapped) if bound else wrapped)


def _is_library(file, names):
    """Whether a file belongs to installed packages, or to Python, of these names."""
    installed = file.startswith((sys.prefix, sys.base_prefix, "<frozen")) and SOURCE not in Path(file).parents
    return installed and any(name in file for name in names)


def intruders(seen):
    return sorted({(what, str(file)) for what, file in seen if LISTENING not in file.parents})


IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))


def tiny(family, model=None):
    pytest.importorskip("transformers", reason="tiny models need the extra hf")
    from keyquery.proof.families import tiny_model

    return tiny_model(family, **({} if model is None else {"model": model}))


def own_decoder():
    return LanguageModel.load(kq.models.DECODER)


MODELS = {
    "gpt2": lambda: tiny("gpt2", "GPT2LMHeadModel"),  # transformers' interface
    "bloom": lambda: tiny("bloom", "BloomForCausalLM"),  # torch functions
    "own": own_decoder,  # kq.Attention
}


def _monitor(model):
    optimiser = torch.optim.SGD(model.train().parameters(), 1e-3)
    with kq.Monitor(model, every=1):
        out = model(input_ids=IDS)
        getattr(out, "logits", out).square().mean().backward()
        optimiser.step()


def _dial(model):
    with kq.dial(model, skew=0, data=[{"input_ids": IDS}], means="global"):
        model(input_ids=IDS)


def _project(model):
    with kq.project(model, head=(0, 1), kernel="general", rank=2):
        model(input_ids=IDS)


def _ablate_heads(model):
    with kq.ablate_heads(model, heads="0.1"):
        model(input_ids=IDS)


def _listen(model):
    with kq.listen(model):
        model(input_ids=IDS)


BATCH = {"input_ids": IDS}
ANALYSES = {
    "listen": _listen,
    "look": lambda model: kq.look(model, inputs=[BATCH]),
    "roles": lambda model: kq.roles(model, sequences=2, length=33),
    "attribute": lambda model: kq.attribute(model, head="1.0", inputs=[BATCH]),
    "wiring": lambda model: kq.wiring(model, inputs=[BATCH]),
    "ablate": lambda model: kq.ablate(model, [BATCH], heads="0.*", changes=["skew", "zero"], means="global"),
    "ablate_heads": _ablate_heads,
    "dial": _dial,
    "project": _project,
    "flow": lambda model: kq.flow(model, inputs={"input_ids": IDS[:1]}, modality=["a"] * 6 + ["b"] * 6),
    "causes": lambda model: kq.causes(model, inputs={"input_ids": IDS[:1]}),
    "monitor": _monitor,
}


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("model", MODELS)
def test_every_analysis_goes_through_listening(model, analysis):
    model = MODELS[model]()
    with spied() as seen:
        ANALYSES[analysis](model)
    assert seen, "the analysis did not run the model, or the spy is blind"
    assert intruders(seen) == []


def _rerank():
    ranker = kq.HeadReranker(kq.models.DECODER, device="cpu")
    ranker.rerank("the sea", ["A ship on the sea.", "A house in the town."])


def _swap():
    model = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    with kq.swap(model, kernel="symmetric"):
        model(torch.randn(1, 5, 8))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(_rerank, id="rerank"),
        pytest.param(_swap, id="swap"),
        pytest.param(lambda: kq.distill(kq.Attention(8, heads=2), torch.randn(4, 20, 8), rank=2), id="distill"),
        pytest.param(lambda: kq.TransportLens(kq.Encoder(8, depth=1, heads=2), inputs=torch.randn(3, 4, 8)), id="lens"),
        pytest.param(lambda: kq.testing.prove("gpt2"), id="prove"),
        pytest.param(lambda: kq.testing.check_family("bert"), id="check_family"),
    ],
)
def test_other_public_functions_go_through_listening(run):
    with spied() as seen:
        run()
    assert seen or run is _swap, "nothing ran, or the spy is blind"  # a swap replaces modules alone
    assert intruders(seen) == []


def _plant_interface():
    _interfaces()[0].register("planted", print)


def _plant_mask():
    _interfaces()[1]().__setitem__("planted", print)


class Planted(TorchFunctionMode):
    """A mode outside of listening."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _plant_mode():
    with ExitStack() as stack:
        stack.enter_context(Planted())


@pytest.mark.parametrize(
    ("what", "plant"),
    [
        ("register_forward_hook", lambda: nn.Linear(1, 1).register_forward_hook(print)),
        ("register_forward_pre_hook", lambda: nn.Linear(1, 1).register_forward_pre_hook(print)),
        ("register_full_backward_hook", lambda: nn.Linear(1, 1).register_full_backward_hook(print)),
        ("register_module_forward_hook", lambda: torch_module.register_module_forward_hook(print).remove()),
        ("mode", _plant_mode),
        ("forward", lambda: setattr(nn.Linear(1, 1), "forward", print)),
        ("interface", _plant_interface),
        ("interface", _plant_mask),
    ],
)
def test_a_planted_call_is_seen(what, plant):
    with spied() as seen:
        plant()
    assert (what, __file__) in intruders(seen)
