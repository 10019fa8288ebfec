"""Recipes by name: functions that return one."""

from collections.abc import Callable

from redivider.train.errors import TrainError, hint
from redivider.train.recipe import Recipe
from redivider.train.recipes import petra, quickstart, transformers

_MAKERS: list[Callable[[], Recipe]] = [
    *quickstart.RECIPES,
    *petra.RECIPES,
    *transformers.RECIPES,
]
RECIPES = {make().name: make for make in _MAKERS}


def list_recipes() -> list[str]:
    """The names that `get_recipe` knows."""
    return list(RECIPES)


def get_recipe(name: str) -> Recipe:
    """A recipe by its name."""
    if name not in RECIPES:
        otherwise = "`redivider recipes` lists all"
        raise TrainError(f"there is no recipe {name!r}; {hint(name, RECIPES, otherwise)}")
    return RECIPES[name]()
