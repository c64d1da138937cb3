"""Every verb as a Python function: `quiet=True` prints nothing at all, and its result shows itself in short."""

import html.parser
import json
import subprocess
import sys

import pytest

from tests.tiny_evals import save_tiny_dense, write_evals
from tests.tiny_training import tiny_recipe, write_documents

CALLS = """
import json, pickle, sys
import moesaic

work, recipe = sys.argv[1], json.loads(sys.argv[2])
data = f"{work}/math.jsonl"
results = {}

def call(name, verb, *arguments, **keywords):
    results[name] = verb(*arguments, **keywords)

call("upcycle", moesaic.upcycle, f"{work}/dense", f"{work}/moe", method="virtual_group", experts=4, quiet=True)
call("verify", moesaic.verify, f"{work}/dense", f"{work}/moe", text=data, quiet=True)
call("plan", moesaic.plan, f"{work}/moe")
call("train", moesaic.train, recipe, f"{work}/run", quiet=True)
call("plan of a run", moesaic.plan, recipe)
call("select", moesaic.select, f"{work}/moe", f"{work}/math.json", data=data, keep=2, quiet=True)
call("extract", moesaic.extract, f"{work}/moe", f"{work}/math.json", f"{work}/cut", quiet=True)
call("merge_back", moesaic.merge_back, f"{work}/moe", f"{work}/cut", f"{work}/back", quiet=True)
call("expand", moesaic.expand, f"{work}/moe", f"{work}/large", experts=8, utility="uniform", quiet=True)
call("verify an expansion", moesaic.verify, f"{work}/moe", f"{work}/large", text=data, quiet=True)
call("export", moesaic.export, f"{work}/moe", f"{work}/native", check=True, text=data, quiet=True)
call("evaluate", moesaic.evaluate, f"{work}/dense", f"{work}/dense.results.json", task=["piqa", "boolq"],
     data_dir=f"{work}/evals", shots=0, limit=4, dtype="float32", quiet=True)
call("compare", moesaic.compare, [f"{work}/dense.results.json", f"{work}/run"])
call("inspect", moesaic.inspect, f"{work}/run", f"{work}/looked", data=data, clusters=4, quiet=True)
call("report", moesaic.report, [f"{work}/looked", f"{work}/run"], f"{work}/report.html")
moesaic.generate(f"{work}/moe", "abc", max_new_tokens=2)
shown = {
    name: {
        "repr": repr(one), "html": one._repr_html_(), "lines": one.lines(),
        "columns": list(one.to_pandas().columns), "rows": len(one.to_pandas()),
    }
    for name, one in results.items()
}
with open(f"{work}/shown.json", "w") as file:
    json.dump(shown, file)
"""

COLUMNS = {
    "upcycle": {"method", "experts", "active_parameters", "statement.code"},
    "verify": {"layer", "error", "coverage"},
    "plan": {"subject", "parameters.total", "weight_bytes"},
    "train": {"step", "tokens", "loss", "lr"},
    "plan of a run": {"steps", "memory.total"},
    "select": {"layer", "expert", "score", "kept"},
    "extract": {"experts", "nbytes"},
    "merge_back": {"experts", "nbytes"},
    "expand": {"layer", "expert", "copies"},
    "verify an expansion": {"loss_jump", "ok"},
    "export": {"family", "ok"},
    "evaluate": {"task", "part", "metric", "score", "standard_error", "samples"},
    "compare": {"table", "row", "column", "value", "low", "high", "best"},
    "inspect": {"scope", "layer", "level", "entropy"},
    "report": {"out", "tokens"},
}
ROWS = {"verify": 2, "train": 4, "select": 8, "expand": 8, "evaluate": 2, "inspect": 4}
"""Of those that are tables: two layers, four steps, four experts in each layer, two tasks, two scopes."""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """The calls in a process of their own, so that nothing that a library writes to its descriptors is missed."""
    work = tmp_path_factory.mktemp("work")
    save_tiny_dense(work / "dense")
    write_documents(work / "math.jsonl", "math", number=40, seed=0)
    write_evals(work / "evals")
    recipe = tiny_recipe(work / "data", budget={"steps": 4})
    done = subprocess.run([sys.executable, "-c", CALLS, work, json.dumps(recipe)], capture_output=True, text=True)
    return work, done


@pytest.fixture(scope="module")
def shown(process):
    work, done = process
    assert done.returncode == 0, done.stderr
    return json.loads((work / "shown.json").read_text())


def test_quiet_is_quiet(process):
    _, done = process
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_result_is_one_short_line_at_the_prompt(shown):
    assert set(shown) == set(COLUMNS)
    for name, one in shown.items():
        assert one["repr"].startswith("<"), name
        assert "\n" not in one["repr"], name
        assert len(one["repr"]) < 200, name
        assert " object at 0x" not in one["repr"], name
        assert "array(" not in one["repr"], name
    assert "statement N1 holds" in shown["verify"]["repr"]
    assert "experts" in shown["select"]["repr"]
    assert "4 experts, 2 active, statement N1" in shown["upcycle"]["repr"]


class Tags(html.parser.HTMLParser):
    """Refuses tags that are not closed in their order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows = [], 0
        self.feed(text)
        assert not self.open, text

    def handle_starttag(self, tag, attrs):
        self.rows += tag == "tr"
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_notebook_shows_text_and_a_table(shown):
    for name, one in shown.items():
        tags = Tags(one["html"])
        assert len(one["html"]) < 20_000, name
        if name in ROWS:
            assert tags.rows == 1 + min(12, ROWS[name]), name
        if name != "compare":
            assert one["lines"][0].split()[0].replace("<", "&lt;") in one["html"], name


def test_pandas_gets_the_numbers(shown):
    for name, columns in COLUMNS.items():
        assert columns <= set(shown[name]["columns"]), (name, shown[name]["columns"])
        rows = shown[name]["rows"]
        assert rows == ROWS.get(name, rows), name
        assert rows > 0, name
