"""Quantised weights: random codes and scales, packed here element by element by the published layouts."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq

WIDTH, HEADS = 192, 4
NAME = "model.layers.0.self_attn.{}_proj"
ROWS = {"q": WIDTH, "k": WIDTH // 2}
CONFIG = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": 2, "hidden_size": WIDTH}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX specification, table of FP4
E2M1 += [-value for value in E2M1]


def generator(role):
    return np.random.default_rng(ord(role))


def words(codes, bits, axis):
    """Codes along an axis as one stream of bits, lowest first, in int32 words."""
    codes = np.moveaxis(codes, axis, -1)
    out = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] * bits // 32)), np.uint64)
    for at in range(codes.shape[-1]):
        for bit in range(bits):
            place = at * bits + bit
            out[..., place // 32] |= ((codes[..., at].astype(np.uint64) >> np.uint64(bit)) & np.uint64(1)) << np.uint64(
                place % 32
            )
    return np.ascontiguousarray(np.moveaxis(out, -1, axis)).astype(np.uint32).view(np.int32)


def halves(codes, upper_first=False):
    first, second = codes[..., 0::2], codes[..., 1::2]
    return (first << 4 | second if upper_first else second << 4 | first).astype(np.uint8)


def fp8_blocks(role, shape, kind=torch.float8_e4m3fn, ending="weight_scale_inv"):
    numbers = torch.from_numpy(generator(role).normal(size=shape)).to(kind)
    scales = generator(role).uniform(0.5, 2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    plain = numbers.double().numpy()
    values = [[plain[i, j] * scales[i // 128, j // 128] for j in range(shape[1])] for i in range(shape[0])]
    return {"weight": numbers, ending: scales, "input_scale": np.float32(3)}, values


def fp8_block_e5m2(role, shape):
    return fp8_blocks(role, shape, torch.float8_e5m2, "weight_scale")


def fp8_tensor(role, shape):
    numbers = torch.from_numpy(generator(role).normal(size=shape)).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": np.float32(0.37), "input_scale": np.float32(3)}, numbers.double() * (
        np.float32(0.37).item()
    )


def fp8_rows(role, shape):
    numbers = torch.from_numpy(generator(role).normal(size=shape)).to(torch.float8_e4m3fn)
    scales = generator(role).uniform(0.5, 2, (shape[0], 1)).astype(np.float32)
    return {"weight": numbers, "weight_scale": torch.from_numpy(scales).bfloat16()}, numbers.double() * (
        torch.from_numpy(scales).bfloat16().double()
    )


def mxfp8(role, shape):
    numbers = torch.from_numpy(generator(role).normal(size=shape)).to(torch.float8_e4m3fn)
    powers = generator(role).integers(120, 130, (shape[0], shape[1] // 32)).astype(np.uint8)
    return {"weight": numbers, "weight_scale": powers}, numbers.double().numpy() * np.repeat(
        2.0 ** (powers.astype(int) - 127), 32, 1
    )


def int8_rows(role, shape):
    codes = generator(role).integers(-128, 128, shape).astype(np.int8)
    scales = generator(role).uniform(0.01, 0.02, (shape[0], 1)).astype(np.float32)
    zeros = generator(role).integers(-9, 9, (shape[0], 1)).astype(np.int8)
    return (
        {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros},
        (codes.astype(float) - zeros) * scales,
    )


def packed_int(bits, asymmetric=False, ordered=True):
    def make(role, shape):
        rng, groups = generator(role), shape[1] // 32
        integers = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)
        scales = rng.uniform(0.01, 0.02, (shape[0], groups)).astype(np.float32)
        zeros = rng.integers(-3, 4, scales.shape) * asymmetric
        group = np.arange(shape[1]) // 32 if ordered else rng.permutation(np.arange(shape[1]) // 32)
        parts = {"weight_packed": words(integers + 2 ** (bits - 1), bits, 1), "weight_scale": scales}
        parts |= {"weight_shape": np.array(shape)}
        parts |= {"weight_zero_point": words(zeros + 2 ** (bits - 1), bits, 0)} if asymmetric else {}
        parts |= {} if ordered else {"weight_g_idx": group.astype(np.int32)}
        return parts, (integers - zeros[:, group]) * scales[:, group]

    return make


def nvfp4(role, shape, divided=True):
    codes = generator(role).integers(0, 16, shape)
    scales = torch.from_numpy(generator(role).uniform(1, 9, (shape[0], shape[1] // 16))).to(torch.float8_e4m3fn)
    values = np.array(E2M1)[codes] * np.repeat(scales.double().numpy(), 16, 1)
    if divided:
        parts = {"weight_packed": halves(codes), "weight_scale": scales, "weight_global_scale": np.float32([64])}
        return parts, values / 64
    return {"weight": halves(codes), "weight_scale": scales, "weight_scale_2": np.float32(0.25)}, values * 0.25


def modelopt_nvfp4(role, shape):
    return nvfp4(role, shape, divided=False)


def mxfp4(role, shape):
    codes = generator(role).integers(0, 16, shape)
    powers = generator(role).integers(120, 130, (shape[0], shape[1] // 32)).astype(np.uint8)
    values = np.array(E2M1)[codes] * np.repeat(2.0 ** (powers.astype(int) - 127), 32, 1)
    return {"weight_packed": halves(codes), "weight_scale": powers}, values


def mxfp4_blocks(role, shape):
    parts, values = mxfp4(role, shape)
    blocks = parts["weight_packed"].reshape(shape[0], -1, 16)
    return {"weight_blocks": blocks, "weight_scales": parts["weight_scale"]}, values


def gptq(bits, stored_less=1, ordered=True):
    def make(role, shape):
        rng, groups = generator(role), shape[1] // 32
        codes, scales = rng.integers(0, 2**bits, shape[::-1]), rng.uniform(0.01, 0.02, (groups, shape[0]))
        zeros, scales = rng.integers(1, 2**bits, scales.shape), scales.astype(np.float16)
        group = np.arange(shape[1]) // 32 if ordered else rng.permutation(np.arange(shape[1]) // 32)
        parts = {"qweight": words(codes, bits, 0), "qzeros": words(zeros - stored_less, bits, 1)}
        parts |= {"scales": scales, "g_idx": group.astype(np.int32)}
        return parts, ((codes - zeros[group]) * scales[group].astype(float)).T

    return make


def awq(role, shape):
    rng, groups = generator(role), shape[1] // 32
    codes, scales = rng.integers(0, 16, shape[::-1]), rng.uniform(0.01, 0.02, (groups, shape[0])).astype(np.float16)
    zeros, order = rng.integers(0, 16, scales.shape), [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(integers):
        eights = integers.reshape(len(integers), -1, 8).astype(np.uint32)
        out = sum(eights[..., output] << np.uint32(4 * place) for place, output in enumerate(order))
        return out.astype(np.uint32).view(np.int32)

    values = (codes - np.repeat(zeros, 32, 0)) * np.repeat(scales.astype(float), 32, 0)
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, values.T


def mlx(bits, size):
    def make(role, shape):
        rng, groups = generator(role), shape[1] // size
        codes = rng.integers(0, 2**bits, shape)
        scales, biases = rng.uniform(0.01, 0.02, (2, shape[0], groups)).astype(np.float16)
        values = codes * np.repeat(scales.astype(float), size, 1) + np.repeat(biases.astype(float), size, 1)
        return {"weight": words(codes, bits, 1).view(np.uint32), "scales": scales, "biases": biases}, values

    return make


def four_bit(kind, nested):
    def make(role, shape):
        rng, count = generator(role), shape[0] * shape[1]
        codes, table = rng.integers(0, 16, count), rng.normal(size=16).astype(np.float32)
        scales = rng.uniform(0.1, 0.3, count // 64).astype(np.float32)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        parts = {"weight": halves(codes, upper_first=True)[:, None], "weight.quant_map": table}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.21}
            coded, outer_table = rng.integers(0, 256, len(scales)), rng.normal(size=256).astype(np.float32)
            outer = rng.uniform(0.1, 0.3, -(-len(scales) // 256)).astype(np.float32)
            scales = np.array([outer_table[c] * outer[i // 256] + np.float32(0.21) for i, c in enumerate(coded)])
            parts |= {"weight.absmax": coded.astype(np.uint8), "weight.nested_absmax": outer}
            parts |= {"weight.nested_quant_map": outer_table}
        else:
            parts |= {"weight.absmax": scales}
        said = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        parts |= {f"weight.quant_state.bitsandbytes__{kind}": said}
        return parts, (table[codes] * np.repeat(scales, 64)).reshape(shape)

    return make


def eight_bit(role, shape):
    codes = generator(role).integers(-127, 128, shape).astype(np.int8)
    largest = generator(role).uniform(1, 3, shape[0]).astype(np.float32)
    return {"weight": codes, "SCB": largest, "weight_format": np.uint8(0)}, codes * largest[:, None] / 127.0


CASES = {
    "fp8 e4m3 in 128×128 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 e5m2 in 128×128 blocks": (fp8_block_e5m2, {}),
    "fp8 e4m3 per tensor": (fp8_tensor, {"quant_method": "compressed-tensors"}),
    "fp8 e4m3 per row": (fp8_rows, {}),
    "fp8 e4m3 in groups of 32": (mxfp8, {}),
    "int8 per row": (int8_rows, {}),
    "int4 in groups of 32": (packed_int(4), {}),
    "int4 in groups of 32, zero points": (packed_int(4, asymmetric=True), {}),
    "int4 in groups of 32, by order of activations": (packed_int(4, ordered=False), {}),
    "int8 in groups of 32": (packed_int(8), {}),
    "int3 in groups of 32": (packed_int(3, asymmetric=True), {}),
    "nvfp4 in groups of 16": (nvfp4, {}),
    "nvfp4 in groups of 16, ModelOpt": (modelopt_nvfp4, {}),
    "mxfp4 in groups of 32": (mxfp4, {}),
    "mxfp4 in groups of 32, blocks": (mxfp4_blocks, {}),
    **{f"gptq int{bits} in groups of 32": (gptq(bits), {"bits": bits}) for bits in (2, 3, 4, 8)},
    "gptq int4 in groups of 32, v2": (gptq(4, stored_less=0), {"bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq int4 in groups of 32, by order of activations": (gptq(4, ordered=False), {}),
    "mlx int4 in groups of 64": (mlx(4, 64), {}),
    "mlx int3 in groups of 32": (mlx(3, 32), {"group_size": 32, "bits": 3}),
    "awq int4 in groups of 32": (awq, {"quant_method": "awq", "version": "gemm", "bits": 4}),
    **{
        f"bitsandbytes {kind} in blocks of 64{', double quantisation' if nested else ''}": (four_bit(kind, nested), {})
        for kind in ("nf4", "fp4")
        for nested in (False, True)
    },
    "bitsandbytes int8 per row": (eight_bit, {}),
}


def tensors_of(make):
    """The file's tensors, and the weights that they stand for."""
    tensors, expected = {}, {}
    for role, rows in ROWS.items():
        parts, values = make(role, (rows, WIDTH))
        for ending, part in parts.items():
            part = part if isinstance(part, torch.Tensor) else torch.from_numpy(np.array(part))
            tensors[f"{NAME.format(role)}.{ending}"] = part
        expected[role] = torch.as_tensor(values).double() if not isinstance(values, list) else torch.tensor(values)
    return tensors, expected


