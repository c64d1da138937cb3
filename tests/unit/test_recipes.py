"""The recipes inside the package: each loads, fits together, and can be found by name."""

from pathlib import Path

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import dump_recipe, load_recipe
from moesaic.common.yaml_text import parse_yaml
from moesaic.recipes import read_recipe, recipe_source, shipped_recipes
from moesaic.upcycling.choices import choose
from moesaic.upcycling.methods import METHODS
from moesaic.upcycling.recipe import UpcycleRecipe

NAMES = [recipe.name for recipe in shipped_recipes()]
UPCYCLE = [name for name in NAMES if name.startswith("upcycle/")]


@pytest.mark.parametrize("name", UPCYCLE)
def test_upcycling_recipe_loads_and_fits_together(name):
    recipe = load_recipe(UpcycleRecipe, parse_yaml(read_recipe(name), name))
    chosen = choose(recipe, hidden=2048, intermediate=6144)
    assert chosen.notices == ()  # nothing in it falls short of the method's strongest statement
    assert load_recipe(UpcycleRecipe, parse_yaml(dump_recipe(recipe), name)) == recipe


def test_every_method_has_a_recipe():
    methods = {parse_yaml(read_recipe(name), name)["method"] for name in UPCYCLE}
    assert methods == set(METHODS)


@pytest.mark.parametrize("recipe", shipped_recipes(), ids=NAMES)
def test_description_fits_one_line(recipe):
    assert 10 < len(recipe.description) < 100
    assert not recipe.description.endswith(".")


def test_names():
    assert sorted(NAMES) == NAMES
    assert read_recipe("laptop-smollm2") == read_recipe("upcycle/laptop-smollm2")
    with pytest.raises(MoesaicError, match="did you mean 'upcycle/laptop-smollm2'"):
        read_recipe("upcycle/laptop-smolm2")


def test_a_name_or_a_file_is_where_a_recipe_is_read(tmp_path):
    name = shipped_recipes()[0].name
    assert recipe_source(name) == parse_yaml(read_recipe(name), name)
    assert recipe_source("none.yaml") == Path("none.yaml")
