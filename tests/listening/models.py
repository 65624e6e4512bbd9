"""Models to listen to: classes of one's own in plain PyTorch, and whether a model is as it was."""

import sys
from functools import wraps

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import keyquery as kq
from keyquery.listening.exclusive import configs_of
from keyquery.listening.interface import TABLE
from keyquery.listening.listen import _ATTACHED, _SEEN_BY
from tests.instruments.plain import PatchAttention, SelfAttention


class CausalSelfAttention(SelfAttention):
    """As in minGPT: one fused projection, softmax over q·kᵀ."""

    def __init__(self, width=16, heads=4):
        super().__init__(width, heads, fused=False)


class FusedAttention(PatchAttention):
    """As in timm's vision transformers, with torch's fused function."""

    def attend(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, dropout_p=0.0)


class Core(nn.Module):
    """Attention of two heads whose core is a function of q, k and v."""

    def __init__(self, core, width=8):
        super().__init__()
        self.core, self.qkv = core, nn.Linear(width, 3 * width)

    def sides(self, x):
        return [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def forward(self, x):
        return self.core(*self.sides(x)).transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """Attention modules one after the other."""

    def __init__(self, *attentions):
        super().__init__()
        self.attentions = nn.ModuleList(attentions)

    def forward(self, x):
        for attention in self.attentions:
            x = x + attention(x)
        return x


class LlamaAttention(nn.Module):
    """Grouped, and rotated."""

    def __init__(self, width, heads, groups, rope=None, repeat=True):
        super().__init__()
        self.heads, self.groups, self.rank, self.rope, self.repeat = heads, groups, width // heads, rope, repeat
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.rank, bias=False) for _ in range(2))

    def forward(self, x):
        batch, n, _ = x.shape
        q, k, v = (w(x).view(batch, n, -1, self.rank).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.rope is not None:
            q, k = (self.rope.rotate(t, torch.arange(n)) for t in (q, k))
        if self.repeat:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        return self.wo(y.transpose(1, 2).reshape(batch, n, -1))


class NormedAttention(PatchAttention):
    """With l2-normed queries and keys, as in x-transformers."""

    def attend(self, q, k, v):
        return scaled_dot_product_attention(nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1), v)


