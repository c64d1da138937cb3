import json
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.cli import app as cli
from moesaic.common.errors import MoesaicError
from moesaic.evaluation.answers import gold_index, last_number, matches
from moesaic.evaluation.benchmarks import BENCHMARKS, Benchmark
from moesaic.evaluation.catalogue import suite_rows, task_rows
from moesaic.evaluation.local import DataMissingError, read_local
from moesaic.evaluation.own import find_task
from moesaic.evaluation.recipe import EvalRecipe, SuiteTask, chosen_suite, load_suite
from tests.tiny_evals import write_rows


@pytest.mark.parametrize(
    ("answer", "choices", "kind", "place"),
    [
        (1, ["x", "y"], None, 1),
        ("1", ["x", "y"], None, 1),
        ("B", ["x", "y"], None, 1),
        ("(b)", ["x", "y"], None, 1),
        ("y", ["x", "y"], None, 1),
        ("2", ["1", "2", "3"], "text", 1),
        ("2", ["1", "2", "3"], "index", 2),
        (0, ["0", "1"], None, 0),
        ("G", [*"tuvwxyz"], None, 6),
    ],
)
def test_what_an_answer_means(answer, choices, kind, place):
    assert gold_index(answer, choices, field="answer", kind=kind) == place


@pytest.mark.parametrize(
    ("answer", "choices", "kind", "message"),
    [
        ("2", ["1", "2", "3"], None, "'2' means one choice as index and another as text; say which with answer_is"),
        ("E", ["x", "y"], None, "must be the index from 0, letter or text of one of the 2 choices, got 'E'"),
        (2, ["x", "y"], None, "got 2"),
        (-1, ["x", "y"], None, "got -1"),
        ("x", ["x", "x"], None, "got 'x'"),
        ("x", ["x", "y"], "letter", "must be the letter of one of"),
    ],
)
def test_an_answer_that_means_no_one_choice_is_refused(answer, choices, kind, message):
    with pytest.raises(MoesaicError, match=rf"^right: .*{message}"):
        gold_index(answer, choices, field="right", kind=kind)


@pytest.mark.parametrize(
    ("generated", "answers", "options", "right"),
    [
        (" Paris ", ["Paris"], {}, True),
        ("Paris.", ["Paris"], {}, False),
        ("b", ["a", "b"], {}, True),
        ("51.0", ["51"], {"metric": "number"}, True),
        ("51.0", ["51"], {}, False),
        ("it is 1,200 dollars", ["$1200.00"], {"metric": "number"}, True),
        ("3 and then 4", ["3"], {"metric": "number"}, False),
        ("3 and then 4", ["3"], {"metric": "number", "extract": r"\d", "take": "first"}, True),
        ("The answer is (C).", ["C"], {"extract": r"answer is \(?([A-Z])"}, True),
        ("no idea", ["C"], {"extract": r"answer is \(?([A-Z])"}, False),
        ("no idea", ["no number"], {"metric": "number"}, False),
        ("-.5", ["-0.5"], {"metric": "number"}, True),
    ],
)
def test_which_generations_are_right(generated, answers, options, right):
    asked = {"metric": "exact", "extract": None, "take": "last"} | options
    assert matches(generated, answers, **asked) is right


def test_the_last_number():
    assert last_number("1,051.50 then $7.") == 7
    assert last_number("none") is None


def _task(folder: Path, text: str, rows: list[dict]) -> Path:
    write_rows(folder / "rows.jsonl", rows)
    file = folder / "mine.yaml"
    file.write_text(f"data: rows.jsonl\n{text}")
    return file


