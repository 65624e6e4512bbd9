"""The reference under docs/api names all that is public, and nothing that does not exist; read, not imported."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import keyquery as kq

SOURCE = Path(kq.__file__).parent
STUDIES = SOURCE.parent.parent / "studies"
ENTRIES = [
    entry
    for page in sorted((SOURCE.parent.parent / "docs/api").glob("*.md"))
    for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]


def file_of(module):
    root = SOURCE.parent if module.startswith("keyquery.") or module == "keyquery" else STUDIES
    path = root.joinpath(*module.split("."))
    if module == "keyquery":
        return path / "__init__.pyi"  # which lists the public names
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def names_in(module):
    """What a module binds: its own names as None, those that it imports from this package as where they are from."""
    found = {}
    for node in ast.walk(ast.parse(file_of(module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("keyquery"):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = None
        elif isinstance(node, ast.Assign):
            found |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
    return found


def is_module(path):
    return file_of(path).exists()


def home(path):
    """Where a name is defined, followed through the imports: keyquery.look is of keyquery.instruments.look.look."""
    module, _, name = path.rpartition(".")
    if module and is_module(module) and name in names_in(module):
        origin = names_in(module)[name]
        return path if origin is None or origin == path else home(origin)
    if is_module(path):
        return path
    raise LookupError(path)


def promised():
    """All that stands in an `__all__` of the package."""
    yield from (f"keyquery.{name}" for name in kq.__all__)
    for path in sorted(set(SOURCE.rglob("__init__.py")) - {SOURCE / "__init__.py"}):
        module = ".".join(("keyquery", *path.parent.relative_to(SOURCE).parts))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                yield from (f"{module}.{name}" for name in ast.literal_eval(node.value))


def test_every_entry_is_there_once():
    homes = [home(entry) for entry in ENTRIES]
    assert len(homes) > 150
    assert len(set(homes)) == len(homes)
    assert not any(map(is_module, homes))


def test_what_is_not_there_is_seen():
    for wrong in ("keyquery.lok", "keyquery.forms.Frm", "keyquery.frms.Form"):
        with pytest.raises(LookupError):
            home(wrong)


def test_every_public_name_has_an_entry():
    homes = {home(entry) for entry in ENTRIES}
    missing = [path for path in promised() if not is_module(home(path)) and home(path) not in homes]
    assert missing == []


def test_names_of_the_package_itself_are_told_by_their_short_path():
    short = {f"keyquery.{name}" for name in kq.__all__}
    assert {path for path in short if not is_module(home(path))} <= set(ENTRIES)


# Sections: what the table of an entry is made of.

SITE = SOURCE.parent.parent / "docs" / "site"
PASSED = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+$|\Z)", re.MULTILINE | re.DOTALL)


def described(node, source):
    spec = importlib.util.spec_from_file_location("fields", SITE / "fields.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.described("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))


@cache
def top_level(path):
    """The definition of a name at the top of its module, and the source; None for a constant."""
    module, _, name = home(path).rpartition(".")
    source = file_of(module).read_text()
    return next((node for node in ast.parse(source).body if getattr(node, "name", None) == name), None), source


def parameters(function):
    group = function.args
    every = [*group.posonlyargs, *group.args, group.vararg, *group.kwonlyargs, group.kwarg]
    return {each.arg for each in every if each is not None} - {"self", "cls"}


def documented(docstring):
    section = PASSED.search(docstring or "")
    rows = re.findall(r"^(\S.*)$", section[1], re.MULTILINE) if section else []
    return {name.strip(" *") for row in rows for name in row.partition(" : ")[0].split(",")}


def lacks(node, source):
    """What the reference would not say about a function or a class."""
    docstring = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        returns = node.returns is not None and ast.unparse(node.returns) != "None"
        missing = parameters(node) - documented(docstring)
        return missing | (
            {"Returns"} if returns and not re.search(r"^(Returns|Yields)\n--", docstring, re.M) else set()
        )
    built = next((each for each in node.body if getattr(each, "name", None) == "__init__"), None)
    if built is not None:
        return parameters(built) - documented(docstring)
    fields = {} if documented(docstring) else described(node, source)
    return {name for name, text in fields.items() if not text}


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.count(".") == 1])  # kq.*: others say one line
def test_an_entry_describes_its_parameters_and_its_result(entry):
    node, source = top_level(entry)
    assert node is None or lacks(node, source) == set()


def test_methods_of_estimators_describe_theirs():
    folders = "events|in_context|npt|rerank|series|vision_language|transport.classifier"
    of_estimators = re.compile(rf"keyquery\.learn\.({folders})\.")
    for entry in (entry for entry in ENTRIES if of_estimators.match(home(entry))):
        node, source = top_level(entry)
        methods = (
            [each for each in node.body if isinstance(each, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
        )
        for method in (each for each in methods if not each.name.startswith("_") and parameters(each)):
            assert lacks(method, source) == set(), f"{entry}.{method.name}"


def test_what_is_not_described_is_seen():
    source = '''def f(a, *, b: int) -> int:
    """Sum.

    Parameters
    ----------
    a
        One.
    """'''
    assert lacks(ast.parse(source).body[0], source) == {"b", "Returns"}
    source = "class C:\n    x: int  # metres\n    y: int\n"
    assert lacks(ast.parse(source).body[0], source) == {"y"}
