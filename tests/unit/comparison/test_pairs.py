"""Paired differences, several results files of one model, and empty columns that say why."""

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from moesaic.common.intervals import Interval, t_quantile
from moesaic.comparison.compare import compare
from tests.unit.comparison.runs import average, results, task


def _answers(scores: list[float], digest: str = "d", **more: Any) -> dict[str, Any]:
    rows = {"hash": digest, "scores": scores}
    return task(fmean(scores), 0.2, samples=len(scores), rows=rows, **more)


def _text(losses: list[float], digest: str = "d") -> dict[str, Any]:
    tokens, sizes = [10, 20, 30, 40], [40, 70, 90, 200]
    loss, bits = sum(losses) / sum(tokens), sum(losses) / sum(sizes) / math.log(2)
    part = {
        "loss": loss,
        "standard_error": 0.3,
        "bits_per_byte": bits,
        "bits_per_byte_error": 0.1,
        "documents": 4,
        "perplexity": 9.0,
        "tokens": 40,
    }
    rows = {"hash": digest, "domains": ["a"] * 4, "losses": losses, "tokens": tokens, "bytes": sizes}
    return task(bits, 0.1, samples=4, metric="bits_per_byte", text={"all": part, "domains": {"a": part}}, rows=rows)


def _cells(tables: Any, title: str, name: str) -> dict[str, Any]:
    table = next(table for table in tables if table.title == title)
    row = next(row for row in table.rows if row.name == name)
    return dict(zip((heading.title for heading in table.headings), row.cells, strict=True))


def test_questions_are_paired(tmp_path: Path):
    ours, theirs = [1.0, 1, 1, 0, 1, 0], [1.0, 0, 1, 0, 1, 0]
    for name, scores in (("a", ours), ("b", theirs)):
        results(tmp_path / f"{name}.json", {"arc_easy": _answers(scores)}, weights=name)
    found = compare(runs=(str(tmp_path / "a.json"), str(tmp_path / "b.json")), baseline="b")
    cell = _cells(found.tables, "Difference to b", "a")["ARC-e"]
    differences = [x - y for x, y in zip(ours, theirs, strict=True)]
    reach = t_quantile(0.975, 5) * stdev(differences) / math.sqrt(6)
    assert isinstance(cell, Interval)
    assert (cell.value, cell.high) == pytest.approx((1 / 6, 1 / 6 + reach), rel=1e-12)
    assert reach < 1.96 * math.hypot(0.2, 0.2)
    assert found.tables[1].notes == ("paired: over the differences of the same questions or documents",)


def test_held_out_text_is_paired_over_documents(tmp_path: Path):
    ours, theirs = [12.0, 25.0, 31.0, 44.0], [14.0, 26.0, 35.0, 45.0]
    for name, losses in (("a", ours), ("b", theirs)):
        results(tmp_path / f"{name}.json", {"perplexity": _text(losses)}, weights=name)
    found = compare(runs=(str(tmp_path / "a.json"), str(tmp_path / "b.json")), baseline="b")
    cells = _cells(found.tables, "Difference to b", "a")
    for title, weights, scale in (
        ("text loss a", [10, 20, 30, 40], 1.0),
        ("bpb all", [40, 70, 90, 200], 1 / math.log(2)),
    ):
        value = scale * (sum(ours) - sum(theirs)) / sum(weights)
        residuals = [scale * (x - y) - value * weight for x, y, weight in zip(ours, theirs, weights, strict=True)]
        error = math.sqrt(4 / 3 * sum(one**2 for one in residuals)) / sum(weights)
        high = value + t_quantile(0.975, 3) * error
        assert (cells[title].value, cells[title].high) == pytest.approx((value, high), rel=1e-9)


