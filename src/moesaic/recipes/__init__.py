"""The recipes inside the package: one folder per verb, one YAML file per recipe, whose first line says what it is."""

from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError, suggest
from moesaic.common.yaml_text import parse_yaml


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """One recipe: `name` is VERB/FILE without the ending."""

    name: str
    verb: str
    description: str


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all recipes, sorted by name."""
    return [
        ShippedRecipe(name=name, verb=name.partition("/")[0], description=_description(file))
        for name, file in sorted(_files().items())
    ]


def read_recipe(name: str) -> str:
    """Return the YAML text of a recipe; an unknown name is a `MoesaicError` with the nearest known one."""
    recipes = _files()
    short_names = {known.partition("/")[2]: known for known in recipes}
    file = recipes.get(name) or recipes.get(short_names.get(name, ""))
    if file is None:
        near = suggest(name, [*recipes, *short_names])
        hint = near if near.startswith("did") else "`moesaic recipes list` shows all"
        raise MoesaicError(f"{name}: no such recipe; {hint}")
    return file.read_text(encoding="utf-8")


def recipe_source(reference: str) -> Path | dict[str, Any]:
    """What `load_recipe` reads for the name of a file, or of a recipe inside the package."""
    if not Path(reference).exists() and reference in _files():
        return parse_yaml(read_recipe(reference), reference)
    return Path(reference)


def _files() -> dict[str, Traversable]:
    return {
        f"{folder.name}/{file.name.removesuffix('.yaml')}": file
        for folder in files(__name__).iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    }


def _description(file: Traversable) -> str:
    first, _, _ = file.read_text(encoding="utf-8").partition("\n")
    assert first.startswith("# "), f"{file}: the first line must be a comment that describes the recipe"
    return first.removeprefix("# ")