class RawAttention(nn.Module):
    """Parameters without modules, (in, out), with biases that are added later."""

    def __init__(self, width, heads):
        super().__init__()
        self.n_head = heads
        for role in "qkvo":
            setattr(self, f"W_{role}", nn.Parameter(torch.randn(width, width) / 5))
            setattr(self, f"b_{role}", nn.Parameter(torch.randn(width)))

    def forward(self, x):
        batch, n, width = x.shape
        q, k, v = (x @ getattr(self, f"W_{role}") + getattr(self, f"b_{role}") for role in "qkv")
        q, k, v = (t.view(batch, n, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(batch, n, width) @ self.W_o + self.b_o


class Stack(nn.Module):
    """Embedded tokens, and attention modules with norms before them, as blocks of a model of one's own."""

    def __init__(self, attentions, width=24, vocabulary=31):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(nn.ModuleDict({"ln": nn.LayerNorm(width), "attn": attn}) for attn in attentions)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = x + block["attn"](block["ln"](x))
        return x


def randomised(model):
    """A model in float64 with large random weights, so that attention is far from uniform."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.6)
    return model.double().eval()


def full_precision(monkeypatch):
    """Let eager attention of transformers take its softmax in float64: in float32 hidden rows of float64 are NaN."""
    softmax = nn.functional.softmax

    @wraps(softmax)
    def exact(x, dim=None, _stacklevel=3, dtype=None):
        return softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(nn.functional, "softmax", exact)


def snapshot(model):
    """Everything that a model is: its modules, their attributes, hooks and tensors, and what it shares with others."""
    modules = {name: (module, type(module)) for name, module in model.named_modules()}
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = {
        name: {key: list(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
    configs = [config._attn_implementation_internal for config in configs_of(model)]
    tables = {id(sys.modules[kind.__module__].__dict__.get(TABLE)) for _, kind in modules.values()}
    listened = model in _ATTACHED, [name for name, (module, _) in modules.items() if _SEEN_BY.get(module)]
    modes = torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled(), torch._C._len_torch_function_stack()
    return modules, tensors, attributes, (configs, tables, listened, modes)


def assert_as_it_was(model, before):
    modules, tensors, attributes, shared = snapshot(model)
    assert list(modules.items()) == list(before[0].items())
    assert list(tensors) == list(before[1])
    for name, (tensor, values) in before[1].items():
        assert tensors[name][0] is tensor
        assert torch.equal(tensors[name][1], values)
    for name, earlier in before[2].items():
        assert attributes[name].keys() == earlier.keys()
        for key, value in earlier.items():
            now = attributes[name][key]
            assert now is value or (not isinstance(now, torch.Tensor) and now == value), (name, key)
    assert shared == before[3]


def assert_one_sentence(error):
    message = str(error.value)
    assert 10 < len(message) < 300
    assert "\n" not in message


def formula(call, new):
    """The output of all heads with replaced tensors, in float64, step by step."""
    query, key, value = (new.get(name, getattr(call, name)).double() for name in ("query", "key", "value"))
    groups = call.heads // key.shape[1]
    key = torch.stack([key[:, head // groups] for head in range(call.heads)], 1)
    groups = call.heads // value.shape[1]
    value = torch.stack([value[:, head // groups] for head in range(call.heads)], 1)
    if "output" in new:
        return new["output"].double()
    if "scores" in new:
        scores = new["scores"].double()
    else:
        scores = call.scale * torch.einsum("bhnr,bhmr->bhnm", query, key)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        bias = new.get("bias", call.bias)
        scores = scores if bias is None else scores + bias.double()
        scores = scores if call.mask is None else scores.masked_fill(~call.mask, -torch.inf)
    weights = scores.exp()
    rest = 0 if call.sinks is None else call.sinks.double().exp()[:, None, None]
    weights = weights / (weights.sum(-1, keepdim=True) + rest)
    return torch.einsum("bhnm,bhmv->bhnv", weights, value)


def rotation(rope, position, rank, start=0):
    """R(position) of dimensions from `start` on, as a matrix, from cosines and sines alone."""
    matrix = torch.eye(rank, dtype=torch.float64)
    for pair, angle in enumerate([] if rope is None else rope.angles(float(position))):
        i, j = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + rope.dims // 2)
        i, j, cos, sin = i + start, j + start, rope.factor * angle.cos(), rope.factor * angle.sin()
        matrix[i, i], matrix[i, j], matrix[j, i], matrix[j, j] = cos, -sin, sin, cos
    return matrix


def entered(model, batch, name):
    """What enters a module in one run, for the tokens that are no padding."""
    inputs, real = [], batch.get("attention_mask")
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model.eval()(**batch)
    hook.remove()
    return inputs[0].flatten(0, 1) if real is None else inputs[0][real.bool()]


def noise(x, *shape):
    source = torch.Generator().manual_seed(5)
    return torch.randn(shape or x.shape, generator=source, dtype=torch.float64).to(x)


def wider(call):
    """Queries and keys with further entries, one key per query head."""
    key = call.key.repeat_interleave(call.heads // call.key_heads, 1)
    sides = ((call.query, 1), (key, -1))
    return dict(
        zip(("query", "key"), (torch.cat((x, sign * noise(x, *x.shape[:-1], 5)), -1) for x, sign in sides), strict=True)
    )


REPLACEMENTS = {
    "query": lambda call: {"query": 1.5 * call.query + 0.1 * noise(call.query)},
    "key": lambda call: {"key": 0.2 * noise(call.key) - call.key},
    "wider": wider,
    "value": lambda call: {"value": noise(call.value) - call.value},
    "bias": lambda call: {"bias": noise(call.query, 1, call.heads, call.query.shape[-2], call.key.shape[-2])},
    "scores": lambda call: {"scores": (0.5 * call.scores()).to(call.query.dtype)},
    "output": lambda call: {"output": 2 * call.output().to(call.query.dtype) + noise(call.value[:, :1, :1])},
    "several": lambda call: {
        **wider(call),
        "value": 2 * call.value,
        "bias": noise(call.query, 1, 1, 1, 1).expand(1, 1, call.query.shape[-2], call.key.shape[-2]).cumsum(-1),
    },
}


def assert_replaced(replacement, model, module, project, run, limit=1e-9, real=None):
    """What the first attention module returns is what the formula says, and the model is changed by it.

    `project` takes the output of all heads (batch, n, heads · v) to what the module returns.
    """
    returned, seen = [], []

    def change(call):
        if call.module is not module:
            return None
        seen.append((call, REPLACEMENTS[replacement](call)))
        return seen[-1][1]

    hook = module.register_forward_hook(lambda _, args, out: returned.append(out if torch.is_tensor(out) else out[0]))
    before = snapshot(model)
    with torch.no_grad():
        plain = run()
        with kq.listen(model, change):
            changed = run()
        wanted = project(formula(*seen[0]).transpose(1, 2).flatten(2))
        again = run()
    assert_as_it_was(model, before)
    hook.remove()
    assert len(seen) == 1
    error = (returned[1].double() - wanted.double()).abs()
    error = error if real is None else error[real]
    assert error.max() <= limit * max(1.0, float(wanted.abs().max()))
    assert torch.equal(plain, again)
    assert (changed - plain).abs().max() > 1e-3
