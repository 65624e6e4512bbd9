"""The package layout: imports go upwards only, importing is light, public names are the promised ones."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path

import jaxtyping
import pytest
import torch

import keyquery as kq
from keyquery.kinds import ESTIMATORS, imported, kinds
from keyquery.reading import CLASSES

SOURCE = Path(kq.__file__).parent
PUBLIC = {name: f"keyquery.{name}" if module == "keyquery" else module for name, module in kq._PUBLIC.items()}
STUDIES = SOURCE.parent.parent / "studies" / "keyquery_studies"
# From top to bottom; a package imports only from packages above it.
PACKAGES = [
    *("_version", "support", "kinds", "reading", "pages", "forms", "checkpoints", "layers", "listening", "intervene"),
    *("proof", "instruments", "learn", "survey", "testing", "models", "cli", "__main__"),
]
HEAVY = ["transformers", "sklearn", "scipy", "pandas", "matplotlib", "triton", "dask", "ot", "PIL", "faiss"]
HEAVY += ["distributed", "pyarrow", "typer", "rich"]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_packages(tree: ast.AST) -> set[str]:
    """Packages that import statements load, also inside functions; a public name loads the package that it is in."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            public = node.module == "keyquery"
            names |= {PUBLIC.get(alias.name, f"keyquery.{alias.name}") for alias in node.names} if public else set()
            names |= set() if public else {node.module}
    assert not any(name.startswith("keyquery_studies") for name in names), "the library does not import studies"
    return {name.split(".")[1] for name in names if name.startswith("keyquery.")}


def modules() -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def matching(pattern: str, *roots: Path) -> set[tuple[str, str]]:
    """Files and what of a pattern stands in them."""
    files = [(root, path) for root in roots or (SOURCE,) for path in sorted(root.rglob("*.py"))]
    return {
        (str(path.relative_to(root)), match[1])
        for root, path in files
        for match in re.finditer(pattern, path.read_text(), re.MULTILINE)
    }


def test_every_module_is_in_a_package_of_the_layout():
    assert {package_of(path) for path in modules()} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_upwards(package):
    for path in (path for path in modules() if package_of(path) == package):
        for other in imported_packages(tree(path)) - {package}:
            assert other in PACKAGES, f"{path} imports {other}, which is neither a package nor a public name"
            assert PACKAGES.index(other) < PACKAGES.index(package), f"{path} imports {other}, which is below it"
    assert imported_packages(ast.parse("from keyquery import EventModel, look")) == {"learn", "instruments"}


def test_one_table_names_modules_and_reading_names_pages():
    named = matching(rf'"keyquery\.({"|".join(PACKAGES)})\b')
    below = {
        (file, name)
        for file, name in named
        if file not in ("kinds.py", "__init__.py") and PACKAGES.index(name) > PACKAGES.index(package_of(SOURCE / file))
    }
    assert below == {("reading.py", "pages")}


def test_few_modules_import_by_text():
    tables = {"__init__.py", "kinds.py", "reading.py", "cli/commands.py"}  # of names, of kinds, and of commands
    libraries = {"support/extras.py", "proof/models.py", "pages/tables.py"}  # rich among them
    assert {file for file, _ in matching(r"\b(import_module|__import__)\(")} == tables | libraries


def test_who_starts_processes():
    libraries = r"^\s*(?:import|from) (subprocess|multiprocessing|pty)\b"
    functions = r"(ProcessPoolExecutor|\bos\.(?:fork|spawn|posix_spawn|exec[lv]|system|popen|startfile)\w*)\("
    assert {file for pattern in (libraries, functions) for file, _ in matching(pattern)} == {"survey/executors.py"}


def test_folders_stay_small():
    for folder in {path.parent for root in (SOURCE, STUDIES) for path in root.rglob("*.py")}:
        count = len(list(folder.glob("*.py")))
        assert count <= 16, f"{folder.name} holds {count} files"


