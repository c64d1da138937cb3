"""Run the notebooks and keep their outputs: `python notebooks/execute.py [NAME...]`, or `make notebooks`.

The file gets what was shown, small enough for a repository, and a hash of its code, by which a test knows that outputs
are of this code.
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401 (its first import says on stderr that it makes a cache)
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
MOST_BYTES = 200_000
"""Of a notebook with its outputs."""

_BARS = ("IProgress not found", "Loading weights")
"""What is left out: the bar of transformers' own `from_pretrained`, and what tqdm says where Jupyter has no widgets."""


def code_hash(notebook: Any) -> str:
    """Of the code cells."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def execute(file: Path) -> None:
    """Run a notebook from its own folder and write it with its outputs.

    Raises:
        CellExecutionError: a cell failed; the file is as it was.
        SystemExit: it printed to stderr, or is too large.
    """
    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(file.parent)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of this run
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if not any(bar in one.get("text", "") for bar in _BARS)]
            if said := [one.text for one in cell.outputs if one.get("name") == "stderr"]:
                raise SystemExit(f"{file}: a cell prints to stderr: {said[0]}")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "moesaic": {"code": code_hash(notebook)},
    }
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > MOST_BYTES:
        raise SystemExit(f"{file}: {len(text.encode()):,} bytes with its outputs, more than {MOST_BYTES:,}")
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            start = time.perf_counter()
            execute(path)
            print(f"{path}: {path.stat().st_size:,} bytes, {time.perf_counter() - start:.0f} s", flush=True)
