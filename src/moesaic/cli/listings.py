"""What the package has, listed: `moesaic families` and `moesaic recipes`."""

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import App, Parameter

from moesaic.cli.options import Json, Quiet
from moesaic.cli.output import print_result
from moesaic.common.fold import column_blocks, room
from moesaic.common.recipe import recipe_values
from moesaic.families.support import COLUMNS, TESTED, Support, find, support
from moesaic.recipes import read_recipe, shipped_recipes

FAMILIES_HELP = {
    "usage": "Usage: moesaic families [FAMILY] [OPTIONS]",
    "help_epilogue": """Examples:
  moesaic families
  moesaic families qwen3_moe
""",
}


def families(
    family: Annotated[
        str | None, Parameter(help="A model_type, for its cells in full [default: all families].")
    ] = None,
    /,
    *,
    json: Json = False,
    quiet: Quiet = False,  # noqa: ARG001 (every verb takes it)
) -> None:
    """Say what each family of mixtures of experts can be used for: per verb tested, derived (unproved), or why not.

    Dense bases for upcycle are listed by `moesaic upcycle` itself when one does not fit.
    """
    rows = support() if family is None else (find(family),)
    lines = _table(rows) if family is None else _details(rows[0])
    print_result(lines, {"columns": list(COLUMNS), "families": [row.to_json() for row in rows]}, as_json=json)


def _table(rows: tuple[Support, ...]) -> list[str]:
    """One line per family; what is not plainly tested has a number, explained below."""
    reasons: dict[str, int] = {}
    width = max(len(row.model_type) for row in rows)
    widths = [max(len(column), len(TESTED)) for column in COLUMNS]
    made: list[tuple[str, list[str]]] = [("", list(COLUMNS))]
    for row in rows:
        values = [row.cells[column] for column in COLUMNS]
        marks = [one if one == TESTED else f"[{reasons.setdefault(one, len(reasons) + 1)}]" for one in values]
        made.append((row.model_type, marks))
    lines: list[str] = []
    for block in column_blocks(width, widths, room(), gap=1):
        lines += [" ".join([name.ljust(width), *(cells[c].rjust(widths[c]) for c in block)]) for name, cells in made]
        lines.append("")
    return [*lines, *(f"[{number}] {reason}" for reason, number in reasons.items())]


def _details(row: Support) -> list[str]:
    notes = [f"({row.notes})"] if row.notes else []
    width = max(map(len, COLUMNS))
    return [f"{row.model_type}: {row.about}", *notes, *(f"{c.ljust(width)}  {row.cells[c]}" for c in COLUMNS)]


def of_tasks(_words: list[str], given: Mapping[str, Any]) -> int | None:
    """Do `moesaic eval --list`, which needs no checkpoint; None for a call that measures."""
    if not given.get("list"):
        return None
    from moesaic.evaluation.catalogue import suite_rows, task_rows

    suites, tasks = suite_rows(), task_rows()
    width = max(len(row["name"]) for row in tasks)
    lines = [
        "Suites (--suite):",
        *(f"  {row['name'].ljust(width)}  {row['about']}" for row in suites),
        "",
        "Tasks (--task): files of --data-dir, and the fields of their rows",
    ]
    for row in tasks:
        first, *others = row["fields"]
        lines.append(f"  {row['name'].ljust(width)}  {', '.join(row['files'])}: {first}")
        lines += [f"  {' ' * width}    or {fields}" for fields in others]
    print_result(lines, {"suites": suites, "tasks": tasks}, as_json="json" in given)
    return 0


recipes = App(
    name="recipes",
    help="Show the recipes that come with the package.",
    help_format="plaintext",
    help_epilogue="""Examples:
  moesaic recipes list
  moesaic recipes show upcycle/divmoe-qwen3-4b > recipe.yaml
""",
)


@recipes.command(name="list", usage="Usage: moesaic recipes list [OPTIONS]")
def list_recipes(*, json: Json = False, quiet: Quiet = False) -> None:  # noqa: ARG001 (every verb takes quiet)
    """List name, verb and a description of every recipe."""
    shipped = shipped_recipes()
    width = max(len(recipe.name) for recipe in shipped)
    lines = [f"{recipe.name:<{width}}  {recipe.verb:<7}  {recipe.description}" for recipe in shipped]
    document = {"recipes": [recipe_values(recipe) for recipe in shipped]}
    print_result(lines, document, as_json=json)


@recipes.command(name="show", usage="Usage: moesaic recipes show NAME [OPTIONS]")
def show_recipe(
    name: Annotated[str, Parameter(help="A name from `moesaic recipes list`.")],
    /,
    *,
    json: Json = False,
    quiet: Quiet = False,  # noqa: ARG001 (every verb takes it)
) -> None:
    """Print a recipe's YAML file, to be saved, edited and given to --config."""
    text = read_recipe(name)
    print_result([text.rstrip("\n")], {"name": name, "yaml": text}, as_json=json)
