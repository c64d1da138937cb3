"""Calibration texts: what a record reads like, which records are drawn, and after which demonstrations."""

import json

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import (
    Calibration,
    calibration_texts,
    categories,
    encode_texts,
    in_split,
    record_digest,
    render,
)


@pytest.fixture
def numbers(tmp_path):
    file = tmp_path / "numbers.jsonl"
    file.write_text("".join(json.dumps({"text": f"n{number}"}) + "\n" for number in range(100)))
    return str(file)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"question": "Q?", "choices": ["a", "b"], "answer": 1}, "Question: Q?\nAnswer: b"),
        ({"context": "C.", "question": "Q?", "choices": ["a", "b"], "answer": 0}, "C.\nQuestion: Q?\nAnswer: a"),
        ({"question": "Q?", "answer": "42"}, "Question: Q?\nAnswer: 42"),
        ({"question": "Q?", "answers": ["x", "y"]}, "Question: Q?\nAnswer: x"),
        ({"question": "Q?", "answers": [{"text": "x", "answer_start": 4}]}, "Question: Q?\nAnswer: x"),
        ({"question": "Q?", "answers": {"text": ["x"], "answer_start": [4]}}, "Question: Q?\nAnswer: x"),
        ({"prompt": "def f():", "canonical_solution": "\n  pass"}, "def f():\n  pass"),
        ({"prompt": "p", "completion": "c"}, "pc"),
        ({"text": "Write it.", "code": "x = 1"}, "Write it.\nx = 1"),
        ({"text": "plain", "domain": "math"}, "plain"),
        (
            {"context": "P.", "qas": [{"question": "Q?", "answers": ["A"]}, {"question": "R?", "answers": []}]},
            "P.\nQuestion: Q?\nAnswer: A",
        ),
    ],
)
def test_the_text_of_a_record(fields, text):
    assert render({"id": "1", **fields}, None, "f:1") == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "x", "completion": None}, "completion must be text"),
        ({"question": "Q?", "answer": None}, "answer must be text or a number"),
        ({"question": "Q?", "answers": [5]}, "answers must be texts"),
        ({"context": "x", "qas": [5]}, "qas must be a list of objects"),
        ({"context": "x", "qas": None}, "qas must be a list of objects"),
        ({"context": "x", "qas": [{"answers": ["a"]}]}, "qas must be a list of objects"),
    ],
)
def test_values_of_other_kinds_are_refused(fields, message):
    with pytest.raises(MoesaicError, match=f"f:1: {message}.*--template"):
        render(fields, None, "f:1")


def test_a_template_takes_fields_and_the_right_choice():
    fields = {"question": "Q?", "choices": ["a", "b"], "answer": 1, "subject": "art"}
    assert render(fields, r"{subject}: {question}\n-> {answer_text}", "f:1") == "art: Q?\n-> b"
    with pytest.raises(MoesaicError, match=r"f:1: no field 'topic'; the record has question"):
        render(fields, "{topic}", "f:1")


def test_records_without_a_known_text_are_refused():
    with pytest.raises(MoesaicError, match="f:1: no text is known for a record with a, b"):
        render({"a": 1, "b": 2}, None, "f:1")
    with pytest.raises(MoesaicError, match="answer must be the index of one of the choices, got 5"):
        render({"question": "Q", "choices": ["a"], "answer": 5}, None, "f:1")
    with pytest.raises(MoesaicError, match="field 'text' must be a string"):
        render({"text": 3}, None, "f:1")


def test_samples_are_nested_and_seeded(numbers):
    all_of_them = calibration_texts(Calibration(path=numbers, seed=1))
    assert sorted(all_of_them) == sorted(f"n{number}" for number in range(100))
    for examples in (1, 5, 40):
        assert calibration_texts(Calibration(path=numbers, examples=examples, seed=1)) == all_of_them[:examples]
    assert calibration_texts(Calibration(path=numbers, examples=5, seed=2)) != all_of_them[:5]


