"""`addends` reduce to their tensor, and `check_strategy` tells rounding from faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.ir.mesh import Mesh
from autoshard.ir.reduction import combine
from autoshard.ir.spec import Reduction
from autoshard.rules.enumeration import Strategy, enumerate_strategies
from autoshard.rules.notation import BoundRule, Rule
from autoshard.rules.registry import bound_rule, sharding_rule
from tests.rules.run_strategy import addends, check_strategy, results_of

aten = torch.ops.aten

_INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.mark.parametrize("reduction", list(Reduction), ids=str)
@pytest.mark.parametrize("dtype", [*_INTEGERS, torch.float32, torch.float64], ids=str)
@given(seed=st.integers(0, 9), count=st.integers(1, 4))
def test_addends_reduce_to_the_tensor(reduction: Reduction, dtype: torch.dtype, seed: int, count: int) -> None:
    """Addends reduce to the tensor without overflow, also in types of few bits."""
    torch.manual_seed(seed)
    x = torch.randint(0, 2, (3, 5)) * torch.randint(0, 120, (3, 5))
    x = x.to(dtype)
    found = addends(x, reduction, count)
    assert len(found) == count
    assert all(addend.dtype == dtype for addend in found)
    torch.testing.assert_close(combine(reduction, found), x)


def test_addends_differ_from_the_tensor() -> None:
    """No addend equals the tensor, so that a wrong linear rule of a nonlinear operator is found."""
    x = torch.randn(64)
    for reduction in Reduction:
        for addend in addends(x, reduction, 2):
            assert not torch.equal(addend, x)


def _strategies(op: Any, args: tuple[Any, ...], mesh: Mesh) -> Iterator[tuple[BoundRule, Strategy]]:
    rule = bound_rule(op, args, {}, results_of(op, args, {}))
    assert rule is not None
    return ((rule, strategy) for strategy in enumerate_strategies(rule, mesh))


@pytest.mark.parametrize("seed", [124, 141, 169, 189])
def test_what_is_gone_in_double_precision_was_rounding(seed: int) -> None:
    """A layer norm's backward passes under every strategy, although its zero gradient is a sum of far larger terms."""
    torch.manual_seed(seed)
    x, gradient = torch.randn(2, 1, 1) * 4
    weight, bias = torch.randn(2, 1) * 4
    _, mean, rstd = aten.native_layer_norm.default(x, [1], weight, bias, 1e-5)
    op, mesh = aten.native_layer_norm_backward.default, Mesh({"a": 2, "b": 5})
    args = (gradient, x, [1], mean, rstd, weight, bias, [True] * 3)
    for rule, strategy in _strategies(op, args, mesh):
        check_strategy(op, args, {}, rule, strategy, mesh)


@torch.library.custom_op("autoshard_test::nearly_linear", mutates_args=())
def nearly_linear(x: Tensor, error: float) -> Tensor:
    """Return `x` plus `error` times its sine; the operator's rule says that it is linear."""
    return x + error * x.sin()


@torch.library.custom_op("autoshard_test::linear_in_double", mutates_args=())
def linear_in_double(x: Tensor, error: float) -> Tensor:
    """Return `x` in float64, and in other types `x` plus `error` times its sine."""
    return x.clone() if x.dtype == torch.float64 else x + error * x.sin()


NEARLY, IN_DOUBLE = torch.ops.autoshard_test.nearly_linear.default, torch.ops.autoshard_test.linear_in_double.default


@sharding_rule(NEARLY, IN_DOUBLE)
def _linear(x: Tensor, error: float) -> Rule:
    return Rule("a -> a", linear=((0,),))


def _finds_fault(op: Any, error: float, seed: int) -> bool:
    torch.manual_seed(seed)
    args, mesh = (torch.randn(64), error), Mesh({"a": 4})
    rule, strategy = next(found for found in _strategies(op, args, mesh) if found[1].inputs[0].is_partial)
    try:
        check_strategy(op, args, {}, rule, strategy, mesh)
    except AssertionError:
        return True
    return False


@given(seed=st.integers(0, 99), error=st.floats(3e-4, 1.0))
def test_a_wrong_rule_is_refused(seed: int, error: float) -> None:
    """`check_strategy` refuses a wrong linear rule, even with a small error, because the error stays in float64."""
    assert _finds_fault(NEARLY, error, seed)


@given(seed=st.integers(0, 99), error=st.floats(0.01, 1.0))
def test_double_precision_settles_small_differences_only(seed: int, error: float) -> None:
    """`check_strategy` refuses a difference far above rounding in float32, even if float64 agrees."""
    assert _finds_fault(IN_DOUBLE, error, seed)
