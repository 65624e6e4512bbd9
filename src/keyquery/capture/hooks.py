"""What passes through the modules of a running model: padding left out, the model left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.capture.guard import Change, hold, temporarily
from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.sources import bare, first_line

Batch = Mapping[str, Tensor]
# What models call the masks of their tokens: 1 (or True) for real ones; of torch's own, True (or −∞) for padding.
REAL = ("attention_mask", "decoder_attention_mask", "padding_mask")
HIDDEN = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")


@contextmanager
def watch(model: nn.Module, listeners: Mapping[str, Callable[[Tensor], None]]) -> Iterator[Callable[[Batch], Any]]:
    """Within the context, the yielded function runs a batch; each listener hears what enters its module.

    A listener gets the valid tokens of the batch, (n, width). The model runs in eval mode and without gradients, and
    is put back afterwards, also after an exception.

    >>> linear, heard = torch.nn.Linear(3, 2), []
    >>> with watch(linear, {"": heard.append}) as run:
    ...     _ = run({"input": torch.ones(2, 4, 3)})
    >>> heard[0].shape
    torch.Size([8, 3])
    """
    model, masks = bare(model), dict[str, Tensor]()
    paired = has_two_sides(model)

    thread = get_ident()

    def hook(name: str, listen: Callable[[Tensor], None]) -> Callable[..., None]:
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if get_ident() != thread:  # somebody else's run of the same model
                return
            entered = args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))
            if getattr(module, "batch_first", True) is False and entered.ndim == 3:
                entered = entered.transpose(0, 1)
            real = mask_for(masks, entered.shape[:2], name, paired)
            listen(entered.detach()[real.to(entered.device)] if real is not None else entered.detach().flatten(0, -2))

        return hear

    def run(batch: Batch) -> Any:
        device = next((weight.device for weight in model.parameters()), None)
        batch = {name: tensor.to(device) if isinstance(tensor, Tensor) else tensor for name, tensor in batch.items()}
        masks.clear()
        masks.update(masks_of(batch))
        try:
            return model(**batch)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(_refusal(model, batch, error)) from error

    def listening(stack: ExitStack) -> None:
        for name, listen in listeners.items():
            handle = model.get_submodule(name).register_forward_pre_hook(hook(name, listen), with_kwargs=True)
            stack.callback(handle.remove)

    with temporarily(model, listening, _evaluation(model)), torch.no_grad():
        yield run


def _refusal(model: nn.Module, batch: Batch, error: Exception) -> str:
    """Why a model does not run on a batch, in a sentence."""
    given = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor))
    places = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    ids = batch.get("input_ids")
    long = isinstance(places, int) and isinstance(ids, Tensor) and ids.shape[-1] > places
    hint = f"; it has places for {places} tokens: give a smaller length" if long else ""
    return f"{type(model).__name__} does not run on {given}: {first_line(error)}{hint}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and torch's fused encoder path off, since it would bypass the modules inside.

    No other thread has the model meanwhile: it waits.
    """
    with temporarily(model, _evaluation(model)), torch.no_grad():
        yield


def _evaluation(model: nn.Module) -> Change:
    def change(stack: ExitStack) -> None:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        slow_path(stack)

    return change


def slow_path(changes: ExitStack) -> None:
    """Switch off torch's fused encoder path, one for all models, which would bypass the modules inside."""
    hold("fast path", _slow, changes)


def _slow() -> Callable[[], None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return partial(torch.backends.mha.set_fastpath_enabled, before)


def entry(layer: Layer, side: str = "query") -> str:
    """The module that a layer's queries, or keys, enter by."""
    if layer.position == "disentangled":  # its projections are called for relative positions, too
        return layer.name
    roles = (side, f"{side}_down", "module", "fused")
    return next(layer.modules[role] for role in roles if role in layer.modules)


def activations(model: nn.Module, batches: Iterable[Batch], modules: Sequence[str]) -> dict[str, Float[Tensor, "n d"]]:
    """What entered each module, on the valid tokens of all batches, kept on the CPU.

    >>> activations(torch.nn.Linear(3, 2), [{"input": torch.ones(1, 4, 3)}], [""])[""].shape
    torch.Size([4, 3])
    """
    kept: dict[str, list[Tensor]] = {name: [] for name in modules}
    listeners = {name: _keeper(kept[name]) for name in modules}
    with watch(model, listeners) as run:
        for batch in batches:
            run(batch)
    silent = [name for name, tensors in kept.items() if not tensors]
    if silent:
        raise ValueError(f"{silent[0]} was never called: these inputs give no activations there")
    return {name: torch.cat(tensors) for name, tensors in kept.items()}


def queries_and_keys(model: nn.Module, batch: Batch, heads: Heads) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries (heads, n, r) and keys of every self-attention layer for the valid tokens of a batch, unrotated."""
    layers = [layer for layer in heads if layer.kind == "self"]
    entered = activations(model, [batch], sorted({entry(layer) for layer in layers}))
    out = {}
    for layer in layers:
        query, key = layer.project(entered[entry(layer)].float())
        out[layer.index] = (query.flatten(0, 1), key.expand_as(query).flatten(0, 1))
    return out


def _keeper(kept: list[Tensor]) -> Callable[[Tensor], None]:
    return lambda tokens: kept.append(tokens.cpu())


def masks_of(given: Mapping[str, Any]) -> dict[str, Bool[Tensor, "batch n"]]:
    """Which tokens are real, by the name of the argument that says so.

    >>> masks_of({"src_key_padding_mask": torch.tensor([[False, True]])})
    {'src_key_padding_mask': tensor([[ True, False]])}
    """
    found = {name: given[name] for name in (*REAL, *HIDDEN) if isinstance(given.get(name), Tensor)}
    return {name: mask.bool() if name in REAL else mask == 0 for name, mask in found.items() if mask.ndim == 2}


def mask_for(
    masks: Mapping[str, Tensor], shape: tuple[int, ...], module: str, paired: bool
) -> Bool[Tensor, "batch n"] | None:
    """The mask of a module's tokens: the first that has their shape; None where all are real.

    Where a model has an encoder and a decoder (`paired`), each has masks of its own.
    """
    other = ("decoder_", "tgt_")
    inside = "decoder" in module.split(".")
    for name, mask in masks.items():
        if tuple(mask.shape) == tuple(shape) and (not paired or name.startswith(other) == inside):
            return mask
    return None


def has_two_sides(model: nn.Module) -> bool:
    """Whether a model has an encoder and a decoder."""
    said = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    return isinstance(model, nn.Transformer) if said is None else bool(said)
