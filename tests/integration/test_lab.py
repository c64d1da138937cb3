"""All experiments at the smallest scale, their numbers recomputed from the raw files, and one killed and continued."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median

import pytest

from moesaic_lab.experiments import EXPERIMENTS
from moesaic_lab.plan import ENVIRONMENT, Plan, write_plan
from moesaic_lab.report import find, write_html
from moesaic_lab.scale import load_scale
from moesaic_lab.workflow import cpu_seconds_file, run_step

CI = Path(__file__).parents[1] / "unit" / "lab" / "ci.yaml"


def _run_here(plan: Plan, out: Path) -> None:
    """Every step of a plan in this process, as `moesaic_lab.workflow` runs them, without Snakemake."""
    write_plan(plan, out)
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(out)
    os.environ.update(ENVIRONMENT)
    try:
        for step in plan.steps:
            assert run_step(step) == 0, step.name
            Path("steps", f"{step.name}.done").touch()
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(scope="module", params=list(EXPERIMENTS))
def done(request, tmp_path_factory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("lab") / request.param
    _run_here(EXPERIMENTS[request.param].plan(load_scale(CI), None, 1), out)
    return request.param, out


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _final(out: Path, run: str) -> dict[str, float]:
    """Held-out losses of a run at its end, straight from its metrics."""
    validations = [line for line in _lines(out / "runs" / run / "metrics.jsonl") if line["kind"] == "validation"]
    return {domain: measured["loss"] for domain, measured in validations[-1]["validation"].items()}


def _first(out: Path, run: str) -> float:
    line = next(line for line in _lines(out / "runs" / run / "metrics.jsonl") if line["kind"] == "validation")
    return fmean(measured["loss"] for measured in line["validation"].values())


def _mean(out: Path, run: str) -> float:
    return fmean(_final(out, run).values())


def _table(out: Path, title: str) -> dict[str, list[str]]:
    """A table of report.md: first cell of a row -> the other cells."""
    text = (out / "report.md").read_text()
    part = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


def test_numbers_are_those_of_the_raw_files(done):
    name, out = done
    _CHECKS[name](out)


def _check_emo(out: Path) -> None:
    trained = _table(out, "From scratch on the same tokens")
    for model in ("standard", "emo", "few_experts", "dense"):
        losses = list(_final(out, f"{model}-0").values())
        assert trained[model] == [f"{value:.3f}" for value in (*losses, fmean(losses))]
    rows = _lines(out / "rows" / "subsets-emo-0.jsonl")
    full = {row["domain"]: row["value"] for row in rows if row["measure"] == "subset_loss" and row["share"] == 1.0}
    assert full == pytest.approx(_final(out, "emo-0"), abs=1e-6)  # measured here and by `train`
    cost = _table(out, "What fewer experts cost")["emo"]
    assert cost[2] == f"{_rise(out, 'emo'):.3f}"
    tuned = [_final(out, f"tuned-emo-{domain}-25-0")[domain] for domain in full]
    assert _table(out, "At equal memory")["25% of emo, fine-tuned"] == [f"{fmean(tuned):.3f}"]
    checks = _table(out, "Checks")
    assert checks["routings of tokens outside their document's pool"][0].startswith("0 of ")
    assert checks["largest difference of logits, masked and extracted"] == ["0"]
    _check_variants(out)


def _rise(out: Path, model: str) -> float:
    """How much a quarter of the experts, by router on 2 documents, loses against all."""
    rows = [r for r in _lines(out / "rows" / f"subsets-{model}-0.jsonl") if r["measure"] == "subset_loss"]
    full = fmean(r["value"] for r in rows if r["share"] == 1.0)
    part = [r for r in rows if r.get("method") == "router" and r["documents"] == 2 and r["share"] == 0.25]
    return fmean(r["value"] for r in part) - full


def _check_variants(out: Path) -> None:
    """Claims about EMO's variants, by hand; at this size none can be judged."""
    claims = _table(out, "Claims")

    def largest_gradient(model: str) -> float:
        lines = [line for line in _lines(out / "runs" / f"{model}-0" / "metrics.jsonl") if line["kind"] == "step"]
        late = [line["grad_norm"] for line in lines[len(lines) // 10 :]]
        return max(late) / median(late)

    expected = {
        "a shared expert helps": _mean(out, "no_shared_expert-0") - _mean(out, "emo-0"),
        "annealing a standard MoE with pools": _rise(out, "standard") - _rise(out, "annealing"),
        "pools from the start are better": _rise(out, "annealing") - _rise(out, "emo"),
        "local balancing makes": largest_gradient("local_balancing") - largest_gradient("emo"),
    }
    for says, value in expected.items():
        _, premise, figure, verdict = next(cells for claim, cells in claims.items() if claim.startswith(says))
        assert float(figure) == pytest.approx(value, abs=6e-5)
        assert premise.count("(fails)") == 3
        assert verdict == "not testable here"


def _check_expand(out: Path) -> None:
    small, large = _mean(out, "fixed-4-0"), _mean(out, "fixed-8-0")
    fixed = _table(out, "Fixed numbers of experts")
    assert fixed["4"] == [f"{small:.4f}"]
    assert fixed["8"] == [f"{large:.4f}"]
    treatments = ("gradient_norm", "uniform", "random", "exact")
    runs = [f"grown-4-0.5-{one}-0" for one in treatments]
    before = _mean(out, "before-4-0.5-0")
    jumps = [f"{_first(out, run) - before:.4f}" for run in runs]
    assert _table(out, "Right after growing")["0.5 (100%)"] == [f"{before:.4f}", *jumps]
    assert abs(_first(out, runs[-1]) - before) < 1e-4, "the exact expansion changes nothing but the noise of 1e-3"
    assert _table(out, "Grown models at the end")["0.5 (100%)"] == [f"{_mean(out, run):.4f}" for run in runs]
    assert _table(out, "Gap closure")["0.5 (100%)"] == ["gap not seen"] * 4  # one seed has no interval
    ratio = _table(out, "Activation ratio, and sparse upcycling from a dense model")
    others = ("fixed-2-0", "fixed-4-0", "grown-2-0.5-gradient_norm-0", "sparse-2-0")
    assert ratio["1/4"] == [f"{_mean(out, run):.4f}" for run in others]


def _check_divmoe(out: Path) -> None:
    joint = _table(out, "After the joint stage")
    body = [name for name in joint if name in ("dense", *_methods())]
    assert body[:3] == ["dense", "scratch", "sparse"]
    assert sorted(body) == sorted(("dense", *_methods()))
    ends = _table(out, "Step 0 and the end")
    for model in ("dense", "divmoe", "drop_fine"):
        end, dense, ours = (_mean(out, f"{name}-0") for name in (model, "dense", "divmoe"))
        expected = (_first(out, f"{model}-0"), end, end - dense, end - ours)
        assert [float(cell) for cell in ends[model]] == pytest.approx(expected, abs=6e-4)
    # What the statements say about step 0: N1 is the base that it starts from, and nothing else of the table is.
    assert _first(out, "virtual_group-0") == pytest.approx(_mean(out, "longer-0"), abs=1e-5)
    rows = _lines(out / "rows" / "accuracy-0.jsonl")
    mine = [row["value"] for row in rows if row["model"] == "divmoe"]
    assert _table(out, "Accuracy on held-out questions")["divmoe"][-1] == f"{fmean(mine):.3f}"
    last = [line for line in _lines(out / "runs" / "btx-0" / "metrics.jsonl") if line["kind"] == "step"][-1]
    health = _table(out, "Routing health")["btx"]
    assert health[:2] == [f"{last['load_entropy']:.3f}", f"{last['largest_share']:.3f}"]


def _methods() -> tuple[str, ...]:
    return load_scale(CI).divmoe.methods


def _check_life(out: Path) -> None:
    table = _table(out, "A model's life")
    rows = _lines(out / "rows" / "measure-0.jsonl")
    for model, run in (("dense base", "base-0"), ("divmoe, annealed with pools", "modular-0")):
        measured = {r["domain"]: r["value"] for r in rows if r["model"] == model and r["measure"] == "measured_loss"}
        assert measured == pytest.approx(_final(out, run), abs=1e-6)
        assert table[model][1:] == [f"{value:.3f}" for value in (*measured.values(), fmean(measured.values()))]
    losses = {
        model: fmean(r["value"] for r in rows if r["model"] == model and r["measure"] == "measured_loss")
        for model in {r["model"] for r in rows}
    }
    assert losses["grown exactly, not trained"] == pytest.approx(losses["divmoe, annealed with pools"], abs=1e-4)
    sizes = {model: int(cells[0].replace(",", "")) for model, cells in table.items() if model[0] not in "-m"}
    assert sizes["part put back"] == sizes["grown plainly, trained"] > sizes["part for arithmetic"]


def _check_operators(out: Path) -> None:
    table = _table(out, "Operators for duplicates")
    names = ("copy", "copy-again", "expert-drop", "router-orthogonal")
    assert tuple(name for name in table if name in names) == names
    before, losses = _mean(out, "before-4-0.8-0"), {name: _mean(out, f"grown-4-0.8-{name}-0") for name in names}
    for name, loss in losses.items():
        gained = f"{losses['copy'] - loss:.4f}" if name != "copy" else ""
        assert table[name] == [f"{_first(out, f'grown-4-0.8-{name}-0') - before:.4f}", f"{loss:.4f}", gained]
    claims = _table(out, "Claims")
    for kind, name in (("experts", "expert-drop"), ("routers", "router-orthogonal")):
        _, _, figure, verdict = next(cells for says, cells in claims.items() if kind in says)
        assert float(figure) == pytest.approx(1e-3 - (losses["copy"] - losses[name]), abs=6e-5)
        assert verdict == "not testable here"


_CHECKS = {
    "emo": _check_emo, "expand": _check_expand, "operators": _check_operators, "divmoe": _check_divmoe,
    "life": _check_life,
}  # fmt: skip


def test_premises_are_those_of_the_raw_files(done):
    """And the model's loss is that of its training: measured twice, in two ways."""
    name, out = done
    model = {"emo": "dense-0", "expand": "fixed-4-0", "operators": "before-4-0.8-0"}.get(name, "base-0")
    rows = _lines(out / "rows" / "premise-0.jsonl")
    losses = {m: fmean(r["value"] for r in rows if r["measure"] == m) for m in {r["measure"] for r in rows}}
    assert losses["premise_loss"] == pytest.approx(_mean(out, model), abs=1e-6)
    assert losses["bigram_loss"] < losses["unigram_loss"] < losses["premise_loss"] + 1
    table = _table(out, "Premises")
    for premise, measure, less in (("more than bigrams", "bigram_loss", 0.3), ("FFNs worth", "without_ffns_loss", 2.5)):
        figure, holds = next(cells for title, cells in table.items() if title.startswith(premise))
        assert float(figure.rpartition(": ")[2]) == pytest.approx(
            losses[measure] - losses["premise_loss"] - less, abs=6e-5
        )
        assert holds == "no"


def test_report_is_one_page_with_curves_and_no_markup_from_outside(done, tmp_path):
    name, out = done
    copy = tmp_path / "<b>"
    shutil.copytree(out, copy, symlinks=True)
    plan = json.loads((copy / "plan.json").read_text())
    plan["data"] = "<script>alert(1)</script>"
    (copy / "plan.json").write_text(json.dumps(plan))
    write_html([find(copy)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=", page)
    assert "<polyline" in page
    assert ("Loss against the share of experts kept" in page) == (name == "emo")
    assert f"<h1>{name}: " in page


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_and_started_again_it_ends_with_the_same_numbers(tmp_path):
    scale = tmp_path / "scale.yaml"
    text = CI.read_text()
    text = text.replace("shares: [0.5]", "shares: [0.5]\n  treatments: [uniform]").replace("other_experts: [2]", "")
    # Long enough to be killed in the middle of: 120 steps of a moment each.
    scale.write_text(text.replace("train: {tokens: 4000", "train: {tokens: 60000"))
    plan = EXPERIMENTS["expand"].plan(load_scale(scale), None, 1)
    whole, out = tmp_path / "whole", tmp_path / "out"
    _run_here(plan, whole)
    command = [sys.executable, "-m", "moesaic", "lab", "run", "expand", str(out), "--scale", str(scale)]
    command += ["--seeds", "1", "--jobs", "2", "--quiet"]
    metrics = out / "runs" / "fixed-8-0" / "metrics.jsonl"
    with subprocess.Popen(command) as process:
        _wait(lambda: metrics.exists() and metrics.read_text().count("\n") > 30)
        process.send_signal(signal.SIGKILL)
    assert not (out / "steps" / "report.done").exists()
    finished = {file.name: file.stat().st_mtime_ns for file in (out / "steps").glob("*.done")}
    assert "prepare.done" in finished
    _wait(lambda: not _is_locked(out / "runs" / "fixed-8-0"))  # its step ends once it sees that it is alone
    subprocess.run(command, check=True)
    assert {name: (out / "steps" / name).stat().st_mtime_ns for name in finished} == finished, "not run again"
    left, right = (
        [row for row in _lines(folder / "results.jsonl") if row["measure"] != "seconds"] for folder in (whole, out)
    )
    assert left == right
    seconds = [float(cpu_seconds_file(out, step.name).read_text()) for step in plan.steps]
    assert min(seconds) > 0
    assert f"{sum(seconds) / 60:.0f} minutes of one core" in (out / "report.md").read_text()


def _wait(condition) -> None:
    """What never comes ends with the test's own time limit."""
    while not condition():
        time.sleep(0.05)


def _is_locked(run: Path) -> bool:
    import fcntl

    with (run / "state" / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
