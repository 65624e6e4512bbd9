"""`swap`: a model's attention replaced by kq.Attention with a structured kernel, and given back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from keyquery.capture import batches_of, joint_moments
from keyquery.capture.guard import hold
from keyquery.capture.hooks import Batch
from keyquery.checkpoints import Heads, Layer, read
from keyquery.layers import Attention
from keyquery.support.bounded_json import parse_json
from keyquery.support.checks import check_choice, check_count
from keyquery.support.files import write_all
from keyquery.surgery.handle import Handle, check_model, lasting, put
from keyquery.surgery.rewriting.attach import check_unchanged
from keyquery.surgery.swap.adapters import Swapped, replace, unnest, unrecord
from keyquery.surgery.swap.build import adapt, build, carried_state, check_layer, place_of, start_nearest

FORMAT = "keyquery swap 1"  # one key of the metadata, whose keys have no order: equal swaps are equal files
IMPLEMENTATIONS = (None, "eager", "sdpa")  # whose masks say all that a kq.Attention needs


@dataclass(frozen=True)
class Recipe:
    """What a swap is made by, and what a saved one says of itself."""

    kernel: str
    symmetric_dims: int | float
    layers: tuple[int, ...]
    names: tuple[str, ...]


class Swap(Handle):
    """A model whose attention was swapped: undo, save, and what there is to train.

    `names` are the modules that were replaced. `lost` is, by layer, the share of each head's ‖M‖² that the new kernel
    could not keep, in the norm of the weights or on data; it is empty where nothing was fitted. Move the model to
    another device or dtype before the swap or after the undo: what is set aside stays where it is.
    """

    def __init__(
        self,
        changes: ExitStack,
        recipe: Recipe,
        heads: Heads,
        attentions: list[Attention],
        lost: dict[int, Tensor],
    ) -> None:
        super().__init__(changes, f"this swap to {recipe.kernel!r} attention")
        self.names, self.lost = recipe.names, lost
        self._recipe, self._heads, self._attentions = recipe, heads, attentions

    def undo(self) -> None:
        """Give the model back as it was, bit for bit; what was done to the new layers must be undone before."""
        if any("_attend" in vars(attention) for attention in self._attentions):
            raise RuntimeError("the swapped layers are dialled or projected: undo that first")
        super().undo()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that are new, to train."""
        return (weight for attention in self._attentions for weight in attention.parameters())

    def save(self, path: str | Path) -> None:
        """Write what is new to a safetensors file, for `kq.swap(model, saved=path)`.

        Values and outputs that are still those of the base model are left out.
        """
        tensors = {}
        for name, index, attention in zip(self.names, self._recipe.layers, self._attentions, strict=True):
            carried = carried_state(self._heads.values(index), attention)
            for key, tensor in attention.state_dict().items():
                if key not in carried or not torch.equal(tensor, carried[key]):
                    tensors[f"{name}.{key}"] = tensor.detach().cpu().contiguous()
        recipe = {"kernel": self._recipe.kernel, "symmetric_dims": self._recipe.symmetric_dims}
        facts = {**recipe, "layers": self._recipe.layers, "names": self._recipe.names}
        write_all({path: to_bytes(tensors, {FORMAT: json.dumps(facts)})})


def swap(
    model: nn.Module,
    kernel: str = "psd",
    layers: int | Iterable[int] | None = None,
    *,
    init: str = "nearest",
    data: Iterable[Batch] | None = None,
    symmetric_dims: int | float = 0.5,
    saved: str | Path | None = None,
) -> Swap:
    """Replace self-attention layers of a live model by kq.Attention with a kernel; the Swap undoes it, bit for bit.

    `layers` are numbered as `kq.read(model)` and `keyquery look` number them; all self-attention layers by default.
    Values, outputs, biases, rotary positions and dropout stay. With `init="nearest"` the kernel starts at the nearest
    one to each trained head (for `pairwise`: near it), in the norm of the weights or, where `data` (batches of
    tensors that the model takes) is given, of the covariance of its queries and keys; with "random", anew. The kernel
    "general" is a copy. Where queries share keys, every head gets a key of its own, but for "general". `saved` is a
    file that `Swap.save` wrote: kernel and layers are then the file's.

    transformers models of the families BERT, RoBERTa, ELECTRA, DistilBERT, GPT-2, GPT-NeoX, OPT, Llama, Mistral, Qwen2,
    Phi, ViT, DINOv2 and CLIP can be swapped, and nn.MultiheadAttention anywhere, which then gives no attention
    weights. What a kq.Attention cannot keep is refused: windows, position biases, norms of queries and keys.

    >>> model = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    >>> with kq.swap(model, kernel="symmetric") as swapped:
    ...     print(swapped.names, kq.read(model)[0].form.symmetry.min() > 0.999)
    ('self_attn',) tensor(True)
    >>> type(model.self_attn).__name__
    'MultiheadAttention'
    """
    model = check_model(model)
    check_unchanged(model)
    check_choice("init", init, ("nearest", "random"))
    if data is not None and (saved is not None or init != "nearest"):
        raise ValueError('data is for init="nearest" without `saved`: nothing else is fitted to it')
    stored, tensors = (None, {}) if saved is None else _read_saved(Path(saved))
    heads = _heads(model)
    chosen = _chosen(heads, layers if stored is None else stored.layers)
    for layer in chosen:
        check_layer(model, heads, layer)
    if len({model.get_submodule(place_of(layer)) for layer in chosen}) < len(chosen):
        raise ValueError("some of these layers are one module, used twice: give `layers` that names it once")
    names = tuple(place_of(layer) or "attention" for layer in chosen)
    recipe = stored or Recipe(kernel, symmetric_dims, tuple(layer.index for layer in chosen), names)
    if recipe.names != names:
        raise ValueError(f"saved is of a model whose layers are {', '.join(recipe.names)}; here: {', '.join(names)}")
    attentions = [build(model, heads, layer, recipe.kernel, recipe.symmetric_dims) for layer in chosen]
    lost: dict[int, Tensor] = {}
    if stored is not None:
        _load(recipe, attentions, tensors, str(saved))
    elif init == "nearest":
        seen = None if data is None else _covariances(model, data, heads, chosen)
        for layer, new in zip(chosen, attentions, strict=True):
            lost[layer.index] = start_nearest(new, layer, None if seen is None else seen[layer.index])

    def change(changes: ExitStack) -> Swap:
        _put_all(model, heads, chosen, attentions, changes)
        return Swap(changes, recipe, heads, attentions, lost)

    return lasting(model, change)


