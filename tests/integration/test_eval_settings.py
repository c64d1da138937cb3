"""What `eval` leaves out for a selection's sake, what it does not mix in one file, and what it can always write."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split, record_digest
from moesaic.evaluation import evaluate as evaluating
from moesaic.evaluation import perplexity
from moesaic.evaluation.evaluate import evaluate
from moesaic.evaluation.recipe import Average, Suite, SuiteTask
from moesaic.selection.select import select
from tests.tiny_evals import choice_rows, save_tiny_dense, save_tiny_routed, write_evals, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # what lm-eval and its packages warn of is theirs


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_routed(tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_evals(tmp_path_factory.mktemp("evals"), rows=10)


@pytest.fixture(scope="module")
def drawn(routed: Path, evals: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A selection made on 40% of ARC-easy's rows."""
    file = tmp_path_factory.mktemp("selection") / "sel.json"
    select(routed, file, keep="4", data=str(evals / "arc_easy.test.jsonl"), split=0.4, seed=5)
    return file


def _left(share: float, seed: int, rows: list[dict[str, Any]] | None = None) -> int:
    """How many rows are left of these, or of those of ARC-easy as `write_evals` writes them."""
    return sum(not in_split(record_digest(row), share=share, seed=seed) for row in rows or choice_rows(10))


def test_rows_that_a_selection_was_made_on_are_left_out_of_any_suite(routed: Path, evals: Path, drawn: Path):
    assert 0 < _left(0.4, 5) < 10
    tasks = evaluate(routed, suite="arc_easy,piqa", data_dir=evals, selection=drawn).document["tasks"]
    assert tasks["arc_easy"]["samples"] == _left(0.4, 5)
    assert tasks["arc_easy"]["identity"]["left_out"] == {"share": 0.4, "seed": 5}
    assert tasks["piqa"]["samples"] == 10
    assert evaluate(routed, suite="arc_easy", data_dir=evals).document["tasks"]["arc_easy"]["samples"] == 10


def test_the_flag_says_the_share_or_is_refused(routed: Path, evals: Path, drawn: Path):
    asked = {"suite": "arc_easy", "data_dir": evals, "limit": 1}
    with pytest.raises(
        MoesaicError, match=r"--selection-share 0.6: .*sel.json was made on a share of 0.4 of .*arc_easy"
    ):
        evaluate(routed, selection=drawn, selection_share=0.6, **asked)
    evaluate(routed, selection=drawn, selection_share=0.4, dry_run=True, **asked)
    with pytest.raises(MoesaicError, match=r"--selection-share 1: must be above 0 and below 1"):
        evaluate(routed, selection_share=1.0, **asked)
    suites = ("piqa", Suite(name="mine", tasks=(SuiteTask(task="piqa"),), selection_share=0.9))
    for suite in suites:
        tasks = evaluate(routed, suite=suite, data_dir=evals, selection=drawn, selection_share=0.6).document["tasks"]
        assert tasks["piqa"]["samples"] == _left(0.6, 5, choice_rows(10, choices=2, seed=3))


def test_rows_that_cannot_be_left_out_are_named(
    routed: Path, tmp_path: Path, drawn: Path, evals: Path, capsys: pytest.CaptureFixture[str]
):
    def said(selection: Path, suite: str, folder: Path) -> str:
        evaluate(routed, suite=suite, data_dir=folder, limit=1, selection=selection, dry_run=True)
        return capsys.readouterr().err

    assert "was made on" not in said(drawn, "arc_easy", evals)
    for name, split in (("all", None), ("whole", 1.0)):
        file = tmp_path / f"{name}.json"
        select(routed, file, keep="4", data=str(evals / "arc_easy.test.jsonl"), split=split)
        rows = evals / "arc_easy.test.jsonl"
        assert f"{name}.json: was made on 10 of the 10 rows of {rows} without --split, so rows of" in said(
            file, "arc_easy", evals
        )
    folder = write_evals(tmp_path / "few")
    for file in folder.iterdir():
        if not file.name.startswith(("arc_easy", "piqa")):
            file.unlink()
    select(routed, tmp_path / "folder.json", keep="4", data=str(folder), split=0.5)
    for task in ("arc_easy", "piqa"):  # rows of every file are known by their content
        assert "was made on" not in said(tmp_path / "folder.json", task, folder)


def test_held_out_texts_that_a_selection_was_made_on_are_named(
    routed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "text"
    folder.mkdir()
    text = write_rows(folder / "a.valid.jsonl", [{"text": "abc abc", "domain": "a"}])
    select(routed, tmp_path / "sel.json", keep="4", data=str(text))
    evaluate(routed, suite="perplexity", data_dir=folder, selection=tmp_path / "sel.json", dry_run=True)
    said = capsys.readouterr().err
    assert f"was made on 1 of the 1 rows of {text} without --split, so held-out texts are among its own" in said


def test_another_metric_is_refused_and_nothing_is_mixed(dense: Path, evals: Path, tmp_path: Path):
    out = tmp_path / "results.json"
    evaluate(dense, out, suite="piqa", data_dir=evals, limit=2)
    before = out.read_bytes()
    normed = Suite(
        name="normed", tasks=(SuiteTask(task="piqa", metric="acc_norm,none"),), averages=(Average(name="a"),)
    )
    with pytest.raises(MoesaicError, match=r"piqa was measured with metric acc,none, this call has acc_norm,none; use"):
        evaluate(dense, out, suite=normed, data_dir=evals, limit=2)
    assert out.read_bytes() == before
    plain = Suite(name="plain", tasks=(SuiteTask(task="piqa", metric="acc,none"),))
    assert evaluate(dense, out, suite=plain, data_dir=evals, limit=2).ran == ()


def test_numbers_that_json_does_not_have_are_null_and_said(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rows = [{"text": "abc", "domain": "a"}, {"text": "abd", "domain": "b"}]
    write_rows(tmp_path / "a.valid.jsonl", rows)
    out = tmp_path / "results.json"

    def overflows(model, tokenizer, texts, **_rest):
        return torch.tensor([math.nan, 3.0]), torch.tensor([3.0, 3.0])

    monkeypatch.setattr(perplexity, "document_losses", overflows)
    result = evaluate(dense, out, suite="perplexity", data_dir=tmp_path)
    entry = json.loads(out.read_text())["tasks"]["perplexity"]
    assert entry["score"] is None
    assert entry["text"]["domains"]["a"]["loss"] is None
    assert entry["text"]["domains"]["b"]["loss"] == 1.0
    assert "perplexity of all: -, - bits per byte, loss -, 2 documents" in result.lines()[0]
    why = "the loss is beyond what a number holds"
    assert entry["not_finite"] == why
    assert f"perplexity: {why}" in "\n".join(result.lines())
    assert f"perplexity: {why}; no number of it is reported" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_first(
    dense: Path, evals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluating, "open_checkpoint", lambda _: pytest.fail("the checkpoint was opened"))
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path, "is a folder; name a file"), (tmp_path / "file" / "out.json", "is a file, not a")):
        with pytest.raises(MoesaicError, match=message):
            evaluate(dense, out, suite="piqa", data_dir=evals)