def test_demonstrations_are_the_same_for_all_and_none_of_the_examples(numbers):
    few = calibration_texts(Calibration(path=numbers, examples=3, shots=2))
    many = calibration_texts(Calibration(path=numbers, examples=98, shots=2))
    assert many[:3] == few
    assert len({tuple(text.split("\n\n")[:2]) for text in many}) == 1
    assert sorted({part for text in many for part in text.split("\n\n")}) == sorted(f"n{n}" for n in range(100))
    assert len({text.split("\n\n")[2] for text in many}) == 98


def test_a_split_leaves_records_for_evaluation(numbers):
    texts = [f"n{number}" for number in range(100)]
    inside = {text for text in texts if in_split(record_digest({"text": text}), share=0.4, seed=0)}
    assert 25 < len(inside) < 55
    assert set(calibration_texts(Calibration(path=numbers, split=0.4))) == inside
    assert set(calibration_texts(Calibration(path=numbers, split=0.6))) > inside


def test_one_category(tmp_path):
    rows = [{"text": f"{number}", "subject": "ab"[number % 2]} for number in range(10)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert categories(str(file), "subject") == ["a", "b"]
    assert sorted(calibration_texts(Calibration(path=str(file), only=("subject", "b")))) == ["1", "3", "5", "7", "9"]
    with pytest.raises(MoesaicError, match=r"rows\.jsonl: the calibration set is empty: no record with subject = c"):
        calibration_texts(Calibration(path=str(file), only=("subject", "c")))
    with pytest.raises(MoesaicError, match="no field 'topic'"):
        categories(str(file), "topic")


def test_the_categories_of_mmlu_come_from_its_subjects(tmp_path):
    subjects = ("college_biology", "econometrics", "high_school_biology", "high_school_macroeconomics")
    rows = [{"text": f"{subject}-{number}", "subject": subject} for number in range(50) for subject in subjects]
    file = tmp_path / "mmlu.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert categories(str(file), "mmlu_category") == ["biology", "economics"]
    share = calibration_texts(Calibration(path=str(file), only=("mmlu_category", "biology"), split=0.4))
    expected = [row["text"] for row in rows[::2] if in_split(record_digest(row), share=0.4, seed=0)]
    assert sorted(share) == sorted(expected)
    assert 20 < len(share) < 60
    file.write_text('{"text": "t", "subject": "cooking"}\n')
    with pytest.raises(MoesaicError, match="subject 'cooking': not one of MMLU's 57"):
        categories(str(file), "mmlu_category")
    file.write_text('{"text": "t"}\n')
    with pytest.raises(MoesaicError, match=r"mmlu\.jsonl:1: no field 'subject'"):
        calibration_texts(Calibration(path=str(file), only=("mmlu_category", "law")))


def test_text_files_of_a_folder_are_documents(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    assert sorted(calibration_texts(Calibration(path=str(tmp_path)))) == ["text a", "text b"]


class _Tokenizer:
    eos_token_id, bos_token_id, unk_token_id, pad_token_id = 1, 2, None, 0

    def __call__(self, text):
        return {"input_ids": [int(part) for part in text.split()]}


def test_padding_is_dropped_and_texts_are_cut():
    texts = ["0 0 5 6 7 8 0", "9", "0"]
    assert encode_texts(texts, _Tokenizer(), max_tokens=3, vocab_size=10, name="f") == [[5, 6, 7], [9]]
    with pytest.raises(MoesaicError, match="f: all tokens of the calibration set are padding"):
        encode_texts(["0 0"], _Tokenizer(), max_tokens=3, vocab_size=10, name="f")
    with pytest.raises(MoesaicError, match="f: its tokenizer gives token 9, but the model has only 9"):
        encode_texts(["9"], _Tokenizer(), max_tokens=3, vocab_size=9, name="f")


def test_padding_that_is_also_the_end_token_counts():
    tokenizer = _Tokenizer()
    tokenizer.pad_token_id = 1
    assert encode_texts(["5 1 6"], tokenizer, max_tokens=9, vocab_size=10, name="f") == [[5, 1, 6]]
