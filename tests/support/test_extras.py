"""Packages that are missing: one sentence says which, and which extra brings it."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import keyquery as kq
from keyquery.support.extras import EXTRAS, optional

SOURCE = Path(kq.__file__).parent
CORE = {"torch", "numpy", "scipy", "safetensors", "jaxtyping", "typer", "rich", "keyquery"}


def imported(path):
    """Modules that a file imports, by statement or by `import_module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def test_optional_packages_are_imported_by_one_function():
    # Behind `no_kernels`, which names the extra.
    kernels = (
        "primal/kernel.py",
        "forms/eigenvalues_gpu.py",
        "monitor/kernels.py",
        "widen_triton.py",
        "triton_support.py",
    )
    for path in SOURCE.rglob("*.py"):
        for module in imported(path):
            root = module.partition(".")[0]
            if root not in CORE and root not in sys.stdlib_module_names:
                assert root == "triton", f"{path} imports {module}"
                assert any(part in path.as_posix() for part in kernels), f"{path} imports {module}"


def test_every_extra_that_is_named_brings_its_package():
    extras = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # What comes along with the packages that are listed.
    along = {"tokenizers": "transformers", "huggingface_hub": "transformers", "threadpoolctl": "scikit-learn"}
    for called, extra in EXTRAS.values():
        listed = {re.split(r"[^\w-]", line)[0].lower() for line in extras[extra]}
        assert along.get(called, called).lower() in {name.removesuffix("-cpu") for name in listed}, called


@pytest.mark.parametrize("module", EXTRAS)
def test_a_missing_package_is_told_with_its_extra(module, monkeypatch):
    called, extra = EXTRAS[module]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as raised:
        optional(module, "this")
    assert str(raised.value) == f"this needs {called}: pip install 'keyquery[{extra}]'"


def test_a_package_that_is_there_and_broken_is_not_called_missing(monkeypatch, tmp_path):
    (tmp_path / "ot").mkdir()
    (tmp_path / "ot" / "__init__.py").write_text("import a_package_that_nobody_has")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="needs POT, which cannot be imported: No module named 'a_package"):
        optional("ot.bregman", "optimal transport")