def test_rows_become_requests(tmp_path: Path):
    file = _task(
        tmp_path,
        "kind: choice\nchoices: [a, b, c]\nanswer: right\nprompt: '{topic}: {stem}\\n{lettered}\\n='\n",
        [{"topic": "t", "stem": " s ", "a": "x", "b": 2, "c": 2.5, "right": "2.5"}],
    )
    task = find_task(str(file)).task
    assert isinstance(task, Benchmark)
    rows = read_local("mine", task, None, shots=0).rows[""]["test"]
    assert rows == [{"request": "t: s\nA. x\nB. 2\nC. 2.5\n=", "continuations": ["A", "B", "C"], "gold": 2}]
    file = _task(tmp_path, "kind: generation\nprompt: '{words[1]}?'\n", [{"words": ["v", "w"], "answer": 51}])
    task = find_task(str(file)).task
    assert isinstance(task, Benchmark)
    assert read_local("mine", task, None, shots=0).rows[""]["test"] == [{"request": "w?", "answers": ["51"]}]


@pytest.mark.parametrize(
    ("text", "row", "message"),
    [
        ("kind: choice\n", {"question": "q", "choices": "ab", "answer": 0}, r"rows.jsonl:1: choices: expected a list"),
        (
            "kind: choice\n",
            {"question": "q", "choices": ["a"], "answer": 0},
            r"rows.jsonl:1: choices: expected 2 to 26",
        ),
        ("kind: choice\n", {"question": "q", "choices": ["a", "b"], "answer": "Z"}, r"rows.jsonl:1: answer: must be"),
        ("kind: choice\n", {"question": "q", "choices": ["a", "b"]}, r"rows.jsonl:1: .*no field 'answer'"),
        (
            "kind: choice\n",
            {"question": ["q"], "choices": ["a", "b"], "answer": 0},
            r"rows.jsonl:1: question: expected",
        ),
        ("kind: choice\n", {"question": "q", "choices": ["a", " "], "answer": 0}, r"rows.jsonl:1: choices.1: is empty"),
        (
            "kind: choice\nchoices: [a, b, c]\n",
            {"question": "q", "a": "x", "b": "", "c": "y", "answer": 0},
            r"rows.jsonl:1: b: is empty",
        ),
        ("kind: generation\n", {"question": "\ud800", "answer": "a"}, r"rows.jsonl:1: question: is not valid Unicode"),
        ("kind: generation\n", {"question": "q", "answer": {"a": 1}}, r"rows.jsonl:1: answer: expected"),
        ("kind: generation\n", {"question": "q", "answer": []}, r"rows.jsonl:1: answer: the list is empty"),
        (
            "kind: generation\nprompt: '{words[3]}'\n",
            {"words": ["v"], "answer": "a"},
            r"rows.jsonl:1: words: has no value number 3",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_row_and_field(tmp_path: Path, text: str, row: dict, message: str):
    task = find_task(str(_task(tmp_path, text, [row]))).task
    assert isinstance(task, Benchmark)
    with pytest.raises(MoesaicError, match=message):
        read_local("mine", task, None, shots=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: choise\ndata: rows.jsonl\n", r"mine.yaml: kind: 'choise' is not allowed: one of 'choice'"),
        ("kind: choice\n", r"mine.yaml: data: this key is required"),
        (
            "kind: choice\ndata: none.jsonl\n",
            r"mine.yaml: no such file .*none.jsonl; paths are seen from the task file",
        ),
        ("kind: choice\ndata: ~nobody-here/rows.jsonl\n", r"mine.yaml: no such file .*rows.jsonl; paths are seen"),
        ("kind: choice\ndata: rows.jsonl\nshots: 2\n", r"mine.yaml: .*demonstrations.* is needed with shots"),
        ("kind: generation\ndata: rows.jsonl\nextract: '('\n", r"mine.yaml: extract: is no regular expression"),
        ("- a\n", r"mine.yaml: not a task"),
        ("task: t\noutput_type: generate_until\nunsafe_code: true\n", r"mine.yaml: runs programs that the model"),
        ("group: g\ntask: [a]\ninclude: x\n", r"mine.yaml: a group or Python class of lm-eval's"),
    ],
)
def test_task_files_that_are_none_are_refused(tmp_path: Path, text: str, message: str):
    write_rows(tmp_path / "rows.jsonl", [{"question": "q"}])
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(MoesaicError, match=message):
        find_task(str(tmp_path / "mine.yaml"))


def test_a_table_has_as_many_choices_as_cells_and_a_name_for_each_column_once(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("question,a,b,c,answer\nq,x,y,,B\nq,x,y,z,C\n")
    (tmp_path / "mine.yaml").write_text("kind: choice\ndata: rows.csv\nchoices: [a, b, c]\n")
    task = find_task(str(tmp_path / "mine.yaml")).task
    assert isinstance(task, Benchmark)
    rows = read_local("mine", task, None, shots=0).rows[""]["test"]
    assert [(row["continuations"], row["gold"]) for row in rows] == [(["A", "B"], 1), (["A", "B", "C"], 2)]
    (tmp_path / "rows.csv").write_text("question,a,b,a,answer\nq,x,y,z,B\n")
    with pytest.raises(MoesaicError, match=r"rows.csv: its first line names 'a' twice; rename one"):
        read_local("mine", task, None, shots=0)


def test_each_question_has_its_demonstrations_or_the_file_is_named(tmp_path: Path):
    file = _task(
        tmp_path, "kind: generation\ndemonstrations: two.jsonl\nshots: 3\n", [{"question": "q", "answer": "a"}]
    )
    write_rows(tmp_path / "two.jsonl", [{"question": f"{n}", "answer": "a"} for n in range(2)])
    task = find_task(str(file)).task
    assert isinstance(task, Benchmark)
    assert len(read_local("mine", task, None, shots=2).rows[""]["train"]) == 2
    with pytest.raises(DataMissingError, match=r"two.jsonl has 2 rows, and each question needs 3 others .* 2 shots at"):
        read_local("mine", task, None, shots=3)
    with pytest.raises(DataMissingError, match=r"take 1 shots at most"):  # a row is not its own demonstration
        read_local("mine", replace(task, split="train"), None, shots=2)


def test_suites_and_calls_name_task_files(tmp_path: Path):
    file = _task(tmp_path, "kind: generation\n", [{"question": "q", "answer": "a"}])
    (tmp_path / "suite.yaml").write_text("tasks:\n  - {task: mine.yaml}\n  - {task: piqa, shots: 3}\n")
    suite = load_suite(str(tmp_path / "suite.yaml"))
    assert [(task.name, task.shots) for task in suite.tasks] == [("mine", 0), ("piqa", 3)]
    recipe = EvalRecipe(checkpoint="c", task=(str(file), "piqa"), shots=0)
    assert [task.name for task in chosen_suite(recipe).tasks] == ["mine", "piqa"]
    with pytest.raises(MoesaicError, match="--task piqa: cannot be given together with --suite"):
        EvalRecipe(checkpoint="c", task=("piqa",), suite="gsm8k")
    with pytest.raises(MoesaicError, match="'pika' is unknown; did you mean 'piqa'"):
        SuiteTask(task="pika")


def test_the_list_has_every_task_with_its_files_and_fields():
    rows = {row["name"]: row for row in task_rows()}
    assert set(rows) == {*BENCHMARKS, "perplexity"}
    assert rows["piqa"]["files"] == ["piqa.validation.jsonl", "piqa.train.jsonl"]
    assert rows["piqa"]["fields"][0] == "goal: text, sol1: text, sol2: text, label: 0 or 1"
    assert rows["mmlu_math"]["fields"] == ["question: text, choices: list of text, answer: whole number, subject: text"]
    assert {row["name"] for row in suite_rows()} >= {"emo-mc9", "divmoe15"}


def test_the_list_needs_no_checkpoint(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["eval", "--list"]) == 0
    said = capsys.readouterr().out
    assert "gsm8k.test.jsonl, gsm8k.train.jsonl: question: text, answer: text" in said
    assert cli.run(["eval", "--list", "--json"]) == 0
    assert {"suites", "tasks"} == set(json.loads(capsys.readouterr().out))
