"""Set fields of a recipe from the command line: `--epochs 20 --method petra`."""

import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields, replace
from io import StringIO

from redivider.errors import did_you_mean, require
from redivider.train.errors import TrainError
from redivider.train.recipe import Recipe
from redivider.train.recipes import RECIPES


def override(recipe: Recipe, arguments: Sequence[str]) -> Recipe:
    """Return the recipe with the fields that the arguments set; `--help` prints all fields."""
    tyro = require("tyro", "the command line")
    known = [field.name.replace("_", "-") for field in fields(Recipe)]
    for argument in arguments:
        name = _dashed(argument)[2:].partition("=")[0]
        if argument.startswith("--") and name.removeprefix("no-").partition(".")[0] not in known:
            if name == "help":
                continue
            example = recipe.name if recipe.name in RECIPES else "quickstart"
            otherwise = f"`redivider train {example} --help` lists all"
            close = did_you_mean(name, known, otherwise)
            raise TrainError(f"a recipe has no field --{name}; {close.replace(chr(39), '')}")
    words = [_dashed(argument) for argument in arguments]
    # For a dictionary that is not empty, tyro sets only the keys that it has: begin with an empty
    # one, and merge below.
    adds_options = "--model-options" in words
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            changed: Recipe = tyro.cli(
                Recipe,
                default=replace(recipe, model_options={}) if adds_options else recipe,
                args=words,
                prog=f"redivider train {recipe.name}",
                description="Fields of the recipe, with their current values.",
            )
        if adds_options:
            options = {**recipe.model_options, **changed.model_options}
            changed = replace(changed, model_options=options)
        names = {word.partition("=")[0] for word in words}
        # An explicit method, or a plan, replaces those that the recipe compares.
        is_single = names & {"--method", "--memory"} and "--compare" not in names
        return replace(changed, compare=()) if is_single else changed
    except SystemExit as end:
        if not end.code:  # help was asked for
            raise
        raise TrainError(_unframe(errors.getvalue()) or "the fields cannot be read") from None


def _dashed(word: str) -> str:
    """Replace the underscores of a field name by dashes: both spellings are accepted."""
    name = re.match(r"--[^.=]*", word)
    return word if name is None else name[0].replace("_", "-") + word[name.end() :]


def _unframe(box: str) -> str:
    """Return tyro's framed error as one line, without the frame and the advice below it."""
    rows = [line.strip("│╭╮╰╯─━ \n") for line in box.splitlines()]
    lines = [row for row in rows if row and set(row) - set("─━-")]
    text = " ".join(" ".join(lines[1:]).split())  # the first line is a title
    text = text.partition(" Argument helptext:")[0].partition(" For full helptext")[0]
    # For a union tyro lists the error of every type, which does not help the user.
    text = text.partition(". Got errors:")[0].replace(" could be instantiated from ", ", got ")
    text = text.replace("no type matching ", "takes ")
    text = text.replace("Failed to parse key-value pairs!", "takes names and values, as width 8")
    text = text.removeprefix("Error parsing ").removeprefix("Recipe: ")
    choice = re.match(r"invalid choice '(.*?)' for .* one of \((.*)\)", text)
    hint = choice and did_you_mean(choice[1], re.findall(r"'(.*?)'", choice[2]))
    return f"{text.removesuffix('.')}; {hint}" if hint else text
