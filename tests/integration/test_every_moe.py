"""Every causal MoE family of transformers through every verb, on a tiny random model: what tested.json says is so.

`python -m tests.every_moe` writes that file, and docs/families.md, anew.
"""

import gc
import json
import shutil
import subprocess
import sys

import pytest

from moesaic.families.support import NO, TESTED, VERBS, support
from moesaic.families.support import tested as results
from tests.every_moe import Case, cells, families
from tests.tiny_training import write_documents

AT_LEAST = 45
"""Families that every verb works on."""


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("texts") / "t.jsonl", "math", number=6, seed=0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("moesaic.probe.MAX_TOKENS", 40)
    gc.freeze()  # what is imported is no garbage: the verbs that collect theirs need not look at it
    yield
    gc.unfreeze()


def test_all_families_of_transformers_are_in_the_file():
    assert set(results()) == set(families())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", results())
def test_what_is_said_of_a_family_is_so(tmp_path, data, family):
    found = cells(Case(family, tmp_path / family, data))
    shutil.rmtree(tmp_path)  # 54 of these are 300 MB
    assert found == results()[family]["cells"]


def test_counts():
    for row in support():
        assert all(cell.split(":")[0] in (TESTED, NO) for cell in row.cells.values()), row.model_type
    works = [name for name, facts in results().items() if all(facts["cells"][verb] == TESTED for verb in VERBS)]
    assert len(works) >= AT_LEAST


def test_the_list_needs_no_torch():
    code = "import sys, moesaic.families.support as s; s.support(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert json.dumps([row.to_json() for row in support()])