def test_every_kind_display_and_estimator_is_where_the_table_says():
    for name, kind in kinds().items():
        import_module(kind.module)
        assert CLASSES[name].__module__ == kind.module
        show = import_module(kind.show) if kind.show else None
        for display in ("lines", "page", "svg"):
            if function := getattr(show, display, None):
                first, *rest = signature(function).parameters.values()
                assert first.name == "reading"
                assert all(parameter.default is not parameter.empty for parameter in rest), (kind.show, display)
        for function in getattr(show, "FIGURES", {}).values():
            assert list(signature(function).parameters)[:2] == ["reading", "pyplot"], kind.show
    for name, module in ESTIMATORS.items():
        assert imported(f"{module}:{name}") is getattr(kq, name)


COMPILER = ["torch._dynamo", "sympy"]
STEPS = {  # one after the other, in one process: what each must not load
    "import keyquery": [*HEAVY, *COMPILER],
    "keyquery.PrimalAttention(8, 2, 2)(torch.zeros(1, 4, 8))": ["triton", *COMPILER],
    "import keyquery.cli": ["transformers", "sklearn", *COMPILER],
}


def test_importing_and_first_steps_are_light():
    lines = [f"{step}\nprint([name for name in {left!r} if name in sys.modules])" for step, left in STEPS.items()]
    code = "import sys, torch\n" + "\n".join(lines)
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == ["[]"] * len(STEPS)


def test_opening_a_look_loads_no_other_kind_and_writing_it_needs_no_package_of_the_command_line():
    reading = kq.look(torch.nn.MultiheadAttention(8, 2))
    code = f"""
import sys
sys.modules.update(rich=None, typer=None)
import keyquery as kq
look = kq.Reading.load({reading.to_json()!r})
assert look.kind == "look"
left = ("keyquery.learn", "keyquery_studies.", "matplotlib")
print([name for name in sys.modules if name.startswith(left) and name != "keyquery_studies.registry"])
import keyquery.pages, torch
reading = kq.look(torch.nn.MultiheadAttention(8, 2))
assert kq.Reading.load(reading.to_json()) == reading and reading._repr_html_()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names():
    assert dir(kq) == sorted(kq.__all__)
    for name in kq.__all__:
        assert getattr(kq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'frm'"):
        kq.frm  # noqa: B018


def test_files_and_functions_stay_small():
    for path in (*modules(), *STUDIES.rglob("*.py")):
        text = path.read_text()
        assert len(text.splitlines()) <= 420, f"{path.name} is too long to read in one sitting"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                said = node.body[0] if ast.get_docstring(node) else None  # parameters are told one by one: no code
                lines = node.end_lineno - node.lineno - (said.end_lineno - said.lineno + 1 if said else 0)
                assert lines < 60, f"{path.name}: {node.name} is too long"


# Who writes files: `keyquery.support.files`, which writes them whole or not at all. What else seems to, and why it may:
WRITERS = {
    ("support/tensorboard.py", "SummaryWriter"),  # TensorBoard's own file, to which lines are only added
    *((file, "np.save") for file in ("cli/rerank.py", "common/store.py")),  # into memory
    *(("pages/figures.py", "figure.savefig"), ("starts/training.py", "torch.save")),  # into memory
    ("learn/training/loop.py", "torch.save"),  # within `with writing(…)`, like those of the next line
    *((file, "save_file") for file in ("lineage/rows.py", "lineage/models.py")),
    ("checkpoints/formats/torch_files.py", "torch.save"),  # in a message
}


def test_files_are_written_by_one_module():
    files = r"\w+\.write_text|\w+\.write_bytes|\bsave_file|\.tofile|SummaryWriter|\.rename|\bos\.(?:rename|replace)"
    writes = rf"({files}|\b(?:torch|np|figure)\.save\w*)\(|\b(open)\([^)\n]*[\"'][wax]"
    calls = matching(writes, SOURCE, STUDIES)
    assert {(file, name) for file, name in calls if file != "support/files.py"} == WRITERS


def test_shapes_are_checked_and_uninitialised_memory_is_poisoned_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        kq.Form(torch.ones(2, 4), torch.ones(3, 4))
    assert torch.empty(1000).isnan().all()
