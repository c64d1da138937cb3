from pathlib import Path

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.evaluation.benchmarks import BENCHMARKS
from moesaic.evaluation.recipe import load_suite, shipped


def _shots(name: str) -> dict[str, int | None]:
    return {task.task: task.shots for task in load_suite(name).tasks}


def test_table_10_of_divmoe():
    assert _shots("divmoe15") == {
        "arc_challenge": 25,
        "arc_easy": 25,
        "boolq": 0,
        "copa": 0,
        "mmlu": 5,
        "openbookqa": 0,
        "triviaqa": 5,
        "hellaswag": 10,
        "squad2": 1,
        "humaneval": 0,
        "mbpp": 3,
        "gsm8k_cot": 8,
        "math": 4,
        "gpqa": 0,
        "bbh": 3,
    }
    eight = _shots("divmoe8")
    assert len(eight) == 8
    assert eight.items() <= _shots("divmoe15").items()


def test_table_4_of_emo():
    assert set(_shots("emo-mc9").values()) == {5}
    assert len(_shots("emo-mc9")) == 9
    assert _shots("emo-gen5") == {"squad": 5, "coqa": 0, "naturalqs": 5, "triviaqa_f1": 5, "drop": 5}
    assert _shots("gsm8k") == {"gsm8k_cot": 8}
    for name, number in (("mmlu-categories", 17), ("mmlu-pro", 14)):
        suite = load_suite(name)
        assert len(suite.tasks) == number
        assert {task.shots for task in suite.tasks} == {5}
        assert [len(average.without) for average in suite.averages] == [1, 0]
        assert all("other" in task for task in suite.averages[0].without)
        assert suite.selection_share == 0.4


def test_mc9_and_mmlu_are_raw_accuracy_and_gen5_is_f1():
    raw = [*_shots("emo-mc9"), *_shots("mmlu-categories"), *_shots("mmlu-pro")]
    assert {BENCHMARKS[task].metric for task in raw} == {"acc,none"}
    assert {BENCHMARKS[task].metric for task in _shots("emo-gen5")} == {"f1,none"}


def test_every_shipped_suite_can_be_read_and_has_the_demonstrations_it_asks_for():
    for name in shipped():
        for task in load_suite(name).tasks:
            most = BENCHMARKS[task.task].demonstrations if task.task in BENCHMARKS else 0
            assert most is None or (task.shots or 0) <= most


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("emo-mc8", "--suite emo-mc8: no such suite or task; did you mean 'emo-mc9'"),
        ("piqa,arc_esy", "--suite arc_esy: no such suite or task; did you mean 'arc_easy'"),
        ("xyzzy", r"suites: divmoe15, .*; or a task such as arc_easy, or a \.yaml file"),
        ("mmlu-categories,piqa", "some of these leave out the rows of selections"),
        (
            "divmoe15,emo-mc9",
            "divmoe15,emo-mc9: arc_easy is asked with 25 shots in divmoe15 and 5 shots in emo-mc9; run them apart",
        ),
        ("emo-mc9,piqa", "piqa is asked with 5 shots in emo-mc9 and 0 shots in piqa"),
    ],
)
def test_unknown_names(reference: str, message: str):
    with pytest.raises(MoesaicError, match=message):
        load_suite(reference)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [{task: piqqa}]", r"mine.yaml: tasks.0: task: 'piqqa' is unknown; did you mean 'piqa'"),
        ("tasks: [{task: piqa, shot: 1}]", "mine.yaml: .*shot.*did you mean 'shots'"),
        ("tasks: [{task: piqa}, {task: piqa}]", "'piqa' is listed twice"),
        ("tasks: []", "needs at least one"),
        ("tasks: [{task: piqa, shots: -1}]", "shots: must be 0 or more"),
        ("tasks: [{task: piqa}]\naverages: [{name: a, without: [boolq]}]", "'a' leaves out 'boolq'"),
        (
            "tasks: [{task: piqa}, {task: perplexity}]\naverages: [{name: a}]",
            "'a' takes perplexity in, whose score is no share; put it in `without`",
        ),
        ("tasks: [{task: perplexity, metric: loss}]", "the score of perplexity is bits_per_byte, got 'loss'"),
        ("- piqa", "mine.yaml: expected keys and values"),
    ],
)
def test_a_file_of_ones_own(tmp_path: Path, text: str, message: str):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(MoesaicError, match=message):
        load_suite(str(file))


def test_own_file_joined_suites_and_shots(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("tasks:\n  - {task: piqa, shots: 2, metric: 'acc_norm,none'}\n")
    suite = load_suite(str(file))
    assert (suite.name, suite.tasks[0].shots, suite.tasks[0].metric) == ("mine", 2, "acc_norm,none")
    assert load_suite(str(file), shots=0).tasks[0].shots == 0
    joined = load_suite("emo-mc9,gsm8k")
    assert len(joined.tasks) == 10
    assert [(average.name, average.without) for average in joined.averages] == [("emo-mc9 MC9", ("gsm8k_cot",))]


def test_suites_with_a_task_in_common_join_where_they_ask_it_alike():
    assert len(load_suite("divmoe15,divmoe8").tasks) == 15
    assert {task.shots for task in load_suite("divmoe15,emo-mc9", shots=2).tasks} == {2}
    assert load_suite("emo-mc9,perplexity").averages[0].without == ("perplexity",)
