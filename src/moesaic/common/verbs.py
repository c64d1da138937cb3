"""A verb written once: its recipe class makes the Python function here, and the command line's flags in `moesaic.cli`.

    @verb(ExtractRecipe, positional=("checkpoint", "selection"), out="folder")
    def extract(recipe: ExtractRecipe, out: str | Path, *, dry_run: bool = False, quiet: bool = True) -> ExtractResult:
        ...

`extract(checkpoint, selection, out, top_k=2, dry_run=True)` builds the recipe from its keywords and calls the function
below the decorator, which stays as `extract.run(recipe, out, dry_run=True)`; `extract.recipe` is the class.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field
from functools import cache, wraps
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from moesaic.common.errors import MoesaicError
from moesaic.common.place import Kind, check_place
from moesaic.common.recipe import init_fields, load_recipe
from moesaic.common.workers import MOST_WORKERS, check_workers

RunArguments = ParamSpec("RunArguments")
Result = TypeVar("Result")

RUN_OPTIONS = {
    "out": "Folder to write.",
    "overwrite": "Replace OUT if it exists; the old one stays until the new one is complete.",
    "dry_run": "Check everything and say what would be written, but write nothing.",
    "workers": f"Threads; the result does not depend on it. Default: one per core, at most {MOST_WORKERS}.",
    "push_to_hub": "Upload the result to this repository on the hub, private; needs `hf auth login` or HF_TOKEN.",
    "public": "--push-to-hub: let everybody see the repository.",
    "quiet": "Print no progress, notices or summary; errors are always printed.",
}
"""Help of the arguments that are about one run and not about its result."""


class Verb(Protocol, Generic[RunArguments, Result]):
    """The public function of a verb."""

    __name__: str
    recipe: type
    """Class of its settings."""
    positional: tuple[str, ...]
    """Arguments that have a place, in their order, `out` among them."""
    run: Callable[RunArguments, Result]
    """The function itself, which takes the recipe."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Result:
        """Do it, with the recipe's keys as keywords."""
        ...


def verb(
    recipe: type,
    *,
    positional: Sequence[str] = (),
    out: Kind | None = None,
    convert: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Callable[[Callable[RunArguments, Result]], Verb[RunArguments, Result]]:
    """Make the public function of a verb from a function that takes its recipe.

    The public function takes the recipe's keys and the other keywords of the decorated function (`overwrite`,
    `dry_run`, ...); its signature and the `Args:` of its docstring are made from both. In place of the keys it takes
    a recipe as its first argument. Mistakes name function and key: `extract(): top_k: expected ...`.

    Args:
        recipe: a frozen, keyword-only dataclass whose fields have docstrings.
        positional: keys that are arguments with a place, in this order.
        out: what `out`, the second argument of the function, is, where it has one: it has a place as well, after the
            others, and a path that can be no output (`check_place`) is refused before the function is called.
        convert: key -> function that turns what Python callers give into what the recipe takes; a `MoesaicError` of
            it is put after function and key.
    """

    def decorate(run: Callable[RunArguments, Result]) -> Verb[RunArguments, Result]:
        run = run if out is None else _with_place(run, out)
        name, anyhow = run.__name__, cast("Any", run)
        _, *options = inspect.signature(run).parameters.values()
        order = (*positional, *(("out",) if out else ()))
        signature = _signature(recipe, order, options, inspect.signature(run).return_annotation)

        @wraps(run)
        def call(*arguments: Any, **keywords: Any) -> Result:
            check_workers(keywords.get("workers"))
            if arguments and isinstance(arguments[0], recipe):
                return anyhow(*arguments, **keywords)
            known = {key: value for key, value in keywords.items() if key in signature.parameters}
            given = keywords | signature.bind(*arguments, **known).arguments  # `load_recipe` refuses the unknown ones
            chosen = {option.name: given.pop(option.name) for option in options if option.name in given}
            for key in (convert or {}).keys() & given.keys():
                given[key] = _converted(convert or {}, key, given[key], f"{name}()")
            return anyhow(load_recipe(recipe, given, name=f"{name}()"), **chosen)

        made = cast("Any", call)
        made.__signature__ = signature
        made.__doc__ = _docstring(run.__doc__ or "", signature, recipe)
        made.recipe, made.positional, made.run = recipe, order, run
        return made

    return decorate


def _with_place(run: Callable[RunArguments, Result], kind: Kind) -> Callable[RunArguments, Result]:
    """The function, called only where `out` (None where the caller wants no output) can be one."""

    @wraps(run)
    def call(*arguments: RunArguments.args, **keywords: RunArguments.kwargs) -> Result:
        target: Any = keywords.get("out") if len(arguments) < 2 else arguments[1]
        if target is not None:
            check_place(target, kind)
        return run(*arguments, **keywords)

    return call


def _converted(convert: Mapping[str, Callable[[Any], Any]], key: str, value: Any, name: str) -> Any:
    try:
        return convert[key](value)
    except MoesaicError as error:
        raise MoesaicError(f"{name}: {key}: {error}") from error


def _signature(
    recipe: Any, order: Sequence[str], options: Sequence[inspect.Parameter], result: Any
) -> inspect.Signature:
    """First what has a place, then the recipe's other keys, then the options of a run."""
    hints = get_type_hints(recipe)
    keys = {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_required(field) else field_default(field),
            annotation=hints[field.name],
        )
        for field in init_fields(recipe)
    }
    keys |= {option.name: option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options}
    placed = [keys.pop(key).replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for key in order]
    return inspect.Signature([*placed, *keys.values()], return_annotation=result)


def _docstring(text: str, signature: inspect.Signature, recipe: type) -> str:
    """The function's own, with `Args:` for all arguments; what it says of further ones itself comes after them."""
    helps = RUN_OPTIONS | field_docs(recipe)
    lines = [
        textwrap.fill(f"{key}: {helps[key]}", 112, initial_indent="    ", subsequent_indent="        ")
        for key in signature.parameters
        if key in helps
    ]
    before, _, own = inspect.cleandoc(text).partition("\nArgs:\n")
    if not own:
        before, heading, rest = before.partition("\nRaises:\n")
        own = f"{heading}{rest}"
    return "\n".join([before.rstrip(), "", "Args:", *lines, own])


# --- what the fields of a recipe say --------------------------------------------------------------------------------


def is_required(field: Field[Any]) -> bool:
    """Whether the key has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def field_default(field: Field[Any]) -> Any:
    """What the key is where nobody sets it; None also for one that must be set."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


@cache
def field_docs(recipe: type) -> dict[str, str]:
    """The docstrings below the fields, each as one line: key -> text. Subclasses have those of their bases, too."""
    docs: dict[str, str] = {}
    for cls in reversed(recipe.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, doc in zip(tree.body, tree.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str):
                docs[field.target.id] = re.sub(r"\s+", " ", doc.value.value).strip()
    return docs
