"""mkdocs hook: the executed notebooks as pages. Links between docs/ and notebooks/ hold on GitHub and on the site."""

import re
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        content = as_markdown(nbformat.read(file, as_version=4))
        files.append(File.generated(config, f"notebooks/{file.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to notebooks at their pages."""
    return re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb", r"](notebooks/\1.md", markdown)


def as_markdown(notebook: Any) -> str:
    """Text, code and outputs of a notebook as a page."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../docs/", "](../"))
        else:
            parts += [f"```python\n{cell.source}\n```", *map(_output, cell.outputs)]
    return "\n\n".join(parts) + "\n"


def _output(output: Any) -> str:
    """One output in the richest form that a page can show."""
    if output.output_type == "stream":
        return f"<pre>{escape(output.text)}</pre>"
    data = output.data
    if "image/png" in data:
        return f'<img alt="figure" src="data:image/png;base64,{data["image/png"].strip()}">'
    # One block of HTML without empty lines, which would end it for Markdown.
    inner = data.get("text/html") or f"<pre>{escape(data['text/plain'])}</pre>"
    return f'<div class="output">{re.sub(chr(10) + "+", chr(10), inner)}</div>'
