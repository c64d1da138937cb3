"""`moesaic report` from the command line: what it writes and what it refuses."""

import json
import re
import subprocess
import sys

import pytest

from moesaic.cli import app as cli
from moesaic.common import files
from moesaic.reporting import report as api
from moesaic.reporting.report import short_names
from tests.tiny_inspection import write_tiny_inspection
from tests.tiny_report import write_results, write_run


@pytest.fixture
def call(capsys):
    def run(*arguments):
        status = cli.run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return [
        write_tiny_inspection(folder / "inspected", against=True),
        write_run(folder / "run"),
        write_results(folder / "results.json"),
    ]


def data_of(page):
    """The data block of a page, as a browser's parser finds it: up to the first closing tag."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_one_file_with_everything(call, inputs, tmp_path):
    out = tmp_path / "report.html"
    status, said, err = call("report", *inputs, out)
    assert (status, err) == (0, "")
    assert said == f"{out}: {out.stat().st_size / 1e6:.1f} MB, 2 models, 1 run, 1 evaluation\n"
    data = data_of(out.read_text())
    assert [model["name"] for model in data["models"]] == ["tiny", "other"]
    assert [run["name"] for run in data["runs"]] == ["run"]
    assert [result["name"] for result in data["results"]] == ["moe"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]


def test_each_kind_alone(call, inputs, tmp_path):
    for index, source in enumerate(inputs):
        assert call("report", source, tmp_path / f"{index}.html")[0] == 0


def test_the_same_inputs_give_the_same_bytes(call, inputs, tmp_path):
    for name in ("a.html", "b.html"):
        call("report", *inputs, tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_json_says_what_was_written(call, inputs, tmp_path):
    status, said, _ = call("report", *inputs, tmp_path / "report.html", "--json")
    document = json.loads(said)
    assert status == 0
    assert document["models"] == ["tiny", "other"]
    assert document["bytes"] == (tmp_path / "report.html").stat().st_size
    assert document["reader_layers"] == [[3, 3], [3, 3]]


def test_quiet_says_nothing(call, inputs, tmp_path):
    assert call("report", inputs[1], tmp_path / "report.html", "--quiet") == (0, "", "")


def test_layers_left_out_are_said(call, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "DATA_LIMIT", 1)
    said = call("report", inputs[0], tmp_path / "report.html")[1]
    assert "tiny: the reader shows 1 of 3 layers" in said


def test_a_title_from_a_person_is_text(call, inputs, tmp_path):
    out = tmp_path / "report.html"
    call("report", inputs[1], out, "--title", "<script>alert(1)</script> & more")
    page = out.read_text()
    assert "<title>&lt;script&gt;alert(1)&lt;/script&gt; &amp; more</title>" in page
    assert data_of(page)["title"] == "<script>alert(1)</script> & more"


def test_an_existing_file_stays_unless_told(call, inputs, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("mine")
    status, _, err = call("report", inputs[1], out)
    assert status == 2
    assert "exists" in err
    assert out.read_text() == "mine"
    assert call("report", inputs[1], out, "--overwrite")[0] == 0
    assert out.read_text().startswith("<!doctype html>")


def test_a_failed_write_leaves_nothing(call, inputs, tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    status, _, err = call("report", inputs[1], tmp_path / "report.html")
    assert status == 2
    assert "the disk is full" in err
    assert list(tmp_path.iterdir()) == []


def make_refusals(folder, inputs):
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("x")
    (folder / "other.json").write_text('{"format": "something"}')
    (folder / "broken.json").write_text("{")
    damaged = write_tiny_inspection(folder / "damaged")
    (damaged / "statistics.npz").write_bytes(b"PK")
    out = folder / "out.html"
    return {
        "nothing": ([], "expected RUN_OR_INSPECT... OUT.html, got 0 paths"),
        "one path": ([inputs[0]], "expected RUN_OR_INSPECT... OUT.html, got 1 paths"),
        "missing": ([folder / "absent", out], "absent: no such file or folder"),
        "empty folder": ([folder / "empty", out], "empty: neither a folder of `moesaic inspect`"),
        "other file": ([folder / "notes.txt", out], "notes.txt: is a file; report takes folders"),
        "other json": ([folder / "other.json", out], "other.json: not a results file"),
        "broken json": ([folder / "broken.json", out], "broken.json: "),
        "damaged": ([damaged, out], "statistics.npz: damaged"),
        "twice": ([inputs[1], inputs[1], out], "is given twice"),
        "not html": ([inputs[0], inputs[1]], "is a folder; name a file"),
        "a folder": ([inputs[1], folder / "empty.html"], "is a folder; name a file"),
        "no parent": ([inputs[1], folder / "no" / "out.html"], "there is no folder"),
        "unknown option": ([inputs[1], out, "--titel", "x"], "--titel"),
    }


def test_bad_input_is_one_line_and_status_2(call, inputs, tmp_path):
    (tmp_path / "empty.html").mkdir()
    for name, (arguments, says) in make_refusals(tmp_path, inputs).items():
        status, said, err = call("report", *arguments)
        assert (status, said) == (2, ""), name
        assert says in err, name
        assert err.count("\n") == 1, name
    assert not (tmp_path / "out.html").exists()


def test_without_plotly_it_says_how_to_install_it(call, inputs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    status, _, err = call("report", inputs[1], tmp_path / "report.html")
    assert status == 2
    assert "pip install 'moesaic[report]'" in err


def test_names_tell_inputs_apart(tmp_path):
    from pathlib import Path

    assert short_names([Path("/a/emo"), Path("/a/base")]) == ["emo", "base"]
    assert short_names([Path("/a/run"), Path("/b/run")]) == ["a/run", "b/run"]


def test_one_checkpoint_inspected_twice_has_two_names(call, tmp_path):
    folders = [write_tiny_inspection(tmp_path / name) for name in ("one", "two")]
    document = json.loads(call("report", *folders, tmp_path / "report.html", "--json")[1])
    assert document["models"] == ["tiny (one)", "tiny (two)"]


def test_report_needs_no_torch(inputs, tmp_path):
    code = (
        "import sys; from moesaic.cli.app import run; status = run(sys.argv[1:]);"
        "assert status == 0, status; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, "report", *map(str, inputs), str(tmp_path / "r.html")], check=True)


def test_report_in_python(inputs, tmp_path):
    import moesaic

    result = moesaic.report(inputs, tmp_path / "report.html")
    assert result.models == ("tiny", "other")
    assert result.bytes < 15_000_000
