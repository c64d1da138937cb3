"""YAML as recipes need it: plain data only, numbers as people write them, no key twice.

PyYAML reads YAML 1.1, in which `5e-4` is text, `no` is false, `12:30` is 750 and `2026-01-01` is a date. The reader
here keeps PyYAML's parser and replaces its rules for plain words by those of YAML 1.2's core schema.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from moesaic.common.errors import MoesaicError
from moesaic.common.plain import refuse_unwritable

_TAG = "tag:yaml.org,2002:"
_WORDS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"-?(0|[1-9][0-9]*)", list("-0123456789")),
    "float": (
        r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own registry; an empty one drops the YAML 1.1 rules)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or our reader would take for something else than text."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 (PyYAML's signature)
        super().increase_indent(flow, False)  # lists are indented below their key


for _name, (_pattern, _first) in _WORDS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _first)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = {}
    for key_node, _ in node.value:
        key, mark = key_node.value, key_node.start_mark
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a single word or text", mark)
        if key in seen and key_node.tag != f"{_TAG}merge":
            problem = f"the key {key!r} is there twice (first in line {seen[key] + 1})"
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        seen[key] = mark.line
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes some line separators (U+0085, U+2028) unescaped in single quotes and then folds them when it reads
    return dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')


_Loader.add_constructor(f"{_TAG}map", _construct_mapping)
_Dumper.add_representer(str, _represent_text)


def parse_yaml(text: str, name: str) -> Any:
    """Parse one YAML document of plain data; `name` stands for its source in messages."""
    try:
        value = yaml.load(text, _Loader)
        refuse_unwritable(value, name)
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise MoesaicError(f"{name}{line}: not valid YAML: {error.problem}") from error
    except MoesaicError:
        raise
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        LookupError,
    ) as error:  # such as `!!int abc`
        raise MoesaicError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds keys and values."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MoesaicError(f"{path}: not a YAML text file (byte {error.start} is not UTF-8)") from error
    except OSError as error:
        raise MoesaicError(f"{path}: cannot be read: {error.strerror}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise MoesaicError(
            f"{path}: expected keys and values, got {type(values).__name__ if values else 'an empty file'}"
        )
    return values


def dump_yaml(values: Any) -> str:
    """Write plain data as YAML in the given order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def apply_override(values: dict[str, Any], override: str) -> str:
    """Set one `a.b.c=value` (the value is YAML, a number as key is a list index) in the raw values; return its key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise MoesaicError(f"--set {override}: expected KEY=VALUE, such as optimizer.lr=5e-4")
    *parents, last = key.split(".")
    holder: Any = values
    for depth, part in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(holder, list):
            holder = holder[_list_index(holder, part, override)]
        elif holder.get(part) is None:  # not in the file, or null: the class's defaults apply to the rest of it
            holder[part] = {}
            holder = holder[part]
        else:
            holder = holder[part]
        if not isinstance(holder, (dict, list)):
            raise MoesaicError(f"--set {override}: {where} is {holder!r}, which has no keys; set {where} as a whole")
    value = parse_yaml(text, f"--set {override}")
    if isinstance(holder, list):
        holder[_list_index(holder, last, override)] = value
    else:
        holder[last] = value
    return key


def _list_index(items: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        allowed = f"0 to {len(items) - 1}" if items else "none, the list is empty"
        raise MoesaicError(f"--set {override}: {part!r} is not an index of this list; allowed: {allowed}")
    return int(part)
