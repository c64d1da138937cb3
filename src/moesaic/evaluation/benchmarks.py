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
    metric: str
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


_MINERVA_PARTS = {
    f"minerva_math_{part}": part
    for part in (
        "algebra",
        "counting_and_prob",
        "geometry",
        "intermediate_algebra",
        "num_theory",
        "prealgebra",
        "precalc",
    )
}

_BBH_PARTS = (
    "boolean_expressions",
    "causal_judgement",
    "date_understanding",
    "disambiguation_qa",
    "dyck_languages",
    "formal_fallacies",
    "geometric_shapes",
    "hyperbaton",
    "logical_deduction_five_objects",
    "logical_deduction_seven_objects",
    "logical_deduction_three_objects",
    "movie_recommendation",
    "multistep_arithmetic_two",
    "navigate",
    "object_counting",
    "penguins_in_a_table",
    "reasoning_about_colored_objects",
    "ruin_names",
    "salient_translation_error_detection",
    "snarks",
    "sports_understanding",
    "temporal_sequences",
    "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects",
    "tracking_shuffled_objects_three_objects",
    "web_of_lies",
    "word_sorting",
)


def _mmlu(title: str, subjects: tuple[str, ...]) -> Benchmark:
    return Benchmark(
        title=title,
        fields=("question", "choices", "answer"),
        metric="acc,none",
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
        metric="acc,none",
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
    "arc_challenge": Benchmark(
        title="ARC-c",
        fields=("question", "choices", "answerKey"),
        metric="acc,none",
        folder="arc",
        adapt=tasks.lettered("question"),
        chance=0.25,
    ),
    "arc_easy": Benchmark(
        title="ARC-e",
        fields=("question", "choices", "answerKey"),
        metric="acc,none",
        folder="arc",
        adapt=tasks.lettered("question"),
        chance=0.25,
    ),
    "boolq": Benchmark(
        title="BoolQ",
        fields=("passage", "question", "label"),
        metric="acc,none",
        folder="super_glue/boolq",
        split="validation",
        adapt=tasks.yes_or_no,
        chance=0.5,
    ),
    "copa": Benchmark(
        title="COPA",
        fields=("premise", "choice1", "choice2", "question", "label"),
        metric="acc,none",
        folder="super_glue/copa",
        split="validation",
        chance=0.5,
    ),
    "mmlu": _mmlu("MMLU", SUBJECTS),
    "openbookqa": Benchmark(
        title="OBQA",
        fields=("question_stem", "choices", "answerKey"),
        metric="acc,none",
        folder="openbookqa",
        adapt=tasks.lettered("question_stem"),
        chance=0.25,
    ),
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
        metric="acc,none",
        folder="hellaswag",
        local_config={"process_docs": None},
        split="validation",
        adapt=tasks.endings,
        chance=0.25,
    ),
    "squad2": Benchmark(
        title="SQuAD2",
        fields=("title", "context", "question", "answers"),
        metric="f1,none",
        config=tasks.SQUAD2,
        split="validation",
        adapt=tasks.paragraph_questions,
        adapts_all=True,
    ),
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
        parts=_MINERVA_PARTS,
        part_field="subject",
        shot_split=None,
        demonstrations=4,
    ),
    "gpqa": Benchmark(
        title="GPQA",
        fields=("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        metric="acc,none",
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
    "csqa": Benchmark(
        title="CSQA",
        fields=("question", "choices", "answerKey"),
        metric="acc,none",
        folder="commonsense_qa",
        parts={"commonsense_qa": ""},
        split="validation",
        adapt=tasks.lettered("question"),
        chance=0.2,
    ),
    "piqa": Benchmark(
        title="PIQA",
        fields=("goal", "sol1", "sol2", "label"),
        metric="acc,none",
        folder="piqa",
        split="validation",
        adapt=tasks.two_solutions,
        chance=0.5,
    ),
    "social_iqa": Benchmark(
        title="SocialIQA",
        fields=("context", "question", "answerA", "answerB", "answerC", "label"),
        metric="acc,none",
        folder="siqa",
        split="validation",
        adapt=tasks.three_answers,
        chance=1 / 3,
    ),
    "winogrande": Benchmark(
        title="WinoGrande",
        fields=("sentence", "option1", "option2", "answer"),
        metric="acc,none",
        folder="winogrande",
        split="validation",
        adapt=tasks.two_options,
        chance=0.5,
    ),
    "squad": Benchmark(
        title="SQuAD",
        fields=("title", "context", "question", "answers"),
        metric="f1,none",
        config=tasks.SQUAD,
        split="validation",
        adapt=tasks.paragraph_questions,
        adapts_all=True,
    ),
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


def categories_of_selection(task: str) -> tuple[str, ...]:
    """Names that a file of a folder of selections may have for a task: the task's, and its category's."""
    for prefix in ("mmlu_pro_", "mmlu_"):
        if task.startswith(prefix):
            return task, task.removeprefix(prefix)
    return (task,)
