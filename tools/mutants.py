"""Do the tests see mistakes? Seeded mutants of the package, and the share that the tests of their module kill.

A mutant changes one operator, comparison, constant or condition of one module. Its tests are the file of its name
(`tests/a/test_b.py` of `a/b.py`), else those of the nearest folder that has any, and the module's own examples.

    python tools/mutants.py --count 200 --seed 0 --out build/mutants.json [--root OTHER_CHECKOUT] [--jobs 2]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}
SECONDS = 300  # of the tests of a mutant: one that takes longer is killed, as an endless loop is


@dataclass(frozen=True)
class Mutant:
    """A file of which the text from `start` to `end` is replaced."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str


def mutants_of(root: Path, path: Path) -> Iterator[Mutant]:
    """All mutants of a module."""
    text = path.read_bytes()
    tree = ast.parse(text)
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    silent = {id(child) for node in ast.walk(tree) for part in _silent(node) for child in ast.walk(part)}
    for node in ast.walk(tree):
        changed = None if id(node) in silent else _changed(node)
        if changed is not None:
            assert isinstance(node, ast.expr)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            new = f"({ast.unparse(changed)})"
            yield Mutant(str(path.relative_to(root)), node.lineno, start, end, text[start:end].decode(), new)


def _silent(node: ast.AST) -> Iterator[ast.AST]:
    """What a mutant of would change no behaviour, or none that a test should see: annotations, texts, messages."""
    for name in ("annotation", "returns"):
        if (part := getattr(node, name, None)) is not None:
            yield part
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
        yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        yield node
    yield from getattr(node, "decorator_list", ())


def _changed(node: ast.AST) -> ast.AST | None:
    """A node with a mistake in it."""
    new = deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(new.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(new, (ast.BinOp, ast.BoolOp)) and type(new.op) in SWAPS:
        new.op = SWAPS[type(new.op)]()  # type: ignore[assignment]
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, (bool, int, float)):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    else:
        return None
    return new


def tests_of(root: Path, file: str) -> list[str]:
    """The tests of a module, and the module itself for its examples."""
    inner = Path(file).relative_to("src/keyquery")
    named = root / "tests" / inner.parent / f"test_{inner.name}"
    if named.exists():
        return [str(named), file]
    for folder in (inner.with_suffix(""), *inner.parents):
        if any((root / "tests" / folder).glob("test_*.py")):
            return [str(root / "tests" / folder), file]
    return [file]


def killed(mutant: Mutant, root: Path) -> str:
    """What becomes of a mutant in a copy of the project: killed, survived or untested."""
    path = root / mutant.file
    text = path.read_bytes()
    path.write_bytes(text[: mutant.start] + mutant.new.encode() + text[mutant.end :])
    paths = [str(root / part) for part in ("src", "studies", ".")]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    try:
        tests = tests_of(root, mutant.file)
        code = subprocess.run(
            [*command, *tests], cwd=root, env=environment, timeout=SECONDS, capture_output=True, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        code = 1
    finally:
        path.write_bytes(text)
    return {0: "survived", 5: "untested"}.get(code, "killed")


def main() -> None:
    """Run the tests of random mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the checkout")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="at once")
    parser.add_argument("--under", default="", help="of modules of this folder alone, such as learn/events")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    files = sorted((asked.root / "src/keyquery" / asked.under).rglob("*.py"))
    every = [mutant for path in files for mutant in mutants_of(asked.root, path)]
    chosen = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        copies: Queue[Path] = Queue()
        for number in range(asked.jobs):
            copy = Path(folder, str(number))
            shutil.copytree(
                asked.root, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "build", "scratch")
            )
            copies.put(copy)

        def run(mutant: Mutant) -> dict[str, object]:
            root = copies.get()
            try:
                result = killed(mutant, root)
            finally:
                copies.put(root)
            print(f"{result:9} {mutant.file}:{mutant.line}  {mutant.old}  ->  {mutant.new}", flush=True)
            return {**asdict(mutant), "result": result}

        rows = list(pool.map(run, chosen))
    counts = Counter(str(row["result"]) for row in rows)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({"of": len(every), "counts": counts, "rows": rows}, indent=1) + "\n")
    print(dict(counts), f"of {len(every)} possible")


if __name__ == "__main__":
    main()
