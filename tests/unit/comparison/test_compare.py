import csv
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.app import run
from moesaic.common.errors import MoesaicError
from moesaic.common.intervals import Interval, gap_closure
from moesaic.comparison.compare import Comparison, compare
from tests.unit.comparison.runs import average, results, task, training

T_2 = 4.302652729911275  # 97.5% quantile of Student's t with two degrees of freedom


def _cells(comparison: Comparison, title: str) -> dict[str, dict[str, Any]]:
    table = next(one for one in comparison.tables if one.title.startswith(title))
    names = [heading.title for heading in table.headings]
    return {row.name: dict(zip(names, row.cells, strict=True)) for row in table.rows}


def _titles(comparison: Comparison) -> list[str]:
    return [table.title for table in comparison.tables]


def test_a_single_run_has_the_interval_over_its_questions(tmp_path: Path):
    file = results(tmp_path / "emo" / "results.json", {"arc_easy": task(0.6, 0.05)})
    cell = _cells(compare([str(file)]), "Scores")["emo"]["ARC-e"]
    assert (cell.value, cell.low, cell.high) == pytest.approx((0.6, 0.6 - 1.959964 * 0.05, 0.6 + 1.959964 * 0.05))
    unknown = results(tmp_path / "u.json", {"arc_easy": task(0.6, None)})
    assert _cells(compare([str(unknown)]), "Scores")["u"]["ARC-e"] == Interval(value=0.6, low=None, high=None)


def test_seeds_of_one_name_are_a_mean_with_students_interval(tmp_path: Path):
    values = [0.50, 0.53, 0.61]
    files = [
        str(results(tmp_path / f"emo-seed{n}.results.json", {"arc_easy": task(value)}))
        for n, value in enumerate(values)
    ]
    cell = _cells(compare(files), "Scores")["emo (3 seeds)"]["ARC-e"]
    reach = T_2 * statistics.stdev(values) / math.sqrt(3)
    assert (cell.value, cell.low, cell.high) == pytest.approx(
        (statistics.mean(values), cell.value - reach, cell.value + reach)
    )
    named = [f"a={file}" for file in files[:2]] + [f"b={files[2]}"]
    assert set(_cells(compare(named), "Scores")) == {"a (2 seeds)", "b"}


def test_differences_to_a_baseline(tmp_path: Path):
    a = results(tmp_path / "a.json", {"arc_easy": task(0.60, 0.03)})
    b = results(tmp_path / "b.json", {"arc_easy": task(0.50, 0.04)})
    cells = _cells(compare([str(a), str(b)], baseline="b"), "Difference to b")
    assert list(cells) == ["a"]
    assert cells["a"]["ARC-e"].value == pytest.approx(0.1)
    assert cells["a"]["ARC-e"].high - 0.1 == pytest.approx(1.959964 * 0.05)


def test_differences_of_seeds_are_over_pairs(tmp_path: Path):
    ours, theirs = [0.60, 0.70, 0.65], [0.50, 0.61, 0.54]
    files = [f"a={results(tmp_path / f'a{n}.json', {'arc_easy': task(v)})}" for n, v in enumerate(ours)]
    files += [f"b={results(tmp_path / f'b{n}.json', {'arc_easy': task(v)})}" for n, v in enumerate(theirs)]
    cell = _cells(compare(files, baseline="b"), "Difference")["a (3 seeds)"]["ARC-e"]
    gaps = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    assert cell.value == pytest.approx(statistics.mean(gaps))
    assert cell.high - cell.value == pytest.approx(T_2 * statistics.stdev(gaps) / math.sqrt(3))


def test_the_best_is_marked_in_every_format(tmp_path: Path):
    tasks = [{"arc_easy": task(score), "text": _text_task(bits)} for score, bits in ((0.6, 1.2), (0.5, 1.0))]
    files = [str(results(tmp_path / f"{name}.json", one)) for name, one in zip("ab", tasks, strict=True)]
    found = compare(files)
    plain = "\n".join(found.lines())
    assert "60.0 ±2.0*" in plain
    assert "50.0 ±2.0*" not in plain
    assert "1.0000 ±0.0196*" in plain  # lower is better
    assert "| a | **60.0 ±2.0** | 1.2000 ±0.0196 |" in "\n".join(found.lines("md"))
    rows = list(csv.DictReader(found.lines("csv")))
    assert {(row["row"], row["column"]) for row in rows if row["best"] == "1"} == {
        ("a", "ARC-e"),
        ("b", "bpb all"),
        ("b", "text loss all"),
    }
    document = json.loads("\n".join(found.lines("json")))
    assert document["tables"][0]["rows"][0]["cells"][0]["value"] == 0.6
    assert "\x1b[1m 60.0 ±2.0\x1b[0m" in "\n".join(found.lines(bold=True))


