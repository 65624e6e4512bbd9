"""A source whose quantised weights are read as floating-point tensors, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from keyquery.checkpoints.formats.quantised.bitsandbytes import EightBit, FourBit
from keyquery.checkpoints.formats.quantised.packed import Awq, Gptq, Mlx, PackedIntegers
from keyquery.checkpoints.formats.quantised.scaled import Blocks, Float4, Inverse, ModelOptFloat4, Scaled
from keyquery.checkpoints.formats.quantised.weight import Quantised
from keyquery.checkpoints.sources import Source
from keyquery.support.printable import message

# Of two that share a mark, the first that fits.
FORMATS: tuple[type[Quantised], ...] = (
    Inverse,
    Scaled,
    PackedIntegers,
    Float4,
    ModelOptFloat4,
    Blocks,
    Gptq,
    Awq,
    Mlx,
    FourBit,
    EightBit,
)


def dequantised(source: Source) -> Source:
    """The source itself, or a view of it in which every quantised weight has its plain name, shape and values."""
    settings, quantised = _settings(source.config), dict[str, Quantised]()
    for name in source.shapes:
        for kind in FORMATS:
            module = name.removesuffix(kind.mark)
            if name.endswith(kind.mark) and kind.fits(module, source.shapes):
                weight = kind(module, source, settings)
                quantised[weight.weight_name] = weight
                break
    return Dequantised(source, quantised) if quantised else source


class Dequantised:
    """Another source with its quantised weights dequantised, each when it is read."""

    def __init__(self, source: Source, weights: Mapping[str, Quantised]) -> None:
        self._source, self._weights = source, weights
        self.label, self.config = source.label, source.config
        hidden = {part for weight in weights.values() for part in weight.parts.values()}
        names = [name for name in source.shapes if name not in hidden and name not in weights]
        self.shapes: Mapping[str, tuple[int, ...]] = Shapes({name: source.shapes[name] for name in names}, weights)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor; a quantised weight is dequantised whole."""
        if name not in self._weights:
            return self._source.rows(name, start, stop)
        weight = self._weights[name]
        with _briefly():
            weight.check()
            return weight.values()[start:stop]

    def stored(self, name: str) -> str | None:
        """The precision of a quantised weight, in words; None for other tensors."""
        with _briefly():
            return self._weights[name].precision or None if name in self._weights else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Shapes(Mapping[str, tuple[int, ...]]):
    """Shapes by name; that of a quantised weight is found when it is asked for, since some formats store it."""

    def __init__(self, plain: Mapping[str, tuple[int, ...]], weights: Mapping[str, Quantised]) -> None:
        self._plain, self._weights = plain, weights
        self._known: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name in self._plain:
            return self._plain[name]
        if name not in self._known:
            with _briefly():
                self._weights[name].check()
                self._known[name] = self._weights[name].shape
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._plain or name in self._weights

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._weights

    def __len__(self) -> int:
        return len(self._plain) + len(self._weights)


@contextmanager
def _briefly() -> Iterator[None]:
    """Shorten the names of tensors, which may have any length, in errors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(message(str(error))) from None


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of its quantisation, or nothing."""
    nested = config.get("text_config")
    for facts in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(stated := facts.get(key), Mapping):
                return stated
    return {}
