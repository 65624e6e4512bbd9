"""The table of readers: for each, real files to begin from, which of them is changed and how, and what reads it."""

import gzip
import io
import json
import lzma
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from keyquery_studies.common.events import read_badges, read_cdnow, read_retail
from rich.console import Console
from safetensors.torch import save_file

import keyquery as kq
from keyquery import Reading
from keyquery.checkpoints.hub import Hub
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.checkpoints.vocabulary import vocabulary
from keyquery.instruments.look.look import opened
from keyquery.intervene.swap.swap import FORMAT, _read_saved
from keyquery.kinds import kinds
from keyquery.layers import LanguageModel, Shape
from keyquery.learn.cooccurrence.tally import Tally, read_into
from keyquery.learn.data import load_images, load_revisited, load_table, load_ts
from keyquery.learn.data.text import read_column, read_corpus
from keyquery.learn.training import Recipe, train
from keyquery.listening.inputs.batches import read_lines, text_batches
from keyquery.pages import terminal
from keyquery.proof.families import tiny_model
from keyquery.support.files import read_text
from tests.fuzz import forged
from tests.fuzz import mutations as m
from tests.fuzz import quantised as q
from tests.fuzz.guard import Broken

# Every kind of reading is attacked, and nothing is imported while a file is read.
for kind in kinds().values():
    import_module(kind.module)

TOKENS = Tokenizer.load(kq.models.DECODER)


@dataclass(frozen=True)
class Reader:
    """`make` puts real files into a folder, `file` is the one that is changed, by `change`, and `read` reads."""

    make: Callable[[Path], None]
    file: str
    change: Callable
    read: Callable[[Path], object]
    packed: bool = False  # whether it may come to more than its bytes


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIG = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 4}
CONFIG |= {"num_hidden_layers": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}
CONFIG |= {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
CONFIG |= {"rope_scaling": {**ROPE, "original_max_position_embeddings": 64}}


def weights():
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(20, 16)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        for role, rows in (("q", 16), ("k", 8), ("v", 8)):
            tensors[f"{name}.self_attn.{role}_proj.weight"] = torch.randn(rows, 16)
        tensors[f"{name}.self_attn.o_proj.weight"] = torch.randn(16, 16)
        tensors[f"{name}.input_layernorm.weight"] = torch.rand(16)
    return tensors


def of_family(name, **changes):
    def make(folder):
        torch.manual_seed(0)
        tiny_model(name, **changes).save_pretrained(folder)

    return make


YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0, 1.0, 1.0], "long_factor": [1.0, 4.0, 1.0, 1.0]}
latent = of_family("deepseek", num_hidden_layers=1, rope_parameters={**YARN, "rope_theta": 1e4})
fused = of_family("phi3", rope_parameters={**LONG, "rope_theta": 1e4, "original_max_position_embeddings": 32})


