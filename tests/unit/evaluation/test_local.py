import gzip
import json
from pathlib import Path

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split
from moesaic.evaluation.benchmarks import BENCHMARKS
from moesaic.evaluation.local import DataMissingError, HeldOut, find_split, read_local
from tests.tiny_evals import choice_rows, write_rows


def test_which_file_is_which_split(tmp_path: Path):
    for name in ("mmlu.test_22subjects.jsonl", "mmlu_pro.test.jsonl", "mmlu.testing.jsonl", "mmlu.test.txt"):
        (tmp_path / name).touch()
    assert find_split(tmp_path, "mmlu", "test").name == "mmlu.test_22subjects.jsonl"
    assert find_split(tmp_path, "mmlu_pro", "test").name == "mmlu_pro.test.jsonl"
    with pytest.raises(DataMissingError, match=r"no piqa\.test\.jsonl in "):
        find_split(tmp_path, "piqa", "test")
    (tmp_path / "mmlu.test.jsonl").touch()
    with pytest.raises(MoesaicError, match=r"mmlu\.test\.jsonl and mmlu\.test_22subjects\.jsonl are both mmlu's test"):
        find_split(tmp_path, "mmlu", "test")


def test_compressed_rows(tmp_path: Path):
    lines = "".join(json.dumps(row) + "\n" for row in choice_rows(3, choices=2))
    (tmp_path / "piqa.validation.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    data = read_local("piqa", BENCHMARKS["piqa"], tmp_path, shots=0)
    assert len(data.rows[""]["validation"]) == 3
    assert list(data.hashes) == ["piqa.validation.jsonl.gz"]


def test_rows_with_the_hubs_fields_are_taken_as_they_are(tmp_path: Path):
    row = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
    write_rows(tmp_path / "piqa.validation.jsonl", [row])
    assert read_local("piqa", BENCHMARKS["piqa"], tmp_path, shots=0).rows[""]["validation"] == [row]


def test_what_local_rows_become():
    choice = {"id": "7", "question": "q", "choices": ["x", "y", "z"], "answer": 2, "context": "c", "subject": "s"}
    lettered = {"id": "7", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "C"}

    def adapted(task: str, row: dict) -> list[dict]:
        return list(BENCHMARKS[task].adapt(row))

    assert adapted("arc_easy", choice) == [lettered | {"question": "q"}]
    assert adapted("openbookqa", choice) == [lettered | {"question_stem": "q"}]
    assert adapted("hellaswag", choice) == [{"query": "q", "choices": ["x", "y", "z"], "label": "2"}]
    assert adapted("mmlu", choice) == [{"question": "q", "choices": ["x", "y", "z"], "answer": 2, "subject": "s"}]
    for choices, answer, label in ((["yes", "no"], 0, 1), (["yes", "no"], 1, 0), (["no", "yes"], 0, 0)):
        row = choice | {"choices": choices, "answer": answer}
        assert adapted("boolq", row) == [{"question": "q", "passage": "c", "label": label}]
    paragraph = {
        "title": "t",
        "context": "c",
        "qas": [{"id": "1", "question": "q", "answers": ["a", "b"]}, {"id": "2", "question": "r", "answers": []}],
    }
    assert [row["answers"]["text"] for row in adapted("squad2", paragraph)] == [["a", "b"], []]
    three = adapted("social_iqa", choice)[0]
    assert (three["answerC"], three["label"], three["context"]) == ("z", "3", "c")
    assert adapted("winogrande", choice | {"choices": ["x", "y"], "answer": 1}) == [
        {"sentence": "q", "option1": "x", "option2": "y", "answer": "2"}
    ]
    assert adapted("bbh", {"question": "q", "answer": "a", "task": "t"}) == [{"input": "q", "target": "a", "task": "t"}]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (
            "piqa",
            {"goal": "g", "sol1": "a"},
            r"not a row of PIQA \(no field 'sol2'\); it has goal, sol1, and the hub's",
        ),
        ("piqa", {"question": "q", "choices": ["a", "b", "c"], "answer": 0}, r"not a row of PIQA \(too many values"),
        ("piqa", {"question": "q", "choices": ["a", "b"], "answer": 2}, r"not a row of PIQA \(no field 'goal'\)"),
        ("copa", {"question": "q", "choices": ["a", "b"], "answer": 0}, r"not a row of COPA \(no field 'premise'\)"),
        ("squad2", {"question": "q", "answer": "a"}, r"not a row of SQuAD2 \(no field 'qas'\)"),
    ],
)
def test_rows_of_something_else_are_refused_with_their_line(tmp_path: Path, task: str, row: dict, message: str):
    file = write_rows(tmp_path / f"{task}.validation.jsonl", [row])
    with pytest.raises(MoesaicError, match=message) as caught:
        read_local(task, BENCHMARKS[task], tmp_path, shots=0)
    assert str(caught.value).startswith(f"{file}:1: ")


def test_demonstrations_come_from_their_split_and_are_limited(tmp_path: Path):
    write_rows(tmp_path / "hellaswag.validation.jsonl", choice_rows(3))
    assert read_local("hellaswag", BENCHMARKS["hellaswag"], tmp_path, shots=0).rows
    with pytest.raises(DataMissingError, match=r"no hellaswag\.train\.jsonl.*from which its 10 demonstrations come"):
        read_local("hellaswag", BENCHMARKS["hellaswag"], tmp_path, shots=10)
    with pytest.raises(DataMissingError, match="it has 5 demonstrations, not 6"):
        read_local("mmlu", BENCHMARKS["mmlu"], tmp_path, shots=6)


def test_held_out_rows_are_numbered_over_the_whole_file(tmp_path: Path):
    rows = choice_rows(8, subject="abstract_algebra") + choice_rows(8, subject="electrical engineering")
    write_rows(tmp_path / "mmlu.test.jsonl", rows)
    data = read_local("mmlu", BENCHMARKS["mmlu"], tmp_path, shots=0, held_out=HeldOut(share=0.4, seed=3))
    kept = [row for number, row in enumerate(rows) if not in_split(number, share=0.4, seed=3)]
    for subject, part in (
        ("abstract_algebra", "abstract_algebra"),
        ("electrical engineering", "electrical_engineering"),
    ):
        expected = [row["question"] for row in kept if row["subject"] == subject]
        assert [row["question"] for row in data.rows[part]["test"]] == expected
    assert len(data.missing_parts) == 55


def test_rows_that_do_not_say_their_part_are_named(tmp_path: Path):
    write_rows(tmp_path / "mmlu.test.jsonl", choice_rows(1))
    with pytest.raises(MoesaicError, match=r"mmlu\.test\.jsonl:1: no field 'subject'"):
        read_local("mmlu", BENCHMARKS["mmlu"], tmp_path, shots=0)
