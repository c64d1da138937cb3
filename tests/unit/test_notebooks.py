"""The notebooks are complete: their outputs are of their code, and their code calls the package as it is.

`make notebooks` runs them (minutes), so that is not done here.
"""

import ast
import inspect
import re
from pathlib import Path

import nbformat
import pytest

import moesaic
from notebooks.execute import MOST_BYTES, code_hash

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


@pytest.fixture(params=NOTEBOOKS)
def notebook(request):
    return nbformat.read(NOTEBOOKS[request.param], as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_three():
    assert list(NOTEBOOKS) == ["emo", "grow", "upcycle"]


def test_outputs_are_of_this_code(notebook):
    said = "make notebooks"
    assert notebook.metadata["moesaic"]["code"] == code_hash(notebook), said
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1)), said
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data"}
    pictures = sum("image/png" in output.data for output in outputs)
    assert pictures >= (1 if "BASE" in code(notebook)[0].source else 3)
    assert len(nbformat.writes(notebook).encode()) <= MOST_BYTES


def test_nothing_of_this_machine_is_in_them(notebook):
    text = nbformat.writes(notebook)
    assert not re.search(r"/root/|/home/|/work/wt|/tmp/", text)


def test_calls_fit_the_package(notebook):
    """Names, places and keywords of every call of a function of the package."""
    called = set()
    for cell in code(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("moesaic."):
                name = node.func.attr  # pyright: ignore[reportAttributeAccessIssue]
                keywords = {str(one.arg): None for one in node.keywords}
                inspect.signature(getattr(moesaic, name)).bind(*node.args, **keywords)
                called.add(name)
    assert len(called) >= 4


def test_links_lead_somewhere(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)", cell.source):
                assert (ROOT / "notebooks" / target).exists(), target
