"""The pages of the atlas, made of its readings when the site is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import keyquery as kq


def on_files(files: Files, config: Any) -> Files:
    """In place of every reading, the page that `keyquery look --html` would have made."""
    for file in [file for file in files if file.src_uri.endswith(".json.xz")]:
        name = Path(file.src_uri).name.removesuffix(".json.xz")
        files.append(File.generated(config, f"atlas/{name}.html", content=kq.Reading.load(file.abs_src_path).page()))
        files.remove(file)
    return files
