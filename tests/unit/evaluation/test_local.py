import gzip
import json
from pathlib import Path

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split, record_digest
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
            r"not a row of PIQA \(no field 'question'\); its fields are goal, sol1, and the hub's are",
        ),
        ("piqa", {"question": "q", "choices": ["a", "b", "c"], "answer": 0}, r"choices: expected 2 values, got 3"),
        (
            "piqa",
            {"question": "q", "choices": ["a", "b"], "answer": 2},
            r"answer: must be the index of one",
        ),
        ("copa", {"question": "q", "choices": ["a", "b"], "answer": 0}, r"not a row of COPA \(no field 'premise'\)"),
        ("squad2", {"question": "q", "answer": "a"}, r"not a row of SQuAD2 \(no field 'qas'\)"),
    ],
)
def test_rows_of_something_else_are_refused_with_their_line(tmp_path: Path, task: str, row: dict, message: str):
    file = write_rows(tmp_path / f"{task}.validation.jsonl", [row])
    with pytest.raises(MoesaicError, match=message) as caught:
        read_local(task, BENCHMARKS[task], tmp_path, shots=0)
    assert str(caught.value).startswith(f"{file}:1: ")


_CHOICE = {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 0}
_ASKED = {"id": "1", "question": "q", "answers": ["a"]}


@pytest.mark.parametrize(
    ("task", "split", "row", "message"),
    [
        (
            "squad2",
            "validation",
            {"context": "c", "qas": [_ASKED | {"answers": "Paris"}]},
            r"qas\.0\.answers: ",
        ),
        (
            "squad",
            "validation",
            {"context": "c", "qas": [_ASKED | {"answers": [["a"]]}]},
            r"qas\.0\.answers\.0: ",
        ),
        ("squad", "validation", {"context": "c", "qas": "q"}, r"qas: expected a list, got 'q'"),
        ("naturalqs", "validation", {"question": "q", "answer": "Paris"}, r"answer: expected a list, got 'Paris'"),
        ("naturalqs", "validation", {"question": "q", "answer": []}, r"answer: the list is empty"),
        (
            "triviaqa_f1",
            "validation",
            {"question": "q", "answer": {"value": "a", "aliases": "a"}},
            r"answer\.aliases: expected a list, got 'a'",
        ),
        ("gsm8k_cot", "test", {"question": "q", "answer": [3]}, r"answer: expected text, got \[3\]"),
        ("gsm8k_cot", "test", {"question": None, "answer": "3"}, r"question: expected text, got null"),
        ("openbookqa", "test", _CHOICE | {"choices": "abcd"}, r"choices: expected a list, got 'abcd'"),
        ("openbookqa", "test", _CHOICE | {"answer": "D"}, r"answer: expected a whole number, got 'D'"),
        ("hellaswag", "validation", {"query": "q", "choices": ["a", "b"], "label": 2}, r"label: must be one of 0, 1"),
        (
            "copa",
            "validation",
            dict.fromkeys(("premise", "choice1", "choice2", "question"), "a") | {"label": -1},
            "label",
        ),
        (
            "arc_easy",
            "test",
            {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "E"},
            r"answerKey: must be one of A, B, got 'E'",
        ),
        ("drop", "validation", {"query_id": "1", "passage": "p", "question": "q"}, r"no field 'answer'"),
        ("mmlu", "test", _CHOICE | {"answer": 4, "subject": "anatomy"}, r"answer: must be the index of one of the 4"),
    ],
)
def test_a_field_of_another_type_is_refused_by_row_and_field(
    tmp_path: Path, task: str, split: str, row: dict, message: str
):
    file = write_rows(tmp_path / f"{BENCHMARKS[task].files or task}.{split}.jsonl", [row])
    with pytest.raises(MoesaicError, match=message) as caught:
        read_local(task, BENCHMARKS[task], tmp_path, shots=0)
    assert str(caught.value).startswith(f"{file}:1: ")


def test_official_squad_answers_and_numbers_as_answers_are_read(tmp_path: Path):
    asked = [
        {"id": "1", "question": "q", "answers": [{"text": "a", "answer_start": 3}, {"text": "b", "answer_start": 3}]},
        {"id": 2, "question": "r", "answers": [], "is_impossible": True, "plausible_answers": [{"text": "x"}]},
        {"id": "3", "question": "s", "answers": {"text": ["c"], "answer_start": [1]}},
    ]
    write_rows(tmp_path / "squad2.validation.jsonl", [{"context": "c", "qas": asked}])
    rows = read_local("squad2", BENCHMARKS["squad2"], tmp_path, shots=0).rows[""]["validation"]
    assert [row["answers"]["text"] for row in rows] == [["a", "b"], [], ["c"]]
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    write_rows(tmp_path / "gsm8k.test.jsonl", [{"question": "q", "answer": 51}])
    assert read_local("gsm8k_cot", BENCHMARKS["gsm8k_cot"], tmp_path, shots=0).rows[""]["test"][0]["answer"] == "51"


@pytest.mark.parametrize("number", [2, 4, 5])
def test_the_choices_that_a_row_has_are_asked(number: int):
    choices = ["v", "w", "x", "y", "z"][:number]
    asked = "".join(f"{letter}. {choice}\n" for letter, choice in zip("ABCDE", choices, strict=False))
    mmlu, csqa = (BENCHMARKS[name].local_config for name in ("mmlu", "csqa"))
    row = {"question": " q ", "choices": choices}
    assert mmlu["doc_to_text"](row) == f"q\n{asked}Answer:"
    assert mmlu["doc_to_choice"](row) == list("ABCDE"[:number])
    row = {"question": " q ", "choices": {"text": choices, "label": list("ABCDE"[:number])}}
    assert csqa["doc_to_text"](row) == f"Question: q\n{asked}Answer:"
    assert csqa["doc_to_choice"](row) == list("ABCDE"[:number])


def test_demonstrations_come_from_their_split_and_are_limited(tmp_path: Path):
    write_rows(tmp_path / "hellaswag.validation.jsonl", choice_rows(3))
    assert read_local("hellaswag", BENCHMARKS["hellaswag"], tmp_path, shots=0).rows
    with pytest.raises(DataMissingError, match=r"no hellaswag\.train\.jsonl.*from which its 10 demonstrations come"):
        read_local("hellaswag", BENCHMARKS["hellaswag"], tmp_path, shots=10)
    with pytest.raises(DataMissingError, match="it has 5 demonstrations, not 6"):
        read_local("mmlu", BENCHMARKS["mmlu"], tmp_path, shots=6)


def test_held_out_rows_are_known_by_their_content(tmp_path: Path):
    rows = choice_rows(8, subject="abstract_algebra") + choice_rows(8, subject="electrical engineering")
    write_rows(tmp_path / "mmlu.test.jsonl", rows)
    data = read_local("mmlu", BENCHMARKS["mmlu"], tmp_path, shots=0, held_out=HeldOut(share=0.4, seed=3))
    kept = [row for row in rows if not in_split(record_digest(row), share=0.4, seed=3)]
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
