"""`prove`: whether a model type is read exactly."""

from __future__ import annotations

import inspect
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from keyquery.checkpoints.reader import open_path, read_recognised
from keyquery.checkpoints.sources import read_json
from keyquery.listening.softmaxes import Capture, captured
from keyquery.proof.compare import CONTENT, Comparison
from keyquery.proof.inputs import inputs_for
from keyquery.proof.models import CannotBuildError, brief, build, overrides, sparse, tiny_configs
from keyquery.proof.norms import norm_errors
from keyquery.support.extras import optional

TOLERANCE = 1e-5
DECAYS = ("A_log", "slope_rate", "decay")  # of states, in modules without a softmax
RUNS = ((8, 1, 0), (9, 0, 0), (13, 2, 1))  # tokens; positions shift + spread·i
PLACED = ("position", "rotary", "rope", "freqs", "cos", "cache")  # in arguments that a part needs from outside
T = TypeVar("T")
Run = tuple[Capture, torch.Tensor | None]  # what was captured, and the positions of the tokens


@dataclass(frozen=True)
class Proof:
    """Whether the checkpoints of a model type are read exactly: every softmax of a tiny model against our scores."""

    model_type: str  # of transformers
    status: str  # as in `prove`: "exact", "wrong", "missing layers", "refused", …
    reason: str = ""  # of the status
    family: str | None = None  # the architecture that read it
    error: float | None = None  # the largest, relative, up to a constant per query
    modules: dict[str, float] = field(default_factory=dict)  # error by attention module
    missing: list[str] = field(default_factory=list)  # attention modules that are not read
    untested: list[str] = field(default_factory=list)  # layers that are read, and that no input reaches
    content: list[str] = field(default_factory=list)  # layers that are read without their term of positions
    norms: dict[str, str] = field(default_factory=dict)  # what is wrong with the norm that feeds a layer
    transformers: str = ""  # version

    def __str__(self) -> str:
        count = len(self.modules)
        covered = f", {count} attention module{'' if count == 1 else 's'}" if count else ""
        error = f", largest relative error {self.error:.1e}" if self.error is not None else ""
        family = f", family {self.family}" if self.family else ""
        text = f"{self.model_type}: {self.status}{covered}{error}{family} (transformers {self.transformers})"
        wrong = [f"  {name}: {error:.1e}" for name, error in self.modules.items() if not error <= TOLERANCE]
        lines = [*wrong, *(f"  {name}: not read" for name in self.missing)]
        lines += [f"  {name}: not run" for name in self.untested]
        return "\n".join([text, *([f"  {self.reason}"] if self.reason else []), *lines])

    def as_dict(self) -> dict[str, Any]:
        """Its fields, as JSON has them."""
        return asdict(self)


def prove(source: str | Path | Mapping[str, Any]) -> Proof:
    """Compare all attention scores of a tiny random model with those that its saved checkpoint is read to have.

    Parameters
    ----------
    source
        A config type of transformers ("qwen3"), a folder with a config.json, or the values of a config. Sizes are
        reduced; every kind of layer stays.

    Returns
    -------
    Proof
        `status` is "exact" (relative error at most 1e-5, at two sets of positions, in every attention module),
        "wrong", "missing layers", "refused", "no softmax attention" or "cannot be built".

    Examples
    --------
    >>> kq.testing.prove("gpt2").status
    'exact'
    """
    facts = _facts(source)
    model_type = str(facts["model_type"]) if isinstance(facts, Mapping) else facts
    about = {"model_type": model_type, "transformers": optional("transformers", "prove").__version__}
    try:
        model, runs = tiny_run(facts)
    except CannotBuildError as error:
        return Proof(status="cannot be built", reason=str(error), **about)
    return judged(model, runs, about)


def tiny_run(source: str | Mapping[str, Any]) -> tuple[Any, list[Run]]:
    """The smallest model of a type that runs, and its runs; the one in which most attention modules run."""

    def attempts() -> Iterator[Callable[[], tuple[int, tuple[Any, list[Run]]]]]:
        try:
            yield from (partial(_quietly, config) for config in tiny_configs(source))
        except CannotBuildError as error:
            yield partial(_fail, error)

    try:
        return _best(attempts())
    except Exception as error:
        reason = str(error) if isinstance(error, CannotBuildError) else brief(error)
        raise CannotBuildError(reason) from error


