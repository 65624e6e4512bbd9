"""Small language models of bytes, many seeds trained side by side: every weight has a leading dimension of models.

They are Llamas, or Qwen3s where queries and keys are normed; `as_model` gives one of them to the reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, scaled_dot_product_attention, silu

from keyquery.support.extras import optional
from keyquery.support.files import writing

Weights = dict[str, Tensor]
BYTES = 256
EPS = 1e-6
BASE = 10_000.0  # of RoPE
ADAPTED = ("query", "key", "value", "output")  # by LoRA
RANK = 4


NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
READ = ("query", "key", "norm", "query_norm", "key_norm")
OUTER = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


@dataclass(frozen=True)
class Size:
    """A config."""

    name: str = "llama"
    width: int = 128
    depth: int = 4
    heads: int = 4
    groups: int = 4
    head_width: int = 32
    hidden: int = 256
    normed: bool = False  # queries and keys, as in Qwen3

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights of one model."""
        d, queries, keys = self.width, self.heads * self.head_width, self.groups * self.head_width
        layer: dict[str, tuple[int, ...]] = {
            "query": (queries, d),
            "key": (keys, d),
            "value": (keys, d),
            "output": (d, queries),
        }
        layer |= {"gate": (self.hidden, d), "up": (self.hidden, d), "down": (d, self.hidden)}
        layer |= {"norm": (d,), "mlp_norm": (d,)}
        layer |= {"query_norm": (self.head_width,), "key_norm": (self.head_width,)} if self.normed else {}
        stacked = {name: (self.depth, *shape) for name, shape in layer.items()}
        return {**stacked, "embedding": (BYTES, d), "final_norm": (d,), "head": (BYTES, d)}


SIZES = (
    Size(),
    Size("grouped", heads=8, groups=2, head_width=16),
    Size("deep", width=96, depth=8, heads=4, groups=4, head_width=24, hidden=192),
    Size("normed", heads=4, groups=2, normed=True),
    Size("tall", width=64, depth=16, heads=4, groups=4, head_width=16, hidden=128),
)


def initial(size: Size, seeds: Sequence[int], device: str = "cpu") -> Weights:
    """Models before training: N(0, .02²), gains of norms 1."""

    def drawn(seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape, generator=generator)
            for name, shape in size.shapes().items()
        }

    models = [drawn(seed) for seed in seeds]
    return {name: torch.stack([model[name] for model in models]).to(device) for name in models[0]}


def picked(weights: Weights, indices: Sequence[int]) -> Weights:
    """Some of the models."""
    return {name: value[list(indices)] for name, value in weights.items()}


def joined(models: Sequence[Weights]) -> Weights:
    """Models side by side."""
    return {name: torch.cat([model[name] for model in models]) for name in models[0]}


