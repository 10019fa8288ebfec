"""Registry of recipes: functions that return one, by name."""

from collections.abc import Callable

from redivider.errors import did_you_mean
from redivider.train.errors import TrainError
from redivider.train.recipe import Recipe
from redivider.train.recipes import best, petra, quickstart, transformers

_FACTORIES: list[Callable[[], Recipe]] = [
    *quickstart.RECIPES,
    *petra.RECIPES,
    *transformers.RECIPES,
    *best.RECIPES,
]
RECIPES = {factory().name: factory for factory in _FACTORIES}


def get_recipe(name: str) -> Recipe:
    """Return the recipe of a name."""
    if name not in RECIPES:
        otherwise = "`redivider recipes` lists all"
        raise TrainError(f"there is no recipe {name!r}; {did_you_mean(name, RECIPES, otherwise)}")
    return RECIPES[name]()
