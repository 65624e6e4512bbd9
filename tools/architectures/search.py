"""Where no architecture fits: find how a tiny model's scores are made of its tensors, and write it down as TOML."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyquery.checkpoints.family import parse
from keyquery.checkpoints.heads import Heads
from keyquery.checkpoints.layer import Layer
from keyquery.checkpoints.locations import section
from keyquery.checkpoints.reader import open_path
from keyquery.listening.products import Softmax
from keyquery.listening.softmaxes import Capture
from keyquery.proof.compare import (
    arrangements,
    content,
    errors,
    fitted,
    informative,
    memory_names,
    scores,
)
from keyquery.proof.masks import HIDDEN, sliding_window
from keyquery.proof.proof import Run, save, tiny_run
from keyquery.proof.tokens import entered, own_window
from keyquery.proof.tokens import windows as in_windows
from tools.architectures.candidates import (
    Names,
    Weight,
    head_keys,
    projections,
    qk_norms,
    ropes,
    scale_name,
    scope,
    sections,
    weights,
)

ANCHORS = ("fused", "key_down", "query")
QUERY = ("query", "query_down", "fused")
KEY = ("key", "key_down", "fused")
CLOSE = 3e-6  # relative error of a reading that is found: well below what a proof allows
WINDOWS = ("all", "some", "alternate", "pattern", "but every", "listed", "both sides")
# Readings without the term of positions, the likeliest first.
UNREAD: list[dict[str, Any]] = [{"rope": "unread"}, {"position": "unread"}, {"rope": "unread", "scale": "one"}]
NUMBER = re.compile(r"(^|\.)(\d+)(?=\.|$)")


@dataclass
class Finding:
    """How one softmax is read: names of roles with {layer}, facts, the layer's number and the config's section."""

    owner: str
    names: Names
    facts: dict[str, Any]
    layer: int
    error: float
    stem: str = ""  # of the query's tensor, or the fused one
    rotated: bool = False
    kind: str = ""  # of the layer, as `layer_types` says
    depth: int = 0  # layers of its stack in the file, with attention or not
    window: int | None = None  # of its mask


def sought(model_type: str) -> tuple[list[Finding], list[str]]:
    """The search in a tiny model of a type."""
    return search(*tiny_run(model_type))


def search(model: Any, runs: list[Run]) -> tuple[list[Finding], list[str]]:
    """Findings for all softmaxes of a model's runs, and the owners of those that nothing explains."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        seeker = _Seeker(model, Path(folder))
        owners: dict[str, list[tuple[Softmax, Capture, Tensor | None]]] = {}
        for capture, positions in runs:
            for event in capture.events:
                if informative(event.scores) and bool((event.scores > HIDDEN).any()):
                    owners.setdefault(event.owner, []).append((event, capture, positions))
        findings, lost = [], []
        for owner, events in owners.items():
            finding = seeker.find(owner, events)
            if finding is None:
                lost.append(owner)
            else:
                findings.append(finding)
        seeker.find_windows(findings)
    return findings, lost


