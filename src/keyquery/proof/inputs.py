"""Inputs of any model, by the names and defaults in the signature of its forward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "width", "encoder_hidden_size")


class NoInputsError(Exception):
    """An argument that a model needs cannot be made."""


def inputs_for(
    model: Any, length: int, spread: int = 1, shift: int = 0, known: Mapping[Any, Any] = {}, config: Any = None
) -> Iterator[dict[str, Any]]:
    """Arguments of a model's forward: `length` tokens at the positions shift + spread·i where it takes positions.

    The likeliest come first; then other shapes of what enters its first layer, and optional arguments that say more
    about it. `known` are shapes of arguments by name; "none" leaves one out. `config` is that of a part without one.
    """
    signature = inspect.signature(model.forward)
    names = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [name for name in names if signature.parameters[name].default is inspect.Parameter.empty]
    known = {name: shape for name, shape in known.items() if name in names}
    main = getattr(model, "main_input_name", "input_ids")
    wanted: list[str] = [name for name in ([main] if main in names else []) + needed if name in names]
    if not wanted:
        usual: tuple[str, ...] = ("input_ids", "pixel_values", "input_features", "input_values", *names[:1])
        wanted = [name for name in usual if name in names][:1]
    wanted = list(dict.fromkeys(wanted + [name for name in WITH if name in names and WITH[name](wanted, model)]))
    more = [name for name in DESCRIBING if name in names and name not in wanted]
    config = getattr(model, "config", config)
    dense = next((name for name in wanted if name in DENSE and name not in known), None)
    failed: NoInputsError | None = None
    for shape in [None, *(entry_shapes(model) if dense is not None else ())]:
        for chosen in [wanted, [*wanted, *more]] if more else [wanted]:
            maker = _Maker(config, length, spread, shift)
            start = {} if shape is None or dense is None else {dense: maker.randn(*shape)}
            try:
                made = start | {name: maker(name) for name in chosen if name not in known and name not in start}
            except (NoInputsError, TypeError, AttributeError) as error:
                failed = failed or (error if isinstance(error, NoInputsError) else NoInputsError(str(error)))
                continue
            yield made | {name: maker.of_shape(shape) for name, shape in known.items() if shape != "none"}
    if failed is not None:
        raise failed


# Arguments whose shape is that of what enters the first layer.
DENSE: tuple[str, ...] = (
    "pixel_values",
    "input_features",
    "input_values",
    "hidden_states",
    "inputs_embeds",
    "audio_mel",
    "spectrogram",
)
DENSE += ("latents", "image", "input_embeds", "patch_embeds", "x", "audio_features", "features", "audio_input_features")
# Optional arguments that say how the others are to be read.
DESCRIBING: tuple[str, ...] = (
    "grid_thw",
    "image_grid_thw",
    "target_sizes",
    "spatial_shapes",
    "pixel_attention_mask",
    "attention_mask",
)
DESCRIBING += ("input_features_mask", "pixel_position_ids", "flattened_patches", "encoder_hidden_states")


def entry_shapes(model: Any) -> Iterator[tuple[int, ...]]:
    """Shapes that the first layer of a model could take."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    first: Any = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if isinstance(first, nn.Linear):
        yield from ((1, 24, first.in_features), (24, first.in_features))
    if isinstance(first, nn.Conv1d):
        frames = [getattr(model.config, "max_source_positions", None) if hasattr(model, "config") else None]
        lengths = [128, 100, *(int(2 * f) for f in frames if f), 3840]
        for length in lengths:
            yield from ((1, first.in_channels, length), (1, length, first.in_channels), (first.in_channels, length))
    if isinstance(first, (nn.Conv2d, nn.Conv3d)):
        channels, kernel = first.in_channels, first.kernel_size
        inside, side = channels * math.prod(kernel), 8 * max(kernel[-1], 4)
        yield from ((24, inside), (1, 24, inside), (24, channels, *kernel), (1, 24, channels, *kernel))
        yield from ((1, channels, side, side), (1, 2, channels, side, side), (1, channels, 2, side, side))
        yield from ((1, 64, 80), (1, 1, 64, 80), (2, channels, side, side))


def _textual(wanted: list[str], model: Any) -> bool:
    return "input_ids" in wanted


def _crossed(wanted: list[str], model: Any) -> bool:
    facts = model.config.to_dict()
    known = {"encoder_hidden_size", "cross_hidden_size", "cross_num_attention_heads"} & set(facts)
    return bool(known) and bool({"query_embeds", "input_ids"} & set(wanted))


