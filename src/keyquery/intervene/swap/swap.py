"""`swap`: replace a model's attention by kq.Attention with a structured kernel, undoably."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer, read
from keyquery.intervene.handle import Handle, check_model, lasting
from keyquery.intervene.rewrites import check_unchanged
from keyquery.intervene.swap.adapters import TorchAttention, TransformersAttention, replace, unnest, unrecord
from keyquery.intervene.swap.build import build, carried_state, check_layer, place_of, start_nearest
from keyquery.layers import Attention
from keyquery.listening import batches_of, joint_moments
from keyquery.listening.exclusive import Changes, hold
from keyquery.listening.hooks import Batch, put
from keyquery.support.bounded_json import parse_json
from keyquery.support.checks import check_count
from keyquery.support.files import write_all

FORMAT = "keyquery swap 1"  # a single metadata key: equal swaps give equal files
IMPLEMENTATIONS = (None, "eager", "sdpa")  # whose masks a kq.Attention understands


@dataclass(frozen=True)
class Recipe:
    """Settings of a swap, stored with a saved one."""

    kernel: str
    symmetric_dims: int | float
    layers: tuple[int, ...]
    names: tuple[str, ...]


class Swap(Handle):
    """A swapped model: undo, save, and the new parameters.

    `names` are the replaced modules. `lost` is, by layer, the share of each head's ‖M‖² that the new kernel cannot
    represent, for the weights or on data; empty if nothing was fitted. Move the model to another device or dtype before
    the swap or after the undo: the replaced modules are not moved.
    """

    def __init__(
        self,
        changes: Changes,
        recipe: Recipe,
        heads: Heads,
        attentions: list[Attention],
        lost: dict[int, Tensor],
    ) -> None:
        super().__init__(changes, f"swap to {recipe.kernel!r} attention")
        self.names, self.lost = recipe.names, lost
        self._recipe = recipe
        self._heads = heads
        self._attentions = attentions

    def undo(self) -> None:
        """Restore the model bit for bit; interventions on the new layers must be undone first."""
        if any("attend_by" in vars(attention) for attention in self._attentions):
            raise RuntimeError("the swapped layers are dialled or projected: undo that first")
        super().undo()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The new parameters, for training."""
        return (weight for attention in self._attentions for weight in attention.parameters())

    def save(self, path: str | Path) -> None:
        """Write the new parameters to a safetensors file, for `kq.swap(model, saved=path)`.

        Value and output projections that equal those of the base model are left out.
        """
        tensors = {}
        for name, index, attention in zip(self.names, self._recipe.layers, self._attentions, strict=True):
            carried = carried_state(self._heads.values(index), attention)
            for key, tensor in attention.state_dict().items():
                if key not in carried or not torch.equal(tensor, carried[key]):
                    tensors[f"{name}.{key}"] = tensor.detach().cpu().contiguous()
        write_all({path: to_bytes(tensors, {FORMAT: json.dumps(asdict(self._recipe))})})


def swap(
    model: nn.Module,
    kernel: str = "psd",
    layers: int | Iterable[int] | None = None,
    *,
    data: Iterable[Batch] | None = None,
    symmetric_dims: int | float = 0.5,
    saved: str | Path | None = None,
) -> Swap:
    """Replace self-attention layers of a live model by kq.Attention with the structured kernel nearest to each head.

    For "pairwise" it is near, not nearest. Value and output projections, biases, RoPE and dropout are kept.

    Parameters
    ----------
    model
        A live model in eval mode: a transformers model (BERT, RoBERTa, ELECTRA, DistilBERT, GPT-2, GPT-NeoX, OPT,
        Llama, Mistral, Qwen2, Phi, ViT, DINOv2, CLIP), or any with nn.MultiheadAttention, which then returns no
        attention weights.
    kernel
        Kernel of kq.Attention; "general" is a copy. With GQA, every head gets its own key, except for "general".
        Default: "psd".
    layers
        Layers, numbered as in `kq.read`. Default: all self-attention layers.
    data
        Batches; the nearest kernel is then that in the norm of the covariance of queries and keys. Default: the norm of
        the weights.
    symmetric_dims
        Dimensions of the symmetric part of a "split" kernel, a count or a share. Default: 0.5.
    saved
        A file written by `Swap.save`, which sets kernel and layers. Default: none.

    Returns
    -------
    Swap
        A context manager, or a handle with `.undo()` (bit for bit), `.save()` and `.parameters()`.

    Raises
    ------
    ValueError
        If a layer has features that kq.Attention lacks (sliding window, position bias, QK-norm), or `saved` does not
        fit.

    Examples
    --------
    >>> model = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    >>> with kq.swap(model, kernel="symmetric") as swapped:
    ...     print(swapped.names, kq.read(model)[0].form.symmetry.min() > 0.999)
    ('self_attn',) tensor(True)
    >>> type(model.self_attn).__name__
    'MultiheadAttention'

    See Also
    --------
    project : Replace the QK form of one head.
    distill : A primal layer from a softmax layer.
    """
    model = check_model(model)
    check_unchanged(model)
    if data is not None and saved is not None:
        raise ValueError("saved needs no data: it holds the kernels")
    stored, tensors = (None, {}) if saved is None else _read_saved(Path(saved))
    heads = _heads(model)
    chosen = _chosen(heads, layers if stored is None else stored.layers)
    for layer in chosen:
        check_layer(model, heads, layer)
    if len({model.get_submodule(place_of(layer)) for layer in chosen}) < len(chosen):
        raise ValueError("some of these layers share one module: pass `layers` with only one of them")
    names = tuple(map(place_of, chosen))
    recipe = stored or Recipe(kernel, symmetric_dims, tuple(layer.index for layer in chosen), names)
    if recipe.names != names:
        raise ValueError(
            f"saved belongs to a model with layers {', '.join(recipe.names)}; this one has {', '.join(names)}"
        )
    attentions = [build(model, heads, layer, recipe.kernel, recipe.symmetric_dims) for layer in chosen]
    lost: dict[int, Tensor] = {}
    if stored is not None:
        _load(recipe, attentions, tensors, str(saved))
    else:
        seen = None if data is None else _covariances(model, data, heads, chosen)
        for layer, new in zip(chosen, attentions, strict=True):
            lost[layer.index] = start_nearest(new, layer, None if seen is None else seen[layer.index])

    def change(changes: Changes) -> Swap:
        _put_all(model, chosen, attentions, changes)
        return Swap(changes, recipe, heads, attentions, lost)

    return lasting(model, change)


