"""A small language model: token embeddings, positions, blocks, and tied output embeddings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor, nn

from keyquery.checkpoints.sources import read_json, read_tensors
from keyquery.forms import Rope
from keyquery.layers.blocks import Decoder, Encoder
from keyquery.layers.cache import Cache
from keyquery.support.files import beside, write_all
from keyquery.support.printable import first_line


@dataclass(frozen=True)
class Shape:
    """Hyperparameters of a language model, saved as config.json."""

    vocab_size: int  # number of tokens
    width: int = 128  # of the residual stream
    depth: int = 4  # number of blocks
    num_attention_heads: int = 4  # per block
    length: int = 256  # longest sequence, in tokens
    causal: bool = False  # decoder, else encoder
    kernel: str = "general"  # of `kq.Attention`
    rope: bool = False  # rotary positions in place of learned ones
    dropout: float = 0.0  # share of activations
    head_dim: int | None = None  # None: width / heads
    model_type: str = "keyquery"  # written to config.json

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return asdict(self)


class LanguageModel(nn.Module):
    """Token ids to logits: an Encoder, or a Decoder if `shape.causal`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.config = shape
        rope = Rope(shape.head_dim or shape.width // shape.num_attention_heads) if shape.rope else None
        stack = Decoder if shape.causal else Encoder
        self.tokens = _embedding(shape.vocab_size, shape.width)
        self.places = None if shape.rope else _embedding(shape.length, shape.width)
        sizes: dict[str, Any] = {"head_dim": shape.head_dim, "dropout": shape.dropout}
        self.body = stack(shape.width, shape.depth, shape.num_attention_heads, shape.kernel, rope=rope, **sizes)
        for embedding in (self.tokens, self.places):
            if embedding is not None and not embedding.weight.is_meta:
                nn.init.normal_(embedding.weight, std=0.02)

    def forward(
        self,
        input_ids: Int[Tensor, "batch n"],
        attention_mask: Tensor | None = None,
        caches: list[Cache] | None = None,
    ) -> Float[Tensor, "batch n vocabulary"]:
        """Logits of every token; `attention_mask` is 1 (or True) for real ones."""
        old = caches[0].length if caches else 0
        n = input_ids.shape[1]
        if self.places is not None and old + n > self.config.length:
            raise ValueError(f"the model has positions for {self.config.length} tokens, got {old + n}")
        x = self.tokens(input_ids)
        mask = None if attention_mask is None else attention_mask.bool()
        if self.places is not None:
            positions = torch.arange(old, old + n, device=x.device)
            if mask is not None and old == 0:  # positions start at the first real token, also with left padding
                positions = (mask.cumsum(1) - 1).clamp(min=0)
            x = x + self.places(positions)
        return self.body(x, mask, caches=caches) @ self.tokens.weight.mT

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().to(dtype).contiguous().cpu() for name, tensor in self.state_dict().items()}
        facts = json.dumps(self.config.to_dict(), indent=1) + "\n"
        write_all({folder / "config.json": facts, folder / "model.safetensors": save(tensors)})

    @classmethod
    def load(cls, folder: str | Path) -> LanguageModel:
        """The model of a folder, in float32 and in eval mode.

        The sizes in config.json are compared to the weights before the model is built.
        """
        shape = _shape_of(read_json(beside(folder, "config.json")))
        weights = read_tensors(beside(folder, "model.safetensors"))
        if shape.depth > len(weights):
            raise ValueError(f"{folder}: a model of depth {shape.depth} has more than {len(weights)} tensors")
        try:
            with torch.device("meta"):
                sizes = {name: weight.shape for name, weight in cls(shape).state_dict().items()}
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: config.json does not describe a valid model: {first_line(error)}") from None
        for name in sorted(sizes.keys() | weights.keys()):
            if name not in sizes or name not in weights or sizes[name] != weights[name].shape:
                raise ValueError(f"{folder}: {name} does not match the model in config.json")
            if not weights[name].isfinite().all():
                raise ValueError(f"{folder}: {name} holds NaN or infinity")
        model = cls(shape)
        model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        return model.eval()


def _embedding(count: int, width: int) -> nn.Embedding:
    """An embedding; on the meta device without normal random numbers, which import torch's compiler there."""
    if torch.get_default_device().type == "meta":
        return nn.Embedding(count, width, _weight=torch.empty(count, width))
    return nn.Embedding(count, width)


def _shape_of(facts: dict[str, Any]) -> Shape:
    """A Shape from plain data; every value must have the type of its field."""
    known = {option.name: str(option.type).split(" | ") for option in fields(Shape)}
    for name, value in facts.items():
        kinds = {"NoneType": "None", "int": "int" if "int" in known.get(name, ()) else "float"}
        if kinds.get(type(value).__name__, type(value).__name__) not in known.get(name, ()):
            raise ValueError(f"config.json: {name} cannot be {value!r:.60}")
    if "vocab_size" not in facts:
        raise ValueError("config.json: vocab_size is missing")
    return Shape(**facts)