def logits(
    size: Size, weights: Weights, tokens: Int[Tensor, "models batch time"]
) -> Float[Tensor, "models batch time bytes"]:
    """Of the next byte, at every position."""
    models, batch, time = tokens.shape
    x = weights["embedding"].gather(1, tokens.flatten(1)[..., None].expand(-1, -1, size.width))
    cos, sin = _rotation(size, time, x)
    for layer in range(weights["query"].shape[1]):
        own = {name: weights[name][:, layer] for name in NAMES if name in weights}
        inner = _rms(x, own["norm"])
        query, key, value = (
            (inner @ own[name].mT).view(models * batch, time, -1, size.head_width).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        if size.normed:
            query, key = (
                (_unit(side).view(models, batch, *side.shape[1:]) * own[name][:, None, None, None]).flatten(0, 1)
                for side, name in ((query, "query_norm"), (key, "key_norm"))
            )
        query, key = (_rotated(side, cos, sin) for side in (query, key))
        shared = size.heads // size.groups
        key, value = (side.repeat_interleave(shared, 1) for side in (key, value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        x = x + mixed.reshape(models, batch * time, -1) @ own["output"].mT
        inner = _rms(x, own["mlp_norm"])
        x = x + (silu(inner @ own["gate"].mT) * (inner @ own["up"].mT)) @ own["down"].mT
    x = _rms(x, weights["final_norm"]) @ weights["head"].mT
    return x.view(models, batch, time, BYTES)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def _rms(x: Float[Tensor, "models tokens d"], gain: Float[Tensor, "models d"]) -> Tensor:
    return _unit(x) * gain[:, None]


def _rotation(size: Size, time: int, like: Tensor) -> tuple[Tensor, Tensor]:
    powers = torch.arange(0, size.head_width, 2, device=like.device) / size.head_width
    angles = torch.arange(time, device=like.device)[:, None] * BASE**-powers
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


Training = Generator[None, None, dict[int, Weights]]
Draw = Callable[[int], Int[Tensor, "models batch time"]]


def batches(
    text: Int[Tensor, " n"], spans: Sequence[tuple[int, int]], seeds: Sequence[int], steps: int, batch: int, length: int
) -> Draw:
    """Windows of the text, each model from a span of its own, in an order of its own."""
    starts = [
        torch.randint(low, high - length - 1, (steps, batch), generator=torch.Generator().manual_seed(seed))
        for (low, high), seed in zip(spans, seeds, strict=True)
    ]
    first = torch.stack(starts).to(text.device)
    within = torch.arange(length + 1, device=text.device)
    return lambda step: text[first[:, step, :, None] + within].long()


def loss(size: Size, weights: Weights, tokens: Tensor, teacher: Weights | None = None) -> Float[Tensor, " models"]:
    """Cross-entropy per byte, or with a teacher the divergence of its predictions."""
    found = logits(size, weights, tokens[..., :-1])
    if teacher is None:
        flat = cross_entropy(found.flatten(0, 2), tokens[..., 1:].flatten(), reduction="none")
        return flat.view(len(tokens), -1).mean(1)
    with torch.no_grad():
        wanted = log_softmax(logits(size, teacher, tokens[..., :-1]), -1)
    return (wanted.exp() * (wanted - log_softmax(found, -1))).sum(-1).flatten(1).mean(1)


def trained(
    size: Size,
    weights: Weights,
    draw: Draw,
    rate: float,
    steps: int,
    *,
    kept: Sequence[int] = (),
    lora: bool = False,
    teacher: Weights | None = None,
    end: float = math.inf,
) -> Training:
    """Models after the steps `kept` and after the last: Adam, warm-up over 50 steps, then a cosine to a tenth.

    A generator that takes one step at a time and returns the models; `together` runs one or several. With `lora`, only
    low-rank updates of the attention are trained. When the clock is past `end`, the training is stopped; the cosine is
    that of the share of steps or of time that has passed, whichever is larger.
    """
    start = {name: value.clone() for name, value in weights.items()}
    free = _adapters(start) if lora else start
    on_gpu = start["query"].is_cuda
    speed = torch.tensor(0.0, device=start["query"].device)
    settings: dict[str, Any] = {"capturable": True, "fused": True} if on_gpu else {}
    optimiser = torch.optim.Adam(
        [value.requires_grad_() for value in free.values()], lr=speed, betas=(0.9, 0.98), **settings
    )
    tokens = draw(0)

    def update() -> None:
        optimiser.zero_grad()
        loss(size, _with_adapters(start, free) if lora else free, tokens, teacher).sum().backward()
        optimiser.step()

    step_once = _captured(update, optimiser) if on_gpu else update
    found: dict[int, Weights] = {}
    begin = monotonic()
    for step in range(steps):
        share = max(step / steps, min((monotonic() - begin) / max(end - begin, 1e-9), 1.0))
        cosine = 0.55 + 0.45 * math.cos(math.pi * share)
        speed.fill_(rate * min((step + 1) / 50, 1.0) * cosine)
        tokens.copy_(draw(step))
        step_once()
        if on_gpu and step % 20 == 0:  # so that the clock is that of the GPU
            torch.cuda.current_stream().synchronize()
        late = monotonic() > end
        if late or step + 1 in (*kept, steps):
            now = _with_adapters(start, free) if lora else free
            found[step + 1] = {name: value.detach().clone() for name, value in now.items()}
        if late:
            break
        yield
    return found


def together(trainings: Mapping[str, Training]) -> dict[str, dict[int, Weights]]:
    """Run trainings in turns, a step of each; on a GPU each has a stream of its own, since one alone leaves it idle."""
    on_gpu = torch.cuda.is_available()
    streams = {name: torch.cuda.Stream() if on_gpu else None for name in trainings}
    if on_gpu:
        torch.cuda.synchronize()
    left, found = dict(trainings), dict[str, dict[int, Weights]]()
    while left:
        for name, training in list(left.items()):
            try:
                with torch.cuda.stream(streams[name]):
                    next(training)
            except StopIteration as ended:
                found[name] = ended.value
                del left[name]
    if on_gpu:
        torch.cuda.synchronize()
    return found


def _captured(update: Callable[[], None], optimiser: torch.optim.Optimizer) -> Callable[[], None]:
    """The update as one CUDA graph: small models would wait for their launches. It is run thrice at rate 0."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(stream)
    optimiser.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return graph.replay


def _adapters(weights: Weights) -> Weights:
    free = {}
    for name in ADAPTED:
        models, depth, rows, columns = weights[name].shape
        free[f"{name}_down"] = torch.randn(models, depth, RANK, columns, device=weights[name].device) / columns**0.5
        free[f"{name}_up"] = torch.zeros(models, depth, rows, RANK, device=weights[name].device)
    return free


def _with_adapters(weights: Weights, free: Weights) -> Weights:
    added = {name: weights[name] + free[f"{name}_up"] @ free[f"{name}_down"] for name in ADAPTED}
    return {**weights, **added}


def as_model(size: Size, weights: Mapping[str, Tensor]) -> nn.Module:
    """One model, without the leading dimension, as a model of transformers."""
    kind = "Qwen3" if size.normed else "Llama"
    model = getattr(optional("transformers", "a model of the study"), f"{kind}ForCausalLM")(
        config_of(size, len(weights["query"]))
    )
    state = {f"{theirs}.weight": weights[ours] for ours, theirs in OUTER.items()} | attention_state(weights, NAMES)
    model.load_state_dict(state)
    return model


def config_of(size: Size, depth: int) -> Any:
    """The config of transformers."""
    sizes: dict[str, Any] = {"hidden_size": size.width, "intermediate_size": size.hidden, "num_hidden_layers": depth}
    sizes |= {"num_attention_heads": size.heads, "num_key_value_heads": size.groups, "head_dim": size.head_width}
    kind = "Qwen3" if size.normed else "Llama"
    return getattr(optional("transformers", "a model of the study"), f"{kind}Config")(
        **sizes, vocab_size=BYTES, max_position_embeddings=256, rms_norm_eps=EPS, tie_word_embeddings=False
    )


def attention_state(weights: Mapping[str, Tensor], names: Iterable[str] = READ) -> dict[str, Tensor]:
    """Weights of the layers under the names of transformers; by default those that the analysis reads."""
    return {
        f"model.layers.{layer}.{NAMES[name]}.weight": row
        for name in names
        if name in weights
        for layer, row in enumerate(weights[name])
    }


def save(size: Size, weights: Mapping[str, Tensor], folder: Path) -> None:
    """A checkpoint of queries, keys and their norms alone."""
    folder.mkdir(parents=True, exist_ok=True)
    config_of(size, len(weights["query"])).save_pretrained(folder)
    state = {name: row.detach().cpu().contiguous() for name, row in attention_state(weights).items()}
    with writing(folder / "model.safetensors") as file:
        save_file(state, file)
