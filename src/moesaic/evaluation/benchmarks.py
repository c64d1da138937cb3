"""The benchmarks that `moesaic eval` knows: whose prompts, which metric, which files. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moesaic.data.mmlu import CATEGORIES, PRO_CATEGORIES, SUBJECTS
from moesaic.evaluation import rows, tasks
from moesaic.evaluation.rows import Check, Texts, Types
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
    fields: Types
    """Fields that the task reads of a row of the hub's form, with their types; a row that has others is refused."""
    check: Check | None = None
    """Refuses a row of the right types whose fields do not fit each other, such as an answer that is no choice."""
    local: Types | None = None
    """Fields of another form of rows, which `adapt` makes the hub's of."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of lm-eval's configuration that replace the task's own."""
    local_config: Mapping[str, Any] = field(default_factory=dict)
    """The same for local rows, which are adapted already."""
    definition: Path | None = None
    """lm-eval's own file of the task, which is then all of its definition."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """Split -> file with its rows, of a task that says where they are; empty: in the folder with the data."""
    files: str | None = None
    """Local files are FILES.SPLIT.jsonl or FILES.SPLIT_anything.jsonl; None: the benchmark's name."""
    split: str = "test"
    """The split that is evaluated."""
    shot_split: str | None = "train"
    """The split of the demonstrations; None: they are part of the task."""
    demonstrations: int | None = None
    """How many demonstrations there are at most; None: as many as rows in their split."""
    adapt: Adapter = as_is
    """Makes the hub's rows of one of the form `local`."""
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
    return Benchmark(
        title=title,
        fields={question: str, "choices": rows.Lettered, "answerKey": str},
        check=rows.one_of("answerKey", lambda row: row["choices"]["label"]),
        local=rows.CHOICE,
        folder=folder,
        adapt=tasks.lettered(question),
        chance=chance,
        **more,
    )


def _squad(title: str, config: Mapping[str, Any]) -> Benchmark:
    return Benchmark(
        title=title,
        fields={"title": str, "context": str, "question": str, "answers": rows.AnswerTexts},
        local=rows.PARAGRAPH,
        metric="f1,none",
        config=config,
        split="validation",
        adapt=tasks.paragraph_questions,
    )


def _mmlu(title: str, subjects: tuple[str, ...]) -> Benchmark:
    return Benchmark(
        title=title,
        fields={"question": str, "choices": Texts, "answer": int, "subject": str},
        check=rows.index_of("choices"),
        folder="mmlu/default",
        parts={f"mmlu_{subject}": subject for subject in subjects},
        part_field="subject",
        files="mmlu",
        shot_split="dev",
        demonstrations=5,
        local_config=tasks.ANY_LETTERS,
        chance=0.25,
    )


def _mmlu_pro(category: str) -> Benchmark:
    return Benchmark(
        title=f"Pro {category.replace('_', ' ')}",
        fields={"question": str, "choices": Texts, "answer": int, "subject": str},
        check=rows.index_of("choices"),
        parts={f"mmlu_pro_{category}": category},
        part_field="subject",
        config=tasks.MMLU_PRO | {"process_docs": tasks.pro_rows(category)},
        local_config={"process_docs": None},
        files="mmlu_pro",
        shot_split="validation",
        demonstrations=5,
    )


