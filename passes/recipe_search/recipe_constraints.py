"""Constraints on the recipes that are searched: fields with the values that they may have.

`{"tensor": 8, "pipeline": (1, 2, 4), "overlap_expert": True}`: a field that is searched may have one value or several;
one that is not (what the framework overlaps and fuses, dtypes of gradients) has one, in place of the default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace

from autoshard.errors import NotAvailableError, RecipeError
from autoshard.ir.recipe import Recipe, check_field
from autoshard.ir.spec import PartitionSpec
from passes.recipe_search.recipe_space import SEARCHED, Only

_FIELDS = tuple(item.name for item in fields(Recipe))

_ELSEWHERE = {
    "global_batch": "pass global_batch=",
    "precision": "pass precision=",
    "optimizer": "pass optimizer=",
    "stage_blocks": "the search shares blocks out evenly; recipe=, and autoshard.price, take a recipe with others",
    "whole_tensors": "autoshard.price takes a recipe with it",
}
"""Fields that constraints do not decide, and what to do instead."""


def pin(base: Recipe, constraints: Mapping[str, object]) -> tuple[Recipe, Only]:
    """What constraints leave: the fields that are not searched, and the values of those that are.

    Args:
        base: a recipe with the defaults of the former.
        constraints: field of `Recipe` to its value, or to a collection of values that it may have.

    Raises:
        RecipeError: no such field, or no such value; names them.
        NotAvailableError: a spec of a value, which recipes do not choose one by one.

    Example:
        >>> pin(Recipe(), {"pipeline": (1, 2), "fused": False})[1]
        {'pipeline': (1, 2)}
    """
    if not isinstance(constraints, Mapping):
        raise RecipeError(
            f"constraints={constraints!r} is a {type(constraints).__name__}; pass a dict of fields to values, "
            "{'tensor': 8, 'pipeline': (1, 2)}."
        )
    only: dict[str, Collection[object]] = {}
    single: dict[str, object] = {}
    for name, given in constraints.items():
        values = _values(name, given)
        if name in SEARCHED:
            only[name] = values
        elif len(values) == 1:
            single[name] = values[0]
        else:
            raise RecipeError(
                f"constraints[{name!r}]={given!r}: {name} is not searched, so it takes one value. Several may be given "
                f"for {', '.join(SEARCHED)}."
            )
    return replace(base, **single), only


def _values(name: str, given: object) -> tuple[object, ...]:
    """The values that a field may have."""
    if isinstance(given, PartitionSpec):
        raise NotAvailableError(
            f"constraints[{name!r}]={given!r} gives a value its spec, but with global_batch= recipes are searched, "
            "whose axes give all values theirs. Constrain fields of the recipe, {'tensor': 8, 'zero': (0, 1)}, or plan "
            "on a mesh without global_batch=, where specs are searched one by one."
        )
    if name not in _FIELDS:
        raise RecipeError(f"constraints[{name!r}]: a recipe has no such field; there are {', '.join(_FIELDS)}.")
    if name in _ELSEWHERE:
        raise RecipeError(f"constraints[{name!r}]={given!r}: constraints do not decide it; {_ELSEWHERE[name]}.")
    values = (given,) if isinstance(given, str) or not isinstance(given, Collection) else tuple(given)
    if not values:
        raise RecipeError(f"constraints[{name!r}]={given!r} leaves no value; leave it out, or name one.")
    for value in values:
        check_field(name, value)
    return values
