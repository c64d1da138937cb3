"""What lm-eval is given of each benchmark: the rows of local files, the prompts, and the scores of free answers.

Local multiple-choice rows are `{question, choices, answer (index)[, context, subject]}`; a row with all of the hub's
fields is taken as it is. Prompts are here for tasks that lm-eval has not, or not in the
papers' form or not without the network; docs/eval.md describes them. Pure functions and lm-eval's configurations.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moesaic.evaluation.programs import humaneval_results, mbpp_results

Row = dict[str, Any]
Adapter = Callable[[Row], Iterator[Row]]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def as_is(row: Row) -> Iterator[Row]:
    """The row itself."""
    yield row


def lettered(question: str) -> Adapter:
    """ARC, OpenBookQA and CommonsenseQA: choices with letters; `question` is the hub's name of that field."""

    def adapt(row: Row) -> Iterator[Row]:
        choices = row["choices"]
        yield {
            "id": str(row.get("id", "")),
            question: row["question"],
            "choices": {"text": choices, "label": list(LETTERS[: len(choices)])},
            "answerKey": LETTERS[row["answer"]],
        }

    return adapt


def yes_or_no(row: Row) -> Iterator[Row]:
    """BoolQ: the label says whether the answer is yes."""
    yield {
        "question": row["question"],
        "passage": row["context"],
        "label": int(row["choices"][row["answer"]].strip().lower() == "yes"),
    }


def two_solutions(row: Row) -> Iterator[Row]:
    """PIQA."""
    first, second = row["choices"]
    yield {"goal": row["question"], "sol1": first, "sol2": second, "label": row["answer"]}


def three_answers(row: Row) -> Iterator[Row]:
    """SocialIQA, whose label counts from 1."""
    first, second, third = row["choices"]
    answers = {"answerA": first, "answerB": second, "answerC": third}
    yield {"context": row["context"], "question": row["question"], **answers, "label": str(row["answer"] + 1)}


def two_options(row: Row) -> Iterator[Row]:
    """WinoGrande: the sentence with `_` is the question."""
    first, second = row["choices"]
    yield {"sentence": row["question"], "option1": first, "option2": second, "answer": str(row["answer"] + 1)}


def endings(row: Row) -> Iterator[Row]:
    """HellaSwag, whose local rows are already what lm-eval makes of the hub's."""
    yield {"query": row["question"], "choices": row["choices"], "label": str(row["answer"])}


def input_target(row: Row) -> Iterator[Row]:
    """BIG-Bench Hard."""
    yield {"input": row["question"], "target": row["answer"], "task": row["task"]}


def paragraph_questions(row: Row) -> Iterator[Row]:
    """SQuAD: a row per question of a paragraph; no answer means that the paragraph does not say it."""
    for asked in row["qas"]:
        yield {
            "id": str(asked.get("id", "")),
            "title": row.get("title") or "",
            "context": row["context"],
            "question": asked["question"],
            "answers": {"text": _answer_texts(asked.get("answers") or [])},
        }


def _answer_texts(answers: Any) -> list[str]:
    """Of texts, of SQuAD's objects with a text, or of the hub's one object of lists."""
    if isinstance(answers, Mapping):
        return list(answers["text"])
    return [one["text"] if isinstance(one, Mapping) else one for one in answers]


# --- scores of free answers: exact match and token F1, as in SQuAD (Rajpurkar et al. 2016) ---------------------------

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


# --- prompts: lm-eval configurations ----------------------------------------------------------------------------------

_MEAN = {"aggregation": "mean", "higher_is_better": True}
_GREEDY = {"do_sample": False, "temperature": 0.0}

_ANSWER: dict[str, Any] = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, **_GREEDY},
    "metric_list": [{"metric": "f1", **_MEAN}, {"metric": "em", **_MEAN}],
    "training_split": "train",
    "validation_split": "validation",
    "metadata": {"version": 1.0},
}
"""A free answer of one line."""

SQUAD = _ANSWER | {
    "dataset_path": "rajpurkar/squad",
    "doc_to_text": "Title: {{title}}\n\nBackground: {{context}}\n\nQuestion: {{question}}\n\nAnswer:",
    "doc_to_target": squad_target,
    "process_results": squad_results,
}
SQUAD2 = SQUAD | {"dataset_path": "rajpurkar/squad_v2"}

