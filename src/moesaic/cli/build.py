"""From a verb's recipe class to its command: flags, `--config FILE`, `--set KEY=VALUE` and arguments make the recipe.

The names, types, defaults and docstrings of the class's fields are the flags and their help. Flags and arguments win
over `--set`, which wins over the file.
"""

import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError
from moesaic.common.numbers import CHECK_FAILED
from moesaic.common.recipe import init_fields, load_recipe
from moesaic.common.verbs import RUN_OPTIONS, field_default, field_docs, is_required
from moesaic.common.workers import check_workers
from moesaic.recipes import recipe_source

_DEFAULT = re.compile(r"\s*\bDefault: (.*?)\.?$")
_RUN_TYPES = {
    **dict.fromkeys(("overwrite", "dry_run", "public", "quiet", "json"), bool),
    "workers": int | None,
    "push_to_hub": str,
}
_SHARED = {
    "config": "YAML file, or a name from `moesaic recipes list`, with these keys; what else is given wins over it.",
    "set": "A key of the recipe, dots between names, and its value; repeatable.",
    "json": "Print one JSON document on stdout, errors included.",
    **RUN_OPTIONS,
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the command line does differently for one key."""

    flag: str | None = None
    """Its name, where that is not made from the key."""
    metavar: str | None = None
    type: Any = None
    """What is read, where it is not the field's type."""
    read: Callable[[Any], Any] | None = None
    """From what was read to the recipe's value."""
    help: str | None = None
    several: bool = False
    """Whether one flag takes all words up to the next."""
    hidden: bool = False
    """Whether the key has no flag: it is set by Python, `--config` and `--set` only."""


_RUN = {"push_to_hub": Option(metavar="ORG/NAME")}
"""Of options that are about one run, whatever the verb."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One verb of the command line."""

    about: str
    """What it does in one sentence, then paragraphs."""
    usage: str
    """Arguments of a call without `--config`; several ways in several lines."""
    examples: str
    recipe: str
    """Class of its settings, as module:name."""
    run: str
    """The verb's function, as module:name; imported when the recipe is made."""
    arguments: tuple[str, ...]
    """Keys, or `out`, in their places. One whose field is a tuple takes what the others leave."""
    words: tuple[str, str] | None = None
    """Name and help of all arguments together, where their number is not fixed."""
    run_options: tuple[str, ...] = ()
    """Beside json and quiet."""
    options: Mapping[str, Option] = field(default_factory=dict)
    further: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Flags that no recipe has, type and help: further arguments of the run, or for `action`."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Key, or `arguments` -> what to say where it is needed and not given (`{count}` of arguments, `{choices}`)."""
    action: str = "moesaic.cli.build:call_and_print"
    """What to do with the `Call`, as module:name."""
    before: str | None = None
    """What may do a call that needs no recipe (module:name): from words and flags to a status, or None."""
    result_when_quiet: bool = False
    """Whether the result is printed in spite of --quiet."""

    @property
    def help(self) -> str:
        """`about`, a line for each paragraph."""
        return "\n\n".join(" ".join(paragraph.split()) for paragraph in self.about.split("\n\n"))

    def usages(self, name: str) -> str:
        """The ways to call it, for the head of its help."""
        lines = self.usage.splitlines()
        if "out" in self.arguments:
            lines.append(f"moesaic {name} --config RECIPE.yaml OUT [OPTIONS]")
        return "Usage: " + "\n       ".join(line.strip() for line in lines)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a verb, ready to be done."""

    command: Command
    recipe: Any
    out: str | None
    run: Mapping[str, Any]
    """The run's own options, `quiet` among them."""
    further: Mapping[str, Any]
    config: str | None
    """Name of the recipe file."""
    json: bool

    @property
    def quiet(self) -> bool:
        """Whether only errors are printed."""
        return self.run["quiet"]


def call_and_print(call: Call) -> int:
    """Do it and print what the result says; status 1 where the result is a check that failed."""
    function = named(call.command.run)
    accepted = inspect.signature(function.run).parameters
    target = () if call.out is None else (call.out,)
    options = {key: value for key, value in {**call.run, **call.further}.items() if key in accepted}
    return show(call, function.run(call.recipe, *target, **options))


def show(call: Call, result: Any) -> int:
    """Print a result and return the exit status."""
    silent = call.quiet and not call.command.result_when_quiet
    lines = () if silent or call.json else result.lines()
    print_result(lines, result.to_dict(), as_json=call.json)
    return 0 if getattr(result, "ok", True) else CHECK_FAILED


def named(path: str) -> Any:
    """What `module:name` stands for."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build(name: str, command: Command) -> Callable[..., int]:
    """The function that cyclopts reads the flags of."""
    recipe = named(command.recipe)
    parameters = [*_places(command, recipe), *(_parameter(key, *one) for key, one in flags(command, recipe).items())]

    def called(*words: str | None, **given: Any) -> int:
        given = {key: value for key, value in given.items() if value is not None}
        texts = [word for word in words if word is not None]
        if command.before and (status := named(command.before)(texts, given)) is not None:
            return status
        return named(command.action)(_read(name, command, recipe, texts, given))

    anyhow: Any = called
    anyhow.__signature__ = inspect.Signature(parameters)
    anyhow.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _read(name: str, command: Command, recipe: type, words: list[str], given: dict[str, Any]) -> Call:
    """Make the recipe of what was given."""
    config, overrides = given.pop("config", None), given.pop("set", ())
    as_json = given.pop("json", False)
    run = {key: given.pop(key, False if _RUN_TYPES[key] is bool else None) for key in (*command.run_options, "quiet")}
    given |= _placed(name, command, words, recipe, has_config=config is not None)
    config = given.pop("config", config)
    for key, message in command.missing.items():
        if key not in ("arguments", *given) and (key == "out" or (config is None and not overrides)):
            choices = typing.get_args(typing.get_type_hints(recipe).get(key))
            raise MoesaicError(message.format(choices=", ".join(map(str, choices))))
    out = given.pop("out", None)
    further = {key: given.pop(key) for key in command.further if key in given}
    for key, option in command.options.items():
        if option.read is not None and key in given:
            given[key] = option.read(given[key])
    spellings = {one.name: _spelling(one.name, command) for one in init_fields(recipe)}
    source = {} if config is None else recipe_source(config)
    made = load_recipe(recipe, source, overrides, flags=given, spellings=spellings, name=config)
    check_workers(run.get("workers"))
    return Call(command=command, recipe=made, out=out, run=run, further=further, config=config, json=as_json)


def _placed(name: str, command: Command, words: list[str], recipe: type, *, has_config: bool) -> dict[str, Any]:
    """Give every word its key. With a recipe file arguments may be left out, but OUT, which is the last one."""
    keys = command.arguments
    if has_config and keys[-1:] == ("out",) and words:
        keys = (*keys[: len(words) - 1], "out")
    place = next((place for place, key in enumerate(keys) if _is_list(recipe, key)), None)
    placed: dict[str, Any] = {}
    if place is not None and len(words) >= len(keys):
        after = place + len(words) - len(keys) + 1
        placed[keys[place]] = tuple(words[place:after])
        keys, words = (*keys[:place], *keys[place + 1 :]), [*words[:place], *words[after:]]
    placed |= dict(zip(keys, words, strict=False))
    optional = {one.name for one in init_fields(recipe) if has_config or not is_required(one)}
    needed = [key for key in command.arguments if key not in placed and key not in optional]
    if needed and "arguments" in command.missing:
        raise MoesaicError(command.missing["arguments"].format(count=len(words)))
    if needed:
        raise MoesaicError(f'Command "{name}" parameter {_spelling(needed[0], command)} requires an argument.')
    return placed


def _spelling(key: str, command: Command) -> str:
    """What the user calls a key: the name of its flag, or of its place."""
    option = command.options.get(key, Option())
    if key in command.arguments:
        return option.metavar or key.upper()
    return option.flag or f"--{key.replace('_', '-')}"


# --- what cyclopts is told ------------------------------------------------------------------------------------------


def _places(command: Command, recipe: type) -> list[inspect.Parameter]:
    """Arguments with a place. All may be left out here: whether one is missing depends on `--config`."""
    if command.words is not None:
        label, said = command.words
        annotation = Annotated[str, Parameter(name=label, help=said)]
        return [inspect.Parameter("words", inspect.Parameter.VAR_POSITIONAL, annotation=annotation)]
    docs = _SHARED | field_docs(recipe)
    made = []
    for key in command.arguments:
        said, default = _split(command.options.get(key, Option()).help or docs[key])
        described = Parameter(name=_spelling(key, command), help=said, show_default=default or False)
        if _is_list(recipe, key):  # the last one, else `words` would be given
            annotation = Annotated[str, described]
            made.append(inspect.Parameter(f"{key}_", inspect.Parameter.VAR_POSITIONAL, annotation=annotation))
            break
        annotation = Annotated[str | None, described]
        made.append(
            inspect.Parameter(f"{key}_", inspect.Parameter.POSITIONAL_ONLY, default=None, annotation=annotation)
        )
    return made


def flags(command: Command, recipe: type) -> dict[str, tuple[Any, Parameter]]:
    """Key -> type and description of each flag, in the order of the help."""
    docs, hints = _SHARED | field_docs(recipe), typing.get_type_hints(recipe)
    made: dict[str, Any] = {"config": (str, Parameter(help=_SHARED["config"], metavar="RECIPE"))}
    for one in init_fields(recipe):
        option = command.options.get(one.name, Option())
        read = None if option.hidden else option.type or _readable(hints[one.name])
        if one.name not in command.arguments and read is not None:
            described = _described(option, one.name, read, docs[one.name], field_default(one))
            made[one.name] = (read, described)
    made["set"] = (tuple[str, ...], Parameter(help=_SHARED["set"], metavar="KEY=VALUE"))
    shared = {key: (_RUN_TYPES[key], _SHARED[key]) for key in (*command.run_options, "json", "quiet")}
    for key, (read, doc) in {**command.further, **shared}.items():
        made[key] = (read, _described(command.options.get(key, _RUN.get(key, Option())), key, read, doc, None))
    return made


def _described(option: Option, key: str, read: Any, doc: str, default: Any) -> Parameter:
    help_text, said = _split(doc)
    if said is None and default is not None and default is not False and default not in ("", ()):
        said = str(default)
    return Parameter(
        name=option.flag,
        help=option.help or help_text,
        show_default=said if said is not None else False,
        metavar=option.metavar or (_placeholder(key) if str in (read, *typing.get_args(read)) else None),
        consume_multiple=option.several or None,
    )


def _placeholder(key: str) -> str:
    """What stands for a text in the help: SIZE for --shard-size."""
    return key.rpartition("_")[2].upper()


def _parameter(key: str, read: Any, described: Parameter) -> inspect.Parameter:
    """A flag; None where it is not given, and then the file or the class decides."""
    annotation = Annotated[read | None, described]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _split(doc: str) -> tuple[str, str | None]:
    """The text of a docstring, and its default in words."""
    found = _DEFAULT.search(doc)
    return (doc[: found.start()], found[1]) if found else (doc, None)


def _readable(hint: Any) -> Any:
    """The type of a flag for a field's type; None where a command line cannot hold it: `--set` and the file can."""
    members = [one for one in typing.get_args(hint) if one is not types.NoneType]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _readable(members[0]) if len(members) == 1 else str if str in members else None
    if typing.get_origin(hint) is Literal or hint in (str, int, float, bool):
        return hint
    if typing.get_origin(hint) is tuple and not any(is_dataclass(one) for one in members):
        return hint
    return str if hint in (Any, Path) else None


def _is_list(recipe: type, key: str) -> bool:
    hint = typing.get_type_hints(recipe).get(key)
    return tuple in (typing.get_origin(one) for one in (hint, *typing.get_args(hint)))
