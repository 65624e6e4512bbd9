"""The reference under docs/api names all that is public, and nothing that does not exist, and describes it."""

import re
import runpy
from dataclasses import is_dataclass
from importlib import import_module
from inspect import cleandoc, getsource, isclass, isfunction, ismodule, signature, unwrap
from pathlib import Path

import pytest

import keyquery as kq

SOURCE = Path(kq.__file__).parent
DOCS = SOURCE.parent.parent / "docs"
ENTRIES = [
    entry
    for page in sorted((DOCS / "api").glob("*.md"))
    for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]
PASSED = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+$|\Z)", re.MULTILINE | re.DOTALL)
described = runpy.run_path(str(DOCS / "site" / "fields.py"))["described"]  # fields of a class, with their comments


def resolved(path):
    """What stands under a name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def home(path):
    """Where a function or class is defined; other things are where they are named."""
    thing = resolved(path)
    return f"{thing.__module__}.{thing.__qualname__}" if isfunction(thing) or isclass(thing) else path


def promised():
    """All that stands in an `__all__` of the package."""
    for path in sorted(SOURCE.rglob("__init__.py")):
        package = ".".join(("keyquery", *path.parent.relative_to(SOURCE).parts))
        names = (f"{package}.{name}" for name in getattr(import_module(package), "__all__", ()))
        yield from (name for name in names if not ismodule(resolved(name)))


def test_every_public_name_has_one_entry():
    homes = [home(entry) for entry in ENTRIES]
    assert len(set(homes)) == len(homes) > 150
    assert not any(ismodule(resolved(entry)) for entry in ENTRIES)
    assert [path for path in promised() if home(path) not in homes] == []
    assert {path for path in promised() if path.count(".") == 1} <= set(ENTRIES)  # by their short path


def documented(thing):
    section = PASSED.search(cleandoc(thing.__doc__ or ""))
    rows = re.findall(r"^(\S.*)$", section[1], re.MULTILINE) if section else []
    return {name.strip(" *") for row in rows for name in row.partition(" : ")[0].split(",")}


def lacks(thing):
    """What the reference would not say about a function or a class."""
    if isclass(thing) and (is_dataclass(thing) or "__init__" not in vars(thing)) and not hasattr(thing, "get_params"):
        fields = {} if documented(thing) else described(cleandoc(getsource(thing)))
        return {name for name, text in fields.items() if not text}
    called = signature(thing.__init__ if isclass(thing) else unwrap(thing))
    missing = set(called.parameters) - {"self", "cls"} - documented(thing)
    silent = isclass(thing) or called.return_annotation in ("None", None, called.empty)
    return missing if silent or re.search(r"^ *(Returns|Yields)\n *--", thing.__doc__, re.M) else {*missing, "Returns"}


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.count(".") == 1])  # kq.*: others say one line
def test_an_entry_describes_its_parameters_and_its_result(entry):
    thing = resolved(entry)
    assert not (isfunction(thing) or isclass(thing)) or lacks(thing) == set()


def test_methods_of_estimators_describe_theirs():
    folders = "events|in_context|npt|rerank|series|vision_language|transport.classifier"
    of_estimators = re.compile(rf"keyquery\.learn\.({folders})\.")
    for entry in (entry for entry in ENTRIES if of_estimators.match(home(entry)) and isclass(resolved(entry))):
        for name, method in vars(resolved(entry)).items():
            if isfunction(method) and not name.startswith("_") and len(signature(method).parameters) > 1:
                assert lacks(method) == set(), f"{entry}.{name}"
