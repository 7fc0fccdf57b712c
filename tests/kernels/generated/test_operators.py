"""Generated kernels of every supported operator equal PyTorch, with NaN, infinities, and mixed dtypes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.kernels.generated.define import NamedGroup, define_kernels
from autoshard.kernels.generated.group import Group, GroupStep, Ref, ValueShape
from autoshard.kernels.generated.loops import NoLoopsError
from autoshard.kernels.generated.operators import POINTWISE, REDUCTIONS, IndexKind, kind_of
from tests.kernels.fused import DEVICE

_aten = torch.ops.aten
X = torch.tensor([[0.0, -0.0, 0.5, -1.5, 2.0, -0.01, 7.0], [3.0, math.nan, math.inf, -math.inf, 1e-6, -4.0, 0.125]])
Y = X.flip(1)
COUNTS, OTHERS = torch.arange(-7, 7).view(2, 7), torch.arange(14).view(2, 7) % 3
MASK = X > 0
FINITE = X.clamp(-9, 9)
# What else is given where a float tensor, or two, do not make a call.
ARGUMENTS: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    _aten.pow.Tensor_Scalar: ((X, 3), {}),
    # At infinity PyTorch's own activations differ between their vectorised and their plain form.
    _aten.gelu.default: ((FINITE,), {}),
    _aten.gelu_backward.default: ((FINITE, FINITE), {"approximate": "tanh"}),
    _aten.silu.default: ((FINITE,), {}),
    _aten.silu_backward.default: ((FINITE, FINITE), {}),
    _aten.where.self: ((MASK, X, Y), {}),
    _aten.where.ScalarSelf: ((MASK, 1.5, Y), {}),
    _aten.where.ScalarOther: ((MASK, X, -math.inf), {}),
    _aten.masked_fill.Scalar: ((X, MASK, 2), {}),
    _aten.masked_fill.Tensor: ((X, MASK, torch.tensor(3.0)), {}),
    _aten.clamp.default: ((X, -1.0, 2.5), {}),
    _aten.clamp_min.default: ((X, 0.25), {}),
    _aten.threshold_backward.default: ((Y, X, 0), {}),
    _aten._to_copy.default: ((X,), {"dtype": torch.bfloat16}),
    _aten.rsub.Scalar: ((X, 2, 3), {}),
    _aten.add.Tensor: ((X, COUNTS), {"alpha": 2}),
    _aten.sub.Tensor: ((COUNTS, OTHERS), {"alpha": 3}),
    _aten.mul.Tensor: ((COUNTS, MASK), {}),
    _aten.div.Tensor: ((COUNTS, OTHERS + 1), {}),
    _aten.lt.Scalar: ((COUNTS, 0.5), {}),
    _aten.eq.Tensor: ((COUNTS, OTHERS), {}),
    _aten.bitwise_and.Tensor: ((MASK, Y > 0), {}),
    _aten.bitwise_or.Tensor: ((COUNTS, OTHERS), {}),
    _aten.bitwise_xor.Tensor: ((MASK, Y > 0), {}),
    _aten.bitwise_not.default: ((MASK,), {}),
    _aten.mean.dim: ((X, [1], True), {}),
    _aten.amax.default: ((X, [-1]), {}),
    _aten.amin.default: ((X, [1], True), {}),
    _aten.sum.dim_IntList: ((MASK, [1]), {}),
}


def _call(target: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if target in ARGUMENTS:
        return ARGUMENTS[target]
    names = [item.name for item in target._schema.arguments if str(item.type) == "Tensor"]
    return (X, Y, X)[: len(names)] if "Scalar" not in str(target) else (X, 1.5), {}


def _group(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Group, list[Tensor]]:
    tensors = [item.to(DEVICE) for item in args if isinstance(item, Tensor)]
    numbers = iter(range(len(tensors)))
    refs = tuple(Ref(next(numbers)) if isinstance(item, Tensor) else item for item in args)
    value = ValueShape.of(target(*args, **kwargs))
    step = GroupStep(
        target, tuple(tuple(item) if isinstance(item, list) else item for item in refs), tuple(kwargs.items()), value
    )
    return Group(tuple(map(ValueShape.of, tensors)), (step,), (len(tensors),)), tensors


def test_every_operator_computes_what_pytorch_does() -> None:
    """Each operator, alone in a kernel, gives PyTorch's values and dtype, with NaN at the same places."""
    targets = [*POINTWISE, *REDUCTIONS]
    made = {target: _group(target, *_call(target)) for target in targets}
    names = ("first", "second", "third", "fourth")
    groups = [NamedGroup(group, names[: len(group.values)], str(target)) for target, (group, _) in made.items()]
    kernels = define_kernels(groups, "Every operator.")
    for target, (group, tensors) in made.items():
        args, kwargs = _call(target)
        expected = target(*args, **kwargs)
        found = kernels[group].operator(*tensors)
        assert found.dtype == expected.dtype, target
        eps = 8e-3 if expected.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(
            found.cpu(),
            expected,
            rtol=eps,
            atol=eps,
            equal_nan=True,
            msg=lambda text, target=target: f"{target}: {text}",
        )


def test_numbers_that_have_no_literal() -> None:
    """An infinite factor gives PyTorch's values, and a group with an infinite exponent is refused."""
    group, (x, y) = _group(_aten.add.Tensor, (FINITE, FINITE), {"alpha": math.inf})
    kernels = define_kernels([NamedGroup(group, ("first", "second", "third"), "An infinite factor.")], "Infinity.")
    torch.testing.assert_close(kernels[group].operator(x, y).cpu(), FINITE + math.inf * FINITE, equal_nan=True)
    group, _ = _group(_aten.pow.Tensor_Scalar, (X, math.inf), {})
    with pytest.raises(NoLoopsError, match="has no expression"):
        define_kernels([NamedGroup(group, ("first", "second"), "An infinite exponent.")], "Infinity.")


def test_kinds_are_told_apart() -> None:
    """The kind of an operator is pointwise, reduction, view or constant, and None for an operator in no table."""
    assert kind_of(_aten.mul.Tensor) is IndexKind.POINTWISE
    assert kind_of(_aten.sum.default) is IndexKind.REDUCTION
    assert kind_of(_aten.permute.default) is IndexKind.VIEW
    assert kind_of(_aten.full.default) is IndexKind.CONSTANT
    assert kind_of(_aten.mm.default) is None
    assert kind_of(_aten.bernoulli.p) is None
