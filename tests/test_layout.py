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
    "_version",
    "support",
    "kinds",
    "reading",
    "pages",
    "forms",
    "checkpoints",
    "layers",
    "listening",
    "intervene",
    "proof",
    "instruments",
    "learn",
    "survey",
    "testing",
    "models",
    "cli",
    "__main__",
]

HEAVY = [
    "transformers",
    "sklearn",
    "scipy",
    "pandas",
    "matplotlib",
    "triton",
    "dask",
    "ot",
    "PIL",
    "faiss",
    "distributed",
    "pyarrow",
    "typer",
    "rich",
]


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


def named_packages(tree: ast.AST) -> set[str]:
    """Packages whose modules a text names, as "keyquery.pages" or "keyquery.pages.document:document" do."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
    ]
    return {name for text in texts for name in re.findall(r"\bkeyquery\.([a-z_]+)", text) if name in PACKAGES}


def imports_by_text(tree: ast.AST) -> bool:
    """Whether a module imports what a text names."""
    return any(
        isinstance(node, ast.Call) and name_of(node) in ("import_module", "__import__") for node in ast.walk(tree)
    )


def starts_processes(tree: ast.AST) -> bool:
    """Whether a module can start a process: by a library, or by a function of os."""
    starters = re.compile(r"fork\w*|spawn\w*|posix_spawn\w*|exec[lv]\w*|system|popen|startfile")
    libraries = ("subprocess", "multiprocessing", "pty", "ProcessPoolExecutor")
    for node in ast.walk(tree):
        named = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] in libraries for name in named):
            return True
        of_os = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "os"
        if of_os and starters.fullmatch(node.attr):
            return True
    return False


def modules():
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def test_every_module_is_in_a_package_of_the_layout():
    assert {package_of(path) for path in modules()} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_upwards(package):
    for path in (path for path in modules() if package_of(path) == package):
        for other in imported_packages(tree(path)) - {package}:
            assert other in PACKAGES, f"{path} imports {other}, which is neither a package nor a public name"
            assert PACKAGES.index(other) < PACKAGES.index(package), f"{path} imports {other}, which is below it"


def test_one_table_names_modules_and_reading_names_pages():
    downwards = {
        (package_of(path), name)
        for path in modules()
        for name in named_packages(tree(path))
        if package_of(path) != "kinds" and PACKAGES.index(name) > PACKAGES.index(package_of(path))
    }
    assert downwards == {("reading", "pages")}


def test_few_modules_import_by_text():
    importing = {str(path.relative_to(SOURCE)) for path in modules() if imports_by_text(tree(path))}
    tables = {"kinds.py", "reading.py", "cli/commands.py"}  # of kinds, and of commands
    assert importing == tables | {
        "support/extras.py",
        "proof/models.py",
        "pages/tables.py",
    }  # libraries, rich among them


def test_who_starts_processes():
    starting = {str(path.relative_to(SOURCE)) for path in modules() if starts_processes(tree(path))}
    assert starting == {"survey/executors.py"}


def test_doors_are_seen():
    for line in ('K = {"a": "keyquery.cli.look"}', 'import_module(f"keyquery.cli.{name}")', 'x = "keyquery.cli:main"'):
        assert named_packages(ast.parse(line)) == {"cli"}
    assert imported_packages(ast.parse("from keyquery import EventModel, look")) == {"learn", "instruments"}
    assert imports_by_text(ast.parse("importlib.import_module(a)"))
    for line in ("import subprocess", "from concurrent.futures import ProcessPoolExecutor", "os.execv(a, b)"):
        assert starts_processes(ast.parse(line)), line


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


def public_definitions(tree):
    """Functions, classes and methods whose names, and whose owners' names, are public."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node)


def test_every_public_function_and_method_has_a_docstring():
    for path in (*modules(), *STUDIES.rglob("*.py")):
        for node in public_definitions(tree(path)):
            assert ast.get_docstring(node), f"{path.name}: {node.name}"


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
    ("keyquery/support/tensorboard.py", "SummaryWriter"),  # TensorBoard's own file, to which lines are only added
}
WRITING = {"write_text", "write_bytes", "save_file", "tofile", "SummaryWriter", "rename", "replace"}
INTO_MEMORY = {"save", "savez", "savez_compressed", "savefig"}  # of torch, numpy and matplotlib


def writes(tree):
    """Calls that put something into a file, by name; not those within `with writing(…)`, nor those into memory."""
    inside = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.With)
        and any(isinstance(i.context_expr, ast.Call) and name_of(i.context_expr) == "writing" for i in block.items)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in inside:
            continue
        name, first = name_of(node), node.args[0] if node.args else None
        method = isinstance(node.func, ast.Attribute)
        if name == "open" and any("r" not in mode for mode in modes(node)):
            yield name
        elif name in ("rename", "replace") and not (method and len(node.args) == 1 and not node.keywords):
            continue  # of texts and dataclasses
        elif (
            name in INTO_MEMORY and method and getattr(node.func.value, "id", "") in ("torch", "np", "numpy", "figure")
        ):
            if not (isinstance(first, ast.Name) and first.id in ("packed", "data", "kept")):
                yield name
        elif name in WRITING and (method or name not in ("write_text", "rename", "replace")):
            yield name


def name_of(call):
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def modes(call):
    """The texts that a call of open is given, of which one may be its mode."""
    given = [
        *call.args[isinstance(call.func, ast.Name) :],
        *(word.value for word in call.keywords if word.arg == "mode"),
    ]
    return [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def test_files_are_written_by_one_module():
    found = {
        (str(path.relative_to(root.parent)), name)
        for root in (SOURCE, STUDIES)
        for path in root.rglob("*.py")
        if path != SOURCE / "support" / "files.py"
        for name in writes(tree(path))
    }
    assert found <= WRITERS, f"written past keyquery.support.files: {sorted(found - WRITERS)}"


def test_writing_past_the_one_module_is_seen():
    for line in ("open('a', 'w')", "p.write_text('x')", "p.open('ab')", "torch.save(x, path)", "np.savez(path, a=1)"):
        assert list(writes(ast.parse(line))), line
    for line in ("open('a')", "p.open('rb')", "write_text(p, 'x')", "with writing(p) as q:\n  torch.save(x, q)"):
        assert not list(writes(ast.parse(line))), line


def test_shapes_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        kq.Form(torch.ones(2, 4), torch.ones(3, 4))


def test_uninitialised_memory_is_poisoned_in_tests():
    assert torch.empty(1000).isnan().all()