def _quietly(config: Any) -> tuple[int, tuple[Any, list[Run]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, runs = run(config)
    return len(_idle(model, runs)), (model, runs)


def _fail(error: Exception) -> Any:
    raise error


def _best(attempts: Iterable[Callable[[], tuple[int, T]]]) -> T:
    """The result of the attempt that leaves fewest modules idle, the first that leaves none; fails as the first did."""
    best: tuple[int, T] | None = None
    failure: Exception | None = None
    for attempt in attempts:
        try:
            idle, result = attempt()
        except Exception as error:
            failure = failure or error
            continue
        if best is None or idle < best[0]:
            best = idle, result
        if not idle:
            break
    if best is None:
        raise failure or RuntimeError("nothing ran")
    return best[1]


def _facts(source: str | Path | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        facts = read_json(file)
        if not isinstance(facts.get("model_type"), str):
            raise ValueError(f"{file} has no model_type")
        return facts
    return str(source)


def run(config: Any) -> tuple[Any, list[Run]]:
    """The model, and two runs of it; parts that a run does not reach are run by themselves."""

    def attempt(alone: bool, dtype: torch.dtype) -> tuple[int, tuple[Any, list[Run]]]:
        model = _as(build(config), dtype)
        runs = [run for sizes in RUNS for run in _runs(model, dtype, alone, *sizes)]
        return len(_idle(model, runs)), (model, runs)

    return _best(partial(attempt, *kind) for kind in product((False, True), (torch.float64, torch.float32)))


def _as(model: Any, dtype: torch.dtype) -> Any:
    """A model in another precision; complex rotations stay complex."""
    turned = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    turned = [(module, name, buffer) for module, name, buffer in turned if buffer is not None and buffer.is_complex()]
    model = model.to(dtype)
    for module, name, buffer in turned:
        module._buffers[name] = buffer.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return model


def _idle(model: Any, runs: list[Run]) -> list[str]:
    """Attention modules that no run has reached."""
    ran = {name for capture, _ in runs for name in capture.ran}
    return [name for name in attention_modules(model) if name not in ran]


def _runs(model: Any, dtype: torch.dtype, alone: bool, length: int, spread: int, shift: int) -> list[Run]:
    """Runs of the model, and of those of its sub-models that it does not reach; of other parts if `alone`."""
    finished, failed, reached = [], None, set[str]()
    for name, part in _parts(model, alone):
        lonely = [a for a in attention_modules(part, name) if a not in reached]
        if name and not lonely:
            continue
        try:
            finished.append(_one_run(model, name, dtype, length, spread, shift))
            reached |= finished[-1][0].ran
        except Exception as error:
            failed = failed or error
    if not finished or (failed is not None and not any(capture.events for capture, _ in finished)):
        raise failed if failed is not None else RuntimeError("nothing ran")
    return finished


def _parts(model: Any, alone: bool) -> Iterator[tuple[str, Any]]:
    """The model, its sub-models, then whatever else can run alone: it takes no positions and is not causal."""
    base = optional("transformers", "prove").PreTrainedModel
    modules = dict(model.named_modules())
    yield from ((name, part) for name, part in modules.items() if isinstance(part, base))
    for name, part in modules.items() if alone else ():
        names = inspect.signature(part.forward).parameters
        placed = any(word in name for name in names for word in PLACED)
        masked = any("mask" in name for name in names)
        causal = any(getattr(modules[a], "is_causal", masked) for a in attention_modules(part, name))
        listed = name in overrides().get(model.config.model_type, {}).get("parts", {})
        if listed or (not isinstance(part, (base, nn.ModuleList)) and names and not placed and not causal):
            yield name, part


def _one_run(model: Any, name: str, dtype: torch.dtype, length: int, spread: int, shift: int) -> Run:
    """A run of a part of a model, with the first arguments under which all of its attention runs, or most."""
    part = model.get_submodule(name)
    kind = getattr(getattr(part, "config", None), "model_type", None)
    known = overrides().get(kind or "", {}).get("inputs", {})
    known = known if kind else overrides().get(model.config.model_type, {}).get("parts", {}).get(name, {})
    modules = set(attention_modules(part, name))

    def attempt(inputs: Mapping[str, Any]) -> tuple[int, Run]:
        inputs = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
        torch.manual_seed(3)
        with captured(model) as capture:
            capture.inputs = inputs
            part(**inputs)
        if any(bool(event.scores.isnan().any()) for event in capture.events):
            raise ArithmeticError("its scores are NaN")  # masks of float32 that overflow in float64
        if modules and not modules & capture.ran:
            raise RuntimeError(f"no input reaches the attention of {name or 'the model'}")
        positions = inputs.get("position_ids")
        return len(modules - capture.ran), (capture, None if positions is None else positions[0])

    candidates = inputs_for(part, length, spread, shift, known, model.config)
    return _best(partial(attempt, inputs) for inputs in candidates)


def attention_modules(model: nn.Module, prefix: str = "") -> list[str]:
    """Modules that look like attention: by the names of their classes, the outermost of each nest."""
    names: list[str] = []
    for name, module in model.named_modules(prefix=prefix):
        kind = type(module).__name__.lower()
        inside = any(name.startswith(f"{other}.") for other in names)
        looks = ("attention" in kind or "attn" in kind) and "mask" not in kind and "linear" not in kind
        looks = looks and not any(part.endswith(DECAYS) for part in module.state_dict())
        if looks and not inside and sum(p.ndim > 1 for p in module.parameters()) >= 2:
            names.append(name)
    return names


def judged(model: nn.Module, runs: list[Run], about: dict[str, Any], facts: Mapping[str, Any] | None = None) -> Proof:
    """The proof of a model from its runs; `facts` are its config as a file may state it, beside what is saved."""
    owners = {event.owner for capture, _ in runs for event in capture.events}
    idle = _idle(model, runs)
    if not owners and not idle:
        return Proof(status="no softmax attention", **about)
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(model, folder)
        except Exception as error:
            return Proof(status="cannot be built", reason=f"it cannot be saved: {brief(error)}", **about)
        try:
            compared = [_comparison(model, Path(folder)), *_of_sparse_config(model, Path(folder))]
            compared += [] if facts is None else [_comparison(model, Path(folder), facts)]
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = str(error).replace(folder, "the checkpoint")
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return Proof(status="refused", reason=kind + reason, missing=sorted(owners), **about)
        return _verdict(compared, model, runs, idle, about)


def agrees(model: nn.Module, runs: list[Run], folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a saved model is read exactly by a config that is not its own."""
    try:
        compared = _comparison(model, folder, facts)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return False
    return _verdict([compared], model, runs, _idle(model, runs), {"model_type": ""}).status == "exact"


def _comparison(model: nn.Module, folder: Path, config: Any = None) -> Comparison:
    return Comparison(read_recognised(open_path(folder, config), trusted=True), model, folder)


def _of_sparse_config(model: Any, folder: Path) -> list[Comparison]:
    """The comparison with a config that leaves out what is a default; none where that is refused."""
    try:
        few = sparse(model.config)
    except Exception:  # a config that its class cannot make of few values
        return []
    try:
        return [_comparison(model, folder, few)]
    except ValueError:  # refused
        return []


def save(model: Any, folder: str) -> None:
    """Save a model without a progress bar."""
    logging = optional("transformers", "prove").logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def _mask_differs(whys: list[str]) -> bool:
    """Whether a layer's mask is read wrongly: sees what it should not once, or never what it should."""
    once = any(why.startswith(("causal", "window")) for why in whys)
    return once or all(why.startswith("not causal") for why in whys)


def _verdict(
    comparisons: list[Comparison], model: nn.Module, runs: list[Run], idle: list[str], about: dict[str, Any]
) -> Proof:
    matches = [match for one in comparisons for capture, places in runs for match in one.matches(capture, places)]
    norms = dict(row for one in comparisons for capture, _ in runs for row in norm_errors(one, model, capture))
    compared = comparisons[0]
    family = compared.heads.family.name
    errors: dict[str, float] = {}
    for match in matches:
        if match.layer is not None:
            error = float("inf") if math.isnan(match.error) else match.error  # max(0.0, nan) is 0.0
            errors[match.owner] = max(errors.get(match.owner, 0.0), error)
    missing = sorted({match.owner for match in matches if match.layer is None} - set(errors))
    untested = sorted({name for name in compared.groups if name not in compared.seen})
    untested += [name for name in idle if not any(name in other or other in name for other in untested)]
    why = dict.fromkeys(match.why for match in matches if match.why and match.layer is not None)
    worst = max(errors.values(), default=None)
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE]
    masks = [owner for owner in errors if _mask_differs([match.why for match in matches if match.owner == owner])]
    bad = wrong or masks or norms
    status = "wrong" if bad else "missing layers" if missing else "cannot be built" if untested else "exact"
    reason = "; ".join([*why, *(f"{layer}: {text}" for layer, text in norms.items())][:2])
    if status == "cannot be built":
        reason = f"no input reaches {len(untested)} attention modules"
    rest: dict[str, Any] = {"error": worst, "modules": errors, "missing": missing, "untested": untested}
    rest["content"] = [name for name, layers in compared.groups.items() if layers[0].position in CONTENT]
    rest["norms"] = norms
    return Proof(status=status, reason=reason, family=family, **rest, **about)
