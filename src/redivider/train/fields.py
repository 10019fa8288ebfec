"""Fields of a recipe from the command line: `--epochs 20 --method petra`."""

import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields, replace
from io import StringIO

from redivider.errors import require
from redivider.train.errors import TrainError, hint
from redivider.train.recipe import Recipe
from redivider.train.recipes import RECIPES


def override(recipe: Recipe, arguments: Sequence[str]) -> Recipe:
    """The recipe with the fields that the arguments set; `--help` prints all of them."""
    tyro = require("tyro", "the command line")
    known = [each.name.replace("_", "-") for each in fields(Recipe)]
    for each in arguments:
        name = _dashed(each)[2:].partition("=")[0]
        if each.startswith("--") and name.removeprefix("no-").partition(".")[0] not in known:
            if name == "help":
                continue
            known_as = recipe.name if recipe.name in RECIPES else "quickstart"
            otherwise = f"`redivider train {known_as} --help` lists all"
            close = hint(name, known, otherwise)
            raise TrainError(f"a recipe has no field --{name}; {close.replace(chr(39), '')}")
    given = [_dashed(each) for each in arguments]
    # Of a dictionary that is not empty, only the values it has could be set.
    adds = "--model-options" in given
    said = StringIO()
    try:
        with redirect_stderr(said):
            found: Recipe = tyro.cli(
                Recipe,
                default=replace(recipe, model_options={}) if adds else recipe,
                args=given,
                prog=f"redivider train {recipe.name}",
                description="Fields of the recipe, with their values now.",
            )
        if adds:
            found = replace(found, model_options={**recipe.model_options, **found.model_options})
        told = {each.partition("=")[0] for each in given}
        # Who tells the method wants that one, and not those that the recipe compares.
        is_one = "--method" in told and "--compare" not in told
        return replace(found, compare=()) if is_one else found
    except SystemExit as end:
        if not end.code:  # help was asked for
            raise
        raise TrainError(_in_a_line(said.getvalue()) or "the fields cannot be read") from None


def _dashed(word: str) -> str:
    """A field may be written as in Python."""
    name = re.match(r"--[^.=]*", word)
    return word if name is None else name[0].replace("_", "-") + word[name.end() :]


def _in_a_line(box: str) -> str:
    """What a parser has framed, without the frame and the advice below it."""
    rows = [each.strip("│╭╮╰╯─━ \n") for each in box.splitlines()]
    words = [each for each in rows if each and set(each) - set("─━-")]
    said = " ".join(" ".join(words[1:]).split())  # the first one is a title
    said = said.partition(" Argument helptext:")[0].partition(" For full helptext")[0]
    # What each of several types had to say is the parser's business.
    said = said.partition(". Got errors:")[0].replace(" could be instantiated from ", ", got ")
    said = said.replace("no type matching ", "takes ")
    said = said.replace("Failed to parse key-value pairs!", "takes names and values, as width 8")
    return said.removeprefix("Error parsing ").removeprefix("Recipe: ")
