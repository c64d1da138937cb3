"""Scores of free answers to questions: exact match and token F1, as in SQuAD (Rajpurkar et al. 2016)."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

NO_ANSWER = "unanswerable"

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> list[str]:
    """The words of an answer: lower case, without punctuation and articles.

    >>> normalised("The Eiffel-Tower, in Paris.")
    ['eiffeltower', 'in', 'paris']
    """
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words that two answers have in common, counted with their number; 1 where both have none."""
    words, expected = normalised(answer), normalised(reference)
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def scores(answer: str, references: Sequence[str]) -> dict[str, float]:
    """Exact match and F1 against the reference that fits best.

    Without references the right answer is `NO_ANSWER`, or nothing.
    """
    if not references:
        unanswered = float(normalised(answer) in ([], [NO_ANSWER]))
        return {"em": unanswered, "f1": unanswered}
    return {
        "em": max(float(normalised(answer) == normalised(reference)) for reference in references),
        "f1": max(token_f1(answer, reference) for reference in references),
    }


def squad_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results` of SQuAD."""
    return scores(results[0].strip(), doc["answers"]["text"])


def natural_questions_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results` of Natural Questions (open)."""
    return scores(results[0].strip(), doc["answer"])


def triviaqa_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results` of TriviaQA with F1."""
    return scores(results[0].strip(), doc["answer"]["aliases"])


def squad_target(doc: Mapping[str, Any]) -> str:
    """What a demonstration of SQuAD answers."""
    references = doc["answers"]["text"]
    return references[0] if references else NO_ANSWER
