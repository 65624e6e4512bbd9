"""The fields of result types and what they hold: the comment on the line of a field, else its entry in `units`."""

from __future__ import annotations

import ast


def described(source: str) -> dict[str, str]:
    """Each public field of a class by its name, with what is written about it ("": nothing).

    >>> described("class Point:\\n  units = {'x': 'metres'}\\n  x: float\\n  y: float  # to the north\\n  z: float")
    {'x': 'metres', 'y': 'to the north', 'z': ''}
    """
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    lines, units, fields = source.splitlines(), {}, {}
    for each in node.body:
        if (
            isinstance(each, (ast.Assign, ast.AnnAssign))
            and isinstance(each.value, ast.Dict)
            and _name(each) == "units"
        ):
            units = ast.literal_eval(each.value)
        elif isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation):
            fields[_name(each)] = lines[(each.end_lineno or 1) - 1].partition("  # ")[2]
    return {name: text or units.get(name, "") for name, text in fields.items() if not name.startswith("_")}


def _name(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return getattr(target, "id", "")
