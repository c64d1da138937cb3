"""What a benchmark is made of. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.evaluation.rows import Adapter, as_is


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
