"""Only `listening/` sees and changes running attention: by the source of all other files."""

import re
from pathlib import Path

import pytest

import keyquery as kq

SOURCE = Path(kq.__file__).parent
LISTENING = SOURCE / "listening"
HOOKS = re.compile(r"register_(module_)?(forward|full_backward|backward)(_pre)?_hook")
FORWARDS = {"forward", "_call_impl", "_compiled_call_impl"}
# What a line outside of listening does not say.
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
