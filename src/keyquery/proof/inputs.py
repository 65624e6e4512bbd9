"""Inputs of any model, by the names and defaults in the signature of its forward; `inputs.toml` says what they are."""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "width", "encoder_hidden_size")


class NoInputsError(Exception):
    """An argument that a model needs cannot be made."""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("keyquery.proof").joinpath("inputs.toml").read_text(encoding="utf-8"))


def inputs_for(
    model: Any, length: int, spread: int = 1, shift: int = 0, known: Mapping[Any, Any] = {}, config: Any = None
) -> Iterator[dict[str, Any]]:
    """Arguments of a model's forward: `length` tokens at the positions shift + spread·i where it takes positions.

    The likeliest come first; then other shapes of what enters its first layer, and optional arguments that say more
    about it. `known` are shapes of arguments by name; "none" leaves one out. `config` is that of a part without one.
    """
    parameters = inspect.signature(model.forward).parameters
    names = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    known = {name: shape for name, shape in known.items() if name in names}
    config = getattr(model, "config", config)
    wanted = _wanted(model, names, [name for name in names if parameters[name].default is inspect.Parameter.empty])
    more = [name for name in _table()["describing"] if name in names and name not in wanted]
    dense = next((name for name in wanted if name in _table()["dense"] and name not in known), None)
    failure: NoInputsError | None = None
    for shape in [None, *(entry_shapes(model) if dense is not None else ())]:
        for chosen in [wanted, [*wanted, *more]] if more else [wanted]:
            maker = _Maker(config, length, spread, shift)
            entry = {} if shape is None or dense is None else {dense: maker.randn(*shape)}
            try:
                made = entry | {name: maker(name) for name in chosen if name not in known and name not in entry}
            except (NoInputsError, TypeError, AttributeError) as error:
                failure = failure or (error if isinstance(error, NoInputsError) else NoInputsError(str(error)))
                continue
            yield made | {name: maker.of_shape(shape) for name, shape in known.items() if shape != "none"}
    if failure is not None:
        raise failure


def _wanted(model: Any, names: list[str], needed: list[str]) -> list[str]:
    """The main argument, those without a default, and the optional ones that go with them."""
    main = getattr(model, "main_input_name", "input_ids")
    wanted = [name for name in (main, *needed) if name in names]
    usual = ("input_ids", "pixel_values", "input_features", "input_values", *names[:1])
    wanted = wanted or [name for name in usual if name in names][:1]
    rules = _table()["with"]
    return list(dict.fromkeys(wanted + [n for n, rule in rules.items() if n in names and _goes(rule, wanted, model)]))


def _goes(rule: Mapping[str, Any], wanted: Sequence[str], model: Any) -> bool:
    """Whether an optional argument goes with those that are wanted."""
    beside = "beside" not in rule or not set(rule["beside"]).isdisjoint(wanted)
    kind = re.search(rule.get("types", ""), model.config.model_type if "types" in rule else "") is not None
    keys = "keys" not in rule or not model.config.to_dict().keys().isdisjoint(rule["keys"])
    return beside and kind and keys and not ("unless" in rule and getattr(model.config, rule["unless"], False))


