"""Tasks that lm-eval has not, or not in the papers' form or not without the network: their lm-eval configurations.

Torch-free; the formats are described in docs/eval.md.
"""

from collections.abc import Callable
from typing import Any

from moesaic.evaluation import answers
from moesaic.evaluation.programs import humaneval_results, mbpp_results

_MEAN = {"aggregation": "mean", "higher_is_better": True}
_GREEDY = {"do_sample": False, "temperature": 0.0}

_ANSWER_METRICS = [{"metric": "f1", **_MEAN}, {"metric": "em", **_MEAN}]

_SQUAD_FORM: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "Title: {{title}}\n\nBackground: {{context}}\n\nQuestion: {{question}}\n\nAnswer:",
    "doc_to_target": answers.squad_target,
    "process_results": answers.squad_results,
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, **_GREEDY},
    "metric_list": _ANSWER_METRICS,
    "training_split": "train",
    "validation_split": "validation",
    "metadata": {"version": 1.0},
}

SQUAD = _SQUAD_FORM | {"dataset_path": "rajpurkar/squad"}
SQUAD2 = _SQUAD_FORM | {"dataset_path": "rajpurkar/squad_v2"}

_QUESTION_FORM: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, **_GREEDY},
    "metric_list": _ANSWER_METRICS,
    "training_split": "train",
    "validation_split": "validation",
    "metadata": {"version": 1.0},
}

NATURAL_QUESTIONS = _QUESTION_FORM | {
    "dataset_path": "google-research-datasets/nq_open",
    "doc_to_target": "{{answer[0]}}",
    "process_results": answers.natural_questions_results,
}
TRIVIAQA_F1 = _QUESTION_FORM | {
    "dataset_path": "mandarjoshi/trivia_qa",
    "dataset_name": "rc.nocontext",
    "doc_to_target": "{{answer.value}}",
    "process_results": answers.triviaqa_results,
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

_LETTERS = ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"]


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


def pro_letters(doc: dict[str, Any]) -> list[str]:
    """The letters of the choices that a question of MMLU-Pro has: up to ten."""
    return _LETTERS[: len(doc["choices"])]


def pro_question(doc: dict[str, Any]) -> str:
    """A question of MMLU-Pro in the form of MMLU's."""
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip(_LETTERS, doc["choices"], strict=False))
    return f"{doc['question'].strip()}\n{choices}Answer:"


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