def _put_all(model: nn.Module, chosen: list[Layer], attentions: list[Attention], changes: ExitStack) -> None:
    """The step that changes the model; undone if it fails."""
    for part in model.modules():
        if hasattr(part, "save_pretrained"):
            hold(("saving", id(part)), partial(_forbid, part), changes)  # shared with swaps of other layers
    unrecord(model, changes)
    unnest(model, [place_of(layer) for layer in chosen], changes)
    for layer, attention in zip(chosen, attentions, strict=True):
        name, output = place_of(layer), layer.modules["output"]
        module = model.get_submodule(name)
        adapter = TorchAttention if isinstance(module, nn.MultiheadAttention) else TransformersAttention
        if not output.startswith(f"{name}."):  # BERT's output projection is now part of the attention
            owner, _, attribute = output.rpartition(".")
            put(model.get_submodule(owner), attribute, nn.Identity(), changes)
        replace(model, name, adapter(attention, module, layer), changes)


def _forbid(part: nn.Module) -> Callable[[], None]:
    vars(part)["save_pretrained"] = _refuse_to_save
    return partial(vars(part).pop, "save_pretrained", None)


def _refuse_to_save(*args: Any, **options: Any) -> None:
    raise RuntimeError(
        "a swapped model cannot be saved by save_pretrained: it would load with random attention. Save the new "
        "parameters with Swap.save(path) and load them by kq.swap(model, saved=path), or undo the swap first"
    )


def _heads(model: nn.Module) -> Heads:
    implementation: Any = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f'the model uses attention {implementation}: call model.set_attn_implementation("sdpa") first')
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError("model is an attention module itself: swap a model that contains it")
    return read(model)


def _chosen(heads: Heads, layers: int | Iterable[int] | None) -> list[Layer]:
    """The selected layers, in the model's order."""
    known = {layer.index: layer for layer in heads if layer.kind == "self"}
    if not known:
        raise ValueError("the model has no self-attention")
    if layers is None:
        return list(known.values())
    requested = [layers] if isinstance(layers, int) else list(layers)
    for index in requested:
        check_count("layers", index, least=0)
        if index not in known:
            raise ValueError(f"layers: there is no self-attention layer {index}; there are {str(list(known))[1:-1]}")
    if len(set(requested)) != len(requested) or not requested:
        raise ValueError(f"layers must be distinct, and at least one, got {requested}")
    return [known[index] for index in sorted(requested)]


def _covariances(model: nn.Module, data: Iterable[Batch], heads: Heads, chosen: list[Layer]) -> dict[int, Tensor]:
    """The covariance of [q; k] of every head, (heads, 2r, 2r), by layer."""
    moments = joint_moments(model, batches_of(data), heads)
    for layer in chosen:
        count, width = moments[layer.index].count, 2 * layer.form.rank
        if count <= width:
            raise ValueError(
                f"data has {count} tokens for {layer.name}: the covariance of [q; k] of width {width} needs more"
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
        raise ValueError(f"{path} is not a saved swap: its metadata has no {FORMAT!r}")
    try:
        stored = parse_json(facts[FORMAT])
        recipe = Recipe(stored["kernel"], stored["symmetric_dims"], tuple(stored["layers"]), tuple(stored["names"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a saved swap: its metadata cannot be read ({error!r})") from None
    return recipe, tensors


def _load(recipe: Recipe, attentions: list[Attention], tensors: Mapping[str, Tensor], label: str) -> None:
    """Load saved tensors into the new layers; the rest is the base model's."""
    expected, spare = {}, set()
    for name, attention in zip(recipe.names, attentions, strict=True):
        for key, tensor in attention.state_dict().items():
            expected[f"{name}.{key}"] = tensor
            spare |= {f"{name}.{key}"} if key.startswith(("value.", "output.")) else set()
    mismatched = sorted(set(tensors) - set(expected)) or sorted(set(expected) - set(tensors) - spare)
    if mismatched:
        raise ValueError(f"{label} does not fit the model: {mismatched[0]} is only in one of them")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = tuple(tensor.shape), tuple(expected[name].shape)
            raise ValueError(f"{label} does not fit the model: {name} is {shapes[0]}, expected {shapes[1]}")
        if not tensor.isfinite().all():
            raise ValueError(f"{label} is not a saved swap: {name} contains NaN or infinity")
        expected[name].copy_(tensor)  # state dicts share memory with their layers