def llama(folder):
    save_file(weights(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.json").write_text(json.dumps({f"Ġ{place}": place for place in range(20)}))


def sharded(folder):
    tensors, index = weights(), {}
    for file, names in (("a.safetensors", sorted(tensors)[::2]), ("b.safetensors", sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    said = {"metadata": {"total_size": 1000}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(said))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def pickled(zipped):
    def make(folder):
        data = {"state_dict": weights(), "epoch": 3}
        torch.save(data, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        (folder / "config.json").write_text(json.dumps(CONFIG))

    return make


def gguf_file(folder):
    from gguf import GGMLQuantizationType

    from tests.checkpoints.formats.gguf_models import write

    named = {"model.layers": "blk", "self_attn.": "attn_", "_proj": "", "attn_o": "attn_output"}
    named |= {"input_layernorm": "attn_norm", "model.embed_tokens": "token_embd"}
    tensors = {}
    for name, value in weights().items():
        for old, new in named.items():
            name = name.replace(old, new)
        tensors[name] = value
    config = SimpleNamespace(**{**CONFIG, "max_position_embeddings": 64})
    fields = {"add_head_count_kv": 2, "add_key_length": 4, "add_sliding_window": 8, "add_token_scores": [0.0] * 20}
    fields["add_token_list"] = [f"▁{place}" for place in range(20)]
    write(folder / "model.gguf", "gemma2", tensors, config, 1e4, GGMLQuantizationType.F16, **fields)


def look(source):
    """All that `keyquery look` reads, and for one file in twenty the whole of it, with the words along directions."""
    file = source if source.is_file() else next(source.glob("*mod*"))
    if zlib.crc32(file.read_bytes()) % 20 == 0:
        return kq.look(source, directions=1)
    found = kq.read(source)
    layers = [(layer.form.norm2, layer.folded.norm2, layer.rope, layer.scale) for layer in found]
    return layers, found.embedding(), vocabulary(source)


def look_gguf(folder):
    return look(folder / "model.gguf")


class Served(Hub):
    """A hub whose answers are the files of a folder."""

    def __init__(self, folder):
        self.folder = folder
        super().__init__("org/name")

    def _range(self, file, start, length):
        data = (self.folder / file).read_bytes()[start : start + length]
        if len(data) != length:
            raise ValueError("ends early")
        return data

    def _whole(self, file):
        return (self.folder / file).read_bytes() if (self.folder / file).is_file() else None


def from_hub(folder):
    found = Served(folder)
    return [found.rows(name) for name in found.shapes]


def own_model(folder):
    LanguageModel(Shape(vocab_size=30, width=8, depth=1, num_attention_heads=2, length=16)).save(folder)


def tokenizer(folder):
    facts = json.loads((kq.models.ENCODER / "tokenizer.json").read_text())
    model = facts["model"]
    kept = dict(list(model["vocab"].items())[:300])
    model["vocab"] = kept
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if "".join(pair) in kept]
    (folder / "tokenizer.json").write_text(json.dumps(facts))


def spoken(folder):
    found = Tokenizer.load(folder)
    ids = found.encode("the words, 12 of them — étude")
    return found.decode(ids), found.convert_ids_to_tokens(ids), vocabulary(folder)


def reading(folder):
    kq.look(torch.nn.MultiheadAttention(8, 2), name="two").to_json(folder / "a.json")


def graph(folder):
    kq.causes(torch.tensor([[1, 0, 0], [0.3, 0.7, 0], [0.2, 0.3, 0.5]])).to_json(folder / "a.json")


def load_reading(folder):
    return Reading.load(folder / "a.json").to_dict()


def show_reading(folder):
    """What was loaded, as the terminal would have it: whatever it holds, no escape codes."""
    loaded, out = Reading.load(folder / "a.json"), io.StringIO()
    with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        terminal.show(loaded, Console(file=out, width=100))
    if not all(sign.isprintable() or sign == "\n" for sign in out.getvalue()):
        raise Broken("escape codes reach the terminal")


def truth(folder):
    told = [{"bbx": np.ones(4), "easy": np.array([0, 1]), "hard": [2], "junk": np.array([], int)}] * 2
    said = {"imlist": list("abcd"), "qimlist": list("qr"), "gnd": told}
    (folder / "gnd.pkl").write_bytes(pickle.dumps(said, 2))
    np.savez(folder / "a.npz", Q=np.ones((2, 3)), X=np.ones((4, 3)))
    np.savez(folder / "b.npz", Q=np.ones((2, 3)), X=np.ones((4, 3)))


def load_truth(folder):
    return load_revisited(folder / "gnd.pkl", folder / "a.npz")


def counted(path):
    read_into(Tally(window=2), path, lambda items, what, total: items)


def lines_of(path):
    return list(text_batches(read_lines(path)[:100], TOKENS, 32, 1000))


TS = "#c\n@problemName x\n@dimensions 2\n@classLabel true up down\n@data\n1,2,?:3,4:up\n5:6:down\n1.5e3,2:7,8,9:up\n"


def text(name, content):
    def make(folder):
        data = content.encode()
        packing = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
        (folder / name).write_bytes(packing(data))

    return make


def reads(function, name):
    return lambda folder: function(folder / name)


TABLE = 'kind,age,"a b"\ncat,3,x\ndog,?,y\n"c, at",5e1,z\n'
RETAIL = (
    "InvoiceNo,StockCode,Quantity,InvoiceDate,UnitPrice,CustomerID\n"
    "536365,a,6,12/1/2010 8:26,2.55,17850\nC536366,b,-1,12/2/2010 9:00,1.85,17850\n536367,c,3,12/3/2010 9:00,4.25,\n"
    "536368,d,8,12/4/2010 9:00,3,13047\n536369,e,1,12/5/2010 9:00,7.5,13047\n"
)
CDNOW = " 00001 19970101  1  11.77\n 00002 19970112  1  12.00\n 00002 19970112  5  77.00\n"


def images(folder):
    np.savez(folder / "a.npz", images=np.zeros((3, 4, 4), np.uint8), labels=np.arange(3), classes=list("abc"))


def photos(folder):
    from PIL import Image

    (folder / "cat").mkdir()
    (folder / "dog").mkdir()
    for name in ("cat/a.png", "dog/b.jpg"):
        Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(folder / name)


def badges(folder):
    np.savez(folder / "a.npz", time=[0.0, 86400.0, 5.0], event=[1, 2, 1], offsets=[0, 2, 3])


def saved(folder):
    chance = np.random.default_rng(0)
    made = kq.SeriesClassifier(width=8, heads=2, depth=1, epochs=1, device="cpu", random_state=0)
    made.fit(chance.normal(size=(6, 5, 2)), list("aabbab"))
    made.save(folder / "a.safetensors")


def swapped(folder):
    recipe = {"kernel": "symmetric", "symmetric_dims": None, "layers": [0], "names": ["h.0.attn"]}
    save_file({"h.0.attn.query.weight": torch.ones(2, 2)}, folder / "a.safetensors", {FORMAT: json.dumps(recipe)})


def run_of(folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    train(
        model,
        lambda step, chance: torch.randn(4, 2, generator=chance),
        lambda model, x: model(x).square().mean(),
        Recipe(4, check_every=1),
        until=lambda step: step >= 2,
        checkpoint=folder / "run.checkpoint",
    )


READERS = {
    "safetensors": Reader(llama, "model.safetensors", m.as_safetensors, look),
    "config": Reader(llama, "config.json", m.as_json, look),
    "config, latent": Reader(latent, "config.json", m.as_json, look),
    "config, fused": Reader(fused, "config.json", m.as_json, look),
    "vocabulary": Reader(llama, "vocab.json", m.as_json, look),
    "index": Reader(sharded, "model.safetensors.index.json", m.as_json, look),
    "shard": Reader(sharded, "b.safetensors", m.as_safetensors, look),
    "pickle, zipped": Reader(pickled(True), "pytorch_model.bin", m.as_zip, look),
    "pickle, old": Reader(pickled(False), "pytorch_model.bin", m.as_bytes, look),
    "quantised": Reader(q.quantised, "model.safetensors", m.as_safetensors, q.read_quantised),
    "quantised, config": Reader(q.quantised, "config.json", m.as_json, q.read_quantised),
    "adapter": Reader(q.adapted, "adapter_model.safetensors", m.as_safetensors, q.read_adapted),
    "adapter, config": Reader(q.adapted, "adapter_config.json", m.as_json, q.read_adapted),
    "gguf": Reader(gguf_file, "model.gguf", m.as_bytes, look_gguf),
    "hub, header": Reader(llama, "model.safetensors", m.as_safetensors, from_hub),
    "hub, index": Reader(sharded, "model.safetensors.index.json", m.as_json, from_hub),
    "own model, config": Reader(own_model, "config.json", m.as_json, LanguageModel.load),
    "own model, weights": Reader(own_model, "model.safetensors", m.as_safetensors, LanguageModel.load),
    "tokenizer": Reader(tokenizer, "tokenizer.json", m.as_json, spoken),
    "reading": Reader(reading, "a.json", m.as_json, load_reading),
    "reading, graph": Reader(graph, "a.json", m.as_json, load_reading),
    "ts": Reader(text("a.ts", TS), "a.ts", m.as_text, reads(load_ts, "a.ts")),
    "ts.gz": Reader(text("a.ts.gz", TS), "a.ts.gz", m.as_gzip, reads(load_ts, "a.ts.gz"), True),
    "csv": Reader(text("a.csv", TABLE), "a.csv", m.as_text, reads(load_table, "a.csv")),
    "column": Reader(text("a.tsv", "label\ttext\n1\tfine\n0\tlong\n"), "a.tsv", m.as_text, reads(read_column, "a.tsv")),
    "text": Reader(text("a.txt.gz", "one\n\ntwo\n" * 9), "a.txt.gz", m.as_gzip, reads(read_corpus, "a.txt.gz"), True),
    "words": Reader(text("a.txt", "one\n\ntwo\n" * 9), "a.txt", m.as_text, reads(read_text, "a.txt")),
    "retail": Reader(text("a.csv", RETAIL), "a.csv", m.as_text, reads(read_retail, "a.csv")),
    "cdnow": Reader(text("a.txt", CDNOW), "a.txt", m.as_text, reads(read_cdnow, "a.txt")),
    "badges": Reader(badges, "a.npz", m.as_zip, reads(read_badges, "a.npz"), True),
    "images": Reader(images, "a.npz", m.as_zip, reads(load_images, "a.npz"), True),
    "photos, png": Reader(photos, "cat/a.png", m.as_bytes, load_images, True),
    "photos, jpeg": Reader(photos, "dog/b.jpg", m.as_bytes, load_images, True),
    "estimator": Reader(saved, "a.safetensors", m.as_safetensors, reads(opened, "a.safetensors")),
    "swap": Reader(swapped, "a.safetensors", m.as_safetensors, reads(_read_saved, "a.safetensors")),
    "run": Reader(run_of, "run.checkpoint", m.as_zip, run_of),
    "forged pickle, zipped": Reader(pickled(True), "pytorch_model.bin", forged.in_zip, look),
    "forged pickle, old": Reader(pickled(False), "pytorch_model.bin", forged.in_older, look),
    "truth": Reader(truth, "gnd.pkl", m.as_bytes, load_truth),
    "forged truth": Reader(truth, "gnd.pkl", forged.in_pickle, load_truth),
    "forged vectors": Reader(truth, "a.npz", forged.in_arrays, load_truth, True),
    "forged images": Reader(images, "a.npz", forged.in_arrays, reads(load_images, "a.npz"), True),
    "forged reading": Reader(reading, "a.json", forged.reading, show_reading),
    "shown reading": Reader(reading, "a.json", m.as_json, show_reading),
    "names": Reader(llama, "model.safetensors", forged.named, look),
    "flood, lines": Reader(text("a.gz", "one\ntwo\n"), "a.gz", forged.flooded("gz"), reads(lines_of, "a.gz"), True),
    "flood, counted": Reader(text("a.xz", "one two\n"), "a.xz", forged.flooded("xz"), reads(counted, "a.xz"), True),
    "flood, table": Reader(text("a.gz", TABLE), "a.gz", forged.flooded("gz"), reads(load_table, "a.gz"), True),
    "flood, series": Reader(text("a.gz", TS), "a.gz", forged.flooded("gz"), reads(load_ts, "a.gz"), True),
}
