"""Optimal transport, in parts that measure and publish for themselves.

python bench/transport.py                   every part
python bench/transport.py --part lens       what following a module costs training
"""

from __future__ import annotations

import argparse
from importlib import import_module

# A part and the file beside this one whose main() measures it; each publishes a result of its own name.
PARTS = {"lens": "transport_lens"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="one of them; all unless given")
    part = parser.parse_args().part
    for name in [part] if part else PARTS:
        import_module(PARTS[name]).main()


if __name__ == "__main__":
    main()
