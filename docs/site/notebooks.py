"""Notebooks become pages: run when the site is built; an error, or another output than the stored one, stops it.

`python docs/site/notebooks.py` stores the outputs anew.
"""

from __future__ import annotations

import base64
import logging
import math
import os
import re
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from traitlets.config import Config

LOG = logging.getLogger("mkdocs.notebooks")  # of mkdocs, so that --strict takes its warnings as errors
LIMIT = 300  # seconds that one cell may take
# tqdm asks for widgets wherever there is a kernel; and what is as small as this is fastest by one thread.
SET = {"PYTHONWARNINGS": "ignore:IProgress not found", "OMP_NUM_THREADS": "1"}
LONGEST = 50_000  # characters of HTML that are stored: no whole pages
CLOSE = 0.02  # relative, and absolute, difference of numbers that another CPU may make
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")
PAGES: dict[str, list[str]] = {}  # the outputs of each page, as HTML


def on_files(files: Files, config: Any) -> Files:
    """Beside every notebook, which can be downloaded, a page of the same name."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        uri = file.src_uri.removesuffix(".ipynb") + ".md"
        content, PAGES[uri] = page(Path(file.abs_src_path), Path(file.src_uri).name)
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Where a page names a notebook, as it lies in the repository, the site has its page."""
    return re.sub(r"\((\S*notebooks/\w+)\.ipynb\)", r"(\1.md)", markdown)


def on_page_content(html: str, page: Any, **rest: Any) -> str:
    """Outputs are put in when Markdown is done: it would read them, too."""
    for number, output in enumerate(PAGES.get(page.file.src_uri, [])):
        html = html.replace(mark(number), output)
    return html


def page(path: Path, name: str) -> tuple[str, list[str]]:
    """A notebook that has been run, as Markdown with marks for its outputs, and the outputs."""
    LOG.info("Running %s", name)
    blocks, outputs = [], []
    kept = nbformat.read(path, as_version=4).cells
    for cell, before in zip(run(path).cells, kept, strict=True):
        if cell.cell_type == "code" and not same(texts(before), texts(cell)):
            LOG.warning(
                "%s, cell %s: the output is not the stored one; python %s", name, cell.id, "docs/site/notebooks.py"
            )
        if cell.cell_type != "code":
            blocks.append(cell.source)
            continue
        blocks.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if output.get("name") == "stderr":
                LOG.warning("%s says on stderr: %s", name, output.text.strip())
            blocks.append(f'<div class="output">{mark(len(outputs))}</div>')
            outputs.append(told(output))
    blocks.append(f"[This page as a notebook]({name})")
    return "\n\n".join(blocks), outputs


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, by a kernel of its own; figures are drawn as SVG."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:  # the kernel is spoken to by files, not by ports
        facts = {"AsyncKernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}
        client = NotebookClient(notebook, timeout=LIMIT, coalesce_streams=True, config=Config(facts))
        client.extra_arguments = ["--InlineBackend.figure_formats=svg"]
        return client.execute(cwd=folder, env={**os.environ, **SET})


def texts(cell: Any) -> list[str]:
    """The outputs of a cell as text; figures and pages by their names."""
    return [output.text if output.output_type == "stream" else output.data["text/plain"] for output in cell.outputs]


def same(stored: list[str], now: list[str]) -> bool:
    """Whether two outputs have the same words, and numbers that are close.

    >>> same(["loss 0.501"], ["loss 0.502"]), same(["loss 0.5"], ["loss 0.6"]), same(["loss 0.5"], ["gain 0.5"])
    (True, False, False)
    """
    one, other = "\n".join(stored), "\n".join(now)
    numbers = zip(map(float, NUMBER.findall(one)), map(float, NUMBER.findall(other)), strict=False)
    near = all(math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in numbers)
    return near and NUMBER.sub("#", one).split() == NUMBER.sub("#", other).split()


def store(path: Path) -> None:
    """Run a notebook and keep its outputs, without whole HTML pages and times."""
    notebook = run(path)
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.metadata = {}
        for output in (output for output in cell.outputs if "data" in output):
            if len(output.data.get("text/html", "")) > LONGEST:
                del output.data["text/html"]
    notebook.metadata = nbformat.read(path, as_version=4).metadata
    nbformat.write(notebook, path)


def told(output: Any) -> str:
    """One output as HTML: a page or a table as it is, a figure as a picture, else its text."""
    if output.output_type == "stream":
        return f"<pre><code>{escape(output.text)}</code></pre>"
    data = output.data
    if "text/html" in data:
        return str(data["text/html"])
    if "image/svg+xml" in data:  # within the page, but apart: the names inside of two figures would clash
        packed = base64.b64encode(data["image/svg+xml"].encode()).decode()
        return f'<img alt="what the code above draws" src="data:image/svg+xml;base64,{packed}">'
    return f"<pre><code>{escape(data['text/plain'])}</code></pre>"


def mark(number: int) -> str:
    """Where an output goes."""
    return f"[output {number}]"


if __name__ == "__main__":
    for each in sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb")):
        store(each)
