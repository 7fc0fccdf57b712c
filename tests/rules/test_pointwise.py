"""Pointwise operators split any dim, and partial sums pass through exactly the linear operators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.rules import pointwise, strategies
from tests.rules.recording import check_call, check_database, check_splits, tensor

aten = torch.ops.aten


@given(st.data())
def test_broadcasting(data: st.DataObject) -> None:
    """Operands of any broadcasting shapes may be split alike."""
    result = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=3))
    shapes = []
    for _ in range(2):
        kept = data.draw(st.integers(0, len(result)))
        aligned = result[len(result) - kept :]
        shapes.append([data.draw(st.sampled_from([1, size])) for size in aligned])
    operator = data.draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.eq.Tensor]))
    check_call(operator, tensor(*shapes[0]), tensor(*shapes[1]))


_X = tensor(4, 2)
_MASK = tensor(4, 2) > 0


@pytest.mark.parametrize(
    ("op", "args", "linear"),
    [
        (aten.add.Tensor, (_X, _X), [(0, 1)]),
        (aten.add.Tensor, (_X, 2.0), []),
        (aten.add.Tensor, (2.0, _X), []),
        (aten.add.Scalar, (_X, 2.0), []),
        (aten.sub.Tensor, (_X, _X), [(0, 1)]),
        (aten.rsub.Scalar, (_X, 2.0), []),
        (aten.mul.Tensor, (_X, _X), [(0,), (1,)]),
        (aten.mul.Tensor, (_X, _MASK), [(0,)]),
        (aten.mul.Scalar, (_X, 2.0), [(0,)]),
        (aten.div.Tensor, (_X, _X.abs() + 1), [(0,)]),
        (aten.floor_divide.default, (_X, _X.abs() + 1), []),
        (aten.neg.default, (_X,), [(0,)]),
        (aten.relu.default, (_X,), []),
        (aten.where.self, (_MASK, _X, _X), [(1, 2)]),
        (aten.where.ScalarOther, (_MASK, _X, 0.0), [(1,)]),
        (aten.where.ScalarOther, (_MASK, _X, 1.0), []),
        (aten.masked_fill.Scalar, (_X, _MASK, 0), [(0,)]),
        (aten.masked_fill.Scalar, (_X, _MASK, 1), []),
        (aten._to_copy.default, (_X,), [(0,)]),
        (aten.threshold_backward.default, (_X, _X, 0), [(0,)]),
        (aten.gelu_backward.default, (_X, _X), [(0,)]),
        (aten.tanh_backward.default, (_X, _X), [(0,)]),
        (aten.addcmul.default, (_X, _X, _X), [(0, 1), (0, 2)]),
        (aten.lerp.Scalar, (_X, _X, 0.25), [(0, 1)]),
        (aten.xlogy.Scalar_Self, (2.0, _X.abs() + 1), []),
        (aten.copy.default, (_X, _X), [(1,)]),
    ],
    ids=str,
)
def test_linearity(op: torch._ops.OpOverload, args: tuple[object, ...], linear: list[tuple[int, ...]]) -> None:
    """Partial sums pass through exactly the sets of operands in which an operator is linear."""
    found = [
        tuple(index for index, placement in enumerate(inputs) if placement == Partial("sum"))
        for inputs, _ in strategies(op, args, {}, 2)
    ]
    assert sorted(carried for carried in found if carried) == linear
    check_splits(op, *args)


def test_rounding_to_integers_carries_nothing() -> None:
    """The sum of rounded addends is not the rounded sum, and infinity, the least minimum, is no integer."""
    found = strategies(aten._to_copy.default, (_X,), {"dtype": torch.int64}, 2)
    assert not [inputs for inputs, _ in found if isinstance(inputs[0], Partial)]


_MASK = torch.where(_X > 0, 0.0, float("-inf"))

_ORDERED: list[tuple[torch._ops.OpOverload, tuple[Any, ...], str]] = [
    (aten.relu.default, (_X,), "0max>max 0min>min"),
    (aten.relu.default, (_X.long(),), "0max>max 0min>min"),
    (aten.add.Scalar, (_X, 1), "0max>max 0min>min"),
    (aten.add.Scalar, (_X.long(), 1), ""),
    (aten.erfc.default, (_X,), "0max>min 0min>max"),
    (aten.neg.default, (_X,), "0max>min 0min>max"),
    (aten.mul.Scalar, (_X, 2), "0max>max 0min>min"),
    (aten.mul.Scalar, (_X, -2), "0max>min 0min>max"),
    (aten.mul.Scalar, (_X, 0), ""),
    (aten.sin.default, (_X,), ""),
    (aten.sub.Tensor, (_X, _X), "0min>min 1min>max"),
    (aten.add.Tensor, (_X, _MASK), "0max>max 1max>max"),
    (aten.add.Tensor, (2.0, _X), "0max>max 0min>min"),
    (aten.sub.Tensor, (2.0, _X), "0max>min 0min>max"),
    (aten.add.Tensor, (2.0, _X > 0), ""),
    (aten.maximum.default, (_X, _X), "01max>max 0max>max 0min>min 1max>max 1min>min"),
    (aten.ge.Tensor, (_X, _X), "0max>max 0min>min 1max>min 1min>max"),
    (aten.mul.Tensor, (_X, _X), "01product>product"),
    (aten.pow.Tensor_Scalar, (_X, 2), "0product>product"),
    (aten.pow.Tensor_Scalar, (_X, 3), "0max>max 0min>min 0product>product"),
    (aten.leaky_relu.default, (_X, -1.0), ""),
    (aten.threshold.default, (_X, 0.0, 1.0), ""),
    (aten.masked_fill.Scalar, (_X, _X > 0, 1), "0max>max 0min>min 0product>product"),
    (aten.logical_not.default, (_X > 0,), "0max>min 0min>max"),
    (aten.logical_not.default, (_X,), ""),
    (aten.nextafter.default, (_X, _X + 1), "0max>max 0min>min"),
    (aten.heaviside.default, (_X, _X + 1), "1max>max 1min>min 1product>product"),
    (aten.bitwise_right_shift.Tensor_Scalar, (_X.long(), 1), "0max>max 0min>min"),
    (aten.pow.Scalar, (2, _X), "0max>max 0min>min"),
    (aten.pow.Scalar, (0.5, _X), "0max>min 0min>max"),
    (aten.pow.Scalar, (-2, _X), ""),
    (aten.pow.Scalar, (1j, _X), ""),
    (aten.where.Scalar, (_X > 0, 2.0, 1.0), "0max>max 0min>min"),
    (aten.where.Scalar, (_X > 0, 2.0, math.nan), ""),
    (aten.where.Scalar, (_X > 0, 1j, 0.0), ""),
    (aten.logical_and.default, (_X > 0, _X > 1), "01min>min 0max>max 0min>min 1max>max 1min>min"),
]


@pytest.mark.parametrize(("op", "args", "expected"), _ORDERED, ids=str)
def test_order_and_products(op: torch._ops.OpOverload, args: tuple[Any, ...], expected: str) -> None:
    """Pending maxima, minima and products pass through monotone and multiplicative operators."""
    found = [
        f"{_awaiting(inputs)}{_pending(inputs)}>{_pending(outputs)}"
        for inputs, outputs in strategies(op, args, {}, 2)
        if _pending(inputs) not in ("", "sum")
    ]
    assert sorted(found) == sorted(expected.split())
    check_call(op, *args)


def _awaiting(placements: tuple[Placement, ...]) -> str:
    return "".join(str(index) for index, place in enumerate(placements) if place.is_partial())


def _pending(placements: tuple[Placement, ...]) -> str:
    return next((place.reduce_op for place in placements if isinstance(place, Partial)), "")


def test_a_dim_of_size_one_stays_whole() -> None:
    """An operand that broadcasts along a dim is repeated where the dim is split."""
    found = strategies(aten.mul.Tensor, (tensor(4, 2), tensor(1, 2)), {}, 4)
    assert [inputs[1] for inputs, _ in found if inputs[0].is_shard(0)] == [Replicate()]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.softplus.default, (torch.randn(5, 40), 1, 0)),
        (aten._prelu_kernel.default, (tensor(5, 40), tensor(5, 40))),
        (aten.mul.Scalar, (_X.abs().relu(), 0)),
        (aten.div.Scalar, (_X, float("inf"))),
        (aten.rsub.Scalar, (_X, float("inf"))),
        (aten._to_copy.default, (torch.complex(tensor(5, 7), tensor(5, 7)),)),
        (aten.addcmul.default, (_X.long(), _X.long(), _X.long())),
        (aten.reciprocal.default, (_X.int(),)),
        (aten.div.Tensor, (_X.int(), _X.int())),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_what_keeps_no_order(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """A step down, infinity times zero, a real part, and a wrapping integer keep no pending extreme."""
    check_splits(op, *args, **({"dtype": torch.float64} if op is aten._to_copy.default else {}))


def test_floors_of_infinite_quotients() -> None:
    """A rank without elements has -inf as its maximum, and torch's floor of an infinite quotient is NaN."""
    for mode in ("floor", "trunc"):
        check_splits(aten.div.Scalar_mode, torch.randn(5, 40), 2.0, rounding_mode=mode)


