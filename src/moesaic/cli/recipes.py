"""`moesaic recipes`."""

from typing import Annotated

from cyclopts import App, Parameter

from moesaic.cli.options import Json, Quiet
from moesaic.cli.output import print_result
from moesaic.recipes import read_recipe, shipped_recipes

app = App(
    name="recipes",
    help="Show the recipes that come with the package.",
    help_format="plaintext",
    help_epilogue="""Examples:
  moesaic recipes list
  moesaic recipes show upcycle/divmoe-qwen3-4b > recipe.yaml
""",
)


@app.command(name="list", usage="Usage: moesaic recipes list [OPTIONS]")
def list_recipes(*, json: Json = False, quiet: Quiet = False) -> None:  # noqa: ARG001 (every verb takes quiet)
    """List name, verb and a description of every recipe."""
    recipes = shipped_recipes()
    width = max(len(recipe.name) for recipe in recipes)
    lines = [f"{recipe.name:<{width}}  {recipe.verb:<7}  {recipe.description}" for recipe in recipes]
    document = {
        "recipes": [{"name": recipe.name, "verb": recipe.verb, "description": recipe.description} for recipe in recipes]
    }
    print_result(lines, document, as_json=json)


@app.command(name="show", usage="Usage: moesaic recipes show NAME [OPTIONS]")
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