# Optional arguments that are passed where the condition holds.
WITH: dict[str, Callable[[list[str], Any], bool]] = {
    "attention_mask": _textual,
    "position_ids": lambda wanted, model: (
        _textual(wanted, model) and not getattr(model.config, "is_encoder_decoder", 0)
    ),
    "decoder_input_ids": lambda wanted, model: True,
    "pixel_values": lambda wanted, model: model.config.model_type in ("clip", "siglip", "idefics", "layoutlmv3"),
    "bbox": _textual,
    "encoder_hidden_states": _crossed,
    "future_values": lambda wanted, model: "past_observed_mask" in wanted,
    "future_time_features": lambda wanted, model: "past_observed_mask" in wanted,
    "query_embeds": lambda wanted, model: "qformer" in model.config.model_type,
    "input_points": lambda wanted, model: "pixel_values" in wanted,
    "feature_lens": lambda wanted, model: "input_features" in wanted,
    "aftercnn_lens": lambda wanted, model: "input_features" in wanted,
    "input_features_mask": lambda wanted, model: "input_features" in wanted and "flamingo" in model.config.model_type,
    "aspect_ratio_ids": lambda wanted, model: "pixel_values" in wanted,
    "aspect_ratio_mask": lambda wanted, model: "pixel_values" in wanted,
    "image_grid_thw": lambda wanted, model: "pixel_values" in wanted,
    "grid_thw": lambda wanted, model: "pixel_values" in wanted or "hidden_states" in wanted,
}


