"""Weights quantised by the libraries that define the formats, read here, against what those libraries make of them.

The libraries are not needed by keyquery; where they are not installed, `test_quantised.py` has the published formulas.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import keyquery as kq
from tests.checkpoints.formats.test_quantised import NAME, ROWS, WIDTH, save


def weights():
    """Real-valued weights with a heavy tail."""
    generator = torch.Generator().manual_seed(0)
    return {role: torch.randn(rows, WIDTH, generator=generator) ** 3 for role, rows in ROWS.items()}


def check(folder, quantise, settings=None, rtol=1e-6):
    """`quantise` makes a weight's parts, and what the library reads back; `rtol` is its own rounding."""
    tensors, expected = {}, {}
    for role, weight in weights().items():
        parts, expected[role] = quantise(weight)
        tensors |= {f"{NAME.format(role)}.{name}": part for name, part in parts.items()}
    (layer,) = kq.read(save(folder, tensors, settings or {}))
    for role, given in (("q", layer.weights.query), ("k", layer.weights.key)):
        wanted = expected[role].float()
        torch.testing.assert_close(given.reshape(wanted.shape), wanted, rtol=rtol, atol=1e-7)
    return layer


COMPRESSED = {
    "float-quantized": [
        {"type": "float", "num_bits": 8, "strategy": "tensor"},
        {"type": "float", "num_bits": 8, "strategy": "channel"},
        {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    ],
    "int-quantized": [{"type": "int", "num_bits": 8, "strategy": "channel"}],
    "pack-quantized": [
        {"type": "int", "num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": symmetric}
        for bits in (4, 8, 3)
        for symmetric in (True, False)
    ],
    "nvfp4-pack-quantized": [{"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}],
    "mxfp4-pack-quantized": [{"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}],
}
CASES = [(kind, scheme) for kind, schemes in COMPRESSED.items() for scheme in schemes]


def scales(weight, args, rows, columns):
    """The range of each region of rows × columns as scale and zero point, as the library rounds them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    regions = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return calculate_qparams(regions.amin((1, 3)), regions.amax((1, 3)), args)


@pytest.mark.parametrize(("kind", "scheme"), CASES, ids=[f"{k} {s['num_bits']} {s['strategy']}" for k, s in CASES])
def test_compressed_tensors(kind, scheme, tmp_path):
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**scheme)
    whole = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(kind)
    sizes = {"tensor": None, "channel": (1, WIDTH), "block": (128, 128)}

    def quantise(weight):
        region = sizes.get(scheme["strategy"], (1, scheme.get("group_size"))) or tuple(weight.shape)
        parts = {"weight": weight}
        if kind == "nvfp4-pack-quantized":
            largest = 448 * 6 / weight.abs().max()
            groups = weight.unflatten(1, (-1, 16)).abs().amax(2)
            parts["weight_scale"] = (groups / 6 * largest).to(torch.float8_e4m3fn).float()
            parts["weight_global_scale"] = largest.reshape(1).float()
        elif kind == "mxfp4-pack-quantized":
            groups = weight.unflatten(1, (-1, 32)).abs().amax(2)
            parts["weight_scale"] = 2.0 ** torch.floor(torch.log2(groups / 4))
        else:
            parts["weight_scale"], zeros = scales(weight, args, *region)
            parts["weight_zero_point"] = zeros.to(torch.int8)
            if scheme["strategy"] == "tensor":
                parts["weight_scale"] = parts["weight_scale"].reshape(1)
                parts["weight_zero_point"] = parts["weight_zero_point"].reshape(1)
        packed = compressor.compress(parts, whole)
        return packed, compressor.decompress(packed, whole)["weight"]

    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": scheme}}}
    layer = check(tmp_path, quantise, settings, 2**-8 if kind.startswith("nvfp4") else 1e-6)  # it rounds to bfloat16
    assert layer.notes, library.__version__


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_four_bits(kind, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")

    def quantise(weight):
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state)

    check(tmp_path, quantise)


def test_bitsandbytes_eight_bits(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")

    def quantise(weight):
        codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
        return {"weight": codes, "SCB": largest}, functional.int8_vectorwise_dequant(codes, largest)

    check(tmp_path, quantise)


def module_file(package, path):
    """One file of an installed package, without its imports of what is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(f"{package}_part", Path(found.origin).parent / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_awq(tmp_path):
    unpacking = module_file("awq", "utils/packing_utils.py")
    generator = np.random.default_rng(0)

    def quantise(weight):
        rows, columns = weight.shape
        parts = {
            "qweight": generator.integers(-(2**31), 2**31, (columns, rows // 8)).astype(np.int32),
            "qzeros": generator.integers(-(2**31), 2**31, (columns // 32, rows // 8)).astype(np.int32),
            "scales": generator.uniform(0.01, 0.02, (columns // 32, rows)).astype(np.float32),
        }
        parts = {name: torch.from_numpy(part) for name, part in parts.items()}
        return parts, unpacking.dequantize_gemm(*parts.values(), 4, 32).T.contiguous()

    check(tmp_path, quantise, {"quant_method": "awq", "bits": 4, "version": "gemm"})


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits, tmp_path):
    """AutoGPTQ's own layer packs a weight on its grid; its multiplication by the identity gives the weight back."""
    layers = module_file("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py")
    top = 2**bits - 1

    def quantise(weight):
        weight = weight[:, torch.randperm(weight.shape[1])]
        rows, columns = weight.shape
        group = torch.randperm(columns) // 32
        scale = torch.stack([weight[:, group == g].abs().amax(1) * 2 / top for g in range(columns // 32)], dim=1)
        scale = scale.half().float()
        zero = torch.full_like(scale, (top + 1) // 2)
        codes = (weight / scale[:, group] + zero[:, group]).round().clamp(0, top)
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = (codes - zero[:, group]) * scale[:, group]
        layer = layers.QuantLinear(bits, 32, columns, rows, bias=False, weight_dtype=torch.float32)
        layer.pack(linear, scale, zero.clone(), group.int())
        parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        return {name: part.clone() for name, part in parts.items()}, linear.weight.detach()

    check(tmp_path, quantise, {"quant_method": "gptq", "bits": bits, "desc_act": True})


def test_the_state_of_bitsandbytes_is_json(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    _, state = functional.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
    packed = state.as_dict(packed=True)["quant_state.bitsandbytes__nf4"]
    assert json.loads(bytes(packed.tolist()))["shape"] == [64, 64]