def entry_shapes(model: Any) -> Iterator[tuple[int, ...]]:
    """Shapes that the first layer of a model could take."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    first: Any = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if isinstance(first, nn.Linear):
        yield from ((1, 24, first.in_features), (24, first.in_features))
    if isinstance(first, nn.Conv1d):
        frames = getattr(getattr(model, "config", None), "max_source_positions", None)
        for length in (128, 100, *([int(2 * frames)] if frames else []), 3840):
            yield from ((1, first.in_channels, length), (1, length, first.in_channels), (first.in_channels, length))
    if isinstance(first, (nn.Conv2d, nn.Conv3d)):
        channels, kernel = first.in_channels, first.kernel_size
        inside, side = channels * math.prod(kernel), 8 * max(kernel[-1], 4)
        yield from ((24, inside), (1, 24, inside), (24, channels, *kernel), (1, 24, channels, *kernel))
        yield from ((1, channels, side, side), (1, 2, channels, side, side), (1, channels, 2, side, side))
        yield from ((1, 64, 80), (1, 1, 64, 80), (2, channels, side, side))


class _Maker:
    """Makes each argument by its name and the model's config."""

    def __init__(self, config: Any, length: int, spread: int, shift: int) -> None:
        self.config, self.length, self.spread, self.shift = config, length, spread, shift
        self.generator = torch.Generator().manual_seed(2)
        self.facts: Mapping[Any, Any] = {} if config is None else config.to_dict()

    def __call__(self, name: str) -> Any:
        if name in _table()["shapes"]:
            return self.of_shape(_table()["shapes"][name])
        made = getattr(self, f"_{name}", None)
        if made is None and name.endswith("_ids"):
            made = self._input_ids
        if made is None and ("hidden_states" in name or "embeds" in name or "features" in name):
            made = self._hidden_states
        if made is None:
            raise NoInputsError(f"nothing is known to pass as {name}")
        return made()

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these values that the config or one of its sub-configs has."""
        for facts in [self.facts, *(v for v in self.facts.values() if isinstance(v, Mapping))]:
            for name in names:
                if facts.get(name) is not None:
                    return facts[name]
        return default

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def of_shape(self, shape: Any) -> Any:
        """An argument as inputs.toml or tiny.toml describe it."""
        match [self._size(size) for size in shape] if isinstance(shape, list) else shape:
            case ["ids", *sizes, end]:
                return torch.randint(0, end, tuple(sizes), generator=self.generator)
            case ["values", *values]:
                return torch.tensor(values)
            case ["first", count, *sizes]:
                return (torch.arange(sizes[-1]) < count).expand(sizes)
            case ["zeros" | "ones" as kind, *sizes]:
                return torch.full(sizes, kind == "ones")
            case ["full", value, *sizes]:
                return torch.full(sizes, value)
            case [*sizes]:
                return self.randn(*sizes)
        return shape

    def _size(self, size: Any) -> Any:
        """A size that is given as the number of tokens, or by keys of the config."""
        if not isinstance(size, str) or size in ("ids", "values", "first", "zeros", "ones", "full"):
            return size
        if size in ("n", "2n"):
            return self.length * (1 if size == "n" else 2)
        keys = size.replace("WIDTHS", " ".join(WIDTHS)).split()
        return int(self.get(*keys, default=keys[-1] if keys[-1].isdecimal() else None))

    def _input_ids(self) -> Tensor:
        vocabulary = int(self.get("vocab_size", "text_vocab_size", default=60))
        special = _special_ids(self.facts)
        usual = [token for token in range(3, vocabulary) if token not in special] or list(range(vocabulary))
        return torch.tensor(usual)[torch.randint(len(usual), (1, self.length), generator=self.generator)]

    def _decoder_input_ids(self) -> Tensor:
        return self._input_ids()[:, : max(3, self.length - 2)]

    def _position_ids(self) -> Tensor:
        return (self.shift + self.spread * torch.arange(self.length))[None]

    def _bbox(self) -> Tensor:
        corners = torch.randint(0, 40, (1, self.length, 4), generator=self.generator)
        return torch.cat((corners[..., :2], corners[..., :2] + corners[..., 2:]), -1)

    # Images

    def _image(self) -> tuple[int, int]:
        size = self.get("image_size", "img_size", "input_size", default=64)
        if isinstance(size, Mapping):
            size = (size.get("height", 64), size.get("width", 64))
        if isinstance(size, (list, tuple)):
            return int(size[-2] if len(size) > 1 else size[0]), int(size[-1])
        return int(size), int(size)

    def _merges_patches(self) -> bool:
        return self.get("temporal_patch_size") is not None and self.get("spatial_merge_size") is not None

    def _pixel_values(self) -> Tensor:
        height, width = self._image()
        if self.config.model_type in ("siglip2_vision_model", "lfm2_vl"):
            return self.randn(1, 12, 3 * int(self.get("patch_size")) ** 2)
        if self.config.model_type == "idefics":
            return self.randn(1, 1, 3, height, width)
        if self.config.model_type.startswith("mllama"):
            return self.randn(1, 1, int(self.get("max_num_tiles")), 3, height, width)
        if self._merges_patches():
            volume = int(self.get("temporal_patch_size")) * int(self.get("patch_size")) ** 2
            channels = int(self.get("in_channels", "num_channels", default=3))
            return self.randn(int(self._grid_thw().prod()), channels * volume)
        channels = self.get("num_channels", "in_chans", "in_channels", default=3)
        frames = self.get("num_frames")
        sizes = (channels if isinstance(channels, int) else 3, height, width)
        return self.randn(1, *sizes) if frames is None else self.randn(1, int(frames), *sizes)

    def _prompt_pixel_values(self) -> Tensor:
        return self._pixel_values()

    def _pixel_values_videos(self) -> Tensor:
        return self.randn(1, int(self.get("frames_per_clip", "num_frames", default=4)), 3, *self._image())

    def _grid_thw(self) -> Tensor:
        merge = int(self.get("spatial_merge_size", default=2))
        return torch.tensor([[1, 2 * merge, 3 * merge]])

    def _image_grid_thw(self) -> Tensor:
        return self._grid_thw()

    def _pixel_position_ids(self) -> Tensor:
        return torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)[None]

    def _flattened_patches(self) -> Tensor:
        corners = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 5)).double()
        side = int(self.get("patch_size", default=16))
        width = int(self.get("patch_embed_hidden_size", default=3 * side * side))
        return torch.cat((corners, self.randn(12, width)), -1)[None]

    def _input_points(self) -> Tensor:
        return self.randn(1, 1, 2, 2).abs() * 20

    def _hidden_states(self) -> Tensor:
        if self._merges_patches():
            return self._pixel_values()
        return self.randn(1, self.length, int(self.get(*WIDTHS, default=32)))

    # Sound and series

    def _input_features(self) -> Tensor:
        kind = self.config.model_type
        mel = int(self.get("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", default=80))
        if kind == "glmasr_encoder":
            return self.randn(1, mel, 48)
        if kind.endswith("omni_audio_encoder") or "omni_moe_audio" in kind:
            return self.randn(mel, 64)  # not batched
        frames = self.get("max_source_positions")
        if frames is not None and self.get("encoder_layers") is not None and "speech_to_text" not in kind:
            return self.randn(1, mel, 2 * int(frames))
        if kind == "speech_to_text":
            return self.randn(1, 40, mel)
        return self.randn(1, 48, int(self.get("feature_projection_input_dim", default=mel)))

    def _input_features_mask(self) -> Tensor:
        return torch.ones(1, self._input_features().shape[-1], dtype=torch.long)

    def _input_values(self) -> Tensor:
        if self.get("max_length") is not None and self.get("num_mel_bins") is not None:
            return self.randn(1, int(self.get("max_length")), int(self.get("num_mel_bins")))
        return self.randn(1, 4000)

    def _past_values(self) -> Tensor:
        lags = max(self.get("lags_sequence", default=[0]) or [0])
        length = int(self.get("context_length", "prediction_length", default=24)) + int(lags)
        channels = int(self.get("num_input_channels", "input_size", default=1))
        values = self.randn(1, length, channels)
        return values[..., 0] if channels == 1 and self.get("input_size") == 1 else values

    def _past_observed_mask(self) -> Tensor:
        return torch.ones_like(self._past_values())

    def _past_time_features(self) -> Tensor:
        return self._time_features(self._past_values().shape[1])

    def _future_values(self) -> Tensor:
        return self._past_values()[:, : int(self.get("prediction_length"))]

    def _future_time_features(self) -> Tensor:
        return self._time_features(int(self.get("prediction_length")))

    def _time_features(self, steps: int) -> Tensor:
        return self.randn(1, steps, int(self.get("num_time_features", default=0)))


def _special_ids(facts: Mapping[Any, Any]) -> set[int]:
    """All ids of special tokens in a config."""
    ids: set[int] = set()
    for key, value in facts.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            ids |= _special_ids(value)
        elif isinstance(key, str) and "token" in key:
            several = value if isinstance(value, (list, tuple)) else [value]
            ids |= {one for one in several if isinstance(one, int) and not isinstance(one, bool)}
    return ids