# fmt: off
_SAMPLED = [
    "abs", "add", "addcdiv", "addcmul", "atan2", "bitwise_and", "clamp", "cos", "div", "eq", "exp", "fmod", "gcd",
    "hypot", "isclose", "lerp", "log", "logaddexp", "logical_and", "masked_fill", "maximum", "mul", "nan_to_num",
    "neg", "nn.functional.celu", "nn.functional.elu", "nn.functional.gelu", "nn.functional.hardshrink",
    "nn.functional.hardsigmoid", "nn.functional.hardswish", "nn.functional.hardtanh", "nn.functional.leaky_relu",
    "nn.functional.logsigmoid", "nn.functional.mish", "nn.functional.prelu", "nn.functional.relu",
    "nn.functional.silu", "nn.functional.softplus", "nn.functional.softshrink", "nn.functional.threshold", "polar",
    "pow", "remainder", "rsqrt", "sigmoid", "sub", "tanh", "to", "where", "xlogy",
]
# fmt: on


def test_on_the_samples_of_pytorch() -> None:
    """PyTorch's own samples run under every strategy, forward and backward."""
    tally = check_database(_SAMPLED)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.strategies > 1000


@pytest.mark.parametrize(
    ("dtype", "threshold", "passes"),
    [(torch.float32, 20, True), (torch.float64, 20, False), (torch.float64, 40, True), (torch.float32, 5, False)],
)
def test_maxima_pass_a_softplus_without_a_visible_step(dtype: torch.dtype, threshold: int, passes: bool) -> None:
    """In float64 the softplus steps down visibly at the usual threshold of 20, so it is not increasing there."""
    below = torch.tensor(threshold, dtype=dtype) * torch.tensor([1.0, 1 + 2 * torch.finfo(dtype).eps], dtype=dtype)
    values = torch.nn.functional.softplus(below, 1, threshold)
    assert bool(values[0] <= values[1]) == passes
    assert bool(pointwise.softplus(below, 1, threshold).carries) == passes
