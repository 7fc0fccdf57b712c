"""The table of sharding rules, keyed by operator.

A rule function takes the call's arguments (tensors as fake or meta tensors of global shape) and returns a
`Rule`, or None where the call cannot be split at all. Rules are registered when the family modules are
imported; registering an operator twice raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from autoshard.rules.notation import BoundRule, Rule, bind

RuleFunction = Callable[..., Rule | None]
_Function = TypeVar("_Function", bound=RuleFunction)

_rules: dict[Any, RuleFunction] = {}


def sharding_rule(*operators: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function as the sharding rule of `operators`.

    Operators are `torch.ops` overloads, or their names ("library.name.overload") where the library that defines
    them may not be imported yet.

    Raises:
        ValueError: an operator already has a rule.
    """

    def register(function: _Function) -> _Function:
        for operator in operators:
            if operator in _rules:
                raise ValueError(f"{operator} already has a sharding rule: {_rules[operator].__qualname__}")
            _rules[operator] = function
        return function

    return register


def has_rule(operator: Any) -> bool:
    """Whether `operator` has a sharding rule."""
    return _find(operator) is not None


def _find(operator: Any) -> RuleFunction | None:
    return _rules.get(operator) or _rules.get(str(operator))


def bound_rule(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor | None]
) -> BoundRule | None:
    """The rule of one call with its factor sizes, or None where the operator has none or refuses the call.

    Args:
        operator: a `torch.ops` overload.
        args, kwargs: the call's arguments, tensors as fake or meta tensors of global shape.
        outputs: the call's results, likewise; None entries of a tuple result are skipped.
    """
    function = _find(operator)
    rule = function(*args, **kwargs) if function is not None else None
    if rule is None:
        return None
    operands = tensor_operands(args, kwargs)
    if rule.transparent and any(operand.is_complex() for operand in operands):
        rule = _with_sums_only(rule)
    shapes = [tuple(operand.shape) for operand in operands]
    return bind(rule, shapes, [tuple(output.shape) for output in outputs if output is not None])


def _with_sums_only(rule: Rule) -> Rule:
    """Complex numbers have no order, so that no maximum of them can be pending."""
    return replace(rule, transparent=False, linear=[*rule.linear, (0,)])


def evaluate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensor results of one call, on the "meta" device: shapes and dtypes, nothing is computed."""
    named: dict[str, Any] = dict(_on_meta(kwargs))
    if any(argument.name == "device" for argument in operator._schema.arguments):
        named["device"] = torch.device("meta")
    with torch.no_grad():
        result = operator(*_on_meta(args), **named)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _on_meta(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def tensor_operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among a call's arguments, in order, with lists flattened."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
