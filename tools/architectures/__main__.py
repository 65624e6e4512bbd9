"""`python -m tools.architectures search TYPE`, and `… prove`: all config types of the installed transformers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from keyquery.proof import Proof
from keyquery.support.files import write_text
from keyquery.support.printable import printable
from tools.architectures.search import sought
from tools.architectures.sweep import counts, sweep
from tools.architectures.written import as_toml, family_tables


def main(arguments: list[str] | None = None) -> None:
    """Search for a reading that is exact and print its TOML, or prove types; exit code 1 if one is read wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    search = commands.add_parser("search", help="print a TOML file of a type whose reading is exact")
    search.add_argument("type")
    prove = commands.add_parser("prove", help="prove config types, each in a process that may crash")
    prove.add_argument("types", nargs="*", help="default: all that transformers has")
    prove.add_argument("--cache", type=Path, help="JSON lines: what they hold is not proven again, the rest is added")
    prove.add_argument("--json", type=Path, help="write all proofs to this file")
    options = parser.parse_args(arguments)
    if options.command == "search":
        findings, lost = sought(options.type)
        print(as_toml(family_tables(options.type, findings), f"{options.type}: found by a search."), end="")
        print("".join(f"# not explained: {printable(owner)}\n" for owner in lost), end="")
        return
    proofs = sweep(options.types or None, options.cache, _show)
    if options.json is not None:
        write_text(options.json, json.dumps([proof.as_dict() for proof in proofs], indent=1) + "\n")
    print(", ".join(f"{status}: {count}" for status, count in counts(proofs).items()))
    if any(proof.status in ("wrong", "missing layers") for proof in proofs):
        sys.exit(1)


def _show(proof: Proof) -> None:
    print(printable(str(proof).splitlines()[0]), flush=True)


if __name__ == "__main__":
    main()