def _text_task(bits: float) -> dict[str, Any]:
    numbers = {"bits_per_byte": bits, "bits_per_byte_error": 0.01, "loss": bits, "standard_error": 0.01, "documents": 3}
    numbers |= {"perplexity": 9.0, "tokens": 60}
    return task(bits, title="bits per byte", higher_is_better=False, text={"all": numbers, "domains": {}})


def test_names_cannot_break_markdown(tmp_path: Path):
    file = results(tmp_path / "r.json", {"arc_easy": task(0.5, title="a|b<c")})
    lines = compare([f"x|<b>y={file}"]).lines("md")
    assert "| x\\|&lt;b>y | 50.0 ±2.0 |" in lines
    assert "| | a\\|b&lt;c |" in lines


def test_averages_are_over_what_all_runs_have(tmp_path: Path):
    first = {name: task(score, 0.03, title=name) for name, score in (("x", 0.2), ("y", 0.4), ("z", 0.9))}
    second = {name: task(score, 0.04, title=name) for name, score in (("x", 0.3), ("y", 0.5))}
    a = results(tmp_path / "a.json", first, averages=[average("mean", ["x", "y", "z"])])
    b = results(
        tmp_path / "b.json", second, averages=[average("mean", ["x", "y"], ("z",))], missing={"z": "no z.jsonl"}
    )
    found = compare([str(a), str(b)], baseline="b")
    cells = _cells(found, "Scores")
    assert cells["a"]["mean (2 of 3)"].value == pytest.approx(0.3)
    assert cells["b"]["mean (2 of 3)"].value == pytest.approx(0.4)
    assert cells["a"]["mean (2 of 3)"].high - 0.3 == pytest.approx(1.959964 * math.hypot(0.03, 0.03) / 2)
    assert _cells(found, "Difference")["a"]["mean (2 of 3)"].value == pytest.approx(-0.1)
    notes = found.tables[0].notes
    assert "mean (2 of 3), suite s: over x, y; without z" in notes
    assert "b: z is missing: no z.jsonl" in notes
    assert "mean" in _cells(compare([str(a)]), "Scores")["a"]


def test_what_was_not_measured_alike_is_not_subtracted(tmp_path: Path):
    a = results(tmp_path / "a.json", {"arc_easy": task(0.6)})
    b = results(tmp_path / "b.json", {"arc_easy": task(0.5)}, settings={"limit": 10})
    found = compare([str(a), str(b)], baseline="b")
    assert _cells(found, "Difference")["a"]["ARC-e"] is None
    assert "ARC-e: a and b were not measured alike (shots, limit, rows or data)" in found.tables[0].notes


def test_training_runs_show_their_last_validation(tmp_path: Path):
    folder = training(tmp_path / "emo-s0", {"math": 2.0, "code": 3.0})
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "step", "st')  # a killed run's last line
    cells = _cells(compare([str(folder)]), "Scores")["emo"]
    assert [cells[name].value for name in ("loss math", "loss code", "mean loss")] == [2.0, 3.0, 2.5]
    assert cells["mean loss"].high - 2.5 == pytest.approx(1.959964 * math.hypot(0.1, 0.1) / 2)


