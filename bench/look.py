"""From a checkpoint on disk to all spectra, whole processes: CPU seconds over `import torch`, and peak memory.

A GPT-2-small-shaped file (500 MB, 144 heads), and an 8B-shaped one (bfloat16, 1,024 heads; query and key tensors
random, the rest a hole in a sparse file). With --lens PYTHON, the interpreter of an environment that has
transformer-lens 4.3 in it, TransformerLens answers what it can of the same question: it loads GPT-2 and takes the
eigenvalues and singular values of its QK circuits. Beside it stands our spectra of M, S and A of the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from compileall import compile_dir
from multiprocessing import Process
from pathlib import Path

import torch
from harness import publish, row

import keyquery

REPEATS = 3
BYTES = {torch.float32: ("F32", 4), torch.bfloat16: ("BF16", 2)}


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, filled: str) -> None:
    """A safetensors file whose tensors are random where their name holds `filled`, and holes elsewhere."""
    code, size = BYTES[dtype]
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + size * torch.Size(shape).numel()
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + offset)
        for name, shape in shapes.items():
            if filled in name:
                file.seek(start + header[name]["data_offsets"][0])
                data = (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)
                file.write(data.view(torch.uint8).numpy().tobytes())


def gpt2(folder: Path) -> None:
    width = 768
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}
    for layer in range(12):
        block = f"h.{layer}"
        shapes |= {f"{block}.attn.c_attn.weight": (width, 3 * width), f"{block}.attn.c_attn.bias": (3 * width,)}
        shapes |= {f"{block}.attn.c_proj.weight": (width, width), f"{block}.attn.c_proj.bias": (width,)}
        shapes |= {f"{block}.mlp.c_fc.weight": (width, 4 * width), f"{block}.mlp.c_fc.bias": (4 * width,)}
        shapes |= {f"{block}.mlp.c_proj.weight": (4 * width, width), f"{block}.mlp.c_proj.bias": (width,)}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    config = {"model_type": "gpt2", "n_head": 12, "n_embd": width, "n_layer": 12, "architectures": ["GPT2LMHeadModel"]}
    write_sparse(folder / "model.safetensors", shapes, torch.float32, "")
    (folder / "config.json").write_text(json.dumps(config))


def eight_billion(folder: Path) -> None:
    width, layers = 4096, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, width)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for role, rows in (("q", width), ("k", 1024), ("v", 1024), ("o", width)):
            shapes[f"{block}.self_attn.{role}_proj.weight"] = (rows, width)
        shapes |= {f"{block}.mlp.{name}_proj.weight": (14336, width) for name in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (width, 14336)
        shapes[f"{block}.input_layernorm.weight"] = (width,)
    write_sparse(folder / "model.safetensors", shapes, torch.bfloat16, "q_proj")
    # The keys and norms are filled in a second pass over the same layout.
    rewrite(folder / "model.safetensors", "k_proj")
    rewrite(folder / "model.safetensors", "input_layernorm")
    config = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": width}
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500000.0}))


def rewrite(path: Path, filled: str) -> None:
    with path.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        for name, entry in header.items():
            if filled in name:
                file.seek(8 + size + entry["data_offsets"][0])
                data = (torch.randn(entry["shape"]) / entry["shape"][-1] ** 0.5).to(torch.bfloat16)
                file.write(data.view(torch.uint8).numpy().tobytes())


SPECTRA = """
import sys, keyquery as kq
for layer in kq.read(sys.argv[1]):
    form = layer.form
    form.singular_values(), form.symmetric_eigenvalues(), form.skew_values()
"""


# As for a user: modules are compiled once, not at every start.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def measure(command: list[str]) -> tuple[float, float]:
    """CPU seconds and peak megabytes of a process, run to its end."""
    process = subprocess.Popen(command, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{command} failed"
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def look(folder: Path, out: Path) -> tuple[list[float], list[float]]:
    command = [sys.executable, "-m", "keyquery", "look", str(folder), "--json", str(out), "--force", "--quiet"]
    runs = [measure(command) for _ in range(REPEATS)]
    return [seconds for seconds, _ in runs], [megabytes for _, megabytes in runs]


def check(out: Path, heads: int) -> None:
    """Every head is there, with all of its spectra."""
    found = json.loads(out.read_text())["heads"]
    assert len(found) == heads
    spectra = ("eigenvalues", "skew_values", "singular_values")
    assert all(len(head[view][name]) > 1 for head in found for view in ("raw", "folded") for name in spectra)


def against_lens(lens: str, folder: Path, base: float) -> list[dict[str, object]]:
    """Like for like: process start to spectra, over `import torch`, the two in turn."""
    ours, theirs = [], []
    for _ in range(REPEATS):
        ours.append(measure([sys.executable, "-c", SPECTRA, str(folder)])[0] - base)
        theirs.append(measure([lens, str(Path(__file__).parent / "lens.py"), str(folder)])[0] - base)
    ratios = [value / sorted(ours)[REPEATS // 2] for value in theirs]
    return [
        row(
            "random weights of GPT-2 small's shape, read and spectra of M, S and A: over `import torch`",
            ours,
            "CPU s",
            "—",
        ),
        row("the same weights, TransformerLens 4.3, load and spectra of M: over `import torch`", theirs, "CPU s", "—"),
        row(
            "spectra of random weights of GPT-2 small's shape: how many times less CPU time than TransformerLens",
            ratios,
            "×",
            "≥ 4 ×",
        ),
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lens", help="the python of an environment with transformer-lens in it")
    lens = options.parse_args().lens
    compile_dir(Path(keyquery.__file__).parent, quiet=1)
    imports = [measure([sys.executable, "-c", "import torch"])[0] for _ in range(REPEATS)]
    base = sorted(imports)[REPEATS // 2]
    rows = [row("`import torch` alone", imports, "CPU s", "—")]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        for name, make, heads, seconds, memory in (
            ("random weights of GPT-2 small's shape, 144 heads", gpt2, 144, 2, 400),
            ("random weights of an 8B Llama's shape, 1,024 heads", eight_billion, 1024, 40, 1500),
        ):
            folder = Path(place) / make.__name__
            folder.mkdir()
            # In a process of its own: what this one has allocated would count as its children's peak.
            maker = Process(target=make, args=(folder,))
            maker.start()
            maker.join()
            cpu, peak = look(folder, out)
            check(out, heads)
            over = [value - base for value in cpu]
            rows.append(row(f"look at {name}: over `import torch`", over, "CPU s", f"≤ {seconds} CPU s"))
            rows.append(row(f"look at {name}: peak memory", peak, "MB", f"≤ {memory} MB"))
            if lens and make is gpt2:
                publish("lens", against_lens(lens, folder, base))
    publish("look", rows)


if __name__ == "__main__":
    main()
