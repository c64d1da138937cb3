"""The benchmarks that `moesaic eval` knows: whose prompts, which metric, which files. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.data.mmlu import CATEGORIES, PRO_CATEGORIES, SUBJECTS
from moesaic.evaluation import tasks
from moesaic.evaluation.tasks import Adapter, as_is


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One column of a paper's table: a task of lm-eval, or several whose rows are counted together."""

    title: str
    metric: str = "acc,none"
    """Key of lm-eval's result, `metric,filter`."""
    folder: str | None = None
    """Folder below lm-eval's tasks that defines the parts; None: `config` is the whole definition."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """lm-eval task -> value of `part_field` of its rows in local files; empty: one task of the benchmark's name."""
    part_field: str | None = None
    fields: tuple[str, ...]
    """Fields that the task reads of a row; one that lacks some is refused."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of lm-eval's configuration that replace the task's own."""
    local_config: Mapping[str, Any] = field(default_factory=dict)
    """The same for local rows, which are adapted already."""
    files: str | None = None
    """Local files are FILES.SPLIT.jsonl or FILES.SPLIT_anything.jsonl; None: the benchmark's name."""
    split: str = "test"
    """The split that is evaluated."""
    shot_split: str | None = "train"
    """The split of the demonstrations; None: they are part of the task."""
    demonstrations: int | None = None
    """How many demonstrations there are at most; None: as many as rows in their split."""
    adapt: Adapter = as_is
    """Makes the hub's rows of local multiple-choice and other rows."""
    adapts_all: bool = False
    """Whether `adapt` is for every local row, not only for multiple-choice ones."""
    runs_programs: bool = False
    """Whether generated programs are executed."""
    chance: float | None = None
    """Score of guessing, where choices are equally many everywhere."""


_MINERVA_PARTS = (
    "algebra", "counting_and_prob", "geometry", "intermediate_algebra", "num_theory", "prealgebra", "precalc",
)  # fmt: skip
_BBH_PARTS = (
    "boolean_expressions", "causal_judgement", "date_understanding", "disambiguation_qa", "dyck_languages",
    "formal_fallacies", "geometric_shapes", "hyperbaton", "logical_deduction_five_objects",
    "logical_deduction_seven_objects", "logical_deduction_three_objects", "movie_recommendation",
    "multistep_arithmetic_two", "navigate", "object_counting", "penguins_in_a_table",
    "reasoning_about_colored_objects", "ruin_names", "salient_translation_error_detection", "snarks",
    "sports_understanding", "temporal_sequences", "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects", "tracking_shuffled_objects_three_objects", "web_of_lies", "word_sorting",
)  # fmt: skip


def _lettered(title: str, folder: str, question: str = "question", chance: float = 0.25, **more: Any) -> Benchmark:
    """Choices with letters: ARC, OpenBookQA, CommonsenseQA; `question` is the hub's name of that field."""
    fields = (question, "choices", "answerKey")
    return Benchmark(title=title, fields=fields, folder=folder, adapt=tasks.lettered(question), chance=chance, **more)


def _squad(title: str, config: Mapping[str, Any]) -> Benchmark:
    return Benchmark(
        title=title,
        fields=("title", "context", "question", "answers"),
        metric="f1,none",
        config=config,
        split="validation",
        adapt=tasks.paragraph_questions,
        adapts_all=True,
    )


def _mmlu(title: str, subjects: tuple[str, ...]) -> Benchmark:
    return Benchmark(
        title=title,
        fields=("question", "choices", "answer"),
        folder="mmlu/default",
        parts={f"mmlu_{subject}": subject for subject in subjects},
        part_field="subject",
        files="mmlu",
        shot_split="dev",
        demonstrations=5,
        adapt=tasks.subject_question,
        chance=0.25,
    )


def _mmlu_pro(category: str) -> Benchmark:
    return Benchmark(
        title=f"Pro {category.replace('_', ' ')}",
        fields=("question", "choices", "answer"),
        parts={f"mmlu_pro_{category}": category},
        part_field="subject",
        config=tasks.MMLU_PRO | {"process_docs": tasks.pro_rows(category)},
        local_config={"process_docs": None},
        files="mmlu_pro",
        shot_split="validation",
        demonstrations=5,
        adapt=tasks.subject_question,
    )


