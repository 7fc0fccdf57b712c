"""Functions that take an operator's arguments have the operator's own defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from torch._ops import OpOverload

from autoshard.rules import registry
from autoshard.tracing import semantic


@pytest.mark.parametrize("table", [registry._rules, semantic._REPLACEMENTS], ids=["rules", "replacements"])
def test_what_is_left_out_is_what_the_operator_takes(table: Mapping[Any, Callable[..., Any]]) -> None:
    """Each default of a rule or replacement equals its operator's, because traces leave default arguments out."""
    functions = {operator: function for operator, function in table.items() if isinstance(operator, OpOverload)}
    defaults = [
        (operator, *found) for operator, function in functions.items() for found in _defaults(operator, function)
    ]
    assert [default for default in defaults if not _is_alike(*default[2:])] == []
    assert len(defaults) > 20


def _defaults(operator: OpOverload, function: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each argument for which function and operator have a default: the name and both defaults."""
    arguments = operator._schema.arguments
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        by_name = [argument for argument in arguments if argument.name == parameter.name]
        by_place = [argument for argument in arguments[place : place + 1] if not argument.kwarg_only]
        by_place = [] if parameter.kind is parameter.KEYWORD_ONLY else by_place
        for argument in (by_place or by_name)[:1]:
            if parameter.default is not parameter.empty and argument.has_default_value():
                yield parameter.name, parameter.default, argument.default_value


def _is_alike(own: Any, taken: Any) -> bool:
    """Whether two defaults are equal; a number stands for a list of equal numbers, any value for an empty list."""
    if not isinstance(taken, list):
        return own == taken
    return list(own) == taken if isinstance(own, tuple) else [own] * len(taken) == taken