def _put_all(
    model: nn.Module, heads: Heads, chosen: list[Layer], attentions: list[Attention], changes: ExitStack
) -> None:
    """The one step that changes the model; whatever fails in it is undone."""
    check_unchanged(model)
    for layer in chosen:
        check_layer(model, heads, layer)  # once more: another thread may have been first
    for part in model.modules():
        if hasattr(part, "save_pretrained"):
            hold(("saving", id(part)), partial(_forbid, part), changes)  # swaps of other layers may come and go
    unrecord(model, changes)
    unnest(model, [place_of(layer) for layer in chosen], changes)
    for layer, attention in zip(chosen, attentions, strict=True):
        place, output = place_of(layer), layer.modules["output"]
        new = adapt(model, layer, attention)
        inside = not place or output.startswith(f"{place}.")
        if not inside:  # BERT's output projection, which is in the attention now
            owner, _, own = output.rpartition(".")
            put(model.get_submodule(owner), own, nn.Identity(), changes)
        replace(model, place, new, changes)


def _forbid(part: nn.Module) -> Callable[[], None]:
    vars(part)["save_pretrained"] = _refuse_to_save
    return partial(vars(part).pop, "save_pretrained", None)


def _refuse_to_save(*args: Any, **options: Any) -> None:
    raise RuntimeError(
        "a swapped model is not saved by save_pretrained, since it would load with random attention: save what is new "
        "with Swap.save(path) and load it by kq.swap(model, saved=path), or undo the swap first"
    )


def _heads(model: nn.Module) -> Heads:
    said: Any = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if said not in IMPLEMENTATIONS:
        raise ValueError(f'the model attends by {said}: call model.set_attn_implementation("sdpa") first')
    if isinstance(model, Swapped):
        raise ValueError("the model is swapped already: undo that first")
    return read(model)


def _chosen(heads: Heads, layers: int | Iterable[int] | None) -> list[Layer]:
    """The layers that are meant, in the model's order."""
    own = {layer.index: layer for layer in heads if layer.kind == "self"}
    if not own:
        raise ValueError("the model has no self-attention")
    if layers is None:
        return list(own.values())
    asked = [layers] if isinstance(layers, int) else list(layers)
    for index in asked:
        check_count("layers", index, least=0)
        if index not in own:
            raise ValueError(f"layers: there is no self-attention layer {index}; there are {', '.join(map(str, own))}")
    if len(set(asked)) != len(asked) or not asked:
        raise ValueError(f"layers must name at least one layer, and each once, got {asked}")
    return [own[index] for index in sorted(asked)]


def _covariances(model: nn.Module, data: Iterable[Batch], heads: Heads, chosen: list[Layer]) -> dict[int, Tensor]:
    """The covariance of [q; k] of every head, (heads, 2r, 2r), by layer."""
    moments = joint_moments(model, batches_of(data), heads)
    for layer in chosen:
        count, width = moments[layer.index].count, 2 * layer.form.rank
        if count <= width:
            raise ValueError(
                f"data gives {count} tokens to {layer.name}: the covariance of {width} queries and keys needs more"
            )
    return {layer.index: moments[layer.index].covariance for layer in chosen}


def _read_saved(path: Path) -> tuple[Recipe, dict[str, Tensor]]:
    """A file that `Swap.save` wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"saved must be a file that Swap.save wrote; there is no {path}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
    if FORMAT not in facts:
        raise ValueError(f"{path} is no saved swap: its metadata has no {FORMAT!r}")
    try:
        said = parse_json(facts[FORMAT])
        recipe = Recipe(said["kernel"], said["symmetric_dims"], tuple(said["layers"]), tuple(said["names"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no saved swap: its metadata cannot be read ({error!r})") from None
    return recipe, tensors


def _load(recipe: Recipe, attentions: list[Attention], tensors: Mapping[str, Tensor], label: str) -> None:
    """Saved tensors into the new layers; what was left out is the base model's own."""
    wanted, spare = {}, set()
    for name, attention in zip(recipe.names, attentions, strict=True):
        for key, tensor in attention.state_dict().items():
            wanted[f"{name}.{key}"] = tensor
            spare |= {f"{name}.{key}"} if key.startswith(("value.", "output.")) else set()
    strange = sorted(set(tensors) - set(wanted)) or sorted(set(wanted) - set(tensors) - spare)
    if strange:
        raise ValueError(f"{label} does not fit the model: {strange[0]} is on one side alone")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shapes = tuple(tensor.shape), tuple(wanted[name].shape)
            raise ValueError(f"{label} does not fit the model: {name} is {shapes[0]}, expected {shapes[1]}")
        if not tensor.isfinite().all():
            raise ValueError(f"{label} is no saved swap: {name} holds NaN or infinity")
        wanted[name].copy_(tensor)  # state dicts share memory with their layers