BENCHMARKS: dict[str, Benchmark] = {
    "arc_challenge": _lettered("ARC-c", "arc"),
    "arc_easy": _lettered("ARC-e", "arc"),
    "boolq": Benchmark(
        title="BoolQ",
        fields=("passage", "question", "label"),
        folder="super_glue/boolq",
        split="validation",
        adapt=tasks.yes_or_no,
        chance=0.5,
    ),
    "copa": Benchmark(
        title="COPA",
        fields=("premise", "choice1", "choice2", "question", "label"),
        folder="super_glue/copa",
        split="validation",
        chance=0.5,
    ),
    "mmlu": _mmlu("MMLU", SUBJECTS),
    "openbookqa": _lettered("OBQA", "openbookqa", "question_stem"),
    "triviaqa": Benchmark(
        title="TriviaQA",
        fields=("question", "answer"),
        metric="exact_match,remove_whitespace",
        folder="triviaqa",
        split="validation",
    ),
    "hellaswag": Benchmark(
        title="HellaSwag",
        fields=("query", "choices", "label"),
        folder="hellaswag",
        local_config={"process_docs": None},
        split="validation",
        adapt=tasks.endings,
        chance=0.25,
    ),
    "squad2": _squad("SQuAD2", tasks.SQUAD2),
    "humaneval": Benchmark(
        title="HumanEval",
        fields=("prompt", "canonical_solution", "test", "entry_point"),
        metric="pass@1,none",
        config=tasks.HUMANEVAL,
        shot_split=None,
        demonstrations=0,
        adapt=tasks.problem_with_id,
        adapts_all=True,
        runs_programs=True,
    ),
    "mbpp": Benchmark(
        title="MBPP",
        fields=("text", "code", "test_list"),
        metric="pass@1,none",
        config=tasks.MBPP,
        shot_split="prompt",
        demonstrations=3,
        adapt=tasks.problem_with_id,
        adapts_all=True,
        runs_programs=True,
    ),
    "gsm8k": Benchmark(
        title="GSM8K", fields=("question", "answer"), metric="exact_match,flexible-extract", folder="gsm8k"
    ),
    "gsm8k_cot": Benchmark(
        title="GSM8K",
        fields=("question", "answer"),
        metric="exact_match,flexible-extract",
        folder="gsm8k",
        files="gsm8k",
        shot_split=None,
        demonstrations=8,
    ),
    "math": Benchmark(
        title="MATH",
        fields=("problem", "solution"),
        metric="exact_match,none",
        folder="minerva_math",
        parts={f"minerva_math_{part}": part for part in _MINERVA_PARTS},
        part_field="subject",
        shot_split=None,
        demonstrations=4,
    ),
    "gpqa": Benchmark(
        title="GPQA",
        fields=("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        folder="gpqa/zeroshot",
        parts={"gpqa_main_zeroshot": ""},
        split="train",
    ),
    "bbh": Benchmark(
        title="BBH",
        fields=("input", "target"),
        metric="exact_match,get-answer",
        folder="bbh/cot_fewshot",
        parts={f"bbh_cot_fewshot_{part}": part for part in _BBH_PARTS},
        part_field="task",
        shot_split=None,
        demonstrations=3,
        adapt=tasks.input_target,
        adapts_all=True,
    ),
    "csqa": _lettered("CSQA", "commonsense_qa", chance=0.2, parts={"commonsense_qa": ""}, split="validation"),
    "piqa": Benchmark(
        title="PIQA",
        fields=("goal", "sol1", "sol2", "label"),
        folder="piqa",
        split="validation",
        adapt=tasks.two_solutions,
        chance=0.5,
    ),
    "social_iqa": Benchmark(
        title="SocialIQA",
        fields=("context", "question", "answerA", "answerB", "answerC", "label"),
        folder="siqa",
        split="validation",
        adapt=tasks.three_answers,
        chance=1 / 3,
    ),
    "winogrande": Benchmark(
        title="WinoGrande",
        fields=("sentence", "option1", "option2", "answer"),
        folder="winogrande",
        split="validation",
        adapt=tasks.two_options,
        chance=0.5,
    ),
    "squad": _squad("SQuAD", tasks.SQUAD),
    "coqa": Benchmark(
        title="CoQA", fields=("story", "questions", "answers"), metric="f1,none", folder="coqa", split="validation"
    ),
    "naturalqs": Benchmark(
        title="NaturalQS",
        fields=("question", "answer"),
        metric="f1,none",
        config=tasks.NATURAL_QUESTIONS,
        split="validation",
    ),
    "triviaqa_f1": Benchmark(
        title="TriviaQA",
        fields=("question", "answer"),
        metric="f1,none",
        config=tasks.TRIVIAQA_F1,
        files="triviaqa",
        split="validation",
    ),
    "drop": Benchmark(
        title="DROP", fields=("passage", "question"), metric="f1,none", folder="drop", split="validation"
    ),
    **{f"mmlu_{name}": _mmlu(name.replace("_", " "), subjects) for name, subjects in CATEGORIES.items()},
    **{f"mmlu_pro_{name}": _mmlu_pro(name) for name in PRO_CATEGORIES},
}

PERPLEXITY = "perplexity"
"""The task that measures held-out text instead of asking questions."""
