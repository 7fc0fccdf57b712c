"""A pending sum passes a product only if the range of the second operand keeps all addends finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Carry, Strategy, enumerate_strategies
from autoshard.rules.linearity import Range
from autoshard.rules.ranges import ANYTHING, range_of_values
from autoshard.rules.registry import bound_rule, tensor_operands
from tests.rules.recording import Call, database_calls, even_samples
from tests.rules.run_strategy import check_strategy, results_of

aten = torch.ops.aten
MESH = Mesh({"a": 2})
SAMPLED = (
    "mul", "div", "true_divide", "addcmul", "addcdiv", "lerp", "xlogy", "ldexp", "matmul", "addmm", "linalg.solve",
    "nn.functional.linear", "nn.functional.gelu", "nn.functional.silu", "nn.functional.relu", "nn.functional.elu",
    "nn.functional.softplus", "nn.functional.softmin", "sigmoid", "tanh", "logit", "where", "masked_fill",
)  # fmt: skip


def sums_of(call: Call, *, ranges: list[Range] | None = None) -> Iterator[tuple[Strategy, Carry]]:
    """Yield the strategies of a call in which operands are pending sums, each with its choice."""
    rule = bound_rule(call.op, call.args, call.kwargs, results_of(call.op, call.args, call.kwargs), ranges)
    for strategy in [] if rule is None else enumerate_strategies(rule, MESH):
        (choice,) = strategy.choices
        if isinstance(choice, Carry) and choice.operands:
            yield strategy, choice


def sampled() -> list[Call]:
    """Return PyTorch's sampled calls that pass a sum beside another floating-point operand."""
    found = []
    with even_samples():
        for _, call in database_calls(SAMPLED, 2):
            floats = {i for i, x in enumerate(tensor_operands(call.args, call.kwargs)) if x.is_floating_point()}
            if any(floats - carry.operands for _, carry in sums_of(call)):
                found.append(call)
    return found


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """The calls of `sampled`."""
    return sampled()


def planted(call: Call, number: float, seed: int) -> Call:
    """Return the call with `number` at random places of some floating-point operands."""
    generator = torch.Generator().manual_seed(seed)

    def plant(x: Tensor) -> Tensor:
        if not x.is_floating_point() or torch.rand((), generator=generator) < 0.5:
            return x
        return torch.where(torch.rand(x.shape, generator=generator) < 0.3, torch.tensor(number, dtype=x.dtype), x)

    args, kwargs = pytree.tree_map_only(Tensor, plant, (call.args, call.kwargs))
    return Call(call.op, args, kwargs)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), number=st.sampled_from([0.0, math.inf, -math.inf]), seed=st.integers(0, 1000))
def test_sums_pass_where_the_numbers_beside_them_allow_it(
    calls: list[Call], data: st.DataObject, number: float, seed: int
) -> None:
    """With zeros and infinities among the operands, strategies that pass a sum compute one device's result.

    The backward of a log-softmax is left out, because the logarithm of a softmax is never infinite.
    """
    call = planted(data.draw(st.sampled_from(calls)), number, seed)
    operands = tensor_operands(call.args, call.kwargs)
    assume("log_softmax" not in str(call.op) or math.isfinite(number))
    ranges = [range_of_values(x.double().abs()) for x in operands]
    rule = bound_rule(call.op, call.args, call.kwargs, results_of(call.op, call.args, call.kwargs), ranges)
    assert rule is not None
    for strategy, _ in sums_of(call, ranges=ranges):
        check_strategy(call.op, call.args, call.kwargs, rule, strategy, MESH)


def passes(op: object, operands: list[Tensor], *found: Range) -> list[list[int]]:
    """Return the groups of operands that may be pending sums, if `found` are the ranges of the operands."""
    rule = bound_rule(op, operands, {}, results_of(op, operands, {}), found)
    assert rule is not None
    return sorted(sorted(group) for group in rule.linear)


X = torch.ones(4, 4)
BOUNDED, POSITIVE = Range(-2.0, 2.0), Range(0.5, math.inf)


def test_a_sum_passes_a_product_beside_what_is_finite() -> None:
    """A pending sum passes a product, also of matrices, only if the second operand is finite."""
    for op in (aten.mul.Tensor, aten.mm.default):
        assert passes(op, [X, X], BOUNDED, BOUNDED) == [[0], [1]]
        assert passes(op, [X, X], ANYTHING, BOUNDED) == [[0]]
        assert passes(op, [X, X], BOUNDED, POSITIVE) == [[1]]
        assert passes(op, [X, X], ANYTHING, ANYTHING) == []


def test_a_sum_passes_a_quotient_over_what_is_not_zero() -> None:
    """A pending sum passes a quotient only if the divisor is never zero; the divisor may be infinite."""
    assert passes(aten.div.Tensor, [X, X], ANYTHING, POSITIVE) == [[0]]
    assert passes(aten.div.Tensor, [X, X], ANYTHING, BOUNDED) == []
    assert passes(aten.addcdiv.default, [X, X, X], ANYTHING, ANYTHING, POSITIVE) == [[0, 1]]


@pytest.mark.parametrize("op", [aten.gelu_backward.default, aten.silu_backward.default])
def test_a_gradient_passes_an_activation_whatever_its_operand_is(op: object) -> None:
    """A pending gradient passes the backward of GELU and SiLU for any operand, as their derivatives are bounded."""
    assert passes(op, [X, X], ANYTHING, ANYTHING) == [[0]]


def test_a_sum_never_passes_a_scale_with_poles() -> None:
    """No sum passes `xlogy` or a triangular solve, because log(0) and a singular matrix's inverse are infinite."""
    assert passes(aten.xlogy.Tensor, [X, X], BOUNDED, BOUNDED) == []
    rule = bound_rule(aten.linalg_solve_triangular.default, [X.tril(), X], {"upper": False}, [X], [BOUNDED, BOUNDED])
    assert rule is not None
    assert not rule.linear


@pytest.mark.parametrize(
    ("op", "number", "expected"),
    [
        (aten.mul.Scalar, math.inf, []),
        (aten.mul.Scalar, 0.0, [[0]]),
        (aten.div.Scalar, 0.0, []),
        (aten.div.Scalar, math.inf, [[0]]),
        (aten.xlogy.Scalar_Other, 0.0, []),
    ],
)
def test_literal_numbers_decide_for_themselves(op: object, number: float, expected: list[list[int]]) -> None:
    """A pending sum passes a literal factor or divisor only if the number keeps addends finite."""
    rule = bound_rule(op, [X, number], {}, [X])
    assert rule is not None
    assert [sorted(group) for group in rule.linear] == expected


def test_splits_do_not_depend_on_what_is_known() -> None:
    """Ranges of the operands change neither the splits nor the padding of a matrix product."""
    free, strict = (bound_rule(aten.mm.default, [X, X], {}, [X], known) for known in (None, [ANYTHING, ANYTHING]))
    assert free is not None
    assert strict is not None
    assert (free.splittable, free.padding) == (strict.splittable, strict.padding)