def test_gap_closure_of_three_runs(tmp_path: Path):
    draw = random.Random(0)
    losses = {
        name: [value + draw.gauss(0, 0.002) for _ in range(3)]
        for name, value in (("e", 1.30), ("up", 1.27), ("me", 1.26))
    }
    runs = [
        f"{name}={training(tmp_path / f'{name}-{seed}', {'text': loss})}"
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    cells = _cells(compare(runs, gap=("e", "up", "me")), "Gap closure of up")["loss text"]
    expected = gap_closure(losses["e"], losses["up"], losses["me"])
    assert cells["closure %"] == expected.closure
    assert cells["gap L_E - L_mE"] == expected.gap
    single = compare(runs[::3], gap=("e", "up", "me"))
    assert _cells(single, "Gap")["loss text"]["closure %"] == "one seed"
    with pytest.raises(MoesaicError, match=r"the three need the same seeds.*e has 3, up has 3, me has 2"):
        compare(runs[:-1], gap=("e", "up", "me"))


def test_no_gap_closure_where_the_gap_may_be_nothing(tmp_path: Path):
    losses = {"e": [1.30, 1.20], "up": [1.25, 1.26], "me": [1.26, 1.25]}
    runs = [
        f"{name}={training(tmp_path / f'{name}-{seed}', {'text': loss})}"
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    assert _cells(compare(runs, gap=("e", "up", "me")), "Gap")["loss text"]["closure %"] == "gap includes 0"
    other = results(tmp_path / "x.json", {"arc_easy": task(0.5)})
    with pytest.raises(MoesaicError, match="no held-out loss in common"):
        compare([runs[0], runs[2], f"x={other}"], gap=("e", "up", "x"))


def test_gap_closure_leaves_out_what_was_not_measured_alike(tmp_path: Path):
    losses = {"e": 1.30, "up": 1.27, "me": 1.26}
    runs = [
        str(training(tmp_path / name, {"math": loss, "code": loss}, tokens={"code": 100 + (name == "up")}))
        for name, loss in losses.items()
    ]
    found = compare(runs, gap=("e", "up", "me"))
    assert list(_cells(found, "Gap")) == ["loss math"]
    said = "loss code: e and up were not measured alike (shots, limit, rows or data)"
    assert f"{said}: left out" in next(table for table in found.tables if table.title.startswith("Gap")).notes
    other = training(tmp_path / "all", {"math": 1.27, "code": 1.27}, tokens={"math": 90, "code": 90})
    with pytest.raises(MoesaicError, match=r"loss math: e and all were not measured alike .*; measure all three"):
        compare([runs[0], str(other), runs[2]], gap=("e", "all", "me"))


def test_a_domain_called_mean_is_beside_the_mean_over_domains(tmp_path: Path):
    runs = [
        str(training(tmp_path / name, {"mean": loss, "code": loss + 1}))
        for name, loss in (("e", 2.3), ("up", 2.2), ("me", 2.0))
    ]
    found = compare(runs, gap=("e", "up", "me"))
    cells = _cells(found, "Scores")["me"]
    assert [cells[name].value for name in ("loss mean", "loss code", "mean loss")] == [2.0, 3.0, 2.5]
    assert list(_cells(found, "Gap")) == ["loss mean", "loss code", "mean loss"]


def test_loss_jump_at_an_expansion(tmp_path: Path):
    held_out = {"loss": 2.0, "standard_error": 0.1, "documents": 10, "tokens": 100}
    losses = {"before": held_out, "after": held_out | {"loss": 2.25}, "jump": {"value": 0.25, "low": 0.2, "high": 0.3}}
    line = {
        "kind": "expansion",
        "step": 4,
        "tokens": 400,
        "experts_before": 8,
        "experts": 16,
        "losses": {"math": losses},
    }
    found = compare([str(training(tmp_path / "up", {"math": 1.9}, lines=(line,)))])
    cells = _cells(found, "Loss jump")["up, step 4, 8 to 16 experts, math"]
    assert cells["jump"] == Interval(value=0.25, low=0.2, high=0.3)
    assert "+0.2500 ±0.0500" in "\n".join(found.lines())
    assert not any(
        title.startswith("Loss jump") for title in _titles(compare([str(training(tmp_path / "no", {"math": 1.0}))]))
    )


def test_before_and_after_training_are_found_by_their_weights(tmp_path: Path):
    before = results(tmp_path / "before.json", {"arc_easy": task(0.5)}, weights="1")
    after = results(tmp_path / "after.json", {"arc_easy": task(0.7)}, weights="2", made_from=["1"], verb="train")
    other = results(tmp_path / "other.json", {"arc_easy": task(0.7)}, weights="3", made_from=["1"], verb="expand")
    found = compare([str(before), str(after), str(other)])
    cells = _cells(found, "After training")
    assert list(cells) == ["before -> after"]
    assert cells["before -> after"]["ARC-e"].value == pytest.approx(0.2)


def test_retention_against_the_share_of_experts(tmp_path: Path):
    selected = {"kept": 2, "of": 8}
    full = results(tmp_path / "full.json", {"arc_easy": task(0.8)}, weights="1", experts={"kept": 8, "of": 8})
    masked = results(
        tmp_path / "masked.json",
        {"arc_easy": task(0.7, selection=selected)},
        weights="1",
        experts={"kept": 8, "of": 8},
    )
    extracted = results(
        tmp_path / "small.json",
        {"arc_easy": task(0.6)},
        weights="2",
        made_from=["s1"],  # extract does not read all weights, so it records the hash of a sample
        verb="extract",
        experts={"kept": 4, "of": 8},
    )
    tuned = results(
        tmp_path / "tuned.json",
        {"arc_easy": task(0.75)},
        weights="3",
        made_from=["2"],
        verb="train",
        experts={"kept": 4, "of": 8},
    )
    stranger = results(tmp_path / "stranger.json", {"arc_easy": task(0.6)}, weights="9", experts={"kept": 4, "of": 8})
    found = compare([str(file) for file in (full, masked, extracted, tuned, stranger)])
    cells = _cells(found, "Retention")
    assert list(cells) == ["small: 4 of 8 (50%) of full", "tuned: 4 of 8 (50%) of full", "masked: 2 of 8 (25%) of full"]
    assert cells["masked: 2 of 8 (25%) of full"]["lost"].value == pytest.approx(-0.1)
    assert cells["small: 4 of 8 (50%) of full"]["ARC-e"].value == 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such results file or folder"),
        (["{empty}"], "has neither results.json (of `moesaic eval`) nor metrics.jsonl (of `moesaic train`)"),
        (["{file}", "--baseline", "emmo"], "--baseline emmo: no run has that name; did you mean 'emo'?"),
        (["{file}", "--gap-closure", "emo", "emo", "x"], "--gap-closure x: no run has that name"),
        (["{other}"], "not a results file"),
        (["{broken}"], "metrics.jsonl:1: not JSON"),
        (["{list}"], "metrics.jsonl:1: not a line of `moesaic train`"),
        ([], "give at least one results file or training run"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    for name, text in (("broken", "x\n"), ("list", "[]\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"format": "moesaic-selection/1"}')
    places = {name: tmp_path / name for name in ("empty", "broken", "list")} | {"other": tmp_path / "other.json"}
    places["file"] = results(tmp_path / "emo.json", {"arc_easy": task(0.5)})
    assert run(["compare", *(argument.format(**places) for argument in arguments)]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a = results(tmp_path / "a.json", {"arc_easy": task(0.6)})
    b = results(tmp_path / "b.json", {"arc_easy": task(0.5)})
    assert run(["compare", str(a), str(b), "--baseline", "b", "--format", "md"]) == 0
    assert "| a | **60.0 ±2.0** |" in capsys.readouterr().out
    assert run(["compare", str(a), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["title"] == "Scores"


def test_a_baseline_alone_is_a_table_without_rows(tmp_path: Path):
    file = results(tmp_path / "a.json", {"arc_easy": task(0.6)})
    found = compare([str(file)], baseline="a")
    assert _cells(found, "Difference to a") == {}
    for form in ("table", "md", "csv", "json"):
        assert found.lines(form)
    assert "Difference to a" in found.lines()


def test_an_average_with_bits_per_byte_in_it_is_left_out(tmp_path: Path):
    tasks = {"arc_easy": task(0.6), "perplexity": _text_task(1.2)}
    file = results(tmp_path / "a.json", tasks, averages=[average("both", ["arc_easy", "perplexity"])])
    assert "both" not in _cells(compare([str(file)]), "Scores")["a"]


def test_losses_that_were_no_numbers_have_no_column(tmp_path: Path):
    text = _text_task(1.2)
    nothing = dict.fromkeys(text["text"]["all"]) | {"documents": 3, "tokens": 60}
    text["text"]["domains"] = {"odd": nothing}
    cells = _cells(compare([str(results(tmp_path / "a.json", {"perplexity": text}))]), "Scores")["a"]
    assert set(cells) == {"bpb all", "text loss all"}