BENCHMARKS: dict[str, Benchmark] = {
    "arc_challenge": _lettered("ARC-c", "arc"),
    "arc_easy": _lettered("ARC-e", "arc"),
    "boolq": Benchmark(
        title="BoolQ",
        fields={"passage": str, "question": str, "label": rows.FIRST_OR_SECOND},
        local=rows.TWO_CHOICES | {"context": str},
        folder="super_glue/boolq",
        split="validation",
        adapt=tasks.yes_or_no,
        chance=0.5,
    ),
    "copa": Benchmark(
        title="COPA",
        fields={"premise": str, "choice1": str, "choice2": str, "question": str, "label": rows.FIRST_OR_SECOND},
        folder="super_glue/copa",
        split="validation",
        chance=0.5,
    ),
    "mmlu": _mmlu("MMLU", SUBJECTS),
    "openbookqa": _lettered("OBQA", "openbookqa", "question_stem"),
    "triviaqa": Benchmark(
        title="TriviaQA",
        fields={"question": str, "answer": rows.Aliases},
        metric="exact_match,remove_whitespace",
        folder="triviaqa",
        split="validation",
    ),
    "hellaswag": Benchmark(
        title="HellaSwag",
        fields={"query": str, "choices": Texts, "label": str},
        check=rows.one_of("label", lambda row: [str(number) for number in range(len(row["choices"]))]),
        local=rows.CHOICE,
        folder="hellaswag",
        local_config={"process_docs": None},
        split="validation",
        adapt=tasks.endings,
        chance=0.25,
    ),
    "squad2": _squad("SQuAD2", tasks.SQUAD2),
    "humaneval": Benchmark(
        title="HumanEval",
        fields={"prompt": str, "canonical_solution": str, "test": str, "entry_point": str},
        metric="pass@1,none",
        config=tasks.HUMANEVAL,
        shot_split=None,
        demonstrations=0,
        runs_programs=True,
    ),
    "mbpp": Benchmark(
        title="MBPP",
        fields={"text": str, "code": str, "test_list": Texts},
        metric="pass@1,none",
        config=tasks.MBPP,
        shot_split="prompt",
        demonstrations=3,
        runs_programs=True,
    ),
    "gsm8k": Benchmark(
        title="GSM8K", fields={"question": str, "answer": str}, metric="exact_match,flexible-extract", folder="gsm8k"
    ),
    "gsm8k_cot": Benchmark(
        title="GSM8K",
        fields={"question": str, "answer": str},
        metric="exact_match,flexible-extract",
        folder="gsm8k",
        files="gsm8k",
        shot_split=None,
        demonstrations=8,
    ),
    "math": Benchmark(
        title="MATH",
        fields={"problem": str, "solution": str},
        metric="exact_match,none",
        folder="minerva_math",
        parts={f"minerva_math_{part}": part for part in _MINERVA_PARTS},
        part_field="subject",
        shot_split=None,
        demonstrations=4,
    ),
    "gpqa": Benchmark(
        title="GPQA",
        fields=dict.fromkeys(
            ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"), str
        ),
        folder="gpqa/zeroshot",
        parts={"gpqa_main_zeroshot": ""},
        split="train",
    ),
    "bbh": Benchmark(
        title="BBH",
        fields={"input": str, "target": str},
        local={"question": str, "answer": str, "task": str},
        metric="exact_match,get-answer",
        folder="bbh/cot_fewshot",
        parts={f"bbh_cot_fewshot_{part}": part for part in _BBH_PARTS},
        part_field="task",
        shot_split=None,
        demonstrations=3,
        adapt=tasks.input_target,
    ),
    "csqa": _lettered(
        "CSQA",
        "commonsense_qa",
        chance=0.2,
        parts={"commonsense_qa": ""},
        split="validation",
        local_config=tasks.ANY_LETTERS_OF_HUB,
    ),
    "piqa": Benchmark(
        title="PIQA",
        fields={"goal": str, "sol1": str, "sol2": str, "label": rows.FIRST_OR_SECOND},
        local=rows.TWO_CHOICES,
        folder="piqa",
        split="validation",
        adapt=tasks.two_solutions,
        chance=0.5,
    ),
    "social_iqa": Benchmark(
        title="SocialIQA",
        fields=dict.fromkeys(("context", "question", "answerA", "answerB", "answerC"), str)
        | {"label": Literal["1", "2", "3"]},
        local=rows.THREE_CHOICES,
        folder="siqa",
        split="validation",
        adapt=tasks.three_answers,
        chance=1 / 3,
    ),
    "winogrande": Benchmark(
        title="WinoGrande",
        fields={"sentence": str, "option1": str, "option2": str, "answer": Literal["1", "2"]},
        local=rows.TWO_CHOICES,
        folder="winogrande",
        split="validation",
        adapt=tasks.two_options,
        chance=0.5,
    ),
    "squad": _squad("SQuAD", tasks.SQUAD),
    "coqa": Benchmark(
        title="CoQA",
        fields={
            "story": str,
            "questions": rows.Turns,
            "answers": rows.Turns,
            "additional_answers": dict[str, rows.Turns] | None,
        },
        metric="f1,none",
        folder="coqa",
        split="validation",
    ),
    "naturalqs": Benchmark(
        title="NaturalQS",
        fields={"question": str, "answer": Texts},
        check=rows.at_least_one("answer"),
        metric="f1,none",
        config=tasks.NATURAL_QUESTIONS,
        split="validation",
    ),
    "triviaqa_f1": Benchmark(
        title="TriviaQA",
        fields={"question": str, "answer": rows.Aliases},
        metric="f1,none",
        config=tasks.TRIVIAQA_F1,
        files="triviaqa",
        split="validation",
    ),
    "drop": Benchmark(
        title="DROP",
        fields={
            "query_id": str,
            "passage": str,
            "question": str,
            "answer": rows.Found,
            "validated_answers": rows.AllFound,
        },
        metric="f1,none",
        folder="drop",
        split="validation",
    ),
    **{f"mmlu_{name}": _mmlu(name.replace("_", " "), subjects) for name, subjects in CATEGORIES.items()},
    **{f"mmlu_pro_{name}": _mmlu_pro(name) for name in PRO_CATEGORIES},
}

PERPLEXITY = "perplexity"
"""The task that measures held-out text instead of asking questions."""