NATURAL_QUESTIONS = _ANSWER | {
    "dataset_path": "google-research-datasets/nq_open",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer[0]}}",
    "process_results": natural_questions_results,
}
TRIVIAQA_F1 = NATURAL_QUESTIONS | {
    "dataset_path": "mandarjoshi/trivia_qa",
    "dataset_name": "rc.nocontext",
    "doc_to_target": "{{answer.value}}",
    "process_results": triviaqa_results,
}

HUMANEVAL: dict[str, Any] = {
    "dataset_path": "openai/openai_humaneval",
    "output_type": "generate_until",
    "unsafe_code": True,
    "test_split": "test",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{canonical_solution}}",
    "process_results": humaneval_results,
    # A line at the left margin ends the function; what follows would be other code.
    "generation_kwargs": {
        "until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\nassert"],
        "max_gen_toks": 512,
        **_GREEDY,
    },
    "metric_list": [{"metric": "pass@1", **_MEAN}],
    "num_fewshot": 0,
    "metadata": {"version": 1.0},
}


def mbpp_demonstrations(prompt_split: Any) -> Any:
    """Problems 2, 3 and 4: the demonstrations of Austin et al. 2021."""
    return prompt_split.select(range(1, min(4, len(prompt_split))))


MBPP: dict[str, Any] = {
    "dataset_path": "google-research-datasets/mbpp",
    "dataset_name": "full",
    "output_type": "generate_until",
    "unsafe_code": True,
    "test_split": "test",
    "fewshot_split": "prompt",
    "fewshot_config": {"sampler": "first_n", "process_docs": mbpp_demonstrations},
    "doc_to_text": (
        "You are an expert Python programmer, and here is your task: {{text}} Your code should pass these tests:"
        "\n\n{{test_list|join('\n')}}\n[BEGIN]\n"
    ),
    "doc_to_target": "{{code}}\n[DONE]",
    "target_delimiter": "",
    "process_results": mbpp_results,
    "generation_kwargs": {"until": ["[DONE]"], "max_gen_toks": 512, **_GREEDY},
    "metric_list": [{"metric": "pass@1", **_MEAN}],
    "metadata": {"version": 1.0},
}


def pro_rows(category: str) -> Callable[[Any], Any]:
    """What makes the rows of one category of the hub's MMLU-Pro: lm-eval's `process_docs`."""
    hub_name = category.replace("_", " ")

    def process(dataset: Any) -> Any:
        chosen = dataset.filter(lambda row: row["category"] == hub_name)
        return chosen.map(
            lambda row: {"question": row["question"], "choices": row["options"], "answer": row["answer_index"]},
            remove_columns=chosen.column_names,
        )

    return process


def lettered_choices(choices: Sequence[str]) -> str:
    """A line for each choice, with its letter."""
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))


def pro_letters(doc: dict[str, Any]) -> list[str]:
    """The letters of the choices that a question has."""
    return list(LETTERS[: len(doc["choices"])])


def pro_question(doc: dict[str, Any]) -> str:
    """A question in the form of MMLU's, with all of its choices."""
    return f"{doc['question'].strip()}\n{lettered_choices(doc['choices'])}\nAnswer:"


ANY_LETTERS: dict[str, Any] = {"doc_to_text": pro_question, "doc_to_choice": pro_letters}
"""MMLU with as many letters as a row has choices; of four, lm-eval's own prompt."""


def letters_of_hub(doc: dict[str, Any]) -> list[str]:
    """The letters of a row whose choices have some."""
    return list(doc["choices"]["label"])


def question_with_letters(doc: dict[str, Any]) -> str:
    """A question of CommonsenseQA with as many choices as it has; of five, lm-eval's own prompt."""
    named = zip(doc["choices"]["label"], doc["choices"]["text"], strict=True)
    choices = "".join(f"{letter}. {text}\n" for letter, text in named)
    return f"Question: {doc['question'].strip()}\n{choices}Answer:"


ANY_LETTERS_OF_HUB: dict[str, Any] = {"doc_to_text": question_with_letters, "doc_to_choice": letters_of_hub}

MMLU_PRO: dict[str, Any] = {
    "dataset_path": "TIGER-Lab/MMLU-Pro",
    "output_type": "multiple_choice",
    "test_split": "test",
    "fewshot_split": "validation",
    "fewshot_config": {"sampler": "first_n"},
    "doc_to_text": pro_question,
    "doc_to_choice": pro_letters,
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", **_MEAN}],
    "metadata": {"version": 1.0},
}