def test_rows_of_something_else_are_not_paired(tmp_path: Path):
    results(tmp_path / "a.json", {"arc_easy": _answers([1.0, 0.0])}, weights="a")
    results(tmp_path / "b.json", {"arc_easy": _answers([0.0, 0.0], digest="e")}, weights="b")
    cell = _cells(compare(runs=(str(tmp_path / "a.json"), str(tmp_path / "b.json")), baseline="b").tables,
                  "Difference to b", "a")["ARC-e"]  # fmt: skip
    assert cell.high - cell.value == pytest.approx(1.959964 * math.hypot(0.2, 0.2), rel=1e-6)


def test_an_average_is_paired_task_by_task(tmp_path: Path):
    tasks = ("arc_easy", "piqa")
    scores = {"a": ([1.0, 1, 0, 1], [1.0, 0, 0, 0]), "b": ([1.0, 0, 0, 1], [0.0, 0, 0, 0])}
    for name, pair in scores.items():
        entries = {one: _answers(list(found)) for one, found in zip(tasks, pair, strict=True)}
        results(tmp_path / f"{name}.json", entries, weights=name, averages=[average("mean", list(tasks))])
    found = compare(runs=(str(tmp_path / "a.json"), str(tmp_path / "b.json")), baseline="b")
    cell = _cells(found.tables, "Difference to b", "a")["mean"]
    reach = t_quantile(0.975, 3) * 0.5 / 2  # of each task: one of four differences is 1, the others 0
    assert (cell.value, cell.high) == pytest.approx((0.25, 0.25 + math.hypot(reach, reach) / 2), rel=1e-12)


def test_files_of_one_model_are_one_row(tmp_path: Path):
    results(tmp_path / "arc.json", {"arc_easy": task(0.5)}, averages=[average("mean", ["arc_easy"], ("piqa",))])
    results(tmp_path / "piqa.json", {"piqa": task(0.7, title="PIQA")}, missing={"arc_easy": "no file"})
    results(tmp_path / "other.json", {"piqa": task(0.6, title="PIQA")}, weights="x")
    runs = [str(tmp_path / f"{name}.json") for name in ("arc", "piqa", "other")]
    found = compare(runs=(f"mine={runs[0]}", *runs[1:]))
    table = found.tables[0]
    assert [row.name for row in table.rows] == ["mine", "other"]
    assert [cell.value for cell in table.rows[0].cells if isinstance(cell, Interval)] == [0.5, 0.7]
    assert "other: not measured: ARC-e" in table.notes
    assert not any("mine: arc_easy is missing" in note for note in table.notes)
    apart = compare(runs=(f"one={runs[0]}", f"two={runs[1]}")).tables[0]
    assert [row.name for row in apart.rows] == ["one", "two"]


def test_a_subset_is_another_model_and_a_task_twice_is_seeds(tmp_path: Path):
    full, cut = tmp_path / "full.json", tmp_path / "cut.json"
    results(full, {"arc_easy": task(0.5)})
    results(cut, {"piqa": task(0.4, title="PIQA", selection={"kept": 2, "of": 8, "hash": "h"})})
    assert len(compare(runs=(str(full), str(cut))).tables[0].rows) == 2
    results(tmp_path / "again.json", {"arc_easy": task(0.6)})
    rows = compare(runs=(f"m={full}", f"m={tmp_path / 'again.json'}")).tables[0].rows
    assert [row.name for row in rows] == ["m (2 seeds)"]


def test_a_score_that_is_null_says_why(tmp_path: Path):
    results(tmp_path / "a.json", {"arc_easy": task(0.5)}, weights="a")
    file = results(tmp_path / "b.json", {"arc_easy": task(0.5)}, weights="b")
    document = json.loads(file.read_text())
    document["tasks"]["arc_easy"]["score"] = None
    file.write_text(json.dumps(document))
    notes = compare(runs=(str(tmp_path / "a.json"), str(file))).tables[0].notes
    assert "b: arc_easy is missing: its numbers are not finite, so there is no score" in notes
    assert not any("not measured" in note for note in notes)
