"""Recipes and constraints as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard import P, Recipe, RecipeError
from autoshard.cli.recipes import parse_constraints, parse_recipe


def test_fields_are_numbers_words_and_lists() -> None:
    """Each value is converted to the type of its field."""
    text = "pipeline=2,virtual_stages=1,stage_layers=3+5,sequence_parallel=yes,tensor=2,recompute=none,zero_group=none"
    expected = Recipe(
        pipeline=2, virtual_stages=1, stage_layers=(3, 5), sequence_parallel=True, tensor=2, recompute="none"
    )
    assert parse_recipe(text) == expected


def test_a_file_holds_the_same_fields(tmp_path: Path) -> None:
    """A JSON file of fields is read as a recipe."""
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"data": 4, "zero": 3}))
    assert parse_recipe(str(path)) == Recipe(data=4, zero=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"recipe.json, which --recipe names, cannot be read: it is no JSON"),
        ("[1]", r"must hold an object"),
        ('{"data": 2, "data": 4}', r"'data' stands twice"),
        ("[" * 100_000, r"too deeply"),
        ('{"data": 1e999}', r"not finite"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(RecipeError, match=message):
        parse_recipe(str(tmp_path / "recipe.json"))


def test_mistakes_are_named() -> None:
    """Text without "=", impossible values, an unknown field and a field given twice are refused by name."""
    with pytest.raises(RecipeError, match="must read FIELD=VALUE"):
        parse_recipe("data")
    with pytest.raises(RecipeError, match=r"data='9+' must be a whole number of at least 1"):
        parse_recipe("data=" + "9" * 5000)
    with pytest.raises(RecipeError, match=r"data is a number of 3322 bits; pass at most 63"):
        Recipe(data=10**1000)
    with pytest.raises(RecipeError, match="no field 'dp'"):
        parse_recipe("dp=8")
    with pytest.raises(RecipeError, match="--recipe 'data=4,data=2' gives 'data' twice; give each field once"):
        parse_recipe("data=4,data=2")
    with pytest.raises(RecipeError, match="--constrain names 'w' twice; give all of its values at once, or one spec"):
        parse_constraints(["w=P('data')", "w=P()"])
    with pytest.raises(RecipeError, match="--constrain 'tensor' must read NAME=VALUE"):
        parse_constraints(["tensor"])


def test_constraints_are_values_or_specs() -> None:
    """A constraint has one or several values of a recipe's field, or the spec of parameters by a pattern of their
    names."""
    texts = ["recompute=none,full", "sequence_parallel=yes", "zero_group=none", "layers.*.weight=P('data', None)"]
    assert parse_constraints(texts) == {
        "recompute": ("none", "full"), "sequence_parallel": (True,), "zero_group": (None,),
        "layers.*.weight": P("data", None),
    }  # fmt: skip
