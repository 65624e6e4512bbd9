"""Do labels predict? What each head's label says can be left out is left out, and the loss is measured.

For every head (or some, by --heads) of every model:

    the label from variance alone      kq.look on the text
    the label from ablation            kq.ablate, each of the five parts left out alone
    the test of both                   all parts but the label's left out at once: the label holds where that costs less
                                       than a limit, by the upper end of its 95 % interval over sequences
    the control                        the label's own parts left out

    python bench/labels.py MODEL ... --device cuda --tokens 16384 --out labels.json
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.losses import default_loss
from keyquery.instruments.ablation.variants import losses_of
from keyquery.instruments.look.labels import LABELS, Thresholds, label_head
from keyquery.intervene.dial.dial import dial
from keyquery.intervene.dial.means import Means
from keyquery.listening import text_batches
from keyquery.listening.inputs.batches import read_lines
from keyquery.listening.inputs.load import load_model
from keyquery.reading import provenance, short
from keyquery.support.devices import pick_device
from keyquery.support.statistics import paired

# The parts that a label keeps; what a query does with positions counts as position, as in `label_head`. Mixed and
# undecided heads have a label that says nothing can be left out.
KEPT = {"position": ("query_only", "position"), "sink": ("query_only", "position"), "pairwise": ("symmetric", "skew")}
KEPT |= {part: (part,) for part in ("popularity", "symmetric", "skew")}
NOTHING = "nothing needed"  # of an ablation by which each part alone can be left out
LIMITS = (0.001, 0.01)  # nats per token


def main() -> None:
    """Read the command line, measure every model, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="folders or .gguf files; default: the two that ship")
    parser.add_argument("--text", default=kq.models.LONG_TEXT, help="default: the long text that ships")
    parser.add_argument("--heads", type=int, help="of each model so many, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the text, at most")
    parser.add_argument("--tested", type=int, help="tokens on which losses are measured; default: all --tokens")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--bos", action="store_true", help="begin windows with BOS, where a .gguf's tokenizer does not")
    parser.add_argument("--batch", type=int, default=32, help="windows that are run at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a JSON file; what it holds of other models is kept")
    asked = parser.parse_args()
    facts = {
        name: str(getattr(asked, name)) for name in ("heads", "seed", "tokens", "tested", "length", "bos", "device")
    }
    found = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {"models": {}}
    for source in asked.models or [kq.models.DECODER, kq.models.ENCODER]:
        name = Path(source).name.removesuffix(".gguf")
        rows, known = measure(source, asked)
        found["models"][name] = {**known, **provenance(**facts, text=Path(asked.text).name), "rows": short(rows, 5)}
        found["models"][name] |= summary(rows)
        show(name, found["models"][name])
        if asked.out:
            asked.out.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


