"""Pointwise operators split any dim, and partial sums pass through exactly the linear operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate

from autoshard.rules import strategies
from tests.rules.recording import check_call, check_database, check_splits, tensor

aten = torch.ops.aten


@given(st.data())
def test_broadcasting(data: st.DataObject) -> None:
    """Under every strategy, operators on drawn broadcasting shapes have one device's results."""
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
    """A cast to integers passes no pending reduction, because rounded addends do not add up to the rounded sum."""
    found = strategies(aten._to_copy.default, (_X,), {"dtype": torch.int64}, 2)
    assert not [inputs for inputs, _ in found if isinstance(inputs[0], Partial)]


def test_a_dim_of_size_one_stays_whole() -> None:
    """If a dim is split, an operand that broadcasts along the dim is whole on each rank."""
    found = strategies(aten.mul.Tensor, (tensor(4, 2), tensor(1, 2)), {}, 4)
    assert [inputs[1] for inputs, _ in found if inputs[0].is_shard(0)] == [Replicate()]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Scalar, (_X.abs().relu(), 0)),
        (aten.div.Scalar, (_X, float("inf"))),
        (aten._to_copy.default, (torch.complex(tensor(5, 7), tensor(5, 7)),)),
        (aten.addcmul.default, (_X.long(), _X.long(), _X.long())),
        (aten.div.Tensor, (_X.int(), _X.int())),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_sums_with_unusual_numbers(op: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
    """Under every strategy, a factor 0, a divisor inf, a real part and wrapping integers give one device's results."""
    check_splits(op, *args, **({"dtype": torch.float64} if op is aten._to_copy.default else {}))


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
    """On PyTorch's samples of pointwise operators, every strategy has one device's results, forward and backward."""
    tally = check_database(_SAMPLED)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.strategies > 1000
