"""Rules of softmax and log-softmax. If their dim is split, ranks reduce the maximum and the sum of each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoshard.ir.spec import Reduction
from autoshard.rules import split_dims
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import OperandCondition, Rule
from autoshard.rules.registry import RuleFunction, sharding_rule
from autoshard.rules.split_dims import converted, is_any_split, split_along, wide

aten = torch.ops.aten


def _softmax(*, is_log: bool) -> RuleFunction:
    def rule(x: torch.Tensor, dim: int, half_to_float: bool) -> Rule:
        dtype = x.dtype

        def local(context: LocalContext, x: Any, dim: int, half_to_float: bool, *, factor: str) -> Any:
            if not is_any_split(context, [factor]):
                return context.default(x, dim, half_to_float)
            x = converted(context, x, dtype, wide(dtype))
            result = split_dims.softmax(context, x, dim, factor, is_log=is_log)
            return converted(context, result, wide(dtype), torch.float32 if half_to_float else dtype)

        return split_along(x, dim, local, Reduction.MAX)

    return rule


def _softmax_to(*, is_log: bool = False, is_safe: bool = False) -> RuleFunction:
    """Return the rule function of a softmax with the arguments (x, dim, dtype). `dtype` is the dtype of the result.

    With `is_log`, the operator is log-softmax. With `is_safe`, rows of -inf give zeros.
    """

    def rule(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Rule:
        source, target = x.dtype, dtype or x.dtype

        def local(context: LocalContext, x: Any, dim: int, dtype: torch.dtype | None = None, *, factor: str) -> Any:
            if not is_any_split(context, [factor]):
                return context.default(x, dim, dtype)
            x = converted(context, x, source, wide(target))
            result = split_dims.softmax(context, x, dim, factor, is_log=is_log, is_safe=is_safe)
            return converted(context, result, wide(target), target)

        return split_along(x, dim, local, Reduction.MAX, is_even=not x.is_floating_point())

    return rule


def _softmax_backward(*, is_log: bool) -> RuleFunction:
    def rule(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Rule:
        sources = (grad.dtype, output.dtype)

        def local(
            context: LocalContext, grad: Any, output: Any, dim: int, input_dtype: torch.dtype, *, factor: str
        ) -> Any:
            if not is_any_split(context, [factor]):
                return context.default(grad, output, dim, input_dtype)
            grad, output = (
                converted(context, value, source, wide(source))
                for value, source in zip((grad, output), sources, strict=True)
            )
            result = split_dims.softmax_backward(context, grad, output, dim, factor, is_log=is_log)
            return converted(context, result, wide(sources[0]), input_dtype)

        rule = split_along(grad, dim, local, 0, operands=2, is_linear=True)
        return replace(rule, beside={1: OperandCondition.ANYTHING}) if is_log else rule

    return rule


sharding_rule(aten._softmax.default)(_softmax(is_log=False))
sharding_rule(aten._log_softmax.default)(_softmax(is_log=True))
sharding_rule(aten.softmax.int)(_softmax_to())
sharding_rule(aten.log_softmax.int)(_softmax_to(is_log=True))
sharding_rule(aten._safe_softmax.default)(_softmax_to(is_safe=True))
sharding_rule(aten._softmax_backward_data.default)(_softmax_backward(is_log=False))
sharding_rule(aten._log_softmax_backward_data.default)(_softmax_backward(is_log=True))
