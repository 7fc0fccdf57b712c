"""The table of sharding rules, from an operator to its rule function.

A rule function takes the arguments of a call, with fake or meta tensors of global shape. It returns a `Rule`, a
notation string such as "m k, k n -> m n", or None if the call cannot be split. The rules of autoshard are registered
when the modules of `autoshard.rules` are imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.library import CustomOpDef
from torch.utils import _pytree as pytree

from autoshard.errors import AutoshardError, InvalidSpecError, OperatorError
from autoshard.ir.spec import Reduction
from autoshard.rules.linearity import Range, with_safe_sums
from autoshard.rules.notation import BoundRule, Rule, bind
from autoshard.rules.padding import padding_of

RuleFunction = Callable[..., Rule | str | None]
_Function = TypeVar("_Function", bound=RuleFunction)

_rules: dict[Any, RuleFunction] = {}
_inferred: dict[Any, tuple[str, ...]] = {}


def sharding_rule(*operators: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function as the sharding rule of `operators`, for all later calls of `compile` and `plan`.

    The function takes the arguments of a call, with fake tensors of global shape. It returns a `Rule`, or only its
    notation as a string. None means that the call runs whole on every rank. Under `torchrun`, each process must
    register the rule. An example is in docs/how_to/custom_operator.md.

    Args:
        operators: `torch.ops` overloads, or results of `torch.library.custom_op` or `triton_op`. If a library is not
            imported yet, give the name "library.name.overload".

    Raises:
        OperatorError: an argument is not an operator, an operator already has a rule, or the decorated object is not a
            function.
    """
    return rule_of(*(operator if _is_name(operator) else checked_operator(operator) for operator in operators))


