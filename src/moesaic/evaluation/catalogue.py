"""The suites and tasks that `eval` knows, and what their data must look like: `moesaic eval --list`. Torch-free."""

import typing
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal

from moesaic.common.recipe import init_fields
from moesaic.evaluation.benchmarks import BENCHMARKS, PERPLEXITY, Benchmark
from moesaic.evaluation.recipe import load_suite, shipped
from moesaic.evaluation.rows import Types

_NAMES = {str: "text", int: "whole number", float: "number", Any: "anything"}


def suite_rows() -> list[dict[str, Any]]:
    """Name, origin and tasks of every suite."""
    suites = [load_suite(name) for name in sorted(shipped())]
    return [
        {"name": suite.name, "about": " ".join(suite.about.split()), "tasks": [task.name for task in suite.tasks]}
        for suite in suites
    ]


def task_rows() -> list[dict[str, Any]]:
    """Name, title, files and fields of every task; fields as lines, one for each form that a row may have."""
    rows = [
        {"name": name, "title": one.title, "files": _files(name, one), "fields": _fields(one)}
        for name, one in BENCHMARKS.items()
    ]
    text = "text: text, domain: text, source: text (may be missing)"
    return [*rows, {"name": PERPLEXITY, "title": "held-out text", "files": ["all held-out files"], "fields": [text]}]


def _files(name: str, benchmark: Benchmark) -> list[str]:
    stem = benchmark.files or name
    splits = [benchmark.split, *([benchmark.shot_split] if benchmark.shot_split else [])]
    return [f"{stem}.{split}.jsonl" for split in dict.fromkeys(splits)]


def _fields(benchmark: Benchmark) -> list[str]:
    forms = [dict(form) for form in (benchmark.fields, benchmark.local) if form is not None]
    part = {} if benchmark.part_field is None else {benchmark.part_field: str}
    return [_described(form | part) for form in forms]


def _described(types: Types) -> str:
    return ", ".join(f"{name}: {_type(kind)}" for name, kind in types.items())


def _type(kind: Any) -> str:
    """A type in words: `list of text`."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return "{" + ", ".join(f"{field.name}: {_type(hints[field.name])}" for field in init_fields(kind)) + "}"
    if origin is Literal:
        return " or ".join(repr(member) for member in members)
    if origin is tuple:
        return f"list of {_type(members[0])}" if members[-1] is Ellipsis else f"list of {len(members)} texts"
    if origin is dict:
        return f"{{name: {_type(members[1])}}}"
    if origin in (typing.Union, UnionType):
        named = " or ".join(_type(member) for member in members if member is not NoneType)
        return f"{named} (may be missing)" if NoneType in members else named
    return _NAMES[kind]