class _Seeker:
    def __init__(self, model: Any, folder: Path) -> None:
        self.source = open_path(folder)
        modules = memory_names(model, folder)
        self.weights = weights(self.source.shapes, modules)
        self.modules = {weight.stem: weight.module for weight in self.weights}
        self.known: list[tuple[dict[str, Any], bool]] = []  # facts that explained other softmaxes

    def find(self, owner: str, events: list[tuple[Softmax, Capture, Tensor | None]]) -> Finding | None:
        """The first reading under which all events of an owner agree."""
        event, capture, _ = events[-1]
        near = scope(event, capture, self.weights)
        tried = 0
        for exactly in (True, False):
            for names, facts in self._readings(near, event, owner, exactly):
                tried += 1
                if tried > 3000:
                    return None
                finding = self._try(names, facts, events[-1], exactly)
                if finding is not None and self._error(finding, events[0], exactly)[0] <= CLOSE:
                    return self._finished(finding, near, events)
        return None

    def find_windows(self, findings: list[Finding]) -> None:
        """Say which layers of each stack have a sliding window, where the kinds of layers in the config do not."""
        stacks: dict[str, list[Finding]] = {}
        for finding in findings:
            stacks.setdefault(anchor(finding.names), []).append(finding)
        for stack in stacks.values():
            for option in (None, *WINDOWS):
                facts = [{**f.facts, **({"window": option} if option else {})} for f in stack]
                layers = [self._layers(replace(f, facts=facts_of)) for f, facts_of in zip(stack, facts, strict=True)]
                if all(facts_of and facts_of[0].window == f.window for facts_of, f in zip(layers, stack, strict=True)):
                    for finding, facts_of in zip(stack, facts, strict=True):
                        finding.facts = facts_of
                    break

    def _readings(
        self, near: list[Weight], event: Softmax, owner: str, exactly: bool
    ) -> Iterator[tuple[Names, dict[str, Any]]]:
        lead = event.scores.numel() // event.scores.shape[-1]
        for names, shape in projections(near):
            seen: set[tuple[int, ...]] = set()
            for path, config in sections(self.source.config, owner):
                for key, numbers in head_keys(config, owner):
                    if all(lead % number for number in numbers) or tuple(numbers) in seen:
                        continue
                    seen.add(tuple(numbers))
                    facts: dict[str, Any] = {**shape, "heads": key, **({"config": path} if path else {})}
                    for norm_names, norm_facts in qk_norms(near):
                        for rope in ropes(config, bool(norm_names)) if exactly else UNREAD:
                            yield {**names, **norm_names}, {**facts, **norm_facts, **rope}

    def _try(self, names: Names, facts: dict[str, Any], item: Any, exactly: bool) -> Finding | None:
        patterns, number = generalised(names)
        finding = Finding("", patterns, dict(facts), number, float("inf"))
        error, factor = self._error(finding, item, exactly)
        config = self._section(facts.get("config"))
        cap = next((k for k in config if "softcap" in k and config[k] and "final" not in k and "router" not in k), None)
        if not error <= CLOSE and error < 0.5 and exactly and cap:
            finding.facts["softcap"] = cap
            error, factor = self._error(finding, item, exactly)
        if error <= CLOSE and exactly and abs(factor - 1) > 1e-6:
            layers = self._layers(finding)
            usual = layers[0].weights.query.shape[2] ** -0.5 if layers else 1.0
            name = scale_name(config, factor * layers[0].scale, usual) if layers else None
            if name is None:
                return None
            finding.facts["scale"] = name
            error, factor = self._error(finding, item, exactly)
            if abs(factor - 1) > 1e-6:
                return None
        finding.error = error
        return finding if error <= CLOSE else None

    def _seen(self, event: Softmax) -> Tensor | None:
        """Which keys some head sees, (n, n); sinks stand behind the keys or before them."""
        n, m = event.scores.shape[-2:]
        if n < 3 or m < n:
            return None
        visible = (event.scores > HIDDEN).reshape(-1, n, m).any(0)
        first, last = visible[:, :n], visible[:, -n:]
        return first if int(first.sum()) <= int(last.sum()) else last

    def _section(self, name: str | None) -> Mapping[str, Any]:
        return section(self.source.config, name)

    def _layers(self, finding: Finding) -> list[Layer]:
        """The layer of a finding as it is read; two kernels in latent attention, none if it cannot be read."""
        facts = {"attention": [{**finding.facts, "names": [dict(finding.names)]}], "model_types": []}
        try:
            heads = Heads(self.source, parse("sought", facts), gaps=True)
            wanted = {role: name.format(layer=finding.layer) for role, name in finding.names.items()}
            anchor = next(role for role in ANCHORS if role in wanted)
            return [heads[i] for i, (p, _) in enumerate(heads._locations) if p.names.get(anchor) == wanted[anchor]]
        except (ValueError, StopIteration, KeyError):
            return []

    def _error(self, finding: Finding, item: Any, exactly: bool) -> tuple[float, float]:
        """Relative error of a reading up to a factor, and the factor."""
        (event, capture, positions), bad = item, (float("inf"), 0.0)
        layers = self._layers(finding)
        if not layers:
            return bad
        layer = layers[0]
        modules = [self.modules[stem] for stem in self._stems(finding)]
        x, y = (entered(capture, module, event.time, which) for which, module in enumerate(modules))
        if x is None or y is None:
            return bad
        try:
            tokens = in_windows(x, y, event, layer, capture, modules[0])
            ours = torch.stack([scores(part, tokens, positions, capture) for part in layers]).sum(0)
            ours = own_window(event, ours)
        except (RuntimeError, ValueError):
            return bad
        if not exactly:
            return content(event, "", ours, layer, positions).error, 1.0
        best = bad
        for arranged in arrangements(event.scores, ours):
            if layer.softcap:  # as it was before it was capped
                inside = (arranged / layer.softcap).clamp(-1 + 1e-12, 1 - 1e-12)
                arranged = torch.where(arranged > HIDDEN, layer.softcap * torch.atanh(inside), arranged)
            factor = fitted(ours, arranged)
            error, _ = errors(factor * ours, arranged)
            if error < best[0]:
                best = (error, factor)
                self.seen = arranged > HIDDEN
        return best

    def _stems(self, finding: Finding) -> list[str]:
        """The tensors that make queries and keys of tokens."""
        roles = finding.names
        chosen = [next(roles[r] for r in known if r in roles) for known in (QUERY, KEY)]
        return [name.format(layer=finding.layer) for name in chosen]

    def _finished(self, finding: Finding, near: list[Weight], events: list[Any]) -> Finding:
        """With kind, mask, and the other roles."""
        event, capture, _ = events[-1]
        finding.owner, finding.rotated = event.owner, any(layer.rope is not None for layer in self._layers(finding))
        inputs = [entered(capture, self.modules[stem], event.time, i) for i, stem in enumerate(self._stems(finding))]
        if not _same(*inputs):
            finding.facts["kind"] = "cross"
        seen = self._seen(event)
        if seen is not None and finding.facts.get("kind") != "cross":
            n = len(seen)
            finding.window = sliding_window(seen)
            if not bool((seen & torch.ones(n, n, dtype=torch.bool).triu(1)).any()):
                section_of = self._section(finding.facts.get("config"))
                finding.facts["causal"] = "always" if section_of.get("use_bidirectional_attention") is True else True
        section_of = self._section(finding.facts.get("config"))
        if finding.facts.get("config") and section_of.get("model_type"):
            finding.facts["of"] = section_of["model_type"]
        kinds = section_of.get("layer_types")
        if isinstance(kinds, list) and finding.layer < len(kinds):
            finding.kind = str(kinds[finding.layer])
        self._others(finding, near, capture, event)
        stack = generalised({"a": finding.stem})[0]["a"].partition("{layer}")[0]
        numbers = [int(name[len(stack) :].split(".")[0]) for name in self._in(stack)] if stack else []
        finding.depth = max(numbers, default=finding.layer) + 1
        return finding

    def _in(self, stack: str) -> Iterator[str]:
        return (name for name in self.source.shapes if name.startswith(stack) and name[len(stack) :][:1].isdecimal())

    def _others(self, finding: Finding, near: list[Weight], capture: Capture, event: Softmax) -> None:
        """Values and outputs by their names, and the norm whose output is the input of the queries."""
        finding.stem = next(finding.names[r] for r in ANCHORS if r in finding.names).format(layer=finding.layer)
        stem = self._stems(finding)[0]
        call = capture.before(self.modules[stem], event.time)
        entering = None if call is None else next(iter([*call.inputs, *call.names.values()]), None)
        for weight in self.weights:
            if len(weight.shape) == 1 and weight.ending == ".weight" and entering is not None:
                made = capture.before(weight.module, event.time)
                if made is not None and made.out is not None and _same(made.out, entering):
                    self._norm(finding, weight, capture, event)
        for weight in near:
            if len(weight.shape) == 2 and weight.words & {"v", "value", "values"} and "query" in finding.names:
                finding.names.setdefault("value", generalised({"v": weight.stem})[0]["v"])
        around = event.owner if any(w.under(event.owner) for w in near) else event.owner.rpartition(".")[0]
        for weight in self.weights:
            later = capture.after(weight.module, event.time) if len(weight.shape) == 2 else None
            used = weight.stem in finding.names.values() or "gate" in weight.words
            if later is not None and weight.under(around) and not used:
                finding.names.setdefault("output", generalised({"o": weight.stem})[0]["o"])

    def _norm(self, finding: Finding, weight: Weight, capture: Capture, event: Softmax) -> None:
        pattern, number = generalised({"norm": weight.stem})
        made = capture.before(weight.module, event.time)
        if made is None or not made.inputs or made.out is None:
            return
        x = made.inputs[0].double()
        rms = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        layer = x - x.mean(-1, keepdim=True)
        layer = layer / (layer.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        gain = self.source.rows(weight.stem + weight.ending).double()
        bias = weight.stem + ".bias"
        shift = self.source.rows(bias).double() if bias in self.source.shapes else 0.0
        fixed = "query_norm" in finding.names
        offsets = [finding.facts.get("gain_offset", 0.0)] if fixed else [0.0, 1.0]
        for (kind, normed), offset in product((("rms", rms), ("layer", layer)), offsets):
            if x.shape[-1] == len(gain) and torch.allclose(
                normed * (gain + offset) + shift, made.out.double(), atol=1e-3
            ):
                finding.names["norm"] = _relative(pattern["norm"], number, weight.stem, finding.layer)
                finding.facts |= {"norm_kind": "rms"} if kind == "rms" else {}
                finding.facts |= {"gain_offset": offset} if offset else {}
                return


def anchor(names: Names) -> str:
    """The name that places of a layer are found by."""
    return next(names[role] for role in ANCHORS if role in names)


def _relative(pattern: str, number: int, stem: str, layer: int) -> str:
    if "{layer}" not in pattern or number == layer:
        return pattern
    return pattern.replace("{layer}", "{previous}") if number == layer - 1 else stem


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)


def generalised(names: Names) -> tuple[Names, int]:
    """Names with their last number as {layer}, and that number."""
    first = next(iter(names.values()))
    numbers = list(NUMBER.finditer(first))
    if not numbers:
        return dict(names), 0
    last = numbers[-1]
    prefix, number = first[: last.start(2)], int(last[2])
    changed = {}
    for role, name in names.items():
        inside = name.startswith(f"{prefix}{number}.")
        changed[role] = f"{prefix}{{layer}}{name[len(prefix) + len(str(number)) :]}" if inside else name
    return changed, number
