"""Recipes and documents: YAML or JSON in, frozen dataclasses out, and back.

A recipe class is any frozen, keyword-only dataclass whose fields are str, int, float, bool, `Path`, `Literal`, `Any`,
`Count`, `Size`, `Measured`, other such dataclasses, or tuples, lists, dicts (string keys) and unions of these. Nothing
here knows one recipe. A document is what a program wrote: the same classes, read to the letter (`load_document`).

Every mistake is one `MoesaicError` line that names the file, the full dotted key, the value and what is allowed. A
check of a value belongs in the class's `__post_init__`: raise a `MoesaicError` there that starts with the field's name
(`"lr must be positive, got -1"`), and the file and the path of the object are put before it.
"""

import dataclasses
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from moesaic.common.errors import MoesaicError, suggest

RecipeT = TypeVar("RecipeT")

Count = Annotated[int, "at least 0"]
Size = Annotated[int, "at least 1"]
Measured = Annotated[float, "NaN and the infinities too"]
"""A number of a run, which may have gone wrong."""

_SET = "--set"
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MOST_DIGITS = 400
"""Of a number that is given as text: no float64 has more before its point."""
_MOST_BITS = 64
_LISTS = (list, tuple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Where:
    """A place in the recipe, for messages."""

    source: str
    key: str = ""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key -> option that set it
    exact: bool = False  # a document: text is not read as a number, nor a number as text
    others: bool = False  # keys that a class does not have are passed over
    way_out: str = ""  # at the end of every message

    def child(self, name: str | int) -> "_Where":
        key = f"{self.key}.{_name(name)}" if self.key else _name(name)
        return dataclasses.replace(self, key=key)

    def error(self, message: str) -> MoesaicError:
        source, key = self.source, self.key
        above = [name for name in self.origins if f"{key}.".startswith(f"{name}.")]
        below = [f"{option} {name}" for name, option in self.origins.items() if name.startswith(f"{key}.")]
        if above:
            name = max(above, key=len)
            source = self.origins[name]
            key = key if source == _SET else key[len(name) + 1 :]  # an option's own name says the key already
        elif below:
            source = f"{source} (with {', '.join(below)})"
        message = f"{message}; {self.way_out}" if self.way_out else message
        return MoesaicError(f"{source}: {key}: {message}" if key else f"{source}: {message}")


def load_recipe(
    cls: type[RecipeT],
    source: Path | str | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    flags: Mapping[str, Any] | None = None,
    spellings: Mapping[str, str] | None = None,
    name: str | None = None,
) -> RecipeT:
    """Build the recipe dataclass `cls` from a YAML file or a mapping.

    `overrides` are `a.b.c=value` texts (the arguments of `--set`); the value is YAML, a number as key is a list index.
    `flags` are values of command line options by top-level key; they win over the file and over `overrides`.
    `spellings` are the options' names by key (else `--key`); where the source is empty, mistakes name these alone.
    `name` is what messages call the source; by default the file's name, or `recipe` for a mapping.
    Raises `MoesaicError` for unknown keys, wrong types, values that are not allowed and missing keys.
    """
    from moesaic.common.yaml_text import apply_override, read_yaml  # PyYAML: a JSON document is read without it

    is_mapping = isinstance(source, Mapping)
    name = name or ("recipe" if is_mapping else str(source))
    values = _copy_containers(dict(source)) if is_mapping else read_yaml(Path(source))
    spelled = {key: f"--{key.replace('_', '-')}" for key in flags or {}} | dict(spellings or {})
    origins = {} if source else dict(spelled)
    for override in overrides:
        origins[apply_override(values, override)] = _SET
    for key, value in (flags or {}).items():
        values[key] = value
        origins[key] = spelled[key]
    return _convert(cls, values, _Where(source=name, origins=origins))


def load_document(
    cls: type[RecipeT], values: Mapping[str, Any], name: str, *, others: bool = False, way_out: str = ""
) -> RecipeT:
    """Build `cls` from a parsed document that a program wrote; nothing is converted, and no number is NaN or infinite.

    So where the result is not needed, the values themselves are what the class says.

    Args:
        cls: what the document holds; a `Measured` may be NaN, and `Any` anything.
        values: the parsed document.
        name: how messages call it.
        others: pass over keys that the class does not have.
        way_out: what to do about a damaged one, at the end of messages.
    """
    return _convert(cls, values, _Where(source=name, exact=True, others=others, way_out=way_out))


def convert_fields(types: Mapping[str, Any], values: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """The fields of a record (a row of data) in the types given; a field without a type stays as it is.

    The types are those of recipes. Of a dataclass, keys that it does not name stay as well, and the result holds plain
    values; `name` is the record's place, for messages.

    Raises `MoesaicError` with the place, the field (`qas.0.answers`), its value and what is expected.
    """
    where = _Where(source=name, others=True)
    typed = {key: _convert(types[key], values[key], where.child(key)) for key in types if key in values}
    return {key: _laid_over(value, typed[key]) if key in typed else value for key, value in values.items()}


def _laid_over(value: Any, typed: Any) -> Any:
    """The plain values of what was converted, and beside them what its class does not name."""
    if dataclasses.is_dataclass(typed) and isinstance(value, Mapping):
        return {k: _laid_over(one, getattr(typed, k)) if hasattr(typed, str(k)) else one for k, one in value.items()}
    if isinstance(typed, (list, tuple)):
        return [_laid_over(*pair) for pair in zip(value, typed, strict=True)]
    return recipe_values(typed)


def dump_recipe(recipe: Any) -> str:
    """Write a recipe dataclass as YAML, every key with its value; `load_recipe` gives an equal object back."""
    from moesaic.common.yaml_text import dump_yaml

    return dump_yaml(recipe_values(recipe))


def recipe_values(value: Any) -> Any:
    """Return a recipe as plain dicts, lists and scalars, as JSON and YAML want them."""
    if dataclasses.is_dataclass(value):
        return {field.name: recipe_values(getattr(value, field.name)) for field in init_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): recipe_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [recipe_values(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def init_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields that can be given."""
    return [field for field in dataclasses.fields(cls) if field.init]


def _copy_containers(value: Any) -> Any:
    """Copy dicts and lists, so that overrides never change the caller's mapping."""
    if isinstance(value, Mapping):
        return {key: _copy_containers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy_containers(item) for item in value]
    return value


def _convert(expected: Any, value: Any, where: _Where) -> Any:
    """Turn a plain value into the expected type, or say why it cannot be."""
    if expected in _SCALARS:
        return _SCALARS[expected](value, where)
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _to_union(typing.get_args(expected), value, where)
    if origin is Literal:
        return _to_literal(typing.get_args(expected), value, where)
    if dataclasses.is_dataclass(expected):
        return _to_dataclass(expected, value, where)
    return _CONTAINERS[origin or expected](typing.get_args(expected), value, where)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _to_dataclass(cls: Any, value: Any, where: _Where) -> Any:
    if isinstance(value, cls):
        return value
    fields = init_fields(cls)
    names = [field.name for field in fields]
    if not isinstance(value, Mapping):
        raise where.error(f"expected keys and values ({', '.join(names)}), got {_show(value)}")
    for key in () if where.others else value:
        if key not in names:
            raise where.child(key).error(f"unknown key; {suggest(_name(key), names)}")
    for field in fields:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in value:
            raise where.child(field.name).error("this key is required and missing")
    hints = _hints(cls)
    arguments = {name: _convert(hints[name], value[name], where.child(name)) for name in names if name in value}
    try:
        return cls(**arguments)
    except MoesaicError as error:
        name, _, rest = str(error).partition(" ")
        if name in names:
            raise where.child(name).error(rest) from error
        if name.startswith("--"):  # it names an option, and so the place, itself
            raise
        raise where.error(str(error)) from error


def _to_union(members: tuple[Any, ...], value: Any, where: _Where) -> Any:
    """Take the member that holds the value as it is, else the first that can be made from it."""
    if value is None and type(None) in members:
        return None
    candidates = [member for member in members if member is not type(None)]
    candidates.sort(key=lambda member: member is not type(value))  # stable: the exact type first, then as declared
    errors = {}
    for member in candidates:
        try:
            return _convert(member, value, where)
        except MoesaicError as error:
            errors[member] = error
    same_shape = [member for member in candidates if isinstance(value, _shape(member))]
    if len(candidates) == 1 or len(same_shape) == 1:  # the mistake is inside: its own message says more
        raise errors[(same_shape or candidates)[0]]
    raise where.error(f"expected {' or '.join(_describe(member) for member in members)}, got {_show(value)}")


def _shape(expected: Any) -> tuple[type, ...]:
    """What a value of this type is in a file: a list, or keys and values; empty for a scalar."""
    kind = typing.get_origin(expected) or expected
    if kind in _LISTS:
        return _LISTS
    return (Mapping,) if dataclasses.is_dataclass(expected) or kind in _CONTAINERS else ()


def _to_literal(allowed: tuple[Any, ...], value: Any, where: _Where) -> Any:
    for choice in allowed:
        if type(choice) is type(value) and choice == value:  # 1 is not true
            return choice
    choices = ", ".join(_show(choice) for choice in allowed)
    hint = suggest(str(value), map(str, allowed))
    raise where.error(f"{_show(value)} is not allowed: one of {choices}{f'; {hint}' if hint.startswith('did') else ''}")


def _to_sequence(build: Callable[..., Any], arguments: tuple[Any, ...], value: Any, where: _Where) -> Any:
    if not isinstance(value, (list, tuple)):
        raise where.error(f"expected a list, got {_show(value)}")
    if build is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise where.error(f"expected {len(arguments)} values, got {len(value)}: {_show(value)}")
        item_types = arguments
    else:
        item_types = (arguments[0] if arguments else Any,) * len(value)
    pairs = zip(item_types, value, strict=True)
    return build(_convert(item_type, item, where.child(index)) for index, (item_type, item) in enumerate(pairs))


def _to_dict(arguments: tuple[Any, ...], value: Any, where: _Where) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise where.error(f"expected keys and values, got {_show(value)}")
    for key in value:
        if not isinstance(key, str):
            raise where.error(f"keys must be text, got {_show(key)}; put it in quotes")
    item_type = arguments[1] if arguments else Any
    return {key: _convert(item_type, item, where.child(key)) for key, item in value.items()}


def _to_bool(value: Any, where: _Where) -> bool:
    if isinstance(value, bool):
        return value
    raise where.error(f"expected true or false, got {_show(value)}")


def _to_float(value: Any, where: _Where) -> float:
    number = _number(value, where)
    if number is None or not math.isfinite(number):
        raise where.error(f"expected a finite number, got {_show(value)}")
    return float(number)


def _to_measured(value: Any, where: _Where) -> float:
    number = _number(value, where)
    if number is None:
        raise where.error(f"expected a number, got {_show(value)}")
    return float(number)


def _to_int(value: Any, where: _Where) -> int:
    number = _number(value, where)
    if number is None or not math.isfinite(number) or number != int(number) or (where.exact and type(value) is not int):
        raise where.error(f"expected a whole number, got {_show(value)}")
    if int(number).bit_length() > _MOST_BITS:
        raise where.error(f"has more than {_MOST_BITS} bits, got {_show(value)}")
    return int(number)


def _at_least(low: int, value: Any, where: _Where) -> int:
    number = _to_int(value, where)
    if number < low:
        raise where.error(f"must be at least {low}, got {_show(value)}")
    return number


def _number(value: Any, where: _Where) -> int | float | None:
    """Read a number, also one that YAML 1.1 or a shell handed over as text (5e-4, 1_000); None for all else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value.bit_length() < sys.float_info.max_exp else None
    if isinstance(value, float):
        return value
    if isinstance(value, str) and not where.exact and len(value) <= _MOST_DIGITS and _NUMBER.fullmatch(value):
        digits = value.replace("_", "")
        whole = digits.lstrip("+-").isdecimal()
        return _number(int(digits), where) if whole else float(digits)
    return None


def _to_str(value: Any, where: _Where) -> str:
    if isinstance(value, (str, Path)):
        return str(value)
    if not where.exact and isinstance(value, int) and not isinstance(value, bool):  # `layers: 12` is kept unchanged
        return str(value)
    hint = "; put it in quotes" if isinstance(value, (bool, float)) else ""
    raise where.error(f"expected text, got {_show(value)}{hint}")


def _to_path(value: Any, where: _Where) -> Path:
    text = _to_str(value, where)
    if not text:
        raise where.error("expected a path, got an empty text")
    if "\0" in text:
        raise where.error(f"no path has a NUL character, got {_show(value)}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise where.error(f"there is no such home folder, got {_show(value)}") from error


_SCALARS: dict[Any, Callable[[Any, _Where], Any]] = {
    Any: lambda value, _where: value,
    Count: lambda value, where: _at_least(0, value, where),
    Size: lambda value, where: _at_least(1, value, where),
    Measured: _to_measured,
    bool: _to_bool,
    float: _to_float,
    int: _to_int,
    str: _to_str,
    Path: _to_path,
}
_CONTAINERS: dict[Any, Callable[[tuple[Any, ...], Any, _Where], Any]] = {
    list: lambda arguments, value, where: _to_sequence(list, arguments, value, where),
    tuple: lambda arguments, value, where: _to_sequence(tuple, arguments, value, where),
    dict: _to_dict,
    Mapping: _to_dict,
}
_NAMES: dict[Any, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "text",
    Path: "a path",
    Count: "a whole number of at least 0",
    Size: "a whole number of at least 1",
    Measured: "a number",
}


def _describe(expected: Any) -> str:
    """Name a type in the words of a YAML file."""
    if expected is type(None):
        return "null"
    if typing.get_origin(expected) is Literal:
        return ", ".join(_show(choice) for choice in typing.get_args(expected))
    if dataclasses.is_dataclass(expected):
        return f"keys and values ({', '.join(field.name for field in init_fields(expected))})"
    if shape := _shape(expected):
        return "a list" if shape == _LISTS else "keys and values"
    return _NAMES[expected]


def _name(key: Any) -> str:
    """A key for a message: one line, not long."""
    text = str(key)
    return text if text.isprintable() and len(text) <= 80 else _show(text)


def _show(value: Any) -> str:
    """Show a value as a YAML file would have it, short."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(recipe_values(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
