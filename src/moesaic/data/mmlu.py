"""The 57 subjects of MMLU in 17 categories (EMO, appendix C; the grouping of Hendrycks et al. 2021). Torch-free."""

from moesaic.common.errors import MoesaicError, suggest

CATEGORIES: dict[str, tuple[str, ...]] = {
    "biology": ("college_biology", "high_school_biology"),
    "business": ("business_ethics", "management", "marketing"),
    "chemistry": ("college_chemistry", "high_school_chemistry"),
    "computer_science": (
        "college_computer_science",
        "computer_security",
        "high_school_computer_science",
        "machine_learning",
    ),
    "culture": ("human_sexuality", "sociology"),
    "economics": ("econometrics", "high_school_macroeconomics", "high_school_microeconomics"),
    "engineering": ("electrical_engineering",),
    "geography": ("high_school_geography",),
    "health": (
        "anatomy",
        "clinical_knowledge",
        "college_medicine",
        "human_aging",
        "medical_genetics",
        "nutrition",
        "professional_medicine",
        "virology",
    ),
    "history": ("high_school_european_history", "high_school_us_history", "high_school_world_history", "prehistory"),
    "law": ("international_law", "jurisprudence", "professional_law"),
    "math": (
        "abstract_algebra",
        "college_mathematics",
        "elementary_mathematics",
        "high_school_mathematics",
        "high_school_statistics",
    ),
    "other": ("global_facts", "miscellaneous", "professional_accounting"),
    "philosophy": (
        "formal_logic",
        "logical_fallacies",
        "moral_disputes",
        "moral_scenarios",
        "philosophy",
        "world_religions",
    ),
    "physics": ("astronomy", "college_physics", "conceptual_physics", "high_school_physics"),
    "politics": (
        "high_school_government_and_politics",
        "public_relations",
        "security_studies",
        "us_foreign_policy",
    ),
    "psychology": ("high_school_psychology", "professional_psychology"),
}
"""Category -> its subjects, both sorted."""

CATCH_ALL = "other"
"""The category that EMO leaves out of its averages (appendix B.3)."""

SUBJECTS: tuple[str, ...] = tuple(sorted(subject for subjects in CATEGORIES.values() for subject in subjects))

PRO_CATEGORIES: tuple[str, ...] = (
    "biology", "business", "chemistry", "computer_science", "economics", "engineering", "health", "history", "law",
    "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip
"""The 14 categories of MMLU-Pro, sorted."""

_CATEGORY_OF = {subject: category for category, subjects in CATEGORIES.items() for subject in subjects}


def category_of(subject: str) -> str:
    """The category of an MMLU subject.

    >>> category_of("high_school_statistics")
    'math'

    Raises:
        MoesaicError: it is no subject of MMLU.
    """
    if subject not in _CATEGORY_OF:
        raise MoesaicError(f"subject {subject!r}: not one of MMLU's 57; {suggest(subject, SUBJECTS)}")
    return _CATEGORY_OF[subject]