def save(folder, tensors, settings, **config):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    facts = {**CONFIG, **({"quantization_config": settings} if settings else {}), **config}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_weight_has_the_values_of_its_formula(case, tmp_path):
    make, settings = CASES[case]
    tensors, expected = tensors_of(make)
    (layer,) = kq.read(save(tmp_path, tensors, settings))
    for role, given in (("q", layer.weights.query), ("k", layer.weights.key)):
        torch.testing.assert_close(
            given.reshape(expected[role].shape).double(), expected[role].double(), rtol=1e-6, atol=1e-7
        )
    note = case.removesuffix(", v2").removesuffix(", blocks").removesuffix(", ModelOpt").removesuffix(", zero points")
    assert layer.notes == (f"weights: {note.removesuffix(', by order of activations')}",)


def test_weights_that_are_not_asked_for_are_not_dequantised(tmp_path):
    """A weight that could not be: its scales are missing."""
    tensors, _ = tensors_of(gptq(4))
    tensors["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(4, 4, dtype=torch.int32)
    assert len(list(kq.read(save(tmp_path, tensors, {})))) == 1


NF4 = "weight.quant_state.bitsandbytes__nf4"
MISSING = {
    "fp8": (fp8_blocks, "weight_scale_inv", r"q_proj\.weight is stored as float8_e4m3fn without scales"),
    "int4": (packed_int(4), "weight_scale", r"q_proj\.weight_packed .* lacks .*q_proj\.weight_scale"),
    "mxfp4": (mxfp4_blocks, "weight_scales", r"q_proj\.weight_blocks .* MXFP4, which lacks .*q_proj\.weight_scales"),
    "gptq": (gptq(4), "qzeros", r"q_proj\.qweight is a weight in GPTQ, which lacks .*q_proj\.qzeros"),
    "awq": (awq, "qzeros", r"q_proj\.qweight is a weight in AWQ, which lacks .*q_proj\.qzeros"),
    "nf4's state": (four_bit("nf4", False), NF4, r"lacks .*bitsandbytes__nf4"),
    "int8": (eight_bit, "SCB", r"q_proj\.weight is stored as int8 without scales"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_quantised_weight_without_its_scales_is_named(case, tmp_path):
    make, ending, words_of_error = MISSING[case]
    tensors, _ = tensors_of(make)
    del tensors[f"{NAME.format('q')}.{ending}"]
    with pytest.raises(ValueError, match=words_of_error) as error:
        list(kq.read(save(tmp_path, tensors, {})))
    assert "\n" not in str(error.value)


SHAPES = {
    "fp8": (fp8_blocks, "weight_scale_inv", r"weight_scale_inv has the shape \(3, 3\), expected \(2, 2\) for 128×128"),
    "int4": (packed_int(4), "weight_scale", r"weight_scale has the shape \(3, 3\)|3 columns, which is no whole group"),
    "gptq": (gptq(4), "qzeros", r"qzeros has the shape \(3, 3\), expected \(6, 24\)"),
    "awq": (awq, "qzeros", r"qzeros has the shape \(3, 3\), expected \(6, 24\)"),
    "nf4": (four_bit("nf4", False), "weight.absmax", r"absmax has the shape \(3, 3\), expected \(576,\)"),
    "int8": (eight_bit, "SCB", r"SCB has the shape \(3, 3\), expected \(192,\)"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_scales_of_another_shape_are_named(case, tmp_path):
    make, ending, words_of_error = SHAPES[case]
    tensors, _ = tensors_of(make)
    tensors[f"{NAME.format('q')}.{ending}"] = torch.ones(3, 3)
    with pytest.raises(ValueError, match=words_of_error):
        list(kq.read(save(tmp_path, tensors, {})))


@pytest.mark.parametrize("make", [packed_int(4), nvfp4, awq])
def test_groups_must_be_whole(make, tmp_path):
    tensors, _ = tensors_of(make)
    name = next(name for name in tensors if "q_proj" in name and name.endswith(("scales", "weight_scale")))
    rows, columns = tensors[name].shape
    tensors[name] = torch.ones((5, columns) if name.endswith("scales") else (rows, 5))
    if make is awq:
        tensors[name.replace("scales", "qzeros")] = torch.zeros(5, columns // 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="is of 5 groups, which are no whole groups of 192 inputs"):
        list(kq.read(save(tmp_path, tensors, {})))


def test_gpt_oss_keeps_only_its_experts_in_mxfp4(tmp_path):
    """Queries and keys are in bfloat16; the experts' packed weights are not touched."""
    transformers = pytest.importorskip("transformers", reason="the model needs the extra hf")
    from keyquery.proof.families import tiny_model

    model = tiny_model("gpt_oss", hidden_size=64, intermediate_size=64).bfloat16()
    model.save_pretrained(tmp_path / "plain")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        shape = tensors.pop(name).mT.shape
        tensors[f"{name}_blocks"] = torch.randint(0, 255, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((*shape[:-1], shape[-1] // 32), 120, dtype=torch.uint8)
    (tmp_path / "packed").mkdir()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    save(tmp_path / "packed", tensors, {"quant_method": "mxfp4"}, **config)
    packed = kq.read(tmp_path / "packed")
    for one, other in zip(packed, kq.read(model), strict=True):
        assert torch.equal(one.weights.query, other.weights.query)
        assert torch.equal(one.folded.key, other.folded.key)
        assert one.notes == ()
    blocks = next(name for name in packed.source.shapes if name.endswith("down_proj"))
    given = packed.source.rows(blocks)
    expected = transformers.integrations.mxfp4.convert_moe_packed_tensors(
        tensors[f"{blocks}_blocks"], tensors[f"{blocks}_scales"], dtype=torch.float32
    )
    assert torch.equal(given.mT, expected)


HOSTILE = {
    "a block without end": {"blocksize": 10**12},
    "a block of none": {"blocksize": 0},
    "a shape without end": {"shape": [2**40, 2**40]},
    "a shape of words": {"shape": ["many", 1]},
    "an offset of words": {"nested_offset": "much"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_states_are_refused(case, tmp_path):
    tensors, _ = tensors_of(four_bit("nf4", nested=True))
    name = f"{NAME.format('q')}.weight.quant_state.bitsandbytes__nf4"
    state = {**json.loads(bytes(tensors[name].tolist())), **HOSTILE[case]}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"q_proj\.weight.*(must hold|bytes|must be a number)"):
        list(kq.read(save(tmp_path, tensors, {})))
    tensors[name] = torch.tensor(list(b"[" * 5000), dtype=torch.uint8)
    with pytest.raises(ValueError, match="must hold a JSON object"):
        list(kq.read(save(tmp_path, tensors, {})))


def test_long_names_are_short_in_errors(tmp_path):
    names = [f"model.layers.0.{'a' * 5000}.{role}_proj" for role in "qk"]
    save_file(
        {f"{name}.weight_packed": torch.zeros(4, 4, dtype=torch.int32) for name in names}, tmp_path / "a.safetensors"
    )
    with pytest.raises(ValueError, match="which lacks") as refusal:
        kq.look(tmp_path / "a.safetensors", query=f"{names[0]}.weight", key=f"{names[1]}.weight", heads=2)
    assert len(str(refusal.value)) < 1000
