"""Recipes on the command line: `data=8,zero=1,tensor=8,sequence_parallel=yes`, or a JSON file with the same fields.

Constraints are `pipeline=1,2,4`, the allowed values of a field, or `up.weight=P('data', None)`, a value's spec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoshard.errors import RecipeError
from autoshard.ir.read_json import parse
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec

_WORDS = {"yes": True, "true": True, "no": False, "false": False, "none": None}
_TEXTS = ("recompute", "offload")


def parse_recipe(text: str) -> Recipe:
    """Parse a recipe: FIELD=VALUE,..., or the path of a JSON file.

    Raises:
        RecipeError: a field is unknown, a value is no number, word or list of numbers, or a file has no recipe.

    Example:
        >>> parse_recipe("data=2,tensor=4,sequence_parallel=yes").devices
        8
    """
    if text.endswith(".json"):
        return _recipe(_read(Path(text)))
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(separator and value for _, separator, value in pairs):
        raise RecipeError(f"--recipe {text!r} must read FIELD=VALUE,FIELD=VALUE, e.g. data=8,tensor=8,zero=1.")
    twice = named_twice(name.strip() for name, _, _ in pairs)
    if twice is not None:
        raise RecipeError(f"--recipe {text!r} gives {twice!r} twice; give each field once.")
    return _recipe({name.strip(): _value(name.strip(), value.strip()) for name, _, value in pairs})


def parse_constraints(texts: Sequence[str]) -> dict[str, Any]:
    """Parse constraints, each NAME=VALUE,VALUE or NAME=SPEC.

    Raises:
        RecipeError: a text has neither form.

    Example:
        >>> parse_constraints(["tensor=8", "pipeline=1,2", "up.weight=P('data', None)"])
        {'tensor': (8,), 'pipeline': (1, 2), 'up.weight': P('data')}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, given = (part.strip() for part in text.partition("="))
        if not (separator and name and given):
            raise RecipeError(f"--constrain {text!r} must read NAME=VALUE,VALUE or NAME=SPEC, e.g. pipeline=1,2,4.")
        if name in found:
            raise RecipeError(f"--constrain names {name!r} twice; give all of its values at once, or one spec.")
        is_spec = given.startswith("P(")
        found[name] = PartitionSpec.parse(given) if is_spec else tuple(_value(name, part) for part in given.split(","))
    return found


def named_twice(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def is_whole(text: str) -> bool:
    """Whether a text is a whole number that fits 64 bits."""
    return text.isdecimal() and len(text) < 19


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError(f"there is no file {path}, which --recipe names.")
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecipeError(f"{path}, which --recipe names, cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path}, which --recipe names, must hold an object of fields to values.")
    return values


def _recipe(values: dict[str, Any]) -> Recipe:
    known = [item.name for item in fields(Recipe)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise RecipeError(f"A recipe has no field {unknown[0]!r}; there are {', '.join(known)}.")
    return Recipe(**values)


def _value(name: str, text: str) -> object:
    """Return a field's value as an int, bool, None, str, or tuple (from a list such as 4+4+3)."""
    if name not in _TEXTS and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if is_whole(text):
        return int(text)
    if "+" in text and all(map(is_whole, text.split("+"))):
        return tuple(int(part) for part in text.split("+"))
    return text
