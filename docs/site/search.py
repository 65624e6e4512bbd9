"""Search that also works on a site opened from disk, where a page may neither start a worker nor fetch its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority


@event_priority(-100)  # after the search plugin, which writes the index
def on_post_build(config: Any) -> None:
    """Writes the index again as a script, which theme/main.html loads with the first query."""
    folder = Path(config["site_dir"]) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"window.searchIndex = {index};\n", encoding="utf-8")