def rule_of(*targets: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function as the sharding rule of `targets`, any functions that a program may call."""

    def register(function: _Function) -> _Function:
        if not callable(function):
            raise OperatorError(f"A sharding rule is a function, and {function!r} is a {type(function).__name__}.")
        for target in targets:
            if known := _rules.get(target):
                raise OperatorError(
                    f"{target} already has a sharding rule: {known.__qualname__}, from {_place(known)}. An operator "
                    "has one rule; leave one of the two out."
                )
            _rules[target] = function
        return function

    return register


def _is_name(operator: Any) -> bool:
    """Whether the operator is a string "library.name.overload". Raise `OperatorError` for any other string."""
    if not isinstance(operator, str):
        return False
    if len(operator.split(".")) != 3 or not all(part.isidentifier() for part in operator.split(".")):
        raise OperatorError(f"{operator!r} is no operator's name: write library.name.overload, 'aten.mm.default'.")
    return True


def checked_operator(operator: Any) -> OpOverload:
    """Return the `OpOverload` of `operator`, which is the target of its calls in programs.

    Raise `OperatorError` if `operator` is no operator, or has several overloads.
    """
    found = as_overload(operator)
    if not isinstance(found, OpOverload):
        name = getattr(operator, "__name__", "mm")
        known = f"torch.ops.aten.{name}.default" if hasattr(torch.ops.aten, name) else "torch.ops.aten.mm.default"
        raise OperatorError(
            f"{operator!r} is a {type(operator).__name__}; pass an operator of torch.ops ({known}), or the "
            "result of torch.library.custom_op or triton_op."
        )
    return found


def as_overload(operator: Any) -> Any:
    """Return the only overload of a custom operator or of an overload packet. Return any other object unchanged.

    Raise `OperatorError` for a packet with several overloads.
    """
    if isinstance(operator, CustomOpDef):
        return operator._opoverload
    if not isinstance(operator, OpOverloadPacket):
        return operator
    overloads = operator.overloads()
    if len(overloads) != 1:
        names = ", ".join(f"{operator}.{name}" for name in overloads)
        raise OperatorError(f"{operator} has {len(overloads)} overloads; name one of them: {names}.")
    return getattr(operator, overloads[0])


def has_rule(operator: Any) -> bool:
    """Whether `operator` has a written or inferred sharding rule."""
    return find_rule(as_overload(operator)) is not None


def author_of_rule(operator: Any) -> str | None:
    """Return the name of the module that defines an operator's rule function, or None without a rule."""
    function = find_rule(as_overload(operator))
    return None if function is None else function.__module__


def mark_inferred(operator: Any, rules: tuple[str, ...]) -> None:
    """Record that the rules of `operator` were found by running the operator. `rules` has their notations as texts."""
    _inferred[operator] = rules


def inferred_operators() -> dict[str, tuple[str, ...]]:
    """Return a dict from the name of each operator with inferred rules to these rules, as texts."""
    return {str(operator): rules for operator, rules in _inferred.items()}


def find_rule(operator: Any) -> RuleFunction | None:
    """Return the rule function that is registered for an operator, or None."""
    return _rules.get(operator) or _rules.get(str(operator))


def bound_rule(
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[torch.Tensor | None],
    ranges: Sequence[Range] | None = None,
) -> BoundRule | None:
    """Return the rule of one call with the sizes of its factors, or None if the call has no rule.

    Args:
        args, kwargs: the call's arguments, with fake or meta tensors of global shape.
        outputs: the call's results, as fake or meta tensors. None entries of a tuple result are skipped.
        ranges: the range of each tensor operand's numbers. `with_safe_sums` then removes unsafe partial sums from the
            rule. By default, no partial sum is removed.
    """
    function = find_rule(operator)
    rule = None if function is None else _rule_for_call(operator, function, args, kwargs)
    if function is None or rule is None:
        return None
    operands = tensor_operands(args, kwargs)
    results = [output for output in outputs if output is not None]
    if any(result.is_complex() for result in results):
        rule = _with_complex_sums_alone(rule)
    barred = {index for index, x in enumerate(operands) if not _may_be_partial(x.dtype, results)}
    if barred:
        rule = replace(rule, linear=[group for group in rule.linear if barred.isdisjoint(group)])
    shapes = [tuple(operand.shape) for operand in operands]
    try:
        bound = bind(rule, shapes, [tuple(output.shape) for output in results])
    except InvalidSpecError as error:
        raise InvalidSpecError(f"The sharding rule of {operator}, at {_place(function)}, is wrong: {error}") from error
    bound = replace(bound, padding=padding_of(operator, rule, bound, [operand.dtype for operand in operands]))
    return bound if ranges is None else with_safe_sums(bound, ranges)


def _rule_for_call(
    operator: Any, function: RuleFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Rule | None:
    try:
        rule = function(*args, **kwargs)
    except Exception as error:
        if isinstance(error, AutoshardError) or (function.__module__ or "").startswith("autoshard."):
            raise
        raise OperatorError(
            f"The sharding rule of {operator}, at {_place(function)}, raised {type(error).__name__}: {error}. It takes "
            "the operator's arguments, tensors as fake tensors of global shape."
        ) from error
    if isinstance(rule, str):
        return Rule(rule)
    if rule is not None and not isinstance(rule, Rule):
        raise OperatorError(
            f"The sharding rule of {operator}, at {_place(function)}, returned {rule!r}, a {type(rule).__name__}. "
            "Return a Rule, its notation such as 'i j, j k -> i k', or None for a call that cannot be split."
        )
    return rule


def _place(function: RuleFunction) -> str:
    """Return file and line of a rule function, such as "rules.py:12", or else its `repr`."""
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _may_be_partial(dtype: torch.dtype, results: Sequence[torch.Tensor]) -> bool:
    """Whether an operand of this dtype may be a partial sum.

    Booleans may not. Narrow integers may not if a result has another dtype, because addends of less than 64 bits may
    have wrapped round before the conversion.
    """
    if dtype.itemsize == 8 or dtype.is_floating_point or dtype.is_complex:
        return True
    return dtype != torch.bool and all(result.dtype == dtype for result in results)


def _with_complex_sums_alone(rule: Rule) -> Rule:
    """Return the rule restricted so that complex results are partial only as sums.

    Complex numbers have no order, so no maxima. Collectives send pairs of real numbers, which have no complex product.
    """
    blocked = [factor for factor, reduction in (rule.reduce or {}).items() if reduction != Reduction.SUM]
    return replace(rule, blocked=[*rule.blocked, *blocked])


def evaluate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Run one call on the "meta" device and return its tensor results, which have shapes and dtypes but no values.

    If shapes depend on values (a mask as an index), the call runs on the real operands. Raise `NotImplementedError` if
    one of these operands has no values.
    """
    named: dict[str, Any] = dict(_on_meta(kwargs))
    if any(argument.name == "device" for argument in operator._schema.arguments):
        named["device"] = torch.device("meta")
    with torch.no_grad():
        try:
            result = operator(*_on_meta(args), **named)
        except NotImplementedError:
            if not all(map(_has_values, tensor_operands(args, kwargs))):
                raise
            result = operator(*args, **kwargs)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _on_meta(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def tensor_operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments, in order, with lists flattened."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
