"""Do labels predict what can be left out of a head? Labels from variance, held against ablation, head by head.

    python bench/labels.py MODEL ... --text FILE --out labels.json     # folders or .gguf files; default: what ships

For every head: its label from variance alone; the cost of leaving out each of its five parts; the label that follows
from that; and the test of the label itself: all parts but the label's own are left out at once, and, as a control, the
label's own part alone. Costs are changes of the cross-entropy in nats per token, with 95 % intervals over sequences.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import keyquery as kq
from keyquery.capture import text_batches
from keyquery.capture.load import load_model, pick_device
from keyquery.capture.text import read_lines
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation import losses_of
from keyquery.instruments.intervals import paired
from keyquery.instruments.labels import LABELS, Thresholds, label_head
from keyquery.instruments.losses import default_loss
from keyquery.reading import provenance, short
from keyquery.surgery.dial import Means

KEPT = {
    "position": ("position", "query_only"),
    "sink": ("position", "query_only"),
    "pairwise": ("symmetric", "skew"),
    **{part: (part,) for part in ("popularity", "symmetric", "skew")},
}
LIMITS = (0.001, 0.01)  # nats per token


def rows_of(name: str, source: str, text: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per head of a model."""
    device = pick_device(options.device)
    model, tokenizer = load_model(source, speaking=True)
    model = model.to(device).eval()
    lines = read_lines(text)
    look = kq.look(model, inputs=_batches(lines, tokenizer, options, options.tokens), length=options.length, name=name)
    heads = {(head["layer"], head["head"]): head for head in look.heads if head["on_data"] is not None}
    chosen = sorted(heads)
    if options.heads and options.heads < len(chosen):
        chosen = sorted(random.Random(options.seed).sample(chosen, options.heads))
    _, loss = default_loss(model, tokenizer)
    batches = _batches(lines, tokenizer, options, options.ablated)
    means, before = Means(model, batches), losses_of(model, batches, loss)
    rows = []
    with kq.dial(model, data=means) as dial:

        def cost(place: tuple[int, int], gains: dict[str, float]) -> list[float]:
            dial.turn([place], **gains)
            return list(paired(before, losses_of(model, batches, loss)))

        for place in chosen:
            head = heads[place]
            single = {part: cost(place, {part: 0.0}) for part in PARTS}
            row = {"model": name, "layer": place[0], "head": place[1], "variance": head["label"], "costs": single}
            row |= {"shares": {part: head["on_data"][part] for part in (*PARTS, "interaction", "sink")}}
            limits = Thresholds(loss=LIMITS[0])
            row["ablation"] = label_head(head["raw"], head["on_data"], single, limits)._asdict()
            if head["label"] in KEPT:
                kept = KEPT[head["label"]]
                row["others_out"] = cost(place, {part: 0.0 for part in PARTS if part not in kept})
                row["own_out"] = cost(place, dict.fromkeys(kept, 0.0))
            row["all_out"] = cost(place, dict.fromkeys(PARTS, 0.0))
            rows.append(row)
    print(f"{name}: loss {float(before.mean()):.3f}, {len(before)} sequences, {len(rows)} heads", flush=True)
    return rows


def _batches(lines: list[str], tokenizer: Any, options: argparse.Namespace, tokens: int) -> list[Any]:
    return list(text_batches(lines, tokenizer, options.length, tokens, options.batch))


def table(rows: list[dict[str, Any]]) -> str:
    """Label from variance by label from ablation, and how many labels hold."""
    text = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        decided = [row for row in own if row["ablation"]["evidence"] == "ablation"]
        counts = Counter((row["variance"], row["ablation"]["label"]) for row in decided)
        across = [label for label in LABELS if any(label == b for _, b in counts)]
        text += [f"\n{name}: {len(own)} heads; no part alone costs {LIMITS[0]} nats in {len(own) - len(decided)}"]
        text += ["variance \\ ablation  " + "".join(f"{label:>11}" for label in across)]
        for label in LABELS:
            if any(a == label for a, _ in counts):
                text.append(f"{label:20} " + "".join(f"{counts[label, other]:11}" for other in across))
        labelled = [row for row in own if "others_out" in row]
        for limit in LIMITS:
            held = sum(row["others_out"][2] <= limit for row in labelled)
            free = sum(row["own_out"][2] <= limit for row in labelled)
            text.append(
                f"other parts out costs at most {limit} nats (upper end): {held} of {len(labelled)} labelled heads; "
                f"own part out, the control: {free}"
            )
    return "\n".join(text)


def main() -> None:
    """Measure, print the tables, and write every row."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("models", nargs="*", default=[str(kq.models.ENCODER), str(kq.models.DECODER)])
    asked.add_argument("--text", type=Path, default=kq.models.LONG_TEXT)
    asked.add_argument("--tokens", type=int, default=20_000, help="for the shares")
    asked.add_argument("--ablated", type=int, default=8_192, help="tokens that losses are of")
    asked.add_argument("--length", type=int, default=128)
    asked.add_argument("--batch", type=int, default=16, help="sequences at a time")
    asked.add_argument("--heads", type=int, default=0, help="a random sample of so many; default: all")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--device", default="auto")
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    rows = []
    for source in options.models:
        rows += rows_of(Path(source).name, source, options.text, options)
        if options.out is not None:
            facts = {"text": options.text.name, "length": options.length, "tokens": options.ablated}
            options.out.write_text(json.dumps({"rows": short(rows, 4), "provenance": provenance(**facts)}))
    print(table(rows))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