def measure(source: str | Path, asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row per head: its two labels, and what leaving out costs; and what was measured on."""
    start = perf_counter()
    model, tokenizer = load_model(source, lm_head=True)
    model.eval()
    lines = read_lines(asked.text)
    batches = list(text_batches(lines, tokenizer, asked.length - asked.bos, asked.tokens, asked.batch))
    if asked.bos:
        batches = [begun(batch, tokenizer.bos_token_id) for batch in batches]
    objective, loss = default_loss(model, tokenizer)
    look = kq.look(copy.deepcopy(model), inputs=batches, length=asked.length)
    print(f"{source}: looked at after {perf_counter() - start:.0f} s", flush=True)
    heads = [(head["layer"], head["head"]) for head in look.heads if head["on_data"] is not None]
    if asked.heads is not None:
        heads = sorted(random.Random(asked.seed).sample(heads, min(asked.heads, len(heads))))
    model.to(pick_device(asked.device))
    means = Means(model, batches, "position")
    batches = batches[: None if asked.tested is None else -(-asked.tested // (asked.batch * asked.length))]
    before = losses_of(model, batches, loss)
    prefix = Prefix(model, batches)
    known = {(head["layer"], head["head"]): head for head in look.heads}
    rows = []
    with dial(model, data=means) as turning:

        def cost(at: tuple[int, int], off: tuple[str, ...]) -> list[float]:
            """The change of the loss without some parts of one head, with its interval."""
            turning.turn([at], **dict.fromkeys(off, 0.0))
            with prefix.skipped(at[0]):
                return list(paired(before, losses_of(model, batches, loss)))

        for count, at in enumerate(heads, 1):
            rows.append(tested(known[at], lambda off, at=at: cost(at, off)))
            if count % 10 == 0:
                print(f"  {count} of {len(heads)} heads after {perf_counter() - start:.0f} s", flush=True)
    sequences = {"sequences": len(before), "tokens_run": int(sum(b["attention_mask"].sum() for b in batches))}
    return rows, {**sequences, "objective": objective, "loss": float(before.mean()), "seconds": perf_counter() - start}


class Prefix:
    """The layers below a head, whose outputs do not depend on it: they are run once per layer, and kept.

    Only for decoders with their blocks in `model.model.layers`; other models run all their layers each time.
    """

    def __init__(self, model: torch.nn.Module, batches: list[Any]) -> None:
        self.model, self.batches = model, batches
        self.layers = getattr(getattr(model, "model", None), "layers", [])
        self.depth, self.outputs = 0, []

    @contextmanager
    def skipped(self, depth: int) -> Iterator[None]:
        """Replace the first `depth` layers by what they returned for these batches."""
        skip = self.layers[:depth]
        if len(skip) and depth != self.depth:
            self.depth, self.outputs = depth, self._record(depth)
        outputs = iter(self.outputs)
        for layer in skip:
            layer.forward = lambda hidden, *_, **__: hidden
        if len(skip):
            skip[0].forward = lambda *_, **__: next(outputs)
        try:
            yield
        finally:
            for layer in skip:
                del layer.forward

    def _record(self, depth: int) -> list[torch.Tensor]:
        """The output of layer `depth - 1` for each batch."""
        outputs: list[torch.Tensor] = []
        hook = self.layers[depth - 1].register_forward_hook(lambda *call: outputs.append(call[2]))
        with torch.no_grad():
            for batch in self.batches:
                self.model(**batch)
        hook.remove()
        assert all(isinstance(output, torch.Tensor) for output in outputs)
        return outputs


def begun(batch: Any, bos: int) -> dict[str, torch.Tensor]:
    """A batch in which every window begins with the token that begins a text."""
    first = {"input_ids": bos, "attention_mask": 1}
    return {name: torch.cat((torch.full_like(ids[:, :1], first[name]), ids), 1) for name, ids in batch.items()}


def tested(head: dict[str, Any], cost: Any) -> dict[str, Any]:
    """A head's labels, the cost of each part, and for each label that claims something the test and its control."""
    alone = {part: cost((part,)) for part in PARTS}
    variance = label_head(head["raw"], head["on_data"]).label
    labels = {"variance": variance, "ablation": by_ablation(head["on_data"], alone)}
    row = {"layer": head["layer"], "head": head["head"], **labels, "without": alone, "test": {}, "control": {}}
    row["shares"] = {name: head["on_data"][name] for name in (*PARTS, "interaction", "sink")}
    for label in {*labels.values()} & set(KEPT):
        kept = KEPT[label]
        row["test"][label] = cost(tuple(part for part in PARTS if part not in kept))
        row["control"][label] = cost(kept)
    if "position" in row["test"]:  # strictly: position alone, without what queries do with positions
        row["test"]["position alone"] = cost(PARTS[:4])
    return row


def by_ablation(shares: dict[str, float], costs: dict[str, list[float]]) -> str:
    """The label that the costs of leaving out each part alone give."""
    label = label_head({}, shares, costs)
    return label.label if label.evidence == "ablation" else NOTHING


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of labels from variance by labels from ablation, and how many labels hold.

    Rows of an earlier run may have labels by another limit: they are made anew.
    """
    rows = [{**row, "ablation": by_ablation(row["shares"], row["without"])} for row in rows]
    table = Counter((row["variance"], row["ablation"]) for row in rows)
    confusion = {one: {other: table[one, other] for other in (*LABELS, NOTHING)} for one in LABELS}
    held = {}
    for evidence in ("variance", "ablation"):
        groups: dict[str, list[dict[str, Any]]] = {"all": []}
        for row in (row for row in rows if row[evidence] in KEPT):
            groups["all"].append(row)
            groups.setdefault(row[evidence], []).append(row)
        held[evidence] = {label: _held(some, evidence) for label, some in groups.items()}
    agree = sum(row["variance"] == row["ablation"] for row in rows)
    return {"confusion": confusion, "agree": [agree, len(rows)], "held": held}


def _held(rows: list[dict[str, Any]], evidence: str) -> dict[str, Any]:
    """Of `n` labels, how many hold at each limit, and of how many the control costs more than the limit."""
    tested = [row for row in rows if row[evidence] in row["test"]]
    ends = [(row["test"][row[evidence]][2], row["control"][row[evidence]][1]) for row in tested]
    found: dict[str, Any] = {"n": len(tested)}
    for limit in LIMITS:
        found[f"hold_{limit:g}"] = sum(high <= limit for high, _ in ends)
        found[f"control_{limit:g}"] = sum(low > limit for _, low in ends)
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """Print what was found of one model."""
    agree, count = found["agree"]
    print(f"\n{name}: {count} heads, {found['sequences']} windows, loss {found['loss']:.3f} ({found['seconds']:.0f} s)")
    used = [label for label in (*LABELS, NOTHING) if any(row[label] for row in found["confusion"].values())]
    print(f"labels from variance (rows) by labels from ablation at {Thresholds().loss:g} nats; {agree} agree")
    print(" " * 12 + "".join(f"{label:>15}" for label in used))
    for label, row in found["confusion"].items():
        if any(row.values()):
            print(f"{label:12}" + "".join(f"{row[other]:15}" for other in used))
    for evidence, groups in found["held"].items():
        for label, one in groups.items():
            told = (
                f"{one[f'hold_{limit:g}']} hold at {limit:g} (control costs more: {one[f'control_{limit:g}']})"
                for limit in LIMITS
            )
            print(f"  from {evidence}, {label}: n {one['n']}, {', '.join(told)}")
    print(flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
