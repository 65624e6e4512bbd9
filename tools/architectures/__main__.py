"""`python -m tools.architectures search TYPE` and `… fields CACHE`: config types of the installed transformers."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from keyquery.proof.models import model_types
from keyquery.support.printable import printable
from tools.architectures import page, sensitivity, table
from tools.architectures.search import sought
from tools.architectures.written import as_toml, family_tables

SHOWN = 300  # letters of a variant that is not read exactly


def main(arguments: list[str] | None = None) -> None:
    """Search for a reading and print its TOML, or try configs; exit code 1 if a default is read wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    search = commands.add_parser("search", help="print a TOML file of a type whose reading is exact")
    search.add_argument("type")
    fields = commands.add_parser("fields", help="try values of config fields, and write their table and page: hours")
    fields.add_argument("cache", type=Path, help="JSON lines: variants of configs that were tried before, and now")
    fields.add_argument("types", nargs="*", help="try these alone, and write no table; default: all types")
    fields.add_argument("--defaults", action="store_true", help="try default configs alone, and write no table")
    fields.add_argument("--again", nargs="*", default=(), help="statuses of variants that are tried once more")
    options = parser.parse_args(arguments)
    if options.command == "search":
        findings, lost = sought(options.type)
        print(as_toml(family_tables(options.type, findings), f"{options.type}: found by a search."), end="")
        print("".join(f"# not explained: {printable(owner)}\n" for owner in lost), end="")
        return
    rows = []
    for row in sensitivity.sweep(options.types or model_types(), options.cache, options.again, options.defaults):
        rows.append(row)
        if row["status"] not in (*sensitivity.GOOD, "cannot be built"):
            print(_line(row), flush=True)
    tried = Counter(row["status"] for row in rows if "change" in row)
    print(", ".join(f"{status}: {count}" for status, count in tried.most_common()))
    if not options.types and not options.defaults:
        table.write(rows)
        page.write(rows)
    if any(row["status"] in table.BAD for row in rows if row.get("change") == {}):
        sys.exit(1)


def _line(row: dict[str, Any]) -> str:
    facts = [row["type"], row["status"], json.dumps(row.get("change")), str(row.get("reason", ""))]
    return printable(" ".join(facts), SHOWN)


if __name__ == "__main__":
    main()
