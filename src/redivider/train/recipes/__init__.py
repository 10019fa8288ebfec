"""Registry of recipes: functions that return one, by name."""

from collections.abc import Callable

from redivider.errors import no_such
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
        raise TrainError(no_such("recipe", name, RECIPES, "`redivider recipes` lists all"))
    return RECIPES[name]()
