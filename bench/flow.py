"""Flow over 24 layers of 16 heads and 1,024 tokens: how much memory it takes beside the model's own run.

Whole processes, peak resident memory: the model runs, or `kq.flow` runs it, or it returns all of its maps at once.
What flow takes beside the plain run is held against one layer's maps, 16 × 1,024 × 1,024 numbers of 4 bytes. Three
models of 24 layers, 16 heads and width 256: one with transformers' attention interface (Bert), one that attends in
code of its own, with the maps of a whole layer at once (VisualBert), and `kq.Encoder`. Half of the tokens are of an
image.

    python bench/flow.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from harness import publish, row

LAYERS, HEADS, TOKENS, WIDTH = 24, 16, 1024, 256
ONE_LAYER = HEADS * TOKENS**2 * 4 / 2**20
MODELS = {"bert": "BertModel", "visual_bert": "VisualBertModel", "encoder": "kq.Encoder"}

RUN = """
import sys, resource, torch, keyquery as kq
torch.set_num_threads(1)
torch.manual_seed(0)
kind, how = sys.argv[1:3]
half = {tokens} // 2
shape = dict(hidden_size={width}, num_hidden_layers={layers}, num_attention_heads={heads}, intermediate_size={width})
shape |= dict(max_position_embeddings={tokens}, vocab_size=100)
if kind == "encoder":
    model = kq.Encoder({width}, {layers}, {heads}, hidden={width}).eval()
    inputs = dict(x=torch.randn(1, {tokens}, {width}))
else:
    import transformers
    transformers.utils.logging.set_verbosity_error()
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(**shape)).eval()
        inputs = dict(input_ids=torch.randint(100, (1, {tokens})))
    else:
        config = transformers.VisualBertConfig(**shape, visual_embedding_dim={width})
        model = transformers.VisualBertModel(config).eval()
        inputs = dict(input_ids=torch.randint(100, (1, half)), visual_embeds=torch.randn(1, half, {width}))
if how == "flow":
    reading = kq.flow(model, ["text"] * half + ["image"] * half, inputs=inputs)
    assert len(reading.raw) == {layers} and len(reading.raw[0]) == {heads} and reading.weighted is not None
else:
    with torch.no_grad():
        if how == "maps" and kind == "encoder":
            from keyquery.listening import attention_maps
            kept = attention_maps(model, inputs)
        elif how == "maps":
            model.set_attn_implementation("eager")
            kept = model(**inputs, output_attentions=True).attentions
        else:
            model(**inputs)
"""


def peak(kind: str, how: str) -> tuple[float, float]:
    """Peak mebibytes and CPU seconds of a process."""
    code = RUN.format(tokens=TOKENS, width=WIDTH, layers=LAYERS, heads=HEADS)
    process = subprocess.Popen([sys.executable, "-c", code, kind, how])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{kind} {how} failed"
    return usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for kind, name in MODELS.items():
        runs = {how: [peak(kind, how) for _ in range(options.repeats)] for how in ("plain", "flow", "maps")}
        own = min(megabytes for megabytes, _ in runs["plain"])
        of = f"{LAYERS} layers, {HEADS} heads, {TOKENS:,} tokens, {name}"
        beside = [megabytes - own for megabytes, _ in runs["flow"]]
        rows.append(row(f"flow: peak memory beside the model's run, {of}", beside, "MiB", f"≤ {ONE_LAYER:.0f} MiB"))
        whole = [(megabytes - own) / 1024 for megabytes, _ in runs["maps"]]
        shown = {"shown": kind == "bert"}
        rows.append({**row(f"all maps at once: peak memory beside it, {of}", whole, "GiB", "—"), **shown})
        seconds = [seconds for _, seconds in runs["flow"]]
        rows.append({**row(f"flow, the whole process, {of}", seconds, "CPU s", "—"), **shown})
    publish("flow", rows, seed=0, one_layer_mib=ONE_LAYER)


if __name__ == "__main__":
    main()
