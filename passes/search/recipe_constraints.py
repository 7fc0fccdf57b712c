"""Read a user's constraints on recipes: a recipe's fields with their values, or with collections of allowed values.

For example `{"tensor": 8, "pipeline": (1, 2, 4)}`. Overlap and fusion are fields of a `Runtime`, not of recipes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields

from autoshard.errors import NotAvailableError, RecipeError
from autoshard.ir.recipe import check_field
from autoshard.ir.runtime import Runtime
from autoshard.ir.spec import PartitionSpec
from passes.search.recipe_space import SEARCHED, Only

_RUNTIME = tuple(item.name for item in fields(Runtime))

_ELSEWHERE = {
    "global_batch": "pass global_batch=",
    "precision": "pass precision=",
    "optimizer": "pass optimizer=",
    "stage_layers": "the search shares blocks out evenly; recipe=, and autoshard.price, take a recipe with others",
    **{
        name: f"it says what a runtime does: pass runtime=autoshard.Runtime(name='mine', {name}=...)"
        for name in _RUNTIME
    },
}
"""For each name that constraints cannot decide, the advice of the error message."""


def pinned(constraints: Mapping[str, object]) -> Only:
    """Return the allowed values of each constrained field, as tuples.

    Raises:
        RecipeError: a field or value is unknown. The message names it.
        NotAvailableError: a value is a `PartitionSpec`. Recipes do not choose specs of single tensors.

    Example:
        >>> pinned({"pipeline": (1, 2), "tensor": 8})
        {'pipeline': (1, 2), 'tensor': (8,)}
    """
    if not isinstance(constraints, Mapping):
        raise RecipeError(
            f"constraints={constraints!r} is a {type(constraints).__name__}; pass a dict of fields to values, "
            "{'tensor': 8, 'pipeline': (1, 2)}."
        )
    return {name: _values(name, given) for name, given in constraints.items()}


def _values(name: str, given: object) -> tuple[object, ...]:
    if isinstance(given, PartitionSpec):
        raise NotAvailableError(
            f"constraints[{name!r}]={given!r} gives a value its spec, but with global_batch= recipes are searched, "
            "whose axes give all values theirs. Constrain fields of the recipe, {'tensor': 8, 'zero': (0, 1)}, or plan "
            "on a mesh without global_batch=, where specs are searched one by one."
        )
    if name in _ELSEWHERE:
        raise RecipeError(f"constraints[{name!r}]={given!r}: constraints do not decide it; {_ELSEWHERE[name]}.")
    if name not in SEARCHED:
        raise RecipeError(f"constraints[{name!r}]: a recipe has no such field; there are {', '.join(SEARCHED)}.")
    values = (given,) if isinstance(given, str) or not isinstance(given, Collection) else tuple(given)
    if not values:
        raise RecipeError(f"constraints[{name!r}]={given!r} leaves no value; leave it out, or name one.")
    for value in values:
        check_field(name, value)
    return values