class _Maker:
    """Makes each argument by its name and the model's config."""

    def __init__(self, config: Any, length: int, spread: int, shift: int) -> None:
        self.config, self.length, self.spread, self.shift = config, length, spread, shift
        self.generator = torch.Generator().manual_seed(2)
        self.facts: Mapping[Any, Any] = {} if config is None else config.to_dict()

    def __call__(self, name: str) -> Any:
        made = getattr(self, f"_{name}", None)
        if made is None and name.endswith(("input_ids", "_ids")):
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
        """Random values of a shape; ["ids", 1, 8, 60]: whole numbers below 60; or "values", "zeros", "ones" of a shape;
        ["first", 2, 1, 8]: true for the first two.

        "n" in a shape is the number of tokens, "2n" twice that.
        """
        if isinstance(shape, list):
            shape = [self.length if size == "n" else 2 * self.length if size == "2n" else size for size in shape]
        match shape:
            case ["ids", *rest]:
                return torch.randint(0, rest[-1], tuple(rest[:-1]), generator=self.generator)
            case ["values", *rest]:
                return torch.tensor(rest)
            case ["first", count, *rest]:  # true for the first tokens
                return (torch.arange(rest[-1]) < count).expand(rest)
            case ["zeros" | "ones" as kind, *rest]:
                return torch.full(rest, kind == "ones")
            case [*_]:
                return self.randn(*shape)
        return shape

    def _input_ids(self) -> Tensor:
        vocab = int(self.get("vocab_size", "text_vocab_size", default=60))
        special = {value for value in _ids(self.facts) if value < vocab}
        usual = [token for token in range(3, vocab) if token not in special] or list(range(vocab))
        picks = torch.randint(len(usual), (1, self.length), generator=self.generator)
        return torch.tensor(usual)[picks]

    def _decoder_input_ids(self) -> Tensor:
        return self._input_ids()[:, : max(3, self.length - 2)]

    def _attention_mask(self) -> Tensor:
        return torch.ones(1, self.length, dtype=torch.long)

    def _position_ids(self) -> Tensor:
        return (self.shift + self.spread * torch.arange(self.length))[None]

    def _token_type_ids(self) -> Tensor:
        return torch.zeros(1, self.length, dtype=torch.long)

    def _bbox(self) -> Tensor:
        corners = torch.randint(0, 40, (1, self.length, 4), generator=self.generator)
        return torch.cat((corners[..., :2], corners[..., :2] + corners[..., 2:]), -1)

    def _pixel_values(self) -> Tensor:
        if self.config.model_type in ("siglip2_vision_model", "lfm2_vl"):
            return self.randn(1, 12, 3 * int(self.get("patch_size")) ** 2)
        if self.config.model_type == "idefics":
            return self.randn(1, 1, 3, *self._image())
        if self.config.model_type.startswith("mllama"):
            height, width = self._image()
            return self.randn(1, 1, int(self.get("max_num_tiles")), 3, height, width)
        if (patch := self.get("temporal_patch_size")) is not None and self.get("spatial_merge_size") is not None:
            side, channels = int(self.get("patch_size")), int(self.get("in_channels", "num_channels", default=3))
            return self.randn(int(self._grid_thw()[0].prod()), channels * int(patch) * side * side)
        height, width = self._image()
        channels = self.get("num_channels", "in_chans", "in_channels", default=3)
        channels = channels if isinstance(channels, int) else 3
        frames = self.get("num_frames")
        video = frames is not None and "video" not in self.config.model_type[:0]
        return self.randn(1, int(frames), channels, height, width) if video else self.randn(1, channels, height, width)

    def _pixel_attention_mask(self) -> Tensor:
        return torch.ones(1, 12, dtype=torch.long)

    def _spatial_shapes(self) -> Tensor:
        return torch.tensor([[3, 4]])

    def _aspect_ratio_ids(self) -> Tensor:
        return torch.ones(1, 1, dtype=torch.long)

    def _aspect_ratio_mask(self) -> Tensor:
        return torch.ones(1, 1, int(self.get("max_num_tiles", default=4)), dtype=torch.long)

    def _input_points(self) -> Tensor:
        return self.randn(1, 1, 2, 2).abs() * 20

    def _flattened_patches(self) -> Tensor:
        places = torch.tensor([[row, column] for row in range(1, 4) for column in range(1, 5)]).double()
        side = int(self.get("patch_size", default=16))
        width = int(self.get("patch_embed_hidden_size", default=3 * side * side))
        return torch.cat((places, self.randn(12, width)), -1)[None]

    def _feature_lens(self) -> Tensor:
        return torch.tensor([64])

    def _aftercnn_lens(self) -> Tensor:
        return torch.tensor([32])

    def _input_features_mask(self) -> Tensor:
        return torch.ones(1, self._input_features().shape[-1], dtype=torch.long)

    def _encoder_hidden_states(self) -> Tensor:
        names = ("encoder_hidden_size", "cross_attention_hidden_size", "cross_hidden_size", *WIDTHS)
        return self.randn(1, 7, int(self.get(*names)))

    def _query_embeds(self) -> Tensor:
        return self.randn(1, self.length, int(self.get("hidden_size")))

    def _inputs(self) -> Tensor:
        return self.randn(1, 12, int(self.get("d_model", *WIDTHS)))

    def _context(self) -> Tensor:
        return self.randn(1, 12, int(self.get(*WIDTHS)))

    def _prompt_pixel_values(self) -> Tensor:
        return self._pixel_values()

    def _image(self) -> tuple[int, int]:
        size = self.get("image_size", "img_size", "input_size", default=64)
        if isinstance(size, Mapping):
            size = (size.get("height", 64), size.get("width", 64))
        if isinstance(size, (list, tuple)):
            return int(size[-2] if len(size) > 1 else size[0]), int(size[-1])
        return int(size), int(size)

    def _hidden_states(self) -> Tensor:
        if self.get("temporal_patch_size") is not None and self.get("spatial_merge_size") is not None:
            return self._pixel_values()
        return self.randn(1, self.length, int(self.get(*WIDTHS, default=32)))

    def _past_observed_mask(self) -> Tensor:
        return torch.ones_like(self._past_values())

    def _past_time_features(self) -> Tensor:
        return self.randn(1, self._past_values().shape[1], int(self.get("num_time_features", default=0)))

    def _future_values(self) -> Tensor:
        return self._past_values()[:, : int(self.get("prediction_length"))]

    def _future_time_features(self) -> Tensor:
        return self.randn(1, int(self.get("prediction_length")), int(self.get("num_time_features", default=0)))

    def _latents(self) -> Tensor:
        return self.randn(1, int(self.get(*WIDTHS)), self.length)

    def _pixel_position_ids(self) -> Tensor:
        return torch.tensor([[[column, row] for row in range(6) for column in range(6)]])

    def _target_sizes(self) -> Tensor:
        return torch.tensor([[4, 6]])

    def _grid_thw(self) -> Tensor:
        merge = int(self.get("spatial_merge_size", default=2))
        return torch.tensor([[1, 2 * merge, 3 * merge]])

    def _image_grid_thw(self) -> Tensor:
        return self._grid_thw()

    def _input_features(self) -> Tensor:
        mel = int(self.get("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", default=80))
        if self.config.model_type in ("glmasr_encoder",):
            return self.randn(1, mel, 48)
        if self.config.model_type.endswith("omni_audio_encoder") or "omni_moe_audio" in self.config.model_type:
            return self.randn(mel, 64)  # not batched
        frames = self.get("max_source_positions")
        if (
            frames is not None
            and self.get("encoder_layers") is not None
            and "speech_to_text" not in self.config.model_type
        ):
            return self.randn(1, mel, 2 * int(frames))
        if self.config.model_type in ("speech_to_text",):
            return self.randn(1, 40, mel)
        width = int(self.get("feature_projection_input_dim", default=mel))
        return self.randn(1, 48, width)

    def _input_values(self) -> Tensor:
        if self.get("max_length") is not None and self.get("num_mel_bins") is not None:
            return self.randn(1, int(self.get("max_length")), int(self.get("num_mel_bins")))
        return self.randn(1, 4000)

    def _past_values(self) -> Tensor:
        length = int(self.get("context_length", "prediction_length", default=24))
        lags = max(self.get("lags_sequence", default=[0]) or [0])
        channels = self.get("num_input_channels", "input_size", default=1)
        values = self.randn(1, length + int(lags), int(channels))
        return values[..., 0] if int(channels) == 1 and self.get("input_size") == 1 else values

    def _pixel_values_videos(self) -> Tensor:
        height, width = self._image()
        return self.randn(1, int(self.get("frames_per_clip", "num_frames", default=4)), 3, height, width)


def _ids(facts: Mapping[Any, Any]) -> set[int]:
    """All ids of special tokens in a config."""
    values: set[int] = set()
    for key, value in facts.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, Mapping):
            values |= _ids(value)
        elif "token" in key and isinstance(value, int) and not isinstance(value, bool):
            values.add(value)
        elif "token" in key and isinstance(value, (list, tuple)):
            values |= {v for v in value if isinstance(v, int)}
    return values
