import pytest

from moesaic.evaluation.tasks import normalised, scores, squad_results, squad_target, token_f1


def test_normalised():
    assert normalised("  The U.S. army, AND a dog! ") == ["us", "army", "and", "dog"]


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("the cat", "Cat", 1.0),
        ("black cat", "cat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "", 1.0),
        ("the", "cat", 0.0),
    ],
)
def test_token_f1(answer: str, reference: str, expected: float):
    assert token_f1(answer, reference) == pytest.approx(expected)


def test_the_reference_that_fits_best_counts():
    assert scores("Denmark and Norway", ["Iceland", "Denmark, Norway"]) == {"em": 0.0, "f1": pytest.approx(0.8)}
    assert scores("Iceland.", ["iceland", "Norway"]) == {"em": 1.0, "f1": 1.0}


def test_a_question_without_an_answer():
    doc = {"answers": {"text": []}}
    assert squad_target(doc) == "unanswerable"
    assert squad_results(doc, [" Unanswerable."]) == {"em": 1.0, "f1": 1.0}
    assert squad_results(doc, [" Norway"]) == {"em": 0.0, "f1": 0.0}
    assert squad_results({"answers": {"text": ["Norway"]}}, [" unanswerable"]) == {"em": 0.0, "f1": 0.0}
