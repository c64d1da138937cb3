import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.app import run
from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split, record_digest
from moesaic.evaluation import evaluate as evaluating
from moesaic.evaluation.benchmarks import BENCHMARKS
from moesaic.evaluation.evaluate import evaluate
from moesaic.evaluation.local import read_local
from moesaic.evaluation.recipe import Average, Suite, SuiteTask
from moesaic.selection.extract import extract
from moesaic.selection.select import select
from tests.tiny_evals import choice_rows, save_tiny_dense, save_tiny_routed, write_evals, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # what lm-eval and its packages warn of is theirs

QUICK = Suite(
    name="quick",
    tasks=(SuiteTask(task="piqa"), SuiteTask(task="boolq"), SuiteTask(task="copa")),
    averages=(Average(name="mean"),),
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_routed(tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_evals(tmp_path_factory.mktemp("evals"))


@pytest.fixture(scope="module")
def measured(dense: Path, evals: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "results.json"
    evaluate(dense, out, suite=QUICK, data_dir=evals, limit=3)
    return out


def _copy(measured: Path, tmp_path: Path) -> Path:
    out = tmp_path / "results.json"
    out.write_bytes(measured.read_bytes())
    return out


def test_what_is_missing_is_said_and_not_averaged(measured: Path):
    document = json.loads(measured.read_text())
    assert set(document["tasks"]) == {"piqa", "boolq"}
    assert document["missing"]["copa"].startswith("no copa.validation.jsonl in ")
    (average,) = document["averages"]
    scores = [document["tasks"][name]["score"] for name in ("piqa", "boolq")]
    errors = [document["tasks"][name]["standard_error"] for name in ("piqa", "boolq")]
    assert average["score"] == sum(scores) / 2
    assert average["standard_error"] == pytest.approx((errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2)
    assert (average["over"], average["missing"], average["complete"]) == (["piqa", "boolq"], ["copa"], False)


def test_results_say_how_to_repeat_them(measured: Path, dense: Path):
    document = json.loads(measured.read_text())
    assert document["settings"]["limit"] == 3
    assert document["settings"]["seed"] == 1234
    assert document["checkpoint"]["name"] == str(dense)
    assert len(document["checkpoint"]["weights_hash"]) == 32
    assert {"moesaic", "torch", "transformers", "lm_eval"} <= set(document["versions"])
    assert document["suites"]["quick"]["version"] == 1
    entry = document["tasks"]["piqa"]
    assert (entry["shots"], entry["samples"]) == (0, 3)
    assert list(entry["identity"]["data"]) == ["piqa.validation.jsonl"]


def test_a_second_call_runs_only_what_is_new(
    measured: Path, dense: Path, evals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = _copy(measured, tmp_path)
    before = json.loads(out.read_text())["tasks"]
    ran = []
    real = evaluating.harness.run
    monkeypatch.setattr(
        evaluating.harness, "run", lambda lm, tasks, **rest: ran.append(list(tasks)) or real(lm, tasks, **rest)
    )
    more = Suite(name="more", tasks=(SuiteTask(task="piqa"), SuiteTask(task="openbookqa")))
    evaluate(dense, out, suite=more, data_dir=evals, limit=3)
    assert ran == [["openbookqa"]]
    after = json.loads(out.read_text())
    assert set(after["tasks"]) == {"piqa", "boolq", "openbookqa"}
    assert after["tasks"]["piqa"] == before["piqa"]
    assert set(after["suites"]) == {"quick", "more"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 2}, "was measured with limit 3, this call has 2"),
        ({"seed": 1}, "was measured with seed 1234, this call has 1"),
        ({"dtype": "float32"}, "was measured with dtype auto, this call has float32"),
        ({"batch_size": 2}, "was measured with batch_size 8, this call has 2"),
    ],
)
def test_a_changed_setting_is_refused(measured: Path, dense: Path, evals: Path, tmp_path: Path, changes, message: str):
    out = _copy(measured, tmp_path)
    with pytest.raises(MoesaicError, match=message):
        evaluate(dense, out, **({"suite": QUICK, "data_dir": evals, "limit": 3} | changes))
    assert out.read_bytes() == measured.read_bytes()


def test_changed_rows_and_shots_are_refused(measured: Path, dense: Path, tmp_path: Path):
    out = _copy(measured, tmp_path)
    other = write_evals(tmp_path / "evals")
    write_rows(other / "piqa.validation.jsonl", choice_rows(5, choices=2, seed=99))
    with pytest.raises(MoesaicError, match=r"results.json: piqa was measured with data .*--overwrite to begin anew"):
        evaluate(dense, out, suite=QUICK, data_dir=other, limit=3)
    write_rows(other / "piqa.validation.jsonl", choice_rows(6, choices=2, seed=3))
    write_rows(other / "piqa.train.jsonl", choice_rows(5, choices=2))
    shots = Suite(name="quick", tasks=(SuiteTask(task="piqa", shots=1),))
    with pytest.raises(MoesaicError, match=r"piqa was measured with (data|shots 0)"):
        evaluate(dense, out, suite=shots, data_dir=other, limit=3)


def test_a_results_file_of_another_model_is_refused(measured: Path, routed: Path, evals: Path, tmp_path: Path):
    out = _copy(measured, tmp_path)
    with pytest.raises(MoesaicError, match=r"has results of .* with other weights"):
        evaluate(routed, out, suite=QUICK, data_dir=evals, limit=3)
    evaluate(routed, out, suite="piqa", data_dir=evals, limit=3, overwrite=True)
    assert set(json.loads(out.read_text())["tasks"]) == {"piqa"}


@pytest.mark.parametrize(
    "text", ["{}", '{"format": "moesaic-results/1"}', "no json", '{"format": "moesaic-selection/1"}']
)
def test_a_file_that_is_no_results_is_refused_and_kept(dense: Path, evals: Path, tmp_path: Path, text: str):
    out = tmp_path / "results.json"
    out.write_text(text)
    with pytest.raises(MoesaicError, match=r"results\.json"):
        evaluate(dense, out, suite="piqa", data_dir=evals, limit=3)
    assert out.read_text() == text


def test_a_stopped_run_keeps_what_it_has(dense: Path, evals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "results.json"
    real, calls = evaluating.harness.run, []

    def stops(lm, tasks, **rest):
        calls.append(tasks)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(lm, tasks, **rest)

    monkeypatch.setattr(evaluating.harness, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(dense, out, suite=QUICK, data_dir=evals, limit=3)
    assert set(json.loads(out.read_text())["tasks"]) == {"piqa"}
    evaluate(dense, out, suite=QUICK, data_dir=evals, limit=3)
    assert set(json.loads(out.read_text())["tasks"]) == {"piqa", "boolq"}
    assert len(calls) == 3


def test_no_data_at_all_is_refused(dense: Path, tmp_path: Path):
    with pytest.raises(MoesaicError, match=r"--suite emo-gen5: no task can be measured \(squad: no squad.validation"):
        evaluate(dense, suite="emo-gen5", data_dir=tmp_path)
    with pytest.raises(MoesaicError, match="no such folder"):
        evaluate(dense, suite="emo-gen5", data_dir=tmp_path / "nowhere")


def test_the_hub_out_of_reach_is_said_in_one_line(dense: Path):
    with pytest.raises(MoesaicError, match=r"piqa: its data set or a package is not to be had \(") as caught:
        evaluate(dense, suite="piqa,mmlu_engineering")
    assert "\n" not in str(caught.value)


def test_rows_of_the_hub_that_selections_leave(dense: Path, evals: Path, monkeypatch: pytest.MonkeyPatch):
    real = evaluating.harness.build
    ours = read_local("mmlu_engineering", BENCHMARKS["mmlu_engineering"], evals, shots=0)

    def as_if_from_the_hub(name, benchmark, *, shots, seed, local):
        assert local is None
        return real(name, benchmark, shots=shots, seed=seed, local=ours)

    monkeypatch.setattr(evaluating.harness, "build", as_if_from_the_hub)
    suite = Suite(name="mine", tasks=(SuiteTask(task="mmlu_engineering"),), selection_share=0.5)
    entry = evaluate(dense, suite=suite).document["tasks"]["mmlu_engineering"]
    rows = [row for part in ours.rows.values() for row in part["test"]]
    left = [row for row in rows if not in_split(record_digest(row), share=0.5, seed=0)]
    assert 0 < len(left) < 6
    assert entry["samples"] == len(left)
    assert evaluate(dense, suite=suite, limit=1).document["tasks"]["mmlu_engineering"]["samples"] == 1


def test_a_damaged_row_is_named_with_its_line(dense: Path, tmp_path: Path):
    rows = choice_rows(3, choices=2)
    write_rows(tmp_path / "piqa.validation.jsonl", [*rows[:2], {"choices": ["a", "b"], "answer": 0}])
    with pytest.raises(MoesaicError, match=r"piqa.validation.jsonl:3: not a row of PIQA \(no field 'question'\)"):
        evaluate(dense, suite="piqa", data_dir=tmp_path)


def test_programs_are_not_run_unless_allowed(dense: Path, tmp_path: Path):
    far = save_tiny_dense(tmp_path / "far", reach=640)
    problem = {"id": "HumanEval/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n"}
    problem |= {"test": "def check(candidate):\n    assert candidate() == 1\n", "entry_point": "one"}
    folder = write_evals(tmp_path / "evals")
    write_rows(folder / "humaneval.test.jsonl", [problem])
    suite = Suite(name="code", tasks=(SuiteTask(task="piqa"), SuiteTask(task="humaneval")))
    result = evaluate(dense, suite=suite, data_dir=folder, limit=1)
    assert result.missing == {"humaneval": "it runs programs that the model writes; --allow-code-execution allows that"}
    result = evaluate(far, suite="humaneval", data_dir=folder, limit=1, allow_code_execution=True)
    assert result.score("humaneval") == 0.0
    result = evaluate(dense, suite="piqa,humaneval", data_dir=folder, limit=1, allow_code_execution=True)
    assert result.missing == {"humaneval": "its answers may take 512 tokens, and the model reaches 512"}
    assert result.ran == ("piqa",)
    with pytest.raises(MoesaicError, match="it has 0 demonstrations, not 2"):
        evaluate(dense, suite="humaneval", shots=2, data_dir=folder, limit=1, allow_code_execution=True)


def test_mmlu_reports_subjects_and_those_that_are_missing(dense: Path, evals: Path):
    entry = evaluate(dense, suite="mmlu", data_dir=evals, limit=4).document["tasks"]["mmlu"]
    assert set(entry["parts"]) == {"electrical_engineering", "high_school_geography", "abstract_algebra"}
    assert len(entry["missing_parts"]) == 54
    assert entry["samples"] == 12
    assert entry["score"] == pytest.approx(sum(part["score"] for part in entry["parts"].values()) / 3)


def test_a_selection_in_place_is_the_extracted_model(routed: Path, evals: Path, tmp_path: Path):
    select(routed, tmp_path / "sel.json", keep="3", data=str(evals / "arc_easy.test.jsonl"))
    extract(routed, tmp_path / "sel.json", tmp_path / "small")
    text = _texts(tmp_path / "text")

    def losses(checkpoint: Path, selection: Path | None) -> tuple[dict[str, Any], Any]:
        found = evaluate(checkpoint, suite="piqa,openbookqa", data_dir=evals, selection=selection)
        read = evaluate(checkpoint, suite="perplexity", data_dir=text, selection=selection)
        return {task: found.score(task) for task in ("piqa", "openbookqa")}, read.score("perplexity")

    in_place, bits = losses(routed, tmp_path / "sel.json")
    extracted, extracted_bits = losses(tmp_path / "small", None)
    _, full_bits = losses(routed, None)
    assert in_place == extracted
    assert bits == pytest.approx(extracted_bits, rel=1e-6)
    assert abs(bits - full_bits) > 1e-3


def test_results_say_which_experts_are_used(routed: Path, evals: Path, tmp_path: Path):
    select(routed, tmp_path / "sel.json", keep="3", data=str(evals / "arc_easy.test.jsonl"))
    extract(routed, tmp_path / "sel.json", tmp_path / "small")
    in_place = evaluate(routed, suite="piqa", data_dir=evals, limit=1, selection=tmp_path / "sel.json").document
    assert in_place["tasks"]["piqa"]["selection"]["kept"] == 3
    assert in_place["checkpoint"]["experts"] == {"kept": 8, "of": 8}
    small = evaluate(tmp_path / "small", suite="piqa", data_dir=evals, limit=1).document
    assert small["checkpoint"]["experts"] == {"kept": 3, "of": 8}
    assert in_place["checkpoint"]["sample_hash"] in small["checkpoint"]["made_from"]
    assert small["checkpoint"]["full_model"] == in_place["checkpoint"]["full_model"]


def test_a_folder_of_selections_on_the_rows_that_they_leave(routed: Path, tmp_path: Path):
    evals = write_evals(tmp_path / "evals", rows=12)
    chosen = tmp_path / "selections"
    rows = evals / "mmlu.test_some.jsonl"
    for category, subject in (("engineering", "electrical_engineering"), ("geography", "high_school_geography")):
        select(
            routed, chosen / f"{category}.json", keep="4", data=str(rows), split=0.4, only=("subject", subject), seed=5
        )
    result = evaluate(routed, suite="mmlu-categories", data_dir=evals, selection=chosen)
    tasks = result.document["tasks"]
    assert set(tasks) == {"mmlu_engineering", "mmlu_geography"}
    left = [
        row["subject"]
        for row in map(json.loads, rows.read_text().splitlines())
        if not in_split(record_digest(row), share=0.4, seed=5)
    ]
    for task, subject in (("mmlu_engineering", "electrical_engineering"), ("mmlu_geography", "high_school_geography")):
        assert tasks[task]["samples"] == left.count(subject)
        assert tasks[task]["selection"]["file"].endswith(f"{task.removeprefix('mmlu_')}.json")
    assert tasks["mmlu_engineering"]["selection"]["hash"] != tasks["mmlu_geography"]["selection"]["hash"]
    assert result.missing["mmlu_math"] == f"no selection mmlu_math.json or math.json in {chosen}"
    macro = next(one for one in result.document["averages"] if one["name"] == "macro of all 17")
    assert macro["over"] == ["mmlu_engineering", "mmlu_geography"]
    assert len(macro["missing"]) == 15


def test_a_selection_that_saw_the_evaluated_rows_is_named(
    routed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    evals = write_evals(tmp_path / "evals")
    rows = str(evals / "mmlu.test_some.jsonl")
    select(routed, tmp_path / "all.json", keep="4", data=rows)
    evaluate(routed, suite="mmlu-categories", data_dir=evals, limit=1, selection=tmp_path / "all.json", dry_run=True)
    assert "all.json: was made on" in capsys.readouterr().err
    select(routed, tmp_path / "dev.json", keep="4", data=str(evals / "arc_easy.train.jsonl"))
    evaluate(routed, suite="mmlu-categories", data_dir=evals, limit=1, selection=tmp_path / "dev.json", dry_run=True)
    assert "was made on" not in capsys.readouterr().err


def test_selections_of_other_models_and_of_dense_models_are_refused(
    dense: Path, routed: Path, evals: Path, tmp_path: Path
):
    other = save_tiny_routed(tmp_path / "other", seed=3)
    select(other, tmp_path / "sel.json", keep="3", data=str(evals / "arc_easy.test.jsonl"))
    with pytest.raises(MoesaicError, match=r"was made for .* with other weights"):
        evaluate(routed, suite="piqa", data_dir=evals, selection=tmp_path / "sel.json")
    with pytest.raises(MoesaicError, match=r"dense|mixture|experts"):
        evaluate(dense, suite="piqa", data_dir=evals, selection=tmp_path / "sel.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MoesaicError, match="the folder has no selection"):
        evaluate(routed, suite="piqa", data_dir=evals, selection=tmp_path / "empty")


def _texts(folder: Path) -> Path:
    folder.mkdir()
    for domain, count in (("math", 3), ("code", 2)):
        rows = [
            {"text": f"{domain} {'abc ' * (n + 2)}", "domain": domain, "source": f"{domain}-{n % 2}"}
            for n in range(count)
        ]
        write_rows(folder / f"{domain}.valid.jsonl", [*rows, {"text": "", "domain": domain}])
    write_rows(folder / "math.train.jsonl", [{"text": "not this one", "domain": "train"}])
    return folder


def test_perplexity_by_domain_and_source(dense: Path, tmp_path: Path):
    result = evaluate(dense, suite="perplexity", data_dir=_texts(tmp_path / "text"))
    text = result.document["tasks"]["perplexity"]["text"]
    assert set(text["domains"]) == {"math", "code"}  # no train rows
    assert set(text["sources"]) == {"math-0", "math-1", "code-0", "code-1"}
    everything, parts = text["all"], list(text["domains"].values())
    for key in ("tokens", "bytes", "documents"):
        assert everything[key] == sum(part[key] for part in parts)
    assert everything["documents"] == 5
    assert everything["loss"] == pytest.approx(sum(p["loss"] * p["tokens"] for p in parts) / everything["tokens"])
    # one token is one byte here, so bits per byte are the loss in other units
    assert everything["bits_per_byte"] == pytest.approx(everything["loss"] / 0.6931471805599453)
    assert result.document["tasks"]["perplexity"]["higher_is_better"] is False


def test_a_document_s_loss_does_not_depend_on_its_neighbours(dense: Path, tmp_path: Path):
    together, alone = _texts(tmp_path / "together"), tmp_path / "alone"
    alone.mkdir()
    (alone / "code.valid.jsonl").write_bytes((together / "code.valid.jsonl").read_bytes())
    both, one = (
        evaluate(dense, suite="perplexity", data_dir=folder, dtype="float32").document["tasks"]["perplexity"]["text"]
        for folder in (together, alone)
    )
    assert both["domains"]["code"]["loss"] == pytest.approx(one["domains"]["code"]["loss"], rel=1e-6)


def test_records_without_the_domain_field_are_refused(dense: Path, tmp_path: Path):
    write_rows(tmp_path / "a.valid.jsonl", [{"text": "abc", "topic": "x"}, {"text": "abd", "topic": "y"}])
    with pytest.raises(MoesaicError, match=r"a.valid.jsonl:1: no field 'domain' .*text, topic.*--domain-field"):
        evaluate(dense, suite="perplexity", data_dir=tmp_path)
    topics = evaluate(dense, suite="perplexity", data_dir=tmp_path, domain_field="topic")
    assert set(topics.document["tasks"]["perplexity"]["text"]["domains"]) == {"x", "y"}
    files = evaluate(dense, suite="perplexity", data_dir=tmp_path, domain_field="")
    assert set(files.document["tasks"]["perplexity"]["text"]["domains"]) == {"a"}


def test_one_document_has_no_standard_error(dense: Path, tmp_path: Path):
    write_rows(tmp_path / "a.valid.jsonl", [{"text": "\x07\x1b[31m ‮שלום </script>", "domain": "odd"}])
    entry = evaluate(dense, suite="perplexity", data_dir=tmp_path).document["tasks"]["perplexity"]
    assert entry["standard_error"] is None
    assert entry["score"] > 0


def test_the_command_line(dense: Path, evals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "results.json"
    arguments = ["eval", str(dense), "--suite", "piqa", "--data-dir", str(evals), "--limit", "2", "--out", str(out)]
    assert run([*arguments, "--dry-run", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ran"] == ["piqa"]
    assert not out.exists()
    assert run([*arguments, "--json", "--quiet"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["results"] == json.loads(out.read_text())
    assert run(arguments) == 0
    lines = capsys.readouterr()
    assert lines.out.startswith("piqa: ")
    assert "acc,none, 0 shots, 2 rows" in lines.out
    assert "1 tasks are there already" in lines.err
    assert run(["eval", str(dense), "--suite", "emo-mc8", "--out", str(out)]) == 2
    assert "emo-mc8: no such suite or task; did you mean 'emo-mc9'?" in capsys.readouterr().err
    assert run([*arguments, "--limit", "0"]) == 2
    assert "--limit" in capsys.readouterr().err
